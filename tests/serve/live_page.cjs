// Runs the script of page.html on a page that is no more than what it uses of one, and lets it look as often as there
// are statistics. Standard input: [page, [statistics], trace]; out: what it shows.
const [html, statistics, trace] = JSON.parse(require("fs").readFileSync(0)), elements = {}, drawn = [];
class Node {}
let looks = 0;
function element(tag) {
  const made = Object.assign(new Node(), {
    tag, textContent: "", children: [], style: {}, clientWidth: 660, clientHeight: 116, value: "50", checked: false,
    append(...more) { this.children.push(...more); },
    replaceChildren(...more) { this.children = more; },
    querySelector: chosen => made.children.find(each => chosen === each.tag || chosen === "." + each.className),
    getContext: () => ({scale() {}, beginPath() {}, moveTo() {}, stroke() {}, lineTo() { drawn.push(made); },
      fillText(text) { drawn.push(text); }, fillRect(...box) { drawn.push(box); }}),
  });
  Object.defineProperty(made, "id", {set(name) { elements[name] = made; }});
  return made;
}
const text = each => typeof each === "string" ? each : each.textContent + each.children.map(text).join("");
for (const [, name] of html.matchAll(/ id="(\w+)"/g)) element("div").id = name;
const document = {createElement: element, getElementById: name => elements[name]};
const window = {devicePixelRatio: 2}, location = {hash: ""}, performance = {now: () => 1000 * looks};
const setTimeout = look => { if (looks < statistics.length) look(); else tell(); };
const fetch = async path => ({ok: true, json: async () => path === "/debug/statistics" ? statistics[looks++] : trace});
function tell() {
  const curves = elements.curves.children.map(box => [box.children[0], text(box.querySelector(".key")), drawn.includes(box.querySelector("canvas"))]);
  const [[x, y], task] = [drawn.filter(Array.isArray)[0], elements.moment];
  elements.timeline.onmousemove({offsetX: x + 0.5, offsetY: y + 1});
  console.log(JSON.stringify({state: elements.state.textContent, colours: elements.colours.children.map(text), curves,
    axis: drawn.filter(each => /ms$/.test(each)).slice(0, 5), workers: drawn.filter(each => /^worker/.test(each)), moment: task.textContent}));
}
eval(html.match(/<script>([^]*)<.script>/)[1]);
