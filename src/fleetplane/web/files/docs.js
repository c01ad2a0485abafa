"use strict";
// Reads the document, shows every operation, and lets a person try it with their own token.

const make = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "class") node.className = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
};

const resolve = (api, schema) =>
  schema && schema.$ref ? resolve(api, api.components.schemas[schema.$ref.split("/").pop()]) : schema || {};

// An example of a schema: required fields and those with defaults, to be edited by the reader.
const example = (api, schema, depth = 0) => {
  const found = resolve(api, schema);
  if ("default" in found && found.default !== null) return found.default;
  if (found.const !== undefined) return found.const;
  if (found.enum) return found.enum[0];
  if (found.anyOf) return example(api, found.anyOf.find((one) => one.type !== "null") || found.anyOf[0], depth + 1);
  if (found.type === "object") {
    if (depth > 6) return {};
    const wanted = new Set(found.required || []);
    const fields = Object.entries(found.properties || {});
    const shown = wanted.size ? fields.filter(([name]) => wanted.has(name)) : fields;
    return Object.fromEntries(shown.map(([name, field]) => [name, example(api, field, depth + 1)]));
  }
  if (found.type === "array") return found.items && depth < 4 ? [example(api, found.items, depth + 1)] : [];
  return { integer: 1, number: 0, boolean: false, null: null }[found.type] ?? "";
};

const field = (parameter) => {
  const input = make("input", { name: parameter.name, autocomplete: "off", "data-in": parameter.in });
  if (parameter.schema.default !== undefined) input.placeholder = String(parameter.schema.default);
  if (parameter.required) input.required = true;
  const words = parameter.description ? `${parameter.name}: ${parameter.description}` : parameter.name;
  return make("label", {}, words, input);
};

const attempt = async (api, method, path, form, output) => {
  const headers = {};
  const query = new URLSearchParams();
  let target = path;
  for (const input of form.querySelectorAll("input[data-in]")) {
    if (!input.value) continue;
    if (input.dataset.in === "path") target = target.replace(`{${input.name}}`, encodeURIComponent(input.value));
    else if (input.dataset.in === "query") query.set(input.name, input.value);
    else headers[input.name] = input.value;
  }
  const token = document.getElementById("token").value.trim();
  if (token) headers.Authorization = `Bearer ${token}`;
  const body = form.querySelector("textarea");
  if (body && body.value.trim()) headers["Content-Type"] = "application/json";
  const url = api.servers[0].url + target + (query.size ? `?${query}` : "");
  output.textContent = "…";
  try {
    const answer = await fetch(url, { method, headers, body: body && body.value.trim() ? body.value : undefined });
    const text = await answer.text();
    let shown = text;
    try { shown = JSON.stringify(JSON.parse(text), null, 2); } catch { /* not JSON: as it is */ }
    output.textContent = `${answer.status} ${answer.statusText}\n\n${shown}`;
    const pair = answer.ok && path === "/auth/login" ? JSON.parse(text) : null;
    if (pair) document.getElementById("token").value = pair.access_token;
  } catch (error) {
    output.textContent = String(error);
  }
};

const operation = (api, path, method, about) => {
  const verb = method.toUpperCase();
  const form = make("form");
  for (const parameter of about.parameters || []) form.append(field(parameter));
  const content = about.requestBody && about.requestBody.content["application/json"];
  if (content) {
    const area = make("textarea", { "aria-label": "Body", spellcheck: "false" });
    area.value = JSON.stringify(example(api, content.schema), null, 2);
    form.append(make("label", {}, "Body", area));
  }
  const output = make("pre", { "aria-live": "polite" });
  form.append(make("button", { type: "submit" }, "Try it"), output);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    attempt(api, verb, path, form, output);
  });
  const head = make("summary", {}, make("span", { class: `method ${verb}` }, verb), make("code", {}, path), make("span", {}, about.summary));
  const node = make("details", {}, head, form);
  node.dataset.words = `${verb} ${path} ${about.summary}`.toLowerCase();
  return node;
};

const show = (api) => {
  document.title = api.info.title;
  document.getElementById("title").textContent = `${api.info.title} ${api.info.version}`;
  document.getElementById("about").textContent = api.info.description;
  const main = document.getElementById("operations");
  const sections = new Map();
  for (const [path, methods] of Object.entries(api.paths)) {
    for (const [method, about] of Object.entries(methods)) {
      const tag = about.tags[0];
      if (!sections.has(tag)) {
        const section = make("section", {}, make("h2", {}, tag));
        sections.set(tag, section);
        main.append(section);
      }
      sections.get(tag).append(operation(api, path, method, about));
    }
  }
  document.getElementById("find").addEventListener("input", (event) => {
    const wanted = event.target.value.trim().toLowerCase();
    for (const node of main.querySelectorAll("details")) node.hidden = !node.dataset.words.includes(wanted);
  });
};

fetch("/openapi.json").then((answer) => answer.json()).then(show).catch((error) => {
  document.getElementById("operations").textContent = String(error);
});
