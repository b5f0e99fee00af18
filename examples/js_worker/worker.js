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
    if (!to) throw new Dead("no recipient");
    log("sent", { to });
    return { to, subject: subject ?? "", sent: true };
  },

  // What `python -m tools.worker_protocol` asks of every worker.
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

const environment = process.env;

/** Ends the program where a setting makes no sense. */
function refuse(name, wanted) {
  console.error(`${name}: ${JSON.stringify(environment[name])} is not valid; give ${wanted}`);
  process.exit(78);
}

function number(name, fallback, least, most) {
  const value = Number(environment[name] || fallback);
  if (!(value >= least && value <= most)) refuse(name, `a number from ${least} to ${most}`);
  return value;
}

function queues() {
  try {
    const read = JSON.parse(environment.HOLDFAST_QUEUES || "null");
    const most = Object.values(read ?? {});
    if (read === null || (!Array.isArray(read) && most.length > 0 && most.every((each) => Number.isInteger(each) && each > 0))) return read ?? undefined;
  } catch {} // no JSON
  return refuse("HOLDFAST_QUEUES", 'JSON such as {"mail": 5, "*": 10}');
}

const worker = new Worker({
  url: environment.HOLDFAST_API_URL ?? "http://localhost:8000",
  key: environment.HOLDFAST_API_KEY,
  queues: queues(),
  concurrency: Math.floor(number("HOLDFAST_CONCURRENCY", 10, 1, 500)),
  lease: number("HOLDFAST_LEASE", 30, 0.1, 86_400),
  grace: number("HOLDFAST_GRACE", 30, 0, 86_400),
  handlers,
});
for (const name of ["SIGTERM", "SIGINT"]) process.on(name, () => worker.stop(name));
await worker.run();
process.exit(worker.refused ? 1 : 0); // handlers that did not stop in time end here
