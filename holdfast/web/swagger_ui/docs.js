// Shows the reference. An API with keys tells its description to holders of one only: then the page asks for it.
const form = document.getElementById("key");

async function show(key) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  const answer = await fetch("openapi.json", { headers });
  form.hidden = answer.status !== 401 && answer.status !== 403;
  if (!answer.ok) return;
  const spec = await answer.json();
  document.title = `${spec.info.title} HTTP API`;
  const reference = SwaggerUIBundle({
    spec,
    dom_id: "#reference",
    validatorUrl: null,
    onComplete: () => key && reference.preauthorizeApiKey("bearer", key),
  });
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  show(new FormData(form).get("key"));
});
show();
