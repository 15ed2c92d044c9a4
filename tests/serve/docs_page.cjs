// Runs the script of docs.html on a page that is no more than what it uses of one, and presses each button: first
// with nothing in what it asks for, then with a value. Standard input: [page, description]; out: what came of it.
const [html, description] = JSON.parse(require("fs").readFileSync(0)), told = [], root = element("div");
function element(tag) {
  return {
    tag, textContent: "", children: [], own: undefined,
    append(...more) { this.children.push(...more); },
    replaceChildren(...more) { this.children = more; },
    set value(given) { this.own = given; },
    get value() { return this.own ?? (this.tag === "select" ? this.children[0].textContent : ""); },
    all(tag) { return this.children.flatMap(each => [...(each.tag === tag ? [each] : []), ...each.all(tag)]); },
  };
}
const key = element("input"), location = {hash: ""};
const document = {createElement: element, getElementById: name => name === "key" ? key : root};
const fetch = async path => {
  if (path === "/openapi.json") return {ok: true, json: async () => description};
  told.push(path);
  return {status: 200, text: async () => ""};
};
eval(html.match(/<script>([^]*)<.script>/)[1]);
const doors = () => root.children.filter(each => each.tag === "details");
setTimeout(async () => {
  for (const value of ["", "a/b c"]) {
    for (const door of doors()) {
      door.all("input").forEach(each => { each.value = value; });
      await door.all("button")[0].onclick();
    }
    told.push(...doors().flatMap(door => door.all("pre")).map(each => each.textContent).filter(Boolean));
  }
  console.log(JSON.stringify(told));
});
