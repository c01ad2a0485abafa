// The editor of a virtual host: typed fields, a trial by the NGINX of a chosen agent, and the plan before anything changes.

import { listed, send } from "../api.mjs";
import { h, mark, put } from "../dom.mjs";
import { itemsOf } from "../model.mjs";
import { button, choice, closeDialog, field, openDialog, proposePlan, words } from "../parts.mjs";

/**
 * @typedef {import("../main.mjs").App} App
 * @typedef {import("../model.mjs").Value} Value
 * @typedef {{node: HTMLElement, read: () => any}} Part
 */

const SERVES = ["upstream", "proxyPass", "root", "respond"];

// What the resource API calls by name, and the API of proxies by id.
const REFERRED = /** @type {Record<string, [string, string]>} */ ({
  upstream: ["upstream_id", "upstreams"], certificate: ["ssl_certificate_id", "certificates"], authority: ["authority_id", "certificates"],
  clientCertificate: ["client_certificate_id", "certificates"], accessLists: ["list_ids", "access-lists"], agents: ["agent_ids", "agents"],
});

/**
 * A specification of the resource API as the API of proxies has it. Names of headers and directives stay as they are.
 * @param {any} value
 * @param {(list: string, name: string) => string} idOf
 * @returns {any}
 */
export const restForm = (value, idOf) => {
  if (Array.isArray(value)) return value.map((one) => restForm(one, idOf));
  if (value === null || typeof value !== "object") return value;
  return Object.fromEntries(Object.entries(value).map(([key, inner]) => {
    const [name, list] = REFERRED[key] ?? [];
    const refers = typeof inner === "string" || (Array.isArray(inner) && inner.every((one) => typeof one === "string"));
    if (name && list && refers) return [name, Array.isArray(inner) ? inner.map((one) => idOf(list, one)) : idOf(list, inner)];
    if (name && inner === null) return [name, null];
    return [/^[a-z0-9]+(?:[A-Z][a-z0-9]*)+$/.test(key) ? key.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`) : key, restForm(inner, idOf)];
  }));
};

/**
 * Have the NGINX of an agent look at a virtual host, beside what it serves; in words, and whether it is good.
 * @param {string} workspace
 * @param {string} agent its name
 * @param {string} name
 * @param {any} spec
 * @param {boolean} isNew
 */
const tried = async (workspace, agent, name, spec, isNew) => {
  /** @type {Map<string, Map<string, string>>} */
  const ids = new Map();
  await Promise.all(["agents", "upstreams", "certificates", "access-lists", "virtual-hosts"].map(async (list) => {
    ids.set(list, new Map((await listed(`/v1/workspaces/${workspace}/${list}`)).map((one) => [one.name ?? one.domain, one.id])));
  }));
  const idOf = (/** @type {string} */ list, /** @type {string} */ called) => ids.get(list)?.get(called) ?? called;
  const given = new URLSearchParams({ agent_id: idOf("agents", agent) });
  if (!isNew) given.set("virtual_host_id", idOf("virtual-hosts", name));
  const told = await send(`/v1/workspaces/${workspace}/config/validate?${given}`, "POST", { virtual_host: { name, ...restForm(spec, idOf) } });
  const errors = told.errors.map((/** @type {any} */ one) => `${one.field.replace(/^virtual_host\.?/, "")}${one.field.includes(".") ? ": " : ""}${one.message}`);
  return { valid: told.valid, text: told.valid ? `NGINX of ${agent} accepts it.` : `NGINX of ${agent} would not serve it: ${errors.join("; ") || told.message}`, output: told.output ?? "" };
};

/**
 * @param {App} app
 * @param {Value | null} value null for a new one
 * @param {string} scope
 * @param {() => Promise<string>} workspaceId
 */
export const editHost = (app, value, scope, workspaceId) => {
  const spec = value?.spec ?? { serverName: "", listenPort: 80, locations: [{ path: "/" }] };
  const inside = (/** @type {string} */ plural) => [...itemsOf(app.world, plural).values()].filter((one) => one.scope === scope).map((one) => one.name).sort();
  const name = field("Name", "host-name", { required: true, value: value?.metadata.name ?? "", readonly: Boolean(value) });
  const serverName = field("Server name", "serverName", { required: true, value: spec.serverName });
  const port = field("Port", "listenPort", { type: "number", min: "1", max: "65535", required: true, value: spec.listenPort });
  const tls = field("TLS", "sslEnabled", { type: "checkbox", checked: spec.sslEnabled });
  const http2 = field("HTTP/2", "http2Enabled", { type: "checkbox", checked: spec.http2Enabled });
  const certificate = choice("Certificate", "certificate", [["", "none"], ...inside("certificates").map((one) => /** @type {[string, string]} */ ([one, one]))], spec.certificate ?? "");
  const list = h("div", { class: "locations" });
  /** @type {Part[]} */
  let locations = [];
  const refusal = h("p", { class: "error", role: "alert" });
  /** @param {any} given */
  const add = (given) => {
    const part = location(given, inside("upstreams"), () => {
      locations = locations.filter((one) => one !== part);
      part.node.remove();
    });
    locations.push(part);
    list.append(part.node);
  };
  spec.locations.forEach(add);
  const agent = choice("Agent", "try-agent", inside("proxy-agents").map((one) => [one, one]), inside("proxy-agents")[0] ?? "");
  const verdict = h("p", { class: "verdict", role: "status" });
  const said = h("pre", { class: "output", tabindex: "0", "aria-label": "What NGINX said", hidden: true });
  const wantedSpec = () => ({ ...spec, serverName: serverName.input.value.trim(), listenPort: Number(port.input.value), sslEnabled: tls.input.checked, http2Enabled: http2.input.checked,
    certificate: certificate.input.value || null, locations: locations.map((one) => one.read()) });
  const validate = async () => {
    said.hidden = true;
    mark(verdict, "data-tone", null);
    if (!agent.input.value) return put(verdict, "There is no agent to try it on.");
    put(verdict, `Asking NGINX of ${agent.input.value}.`);
    try {
      const { valid, text, output } = await tried(await workspaceId(), agent.input.value, name.input.value.trim(), wantedSpec(), !value);
      put(verdict, text);
      mark(verdict, "data-tone", valid ? "good" : "bad");
      said.hidden = !output;
      put(said, output);
    } catch (error) {
      if (app.isRefused(error)) return;
      put(verdict, words(error));
      mark(verdict, "data-tone", "bad");
    }
  };
  const form = h("form", { class: "act editor" }, h("h2", { id: "dialog-title" }, value ? `Virtual host ${value.metadata.name}` : "New virtual host"),
    name.node, serverName.node, port.node, h("p", { class: "tools" }, tls.node, http2.node), certificate.node,
    h("h3", null, "Locations"), list, button("Add a location", () => add({ path: "" })), refusal,
    h("p", { class: "tools" }, agent.node, button("Validate on this agent", () => validate(), { class: "validate" })), verdict, said,
    h("p", { class: "tools" }, h("button", { type: "submit" }, "Show the plan"), button("Close", closeDialog)));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (!locations.length) return put(refusal, "locations: a virtual host needs at least one");
    const metadata = { name: name.input.value.trim(), scope, labels: value?.metadata.labels ?? {} };
    proposePlan(app, { title: value ? `Change ${metadata.name}` : `Make ${metadata.name}`, scope, objects: [{ kind: "virtual-host", metadata, spec: wantedSpec() }],
      before: value ? [{ kind: "virtual-host", metadata, spec }] : undefined, form });
  });
  openDialog(form);
};

/**
 * One location; what this editor has no field for stays as it is.
 * @param {any} given
 * @param {string[]} upstreams
 * @param {() => void} remove
 * @returns {Part}
 */
const location = (given, upstreams, remove) => {
  const serves = SERVES.find((key) => given[key] !== undefined) ?? "upstream";
  const path = field("Path", "path", { required: true, value: given.path });
  const kind = choice("Serves", "serves", [["upstream", "an upstream"], ["proxyPass", "an address"], ["root", "a folder"], ["respond", "a fixed answer"]], serves);
  const upstream = choice("Upstream", "upstream", upstreams.map((one) => [one, one]), given.upstream ?? upstreams[0] ?? "");
  const text = field("Value", "value", { value: given.proxyPass ?? given.root ?? given.respond?.body ?? "" });
  const status = field("Status", "status", { type: "number", min: "100", max: "599", value: given.respond?.status ?? 200 });
  const show = () => {
    upstream.node.hidden = kind.input.value !== "upstream";
    text.node.hidden = kind.input.value === "upstream";
    status.node.hidden = kind.input.value !== "respond";
  };
  kind.input.addEventListener("change", show);
  show();
  const node = h("fieldset", { class: "location" }, h("legend", null, "Location"), path.node, kind.node, upstream.node, status.node, text.node, button("Remove", remove));
  const read = () => {
    const rest = Object.fromEntries(Object.entries(given).filter(([key]) => !SERVES.includes(key)));
    const value = kind.input.value === "upstream" ? upstream.input.value
      : kind.input.value === "respond" ? { ...given.respond, status: Number(status.input.value), body: text.input.value } : text.input.value.trim();
    return { ...rest, path: path.input.value.trim(), [kind.input.value]: value };
  };
  return { node, read };
};
