// Uses the generated types against a real server; compiled strictly, so that a wrong name is an error.
import createClient from "openapi-fetch";
import type { components, paths } from "./schema.js";

type JobState = components["schemas"]["JobState"];

const [baseUrl] = process.argv.slice(2);
const client = createClient<paths>({ baseUrl: baseUrl! });

const submitted = await client.POST("/v1/jobs", {
  params: { header: { "Idempotency-Key": "typescript" } },
  body: { task: "email.send", payload: { to: "a@b.c" }, delay: 60, tags: ["spring"] },
});
if (!submitted.data) throw new Error(submitted.error.detail);
const waiting: JobState = "scheduled";
const listed = await client.GET("/v1/jobs", { params: { query: { state: [waiting], task: ["email.send"] } } });
const shown = await client.GET("/v1/jobs/{job_id}", { params: { path: { job_id: submitted.data.id } } });
const cancelled = await client.POST("/v1/jobs/cancel", { body: { ids: [submitted.data.id] } });
const absent = await client.GET("/v1/jobs/{job_id}", { params: { path: { job_id: "key:nothing" } } });
console.log(
  JSON.stringify({
    task: submitted.data.task,
    listed: listed.data?.jobs.map((job) => job.id),
    shown: shown.data?.history,
    states: cancelled.data?.changed.map((job) => job.state),
    absent: absent.error?.code,
    id: submitted.data.id,
  }),
);
