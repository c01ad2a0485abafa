// Proxies: a workspace with its agents, virtual hosts and their editor, versions, certificates, traffic and logs.

import { address, answer, listed, objectPath, send } from "../api.mjs";
import { h, put } from "../dom.mjs";
import { whyPart } from "../detail.mjs";
import { editHost } from "./host_editor.mjs";
import { trafficPart } from "./proxy_traffic.mjs";
import { workspaceAt } from "../history.mjs";
import { hashOfItem, itemsOf, since, tone } from "../model.mjs";
import { levelTone } from "../logview.mjs";
import { objectLog } from "../observed.mjs";
import { button, choice, curl, field, getCommand, pageHash, propose, tableOf, words } from "../parts.mjs";

/**
 * @typedef {import("../main.mjs").App} App
 * @typedef {import("../main.mjs").Page} Page
 * @typedef {import("../model.mjs").Item} Item
 * @typedef {{version: number, cause: string, actor: string, created_at: string, restored_version: number | null}} Version
 */

const STATE = { title: "STATE", type: "text", wide: false };
const DAY_MS = 86_400_000;
const STORED_LINES = "200";
const DEPLOYED_MS = 2000; // How far agents are is read again at most as often, and only after a change.

/**
 * How long a certificate is still good, and whether that needs somebody.
 * @param {string | null | undefined} expires
 * @param {number} nowMs
 */
export const expiryOf = (expires, nowMs) => {
  const at = Date.parse(expires ?? "");
  if (!Number.isFinite(at)) return { text: "not issued", tone: "waiting" };
  const days = (at - nowMs) / DAY_MS;
  return { text: days < 0 ? `expired ${since(expires ?? "", nowMs)} ago` : `expires ${since(expires ?? "", nowMs)}`, tone: days < 3 ? "bad" : days < 21 ? "waiting" : "good" };
};

/**
 * How far an agent is with a version, in words.
 * @param {any} one
 */
export const deploymentWords = (one) => {
  if (!one) return "";
  if (one.error) return `version ${one.version} ${one.state}: ${one.error}`;
  return one.in_service ? `serves version ${one.version}` : `version ${one.version}: ${one.state}${one.attempt > 1 ? `, attempt ${one.attempt}` : ""}`;
};

/**
 * One stored line of a log, of either kind.
 * @param {any} one
 */
const storedLine = (one) => (one.level === undefined
  ? `${one.timestamp} ${one.remote_addr} ${one.host} "${one.method} ${one.uri}" ${one.status} ${one.body_bytes_sent} bytes ${one.response_time_ms} ms ${one.user_agent}`
  : `${one.timestamp} ${one.level} ${one.source} ${one.message}`);

/**
 * @param {App} app
 * @param {Record<string, string>} query
 * @returns {Page}
 */
