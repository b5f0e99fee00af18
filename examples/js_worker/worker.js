// The handlers of this example, and how they are run: `node worker.js`. Settings come from the environment.

import { Dead, RetryAfter, Snooze, Worker } from "./holdfast.js";

/** Resolves after so many seconds; rejects as soon as the job is to stop. */
function pause(seconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, seconds * 1000);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    });
  });
}

const handlers = {
  async "email.send"({ to, subject }, { log }) {
    if (!to) throw new Dead("nobody to send it to");
    log("sent", { to });
    return { to, subject: subject ?? "", sent: true };
  },

  // What `python -m holdfast.web.conformance` asks of every worker.
  "conformance.echo": async ({ value }) => value,
  "conformance.flaky": async (_, { job }) => {
    if (job.attempt === 1) throw new TypeError("the first attempt fails");
    return job.attempt;
  },
  "conformance.later": async (_, { job }) => {
    if (job.attempt === 1) throw new RetryAfter(1, "not yet");
    return job.attempt;
  },
  "conformance.snooze": async (_, { job }) => {
    if (job.claims === 1) throw new Snooze(1);
    return job.attempt;
  },
  "conformance.dead": async () => {
    throw new Dead("it cannot succeed");
  },
  "conformance.sleep": async ({ seconds }, { signal }) => {
    await pause(seconds, signal);
    return seconds;
  },
};

const said = process.env;
const worker = new Worker({
  url: said.HOLDFAST_API_URL ?? "http://localhost:8000",
  key: said.HOLDFAST_API_KEY,
  queues: said.HOLDFAST_QUEUES ? JSON.parse(said.HOLDFAST_QUEUES) : undefined,
  concurrency: Number(said.HOLDFAST_CONCURRENCY ?? 10),
  lease: Number(said.HOLDFAST_LEASE ?? 30),
  grace: Number(said.HOLDFAST_GRACE ?? 30),
  handlers,
});
for (const name of ["SIGTERM", "SIGINT"]) process.on(name, () => worker.stop(name));
await worker.run();
process.exit(0); // handlers that did not stop when they were told to end here
