// A worker for Holdfast in plain JavaScript: Node 18 or newer, no dependencies. The protocol: docs/worker-protocol.md.

import { hostname } from "node:os";
import { randomUUID } from "node:crypto";

/** Thrown by a handler: the attempt failed, and is to be tried again after so many seconds. */
export class RetryAfter extends Error {
  constructor(seconds, message = `retry after ${seconds} s`) {
    super(message);
    this.delay = seconds;
  }
}

/** Thrown by a handler: no failure, but run it again after so many seconds. */
export class Snooze extends Error {
  constructor(seconds) {
    super(`snoozed for ${seconds} s`);
    this.delay = seconds;
  }
}

/** Thrown by a handler: the job cannot succeed, however often it is tried. */
export class Dead extends Error {}

const STALE = 0.8; // of a lease: past that without a renewal, the job may belong to another worker
const LINGER = 5; // milliseconds a settlement waits for others
const STUBBORN = 5_000; // milliseconds a handler that is to stop may take before the worker goes on
const SETTLED_AT_ONCE = 100;
const LONGEST = 2 ** 31 - 1; // milliseconds of a timer; one that is longer ends at once
const BURST = 1_000; // milliseconds in which calls of stop count as one
const STEP_ASIDE = 1_000; // milliseconds without claiming for the sake of a job that is to run alone; doubled in vain

const now = () => performance.now();
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

export class Worker {
  /**
   * handlers: { "email.send": async (payload, context) => result }; context has job, signal and log.
   * queues: { mail: 5, "*": 10 }, names and how many jobs of each at once. Times are seconds.
   */
  constructor({ url, key, handlers, queues, concurrency = 10, lease = 30, grace = 30, wait = 30, id, log, settled }) {
    this.url = url.replace(/\/$/, "");
    this.key = key;
    this.handlers = handlers;
    this.queues = queues ?? { "*": concurrency };
    this.concurrency = concurrency;
    this.lease = lease;
    this.grace = grace;
    this.wait = wait;
    this.id = id ?? ownName();
    this.log = log ?? ((event, more = {}) => console.log(JSON.stringify({ event, worker: this.id, ...more })));
    this.settled = settled ?? (() => {});
    this.jobs = new Map(); // by token: every job in hand, until its settlement was answered
    this.outcomes = [];
    this.succeeded = 0;
    this.failed = 0;
    this.stopping = false;
    this.draining = false;
    this.refused = false; // for good: a worker with this key, or these queues, will never get a job
    this.claiming = undefined;
    this.woken = () => {};
    this.hurried = new Promise((resolve) => {
      this.hurry = resolve;
    });
  }

  /** Work until stopped; what is in hand then ends or is given back. */
  async run() {
    this.log("worker_started", { url: this.url, queues: this.queues, tasks: Object.keys(this.handlers) });
    let finished = false;
    let settled = false;
    const beating = this.#beat(() => settled);
    const settling = this.#settle(() => finished);
    await this.#claim();
    await this.#finish();
    finished = true;
    this.wakeSettler?.();
    await settling;
    settled = true; // not before: leases must last until what they stand for is written
    this.wakeBeat?.();
    await beating;
    await this.#leave();
    this.log("worker_stopped", { succeeded: this.succeeded, failed: this.failed });
  }

  /** Claims no more and finishes the running jobs within the grace. Called again more than a second later: gives them back at once. */
  stop(reason = "asked") {
    this.askedAt ??= now(); // `timeout` and others signal a program and its group: a burst counts as one
    if (this.stopping) {
      if (now() - this.askedAt > BURST) this.hurry();
      return;
    }
    this.log("worker_stopping", { reason, running: this.jobs.size });
    this.stopping = true;
    this.claiming?.abort(); // to hang up gives back what this claim may be about to take
    this.woken();
  }

