// Servers: who they are, what they run, and how far they are.

import { answer } from "../api.mjs";
import { h, put } from "../dom.mjs";
import { itemsOf, since } from "../model.mjs";
import { reread } from "../observed.mjs";
import { copyParts, tableOf } from "../parts.mjs";

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

const LAGS_SECONDS = 5; // Servers catch up every half second: who needs ten times as long has trouble.
const RECENT_MS = 3_600_000; // A server that has been gone for longer will hardly be missed now.

/** @param {any} status */
const lags = (status) => status.state === "standby" && (status.lagSeconds === null ? status.lagGroups > 0 : status.lagSeconds > LAGS_SECONDS);

/** @param {any} status @param {number} nowMs */
const isMissed = (status, nowMs) => status.state === "gone" && status.silentSince !== null && nowMs - Date.parse(status.silentSince) < RECENT_MS;

/**
 * How old what is known of a server is: nothing to say while it is heard of all the time.
 * @param {any} status
 * @param {number} nowMs
 */
export const serverAge = (status, nowMs) => (status.fresh ? "now" : status.silentSince ? `${since(status.silentSince, nowMs)} ago` : "left");

/** @param {any} status */
export const serverLag = (status) => {
  if (status.state === "gone") return "-";
  if (!status.lagGroups) return "none";
  return `${status.lagGroups} ${status.lagGroups === 1 ? "group" : "groups"}${status.lagSeconds === null ? "" : `, ${status.lagSeconds.toFixed(1)} s`}`;
};

/** @param {{engine: string, sizeBytes: number | null}} database */
const databaseWords = ({ engine, sizeBytes }) => (sizeBytes === null ? engine : `${engine}, ${(sizeBytes / 1024 ** 2).toFixed(1)} MiB`);

/**
 * Over what a server tells others of writes, and whether it can.
 * @param {{kind: string, connected: boolean, trouble: string}} bus
 */
export const busWords = ({ kind, connected, trouble }) => (kind === "none" || connected ? kind : `${kind}, cut${trouble ? `: ${trouble}` : ""}`);

/** @param {any} status */
const isCut = (status) => status.bus.kind !== "none" && !status.bus.connected;

/**
 * Whether something is wrong with the servers, in one sentence.
 * @param {any[]} servers
 * @param {number} nowMs
 */
export const serversWords = (servers, nowMs) => {
  const here = servers.filter((one) => one.status.state !== "gone");
  const missed = servers.filter((one) => isMissed(one.status, nowMs));
  const lagging = servers.filter((one) => lags(one.status));
  const silent = here.filter((one) => !one.status.fresh);
  const mute = here.filter((one) => one.status.state === "active" && !one.status.writable);
  const standing = here.filter((one) => one.status.state === "standby").length;
  const wrong = [
    ...mute.map((one) => `${one.metadata.name} does not write`),
    ...(here.length === standing && servers.length ? ["no server is active"] : []),
    ...missed.map((one) => `${one.metadata.name} is gone, and was last heard of ${serverAge(one.status, nowMs)}`),
    ...silent.map((one) => `${one.metadata.name} was last heard of ${serverAge(one.status, nowMs)}`),
    ...here.filter((one) => isCut(one.status)).map((one) => `${one.metadata.name} is cut off from the bus`),
    ...lagging.map((one) => `${one.metadata.name} lags by ${serverLag(one.status)}`),
  ];
  const stands = standing === 0 ? "" : standing === 1 ? ", one stands by" : `, ${standing} stand by`;
  const count = `${here.length} ${here.length === 1 ? "server" : "servers"}${stands}`;
  return `${count}; ${wrong.length ? wrong.join("; ") : standing ? "nobody lags" : "none needs attention"}.`;
};

/**
 * @param {App} app
 * @returns {Page}
 */
export const serversPage = (app) => {
  const say = h("p", { class: "sentence" }, "Loading.");
  /** @param {(status: any) => string} [tone] */
  const quiet = (tone = () => "") => (/** @type {any} */ one) => (one.status.fresh ? tone(one.status) : isMissed(one.status, Date.now()) ? "bad" : "quiet");
  const unknown = (/** @type {any} */ value) => (value === null ? "-" : String(value));
  const servers = tableOf("Servers", (/** @type {any} */ one) => one.metadata.name, [
    { title: "Server", text: (one) => `${one.metadata.name}${one.status.answers ? " (answers here)" : ""}`, tone: quiet() },
    { title: "State", text: (one) => one.status.state, tone: quiet((status) => (status.state === "active" && !status.writable ? "bad" : "")) },
    { title: "Heard of", text: (one) => serverAge(one.status, Date.now()), tone: quiet() },
    { title: "Lag", text: (one) => serverLag(one.status), tone: quiet((status) => (lags(status) ? "bad" : "")) },
    { title: "Version", text: (one) => one.status.version, tone: quiet() },
    { title: "Agents", text: (one) => unknown(one.status.agents), tone: quiet() },
    { title: "Writes", text: (one) => (one.status.writable ? "yes" : "no"), tone: quiet() },
    { title: "Term", text: (one) => (one.status.term ? String(one.status.term) : "-"), tone: quiet() },
    { title: "Boot", text: (one) => (one.status.boot ? String(one.status.boot) : "-"), tone: quiet() },
    { title: "Revision", text: (one) => (one.status.answers ? app.world.revision || unknown(one.status.revision) : "-"), tone: quiet() },
    { title: "Up for", text: (one) => (one.status.startedAt ? since(one.status.startedAt, Date.now()) : "-"), tone: quiet() },
    { title: "Database", text: (one) => databaseWords(one.status.database), tone: quiet() },
    { title: "Bus", text: (one) => busWords(one.status.bus), tone: quiet((status) => (isCut(status) ? "bad" : "")) },
    { title: "Fleets", text: (one) => one.spec.domains.join(", ") || "-", tone: quiet() },
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
  const others = h("p", null, "The same from the database itself, while no server answers, too: ", ...copyParts("fleetplane servers"));
  const measured = reread(app, h("p", { class: "empty" }), async () => {
    const told = serverFigures(await (await answer("/metrics")).text());
    database.replaceChildren(...told.database.flatMap(([key, text]) => [h("dt", null, key), h("dd", null, text)]));
    sessions.show(told.sessions);
    controllers.show(told.controllers);
    return [];
  }, () => `${app.world.measured} ${app.world.revision}`);
  const node = h("section", null, h("h1", null, "Servers"), say, servers.node, others, h("h2", null, "Agents"), agents.node, sessions.node,
    h("h2", null, "Database"), database, h("h2", null, "Controllers and their leases"), controllers.node, measured.node);

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

  /** @param {number} nowMs */
  const update = (nowMs) => {
    const known = [...itemsOf(app.world, "servers").values()].flatMap((one) => (one.value ? [one.value] : []))
      .sort((one, other) => one.metadata.name.localeCompare(other.metadata.name));
    if (known.length) put(say, serversWords(known, nowMs));
    servers.show(known);
    measured.update(nowMs);
    agents.show(["instances", "proxy-agents", "boards", "edge-nodes"].filter((plural) => app.kinds.some((kind) => kind.plural === plural)).map((plural) => ({ plural })));
  };
  return { node, title: "Servers", update, close: () => {}, key: () => false };
};
