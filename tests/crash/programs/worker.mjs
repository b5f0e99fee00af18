// A JavaScript worker of the crash tests: the example's own, whose handler writes into the ledger what it does.

import { appendFileSync } from "node:fs";
import { Worker } from "../../../examples/js_worker/holdfast.js";

const STEP = 20; // milliseconds; work is counted in steps, not by a clock: who is frozen has as much left as before

function append(what, more = {}) {
  const line = { what, ...more, pid: process.pid, mono: Number(process.hrtime.bigint()) / 1e9, wall: Date.now() / 1e3 };
  appendFileSync(process.env.CRASH_LEDGER, JSON.stringify(line) + "\n", { mode: 0o600 });
}

async function work({ seconds }, { job, signal }) {
  const about = { job: job.id, claims: job.claims, attempt: job.attempt };
  append("start", about);
  for (let left = Math.round((seconds * 1000) / STEP); left > 0; left--) {
    await new Promise((resolve) => setTimeout(resolve, STEP));
    if (signal.aborted) {
      append("cancelled", about);
      throw signal.reason;
    }
  }
  append("end", about);
  return { claims: job.claims };
}

const worker = new Worker({
  url: process.env.API,
  concurrency: Number(process.env.SLOTS),
  lease: Number(process.env.LEASE),
  grace: 5,
  handlers: { "crash.work": work },
  log: (event, more) => {
    if (event === "worker_started") append("ready");
    else if (event.endsWith("failed") || event === "bug") console.error(JSON.stringify({ event, ...more }));
  },
});
for (const name of ["SIGTERM", "SIGINT"]) process.on(name, () => worker.stop(name));
await worker.run();
append("left");
process.exit(0);