  // ── claiming ────────────────────────────────────────────────────────────────────────────────────────────────────
  async #claim() {
    let failures = 0;
    let aside = STEP_ASIDE;
    while (!this.stopping) {
      const free = this.#alone() ? 0 : this.concurrency - this.jobs.size;
      if (free <= 0) {
        await this.#change();
        continue;
      }
      this.claiming = new AbortController();
      try {
        const sent = now();
        const claimed = await this.#post("", this.#ask(free), this.wait + 15, this.claiming.signal);
        failures = 0;
        for (const job of claimed.jobs) this.#start(job, claimed.lease, sent + claimed.waited * 1000);
        this.#obey(claimed.command);
        if (this.draining && claimed.jobs.length === 0 && this.jobs.size === 0) this.stop("drained");
        else if (claimed.quarantined && this.jobs.size > 0 && !this.stopping) aside = await this.#stepAside(aside);
        else if (this.draining && claimed.jobs.length === 0) await this.#change();
      } catch (error) {
        if (this.stopping) break;
        this.log("claim_failed", { error: String(error) });
        if (isFinal(error)) {
          this.refused = true;
          this.stop("refused");
          break;
        }
        await Promise.race([sleep(backoff(failures++, error.retryAfter)), this.#change()]);
      }
    }
  }

  #ask(free) {
    const inHand = {};
    for (const { job } of this.jobs.values()) inHand[job.queue] = (inHand[job.queue] ?? 0) + 1;
    const slots = Object.entries(this.queues).map(([queue, most]) => [queue, Math.max(0, Math.min(free, most - (inHand[queue] ?? 0)))]);
    return {
      worker: this.id,
      queues: Object.fromEntries(slots),
      limit: Math.min(free, 500),
      tasks: Object.keys(this.handlers),
      wait: this.draining ? 0 : this.wait,
      lease: this.lease,
      ...this.#about(),
    };
  }

