// Opens the reference page in Chromium, which resolves no name; prints what the page shows and what it asked for.
import chromium from "@sparticuz/chromium";
import { chromium as playwright } from "playwright-core";

const [address, key, shown] = process.argv.slice(2);
const browser = await playwright.launch({
  executablePath: await chromium.executablePath(),
  args: [...chromium.args, "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"],
  headless: true,
});
try {
  const page = await browser.newPage();
  page.setDefaultTimeout(120_000); // a busy machine
  const asked = [];
  const failed = [];
  page.on("request", (request) => asked.push(request.url()));
  page.on("console", (message) => message.type() === "error" && failed.push(message.text()));
  page.on("pageerror", (error) => failed.push(String(error)));
  await page.goto(`${address}/docs`);
  if (key) {
    await page.locator("input[name=key]").fill(key);
    await page.locator("#key button").click();
  }
  await page.locator(".opblock").first().waitFor();
  const operations = await page.locator(".opblock-summary-path").count();
  const operation = page.locator(`#operations-${shown}`);
  await operation.locator(".opblock-summary-control").click();
  await operation.locator(".try-out__btn").click();
  await operation.locator(".execute").click();
  const status = operation.locator(".live-responses-table tbody .response-col_status").first();
  await status.waitFor();
  console.log(
    JSON.stringify({ title: await page.title(), operations, status: (await status.textContent()).trim(), asked, failed }),
  );
} finally {
  await browser.close();
}
