// Unpacks the Chromium of the package into TMPDIR; prints its path.
import chromium from "@sparticuz/chromium";

console.log(await chromium.executablePath());