  #about() {
    const { succeeded, failed, concurrency } = this;
    return { host: hostname().slice(0, 100) || "js", pid: process.pid, concurrency, running: this.jobs.size, succeeded, failed };
  }

  #alone() {
    return [...this.jobs.values()].some(({ job }) => job.alone);
  }

  /** A job that may kill its process waits to run alone: let this worker come to rest for a while, but not for ever. */
  async #stepAside(ms) {
    const until = now() + ms;
    while (this.jobs.size > 0 && !this.stopping && now() < until) {
      await Promise.race([this.#change(), sleep(until - now())]);
    }
    return this.jobs.size > 0 ? Math.min(2 * ms, 300_000) : STEP_ASIDE;
  }

  /** Until a job has left, or the worker gets a command. */
  #change() {
    return new Promise((resolve) => {
      this.woken = resolve;
    });
  }

  #obey(command) {
    if (command === "stop") this.stop("command");
    if (command === "drain" && !this.draining) {
      this.draining = true;
      this.claiming?.abort();
    }
  }

  // ── running ─────────────────────────────────────────────────────────────────────────────────────────────────────
  #start(job, lease, renewedAt) {
    const run = { job, stop: new AbortController(), renewedAt, lease, why: undefined, lines: [], logged: 0 };
    this.jobs.set(job.token, run);
    if (isStale(run)) this.#end(run, { outcome: "released" }); // this process was frozen, or the answer late
    else run.ended = this.#run(run).catch((error) => this.log("bug", { error: String(error?.stack ?? error) }));
  }

  async #run(run) {
    const { job, stop } = run;
    if (job.timeout !== null) this.#watch(run, now() + job.timeout * 1000);
    let outcome;
    try {
      const handling = (async () => this.handlers[job.task](job.payload, this.#context(run)))();
      handling.catch(() => {}); // one that is given up may fail later
      const result = await Promise.race([handling, stubborn(stop.signal)]);
      if (run.why === undefined) outcome = sendable(() => ({ outcome: "succeeded", result: result ?? null }), { outcome: "dead", reason: "result" });
    } catch (error) {
      if (run.why === undefined) outcome = sendable(() => failure(error), { outcome: "failed" });
    }
    clearTimeout(run.watchdog);
    while (run.lines.length > 0) await this.#say(run);
    outcome ??= interrupted(run.why, job);
    if (outcome === undefined || !this.jobs.has(job.token)) this.#forget(job.token);
    else this.#end(run, outcome);
  }

  #watch(run, until) {
    const left = until - now();
    if (left <= 0) this.#interrupt(run, "timeout");
    else run.watchdog = setTimeout(() => this.#watch(run, until), Math.min(left, LONGEST));
  }

  #end({ job }, outcome) {
    this.outcomes.push({ token: job.token, ...outcome });
    this.wakeSettler?.();
  }

  #context(run) {
    const log = (text, fields, level = "info") => run.lines.push({ number: ++run.logged, text: String(text), fields, level, at: now() });
    return { job: run.job, signal: run.stop.signal, log };
  }

  /** Keep what a handler has logged with its job. */
  async #say(run) {
    const lines = run.lines.splice(0, 100).map(({ at, ...line }) => ({ ...line, ago: (now() - at) / 1000 }));
    try {
      await this.#post("/lines", { worker: this.id, token: run.job.token, lines }, 5);
    } catch (error) {
      this.log("lines_lost", { job: run.job.id, error: String(error) });
    }
  }

  /** Stop a handler. The first reason stays. */
  #interrupt(run, why) {
    if (run.why !== undefined) return;
    run.why = why;
    run.stop.abort(new Error(why));
  }

  #forget(token) {
    this.jobs.delete(token);
    this.woken();
  }

  // ── keeping ─────────────────────────────────────────────────────────────────────────────────────────────────────
  async #beat(over) {
    while (!over()) {
      const pause = new Promise((resolve) => {
        this.wakeBeat = resolve;
      });
      await Promise.race([sleep((this.lease * 1000) / 3), pause]);
      if (over()) return;
      const runs = [...this.jobs.values()];
      const sent = now();
      try {
        const leases = runs.map(({ job }) => job.token);
        const kept = await this.#post("/extend", { worker: this.id, leases, lease: this.lease, ...this.#about() }, this.lease / 3);
        kept.leases.forEach(({ verdict }, place) => this.#heard(runs[place], verdict, sent, kept.lease));
        this.#obey(kept.command);
      } catch (error) {
        this.log("beat_failed", { error: String(error) });
      }
      for (const run of this.jobs.values()) {
        if (run.lines.length > 0) this.#say(run);
        if (isStale(run)) this.#lost(run);
      }
    }
  }

  #heard(run, verdict, sent, lease) {
    if (verdict === "lost") this.#lost(run);
    else if (verdict !== "locked") Object.assign(run, { renewedAt: sent, lease });
    if (verdict === "cancel") this.#interrupt(run, "cancel");
  }

  #lost(run) {
    if (!this.jobs.has(run.job.token) || this.outcomes.some(({ token }) => token === run.job.token)) return;
    this.log("lease_lost", { job: run.job.id });
    this.#interrupt(run, "lost");
  }

  // ── settling ────────────────────────────────────────────────────────────────────────────────────────────────────
  async #settle(over) {
    let failures = 0;
    while (!over() || this.outcomes.length > 0) {
      if (this.outcomes.length === 0) {
        await new Promise((resolve) => {
          this.wakeSettler = resolve;
        });
        await sleep(LINGER);
        continue;
      }
      const batch = this.outcomes.slice(0, SETTLED_AT_ONCE);
      try {
        await this.#write(batch);
        failures = 0;
      } catch (error) {
        this.log("settle_failed", { error: String(error) });
        if (over() && failures > 2 * this.lease) return; // the API is gone for good: the leases end by themselves
        await sleep(backoff(failures++, error.retryAfter));
      }
    }
  }

  /** Settle a batch. Where it is refused for what one of them says, each by itself: the others are to pass. */
  async #write(batch) {
    try {
      const { jobs } = await this.#post("/settle", { worker: this.id, settlements: batch }, 15);
      batch.forEach((settlement, place) => this.#answered(settlement, jobs[place]));
    } catch (error) {
      if (!(error.status >= 400 && error.status < 500) || error.status === 429) throw error;
      if (batch.length > 1) for (const each of batch) await this.#write([each]);
      else if (batch[0].outcome === "succeeded") this.#replace(batch[0], { outcome: "dead", reason: "result", error: { message: error.message } });
      else this.#answered(batch[0], { verdict: "refused", error: error.message });
    }
  }

  #replace(settlement, outcome) {
    const place = this.outcomes.findIndex(({ token }) => token === settlement.token);
    this.outcomes[place] = { token: settlement.token, ...outcome };
  }

  #answered(settlement, answer) {
    if (answer.verdict === "locked") return; // it stays, and is tried again
    const job = this.jobs.get(settlement.token)?.job;
    this.outcomes = this.outcomes.filter(({ token }) => token !== settlement.token);
    if (answer.verdict === "accepted" || answer.verdict === "repeated") {
      this.succeeded += answer.state === "succeeded";
      this.failed += answer.state === "failed" || answer.state === "dead";
    } else this.log("settlement_refused", { job: job?.id, ...answer });
    this.settled(job, settlement, answer);
    this.#forget(settlement.token);
  }

  // ── stopping ────────────────────────────────────────────────────────────────────────────────────────────────────
  /** The grace, then every handler is asked to stop. */
  async #finish() {
    await Promise.race([this.#quiet(), sleep(this.grace * 1000), this.hurried]);
    for (const run of this.jobs.values()) this.#interrupt(run, "release");
    await Promise.race([this.#quiet(), sleep(STUBBORN + 1_000)]);
  }

  async #quiet() {
    await Promise.all([...this.jobs.values()].map((run) => run.ended));
  }

  async #leave() {
    try {
      await this.#post("/leave", { worker: this.id, leases: [...this.jobs.keys()] }, 5);
    } catch (error) {
      this.log("leave_failed", { error: String(error) }); // then the leases end by themselves
    }
  }

  // ── asking ──────────────────────────────────────────────────────────────────────────────────────────────────────
  /** What the API answers to that; `seconds` is all the time it has. */
  async #post(path, body, seconds, signal) {
    const headers = { "content-type": "application/json", ...(this.key ? { authorization: `Bearer ${this.key}` } : {}) };
    const until = new AbortController();
    const abort = () => until.abort(signal?.aborted ? signal.reason : new Error(`no answer within ${seconds} s`));
    const timer = setTimeout(abort, seconds * 1000);
    signal?.addEventListener("abort", abort, { once: true });
    if (signal?.aborted) abort();
    try {
      const options = { method: "POST", headers, body: JSON.stringify(body), signal: until.signal };
      const answer = await fetch(`${this.url}/v1/claims${path}`, options);
      return await this.#read(answer);
    } finally {
      clearTimeout(timer);
      signal?.removeEventListener("abort", abort);
    }
  }

  async #read(answer) {
    if (answer.ok) return answer.json();
    const problem = await answer.json().catch(() => ({}));
    const error = new Error(`${answer.status} ${problem.code ?? ""}: ${problem.detail ?? "no answer of Holdfast"}`);
    throw Object.assign(error, { status: answer.status, code: problem.code, retryAfter: Number(answer.headers.get("retry-after")) || undefined });
  }
}

