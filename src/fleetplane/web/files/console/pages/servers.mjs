// Servers: who they are, what they run, and how far they are.

import { answer, get } from "../api.mjs";
import { h, put } from "../dom.mjs";
import { itemsOf, since } from "../model.mjs";
import { reread } from "../observed.mjs";
import { copyParts, tableOf, words } from "../parts.mjs";

/**
 * @typedef {import("../main.mjs").App} App
 * @typedef {import("../main.mjs").Page} Page
 */

/**
 * What the figures of a server say, by name and by the value of their one label.
 * @param {string} text in the exposition of Prometheus
 */
export const serverFigures = (text) => {
  /** @type {Map<string, Map<string, number>>} */
  const found = new Map();
  for (const [, name, label, value] of text.matchAll(/^(fleetplane_[a-z_]+)(?:\{[a-z_]+="([^"]*)"\})? (\S+)$/gm)) {
    if (!found.has(name)) found.set(name, new Map());
    found.get(name)?.set(label ?? "", Number(value));
  }
  const one = (/** @type {string} */ name) => found.get(`fleetplane_${name}`)?.get("") ?? 0;
  const by = (/** @type {string} */ name) => found.get(`fleetplane_${name}`) ?? new Map();
  return {
    database: /** @type {[string, string][]} */ ([
      ["objects", String(one("store_resources"))], ["writes", `${one("store_transactions_total")} in ${one("store_commits_total")} commits, ${one("store_failed_commits_total")} failed`],
      ["waiting to be written", String(one("store_queued"))], ["refused because too many waited", String(one("store_queue_refusals_total"))],
      ["changes kept for watches to resume", String(one("store_ring_events"))], ["times a watch was too far behind", String(one("store_refills_total"))],
      ["telemetry waiting to be written", String(one("telemetry_queued"))],
      ["times the server was away", `${one("server_gaps_total")}, ${one("server_gap_seconds_total").toFixed(1)} s in all`],
    ]),
    sessions: [...by("sessions_open")].map(([domain, open]) => ({ domain, open, opened: by("sessions_opened_total").get(domain) ?? 0, refused: by("sessions_refused_total").get(domain) ?? 0, queued: by("sessions_queued").get(domain) ?? 0 })),
    controllers: [...by("reconcile_queued")].map(([controller, queued]) => ({ controller, queued, running: by("reconcile_running").get(controller) ?? 0, passes: by("reconcile_passes_total").get(controller) ?? 0,
      failures: by("reconcile_failures_total").get(controller) ?? 0, lost: by("reconcile_leases_lost_total").get(controller) ?? 0 })),
  };
};

/**
 * @param {App} app
 * @returns {Page}
 */
export const serversPage = (app) => {
  const say = h("p", { class: "sentence" }, "Loading.");
  const servers = tableOf("Servers", (/** @type {any} */ one) => one.metadata.name, [
    { title: "Server", text: (one) => one.metadata.name },
    { title: "Version", text: (one) => one.status.version },
    { title: "Writes", text: (one) => (one.status.writable ? "yes" : "no"), tone: (one) => (one.status.writable ? "good" : "bad") },
    { title: "Revision", text: (one) => String(one.status.revision) },
    { title: "Watchers", text: (one) => String(one.status.watchers) },
    { title: "Up for", text: (one) => since(one.status.startedAt, Date.now()) },
    { title: "Fleets", text: (one) => one.spec.domains.join(", ") },
  ]);
  const agents = tableOf("Agents", (/** @type {{plural: string}} */ one) => one.plural, [
    { title: "Agents", text: (one) => one.plural },
    { title: "Known", text: (one) => String(itemsOf(app.world, one.plural).size) },
    { title: "States", text: (one) => states(one.plural) },
  ]);
  const sessions = tableOf("Streams", (/** @type {any} */ one) => one.domain, [
    { title: "Streams of agents", text: (one) => one.domain },
    { title: "Open", text: (one) => String(one.open) },
    { title: "Opened", text: (one) => String(one.opened) },
    { title: "Refused", text: (one) => String(one.refused), tone: (one) => (one.refused ? "waiting" : "") },
    { title: "Messages waiting", text: (one) => String(one.queued) },
  ]);
  const controllers = tableOf("Controllers", (/** @type {any} */ one) => one.controller, [
    { title: "Controller", text: (one) => one.controller },
    { title: "Waiting", text: (one) => String(one.queued) },
    { title: "Running", text: (one) => String(one.running) },
    { title: "Passes", text: (one) => String(one.passes) },
    { title: "Failed", text: (one) => String(one.failures), tone: (one) => (one.failures ? "waiting" : "") },
    { title: "Leases lost", text: (one) => String(one.lost), tone: (one) => (one.lost ? "waiting" : "") },
  ]);
  const database = h("dl", { class: "database" });
  const others = h("p", null, "Servers that share a database, who writes and how far the others are behind, while no server answers, too: ", ...copyParts("fleetplane servers"));
  const measured = reread(app, h("p", { class: "empty" }), async () => {
    const told = serverFigures(await (await answer("/metrics")).text());
    database.replaceChildren(...told.database.flatMap(([key, text]) => [h("dt", null, key), h("dd", null, text)]));
    sessions.show(told.sessions);
    controllers.show(told.controllers);
    return [];
  }, () => `${app.world.measured} ${app.world.revision}`);
  const node = h("section", null, h("h1", null, "Servers"), say, servers.node, others, h("h2", null, "Agents"), agents.node, sessions.node,
    h("h2", null, "Database"), database, h("h2", null, "Controllers and their leases"), controllers.node, measured.node);
  /** @type {any[]} */
  let known = [];
  let seen = "";

  /** @param {string} plural */
  const states = (plural) => {
    /** @type {Map<string, number>} */
    const counted = new Map();
    for (const item of itemsOf(app.world, plural).values()) {
      const state = item.value?.status?.state ?? "unknown";
      counted.set(state, (counted.get(state) ?? 0) + 1);
    }
    return [...counted].map(([state, count]) => `${count} ${state}`).join(", ");
  };

  const load = async () => {
    try {
      known = (await get("/servers", { limit: "100" })).items;
      const bad = known.filter((one) => !one.status.writable);
      put(say, bad.length ? `${bad.length} of ${known.length} servers ${bad.length === 1 ? "does" : "do"} not write: ${bad[0].metadata.name}.` : `${known.length} ${known.length === 1 ? "server" : "servers"}; none needs attention.`);
    } catch (error) {
      if (!app.isRefused(error)) put(say, words(error));
    }
    update(Date.now());
  };

  /** @param {number} nowMs */
  const update = (nowMs) => {
    const mark = JSON.stringify([...itemsOf(app.world, "servers").values()].map((one) => one.cells));
    if (mark !== seen) {
      seen = mark;
      load();
    }
    servers.show(known);
    measured.update(nowMs);
    agents.show(["instances", "proxy-agents", "boards", "edge-nodes"].filter((plural) => app.kinds.some((kind) => kind.plural === plural)).map((plural) => ({ plural })));
  };
  return { node, title: "Servers", update, close: () => {}, key: () => false };
};