export const proxiesPage = (app, query) => {
  const spaces = () => [...itemsOf(app.world, "workspaces").values()].sort((one, other) => (place(one) < place(other) ? -1 : 1));
  const say = h("p", { class: "sentence" });
  const why = whyPart(app);
  const chooser = h("p", { class: "tabs" });
  const agents = tableOf("Agents", (/** @type {Item} */ one) => one.name, [
    { title: "Agent", text: (one) => one.name, href: hashOfItem },
    { title: "State", text: (one) => one.value?.status.state, tone: (one) => tone(STATE, one.value?.status.state) },
    { title: "Version", text: (one) => String(one.value?.status.configVersion ?? one.cells[2] ?? "none") },
    { title: "Rollout", text: (one) => deploymentWords(deployed.get(one.name)), tone: (one) => (deployed.get(one.name)?.error ? "bad" : deployed.get(one.name)?.in_service ? "good" : "waiting") },
    { title: "NGINX", text: (one) => one.value?.status.nginx },
    { title: "Why", text: (one) => (one.value?.status.reasons ?? []).join("; ") },
  ], () => getCommand("proxy-agents", place(chosen())));
  const hosts = tableOf("Virtual hosts", (/** @type {Item} */ one) => one.name, [
    { title: "Virtual host", text: (one) => one.name, href: hashOfItem },
    { title: "Answers", text: (one) => `${one.value?.spec.serverName}:${one.value?.spec.listenPort}${one.value?.spec.sslEnabled ? " TLS" : ""}` },
    { title: "Locations", text: (one) => (one.value?.spec.locations ?? []).map((/** @type {any} */ where) => where.path).join(", ") },
    { title: "", node: (one) => button("Edit", () => edit(itemsOf(app.world, "virtual-hosts").get(one.uid)?.value ?? null, one.scope), { class: "edit", "aria-label": `Edit ${one.name}` }) },
  ], () => getCommand("virtual-hosts", place(chosen())));
  const certificates = tableOf("Certificates", (/** @type {Item} */ one) => one.name, [
    { title: "Certificate", text: (one) => one.name, href: hashOfItem },
    { title: "State", text: (one) => one.value?.status.state, tone: (one) => tone(STATE, one.value?.status.state) },
    { title: "Expires", text: (one) => expiryOf(one.value?.status.expiresAt, Date.now()).text, tone: (one) => expiryOf(one.value?.status.expiresAt, Date.now()).tone },
    { title: "Names", text: (one) => (one.value?.status.names ?? []).join(", ") },
    { title: "Error", text: (one) => one.value?.status.error ?? "", tone: () => "bad" },
  ], () => getCommand("certificates", place(chosen())));
  const versions = tableOf("Versions", (/** @type {Version} */ one) => String(one.version), [
    { title: "Version", text: (one) => String(one.version) },
    { title: "Because of", text: (one) => `${one.cause}${one.restored_version ? ` of ${one.restored_version}` : ""}` },
    { title: "By", text: (one) => one.actor },
    { title: "Age", at: (one) => one.created_at },
    { title: "", node: (one) => h("span", { class: "tools" }, button("Diff", () => diff(one.version)), button("Roll back", () => rollBack(one.version), { class: "roll-back" })) },
  ], () => curl("GET", `/v1/workspaces/${workspace || "WORKSPACE"}/configs?per_page=20`));
  const noCertificates = h("p", { class: "empty" }, "There are no certificates; the API of proxies requests or imports them.");
  const traffic = trafficPart(app, () => workspaceId());
  const tailed = choice("Agent", "tail-agent", []);
  const tail = objectLog(app, "proxy-agents", () => ours().find((one) => one.name === tailed.input.value));
  tailed.input.addEventListener("change", () => tail.stop());
  tail.node.querySelector(".filters")?.prepend(tailed.node);
  const logs = h("ol", { class: "log", tabindex: "0", "aria-label": "Access log" });
  const status = field("Status", "status", { placeholder: "404 or 5xx", size: "8" });
  const host = field("Host", "host", { placeholder: "any" });
  const method = field("Method", "method", { placeholder: "any", size: "6" });
  const level = choice("Log", "log", [["access", "access"], ["error", "error"]], "access");
  const more = h("div", null,
    h("h2", null, "Virtual hosts"), hosts.node, h("p", { class: "tools" }, button("New virtual host", () => { const one = chosen(); if (one) edit(null, place(one)); }, { class: "new-host" })),
    h("h2", null, "Agents"), agents.node, h("h2", null, "Versions"), versions.node,
    h("h2", null, "Certificates"), certificates.node, noCertificates,
    h("h2", null, "Traffic"), traffic.node,
    h("h2", null, "Log of an agent, as it is written"), tail.node,
    h("h2", null, "Requests and errors of every agent"), h("form", { class: "filters stored", onsubmit: (/** @type {Event} */ event) => { event.preventDefault(); showLogs(); } }, level.node, status.node, host.node, method.node,
      h("button", { type: "submit" }, "Read")), logs);
  const node = h("section", null, h("h1", null, "Proxies"), say, why.node, chooser, more);
  /** @type {Version[]} */
  let known = [];
  /** @type {Map<string, any>} how far each agent is with the newest version */
  let deployed = new Map();
  let deployedOf = "";
  let deployedMs = 0;
  let versionsOf = "";
  /** @type {Promise<string> | null} */
  let identity = null;
  let workspace = "";

  const ours = () => {
    const one = chosen();
    return [...itemsOf(app.world, "proxy-agents").values()].filter((item) => one && item.scope === place(one)).sort((left, right) => (left.name < right.name ? -1 : 1));
  };
  /**
   * @param {import("../model.mjs").Value | null} value
   * @param {string} scope
   */
  const edit = (value, scope) => editHost(app, value, scope, workspaceId);
  const chosen = () => spaces().find((one) => place(one) === query.workspace) ?? spaces()[0];
  /** @param {Item} one */
  const place = (one) => `${one.scope}/workspaces/${one.name}`;

  /** The id by which the API of proxies knows the workspace. */
  const workspaceId = () => {
    const one = chosen();
    identity ??= workspaceAt(place(one)).then((found) => {
      if (!found) throw new Error(`There is no workspace ${place(one)}.`);
      workspace = found;
      return found;
    });
    return identity;
  };

  const loadVersions = async () => {
    const mark = versionsOf;
    try {
      const found = await (await answer(`/v1/workspaces/${await workspaceId()}/configs?per_page=20`)).json();
      if (mark === versionsOf) known = found.data;
    } catch (error) {
      identity = null;
      if (app.isRefused(error)) return;
      known = [];
    }
    update(Date.now());
  };

  /** How far each agent is with the newest version: read when there is one, and when an agent or an event tells something new. */
  const loadDeployments = async () => {
    const newest = known[0]?.version;
    if (!newest) return;
    try {
      const found = await listed(`/v1/workspaces/${await workspaceId()}/configs/${newest}/agents`);
      if (newest === known[0]?.version) deployed = new Map(found.map((one) => [one.agent_name, { ...one, version: newest }]));
    } catch (error) {
      if (app.isRefused(error)) return;
      deployed = new Map(); // it is asked again with the next change
    }
    update(Date.now());
  };

  /** @param {number} version */
  const diff = async (version) => {
    try {
      const told = await (await answer(`/v1/workspaces/${await workspaceId()}/configs/diff?from=${Math.max(1, version - 1)}&to=${version}`)).json();
      propose(app, {
        title: `What version ${version} changed`,
        says: [told.differences.length ? h("ul", { class: "plan" }, told.differences.map((/** @type {any} */ one) => h("li", null, `${one.change} in ${one.section}: ${one.id}`,
          h("ul", null, Object.entries(one.fields).map(([key, value]) => h("li", null, h("code", null, key), `: ${JSON.stringify(value)}`)))))) : "Nothing."],
        label: "Roll back to it", command: curl("GET", `/v1/workspaces/${workspace}/configs/diff?from=${Math.max(1, version - 1)}&to=${version}`),
        run: () => rolledBack(version),
      });
    } catch (error) {
      if (!app.isRefused(error)) put(say, words(error));
    }
  };

  /** @param {number} version */
  const rolledBack = async (version) => {
    const one = chosen();
    await send(address(`${objectPath("workspaces", one.name)}/actions/roll-back`, { scope: one.scope }), "POST", { version });
    return `Done: the contents of version ${version} are the newest version now.`;
  };

  /** @param {number} version */
  const rollBack = (version) => {
    const one = chosen();
    const newest = known[0]?.version;
    propose(app, {
      title: `Roll ${one.name} back to version ${version}`,
      says: [`What version ${version} held becomes a new version, and every agent of workspace ${place(one)} gets it: their NGINX reload.`],
      label: "Roll back", command: curl("POST", address(`${objectPath("workspaces", one.name)}/actions/roll-back`, { scope: one.scope }), { version }),
      run: () => rolledBack(version),
      undo: newest && newest !== version ? () => rolledBack(newest) : undefined,
    });
  };

  const showLogs = async () => {
    const given = new URLSearchParams({ limit: STORED_LINES });
    if (level.input.value === "access")
      for (const [key, { input }] of /** @type {[string, {input: HTMLInputElement}][]} */ ([["status_code", status], ["host", host], ["method", method]])) if (input.value.trim()) given.set(key, input.value.trim());
    try {
      const found = await (await answer(`/v1/workspaces/${await workspaceId()}/${level.input.value}-logs?${given}`)).json();
      logs.replaceChildren(...found.data.map((/** @type {any} */ one) => h("li", { "data-tone": levelTone(one.level) ?? (one.status >= 500 ? "bad" : null) }, storedLine(one))));
      if (!found.data.length) logs.replaceChildren(h("li", null, "Nothing fits."));
    } catch (error) {
      if (!app.isRefused(error)) logs.replaceChildren(h("li", { class: "error" }, words(error)));
    }
  };

  /** @param {number} nowMs */
  const update = (nowMs) => {
    const one = chosen();
    more.hidden = !one;
    if (!one) {
      put(say, app.world.synced ? "There are no workspaces. The API of proxies makes the first: /docs" : "Loading.");
      return;
    }
    const inside = (/** @type {Item} */ item) => item.scope === place(one);
    const all = ours();
    const bad = all.filter((item) => tone(STATE, item.value?.status.state) === "bad" || item.value?.status.reasons.length);
    const failed = all.filter((item) => deployed.get(item.name)?.error);
    put(say, !app.world.synced ? "Loading." : failed.length
      ? `${failed.length} of ${all.length} proxies of ${one.name} ${failed.length === 1 ? "does" : "do"} not serve version ${known[0]?.version}: ${failed[0].name}, ${deployed.get(failed[0].name).error}.`
      : bad.length
      ? `${bad.length} of ${all.length} proxies of ${one.name} ${bad.length === 1 ? "needs" : "need"} attention: ${bad[0].name}, ${(bad[0].value?.status.reasons ?? []).join("; ") || bad[0].value?.status.state}.`
      : `${all.length} ${all.length === 1 ? "proxy" : "proxies"} of ${one.name}; none needs attention.`);
    why.show(failed[0] ?? bad[0]);
    const names = spaces();
    if (chooser.childElementCount !== names.length)
      chooser.replaceChildren(...names.map((item) => h("a", { href: pageHash("proxies", { workspace: place(item) }), "aria-current": item === one ? "page" : null }, place(item).replace("/tenants/", ""))));
    agents.show(all);
    if (tailed.input.options.length !== all.length) {
      const before = tailed.input.value;
      tailed.input.replaceChildren(...all.map((item) => h("option", { value: item.name }, item.name)));
      if (all.some((item) => item.name === before)) tailed.input.value = before;
    }
    hosts.show([...itemsOf(app.world, "virtual-hosts").values()].filter(inside).sort((left, right) => (left.name < right.name ? -1 : 1)));
    const certified = [...itemsOf(app.world, "certificates").values()].filter(inside);
    certificates.show(certified);
    noCertificates.hidden = certified.length > 0;
    versions.show(known);
    // A version is made by every change of these; what agents report does not make one.
    const mark = JSON.stringify([place(one), ["virtual-hosts", "upstreams", "workspaces", "certificates"].map((plural) =>
      Math.max(0, ...[...itemsOf(app.world, plural).values()].map((item) => item.value?.metadata.revision ?? 0)))]);
    if (app.world.synced && mark !== versionsOf) {
      versionsOf = mark;
      loadVersions();
    }
    const news = JSON.stringify([known[0]?.version, all.map((item) => item.value?.metadata.revision), app.world.revision]);
    if (known.length && news !== deployedOf && nowMs - deployedMs >= DEPLOYED_MS) {
      [deployedOf, deployedMs] = [news, nowMs];
      loadDeployments();
    }
    if (app.world.synced) traffic.update(nowMs);
  };
  return { node, title: "Proxies", update, close: tail.stop, key: () => false };
};
