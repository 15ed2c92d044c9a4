// Looks at a server's pages in a real browser: node page.cjs URL CHROMIUM; prints what it saw as JSON.
const { chromium } = require("playwright-core");

async function main(url, executablePath) {
  const browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });
  try {
    const page = await browser.newPage();
    const errors = [], elsewhere = [];
    page.on("pageerror", error => errors.push(String(error)));
    page.on("request", request => { if (!request.url().startsWith(url)) elsewhere.push(request.url()); });
    const begin = Date.now();
    await page.goto(url + "/");
    await page.waitForSelector("#models td");
    const firstMs = Date.now() - begin;
    await page.waitForFunction(() => document.getElementById("moment").textContent !== "");
    const models = await page.$$eval("#models tr", rows => rows.slice(1).map(row => row.cells[0].textContent));
    const isDrawn = await page.$eval("#timeline", canvas =>
      canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.some(value => value));
    if (process.argv[4]) await page.screenshot({ path: process.argv[4] });
    await page.goto(url + "/docs");
    await page.waitForSelector("details");
    const door = page.locator("details", { hasText: "/v1/models/letters/infer" }).first();
    await door.locator("summary").first().click();
    await door.locator("button").click();
    await page.waitForFunction(() => [...document.querySelectorAll("pre")].some(one => one.textContent.startsWith("200 in")));
    console.log(JSON.stringify({ models, isDrawn, firstMs, errors, elsewhere }));
  } finally {
    await browser.close();
  }
}

main(process.argv[2], process.argv[3]).catch(error => { console.error(error); process.exit(1); });