/** An id that no other start of this program has had. */
function ownName() {
  const host = hostname().replace(/[^A-Za-z0-9]+/g, "-").replace(/^-+/, "").slice(0, 20);
  return `${host || "js"}-${process.pid}-${randomUUID().slice(0, 8)}`;
}

/** Whether the same request would never pass: Holdfast itself, no proxy on the way, refuses the key or what is asked. */
function isFinal({ status, code }) {
  return code !== undefined && status >= 400 && status < 500 && status !== 408 && status !== 429;
}

/** Whether so much of the lease has passed that another worker may have the job. */
function isStale({ renewedAt, lease }) {
  return now() - renewedAt > lease * 1000 * STALE;
}

/** Milliseconds until the next try: growing, with jitter, at least what the server says. */
function backoff(failures, retryAfter = 0) {
  const most = Math.min(5_000, 100 * 2 ** Math.min(failures, 10));
  return Math.max(retryAfter * 1000, 50) + Math.random() * most;
}

/** Rejects when a handler that was asked to stop has had enough time. */
function stubborn(signal) {
  return new Promise((_, reject) => {
    signal.addEventListener("abort", () => setTimeout(() => reject(signal.reason), STUBBORN).unref(), { once: true });
  });
}

/** An outcome, or `otherwise` where it cannot be made or has no JSON: a BigInt, a circular object, an error without text. */
function sendable(make, otherwise) {
  try {
    const outcome = make();
    JSON.stringify(outcome);
    return outcome;
  } catch (error) {
    return { ...otherwise, error: { message: `what the handler returned or threw cannot be sent: ${error?.message}` } };
  }
}

/** What an error out of a handler means. */
function failure(error) {
  if (error instanceof Snooze) return { outcome: "snoozed", delay: error.delay };
  const thrown = error instanceof Error ? error : new Error(String(error));
  const type = thrown.name === "Error" ? thrown.constructor.name : thrown.name;
  const described = { type, message: thrown.message, traceback: thrown.stack ?? "" };
  if (error instanceof Dead) return { outcome: "dead", error: described };
  if (error instanceof RetryAfter) return { outcome: "failed", error: described, delay: error.delay };
  return { outcome: "failed", error: described };
}

/** What an interrupted handler comes to; nothing where another worker has the job. */
function interrupted(why, job) {
  switch (why) {
    case "cancel":
      return { outcome: "cancelled" };
    case "release":
      return { outcome: "released" };
    case "timeout":
      return { outcome: "failed", reason: "timeout", error: { message: `timeout: still running after ${job.timeout} s` } };
    default:
      return undefined;
  }
}
