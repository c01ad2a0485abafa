// What objects write down and measure, by their kind: which log has which sources and levels, and whose figures are charts.

import { address, answer, get, listed, objectPath } from "./api.mjs";
import { chart, chartOf, renewCharts, shareCursor } from "./chart.mjs";
import { h, put } from "./dom.mjs";
import { workspaceAt } from "./history.mjs";
import { logView } from "./logview.mjs";
import { words } from "./parts.mjs";

/**
 * @typedef {import("./main.mjs").App} App
 * @typedef {import("./model.mjs").Value} Value
 * @typedef {{node: HTMLElement, update: (nowMs: number) => void}} Measured
 */

const NGINX = ["emerg", "alert", "crit", "error", "warn", "notice", "info", "debug"];
const BOARD = ["emergency", "alert", "critical", "error", "warning", "notice", "info", "debug"];
const REREAD_MS = 30_000; // At most so often, however much is measured.

/** @type {Record<string, {sources: [string, string][], levels: string[]}>} */
const LOGS = {
  boards: { sources: [["", "all"], ["journal", "journal"], ["kernel", "kernel"], ["agent", "agent"]], levels: BOARD },
  "proxy-agents": { sources: [["", "all"], ["access", "requests"], ["nginx_error", "NGINX"], ["agent", "agent"]], levels: NGINX },
};

/**
 * The log of an object of the resource API.
 * @param {App} app
 * @param {string} plural
 * @param {() => {name: string, scope: string} | undefined} object
 * @param {Record<string, string>} [given]
 */
export const objectLog = (app, plural, object, given = {}) =>
  logView(app, {
    label: "Log", ...(LOGS[plural] ?? { sources: [], levels: [] }), given,
    url: (query) => {
      const one = object();
      if (!one) return null;
      if (one.scope !== "/") query.set("scope", one.scope);
      return `${address(`${objectPath(plural, one.name)}/logs`)}?${query}`;
    },
  });

/**
 * What is read again when the stream says that something has come; `mark` tells whether it did.
 * @param {App} app
 * @param {HTMLElement} node
 * @param {() => Promise<Node[]>} read
 * @param {() => string | number} [mark]
 * @returns {Measured & {again: () => void}}
 */
export const reread = (app, node, read, mark = () => app.world.measured) => {
  let readMs = -Infinity;
  let reading = 0;
  /** @type {string | number | undefined} */
  let seen;
  const again = async () => {
    const mine = (reading += 1);
    readMs = Date.now();
    seen = mark();
    try {
      const found = await read();
      if (mine === reading) renewCharts(node, found);
    } catch (error) {
      if (mine === reading && !app.isRefused(error)) put(node, words(error));
    }
    node.dataset.reads = String(Number(node.dataset.reads ?? 0) + 1);
  };
  return { node, again, update: (nowMs) => { if (mark() !== seen && nowMs - readMs >= REREAD_MS && !document.hidden) again(); } };
};

// Boards.

/** @type {[string, string, string, number | undefined, number | undefined][]} */
const BOARD_SERIES = [["cpu_usage", "Processor", " %", 100, 90], ["memory_usage", "Memory", " %", 100, 90], ["disk_usage", "Disk", " %", 100, 90], ["temperature", "Temperature", " °C", undefined, 80]];

/**
 * What a board measured in the last hour, as charts.
 * @param {App} app
 * @param {() => number | undefined} number by which its API knows it
 */
export const boardCharts = (app, number) => {
  const node = shareCursor(h("div", { class: "charts" }));
  return reread(app, node, async () => {
    const board = number();
    if (board === undefined) return [];
    const to = Date.now();
    const from = to - 3_600_000;
    const found = await Promise.all(BOARD_SERIES.map(async ([name]) => (await answer(`/api/v1/nodes/${board}/metrics?series=${name}`)).json()));
    return BOARD_SERIES.flatMap(([name, title, unit, most, threshold], place) => {
      const points = found[place].points.map((/** @type {any} */ one) => ({ at: Date.parse(one.timestamp), value: one.average }));
      const how = { stepMs: Math.max(found[place].step_seconds * 1000, 15_000), most, threshold, from, to };
      return name === "temperature" && !points.length ? [] : [chart(title, unit, points, how)]; // many boards have no sensor
    });
  });
};

// Proxies.

const HOUR_MS = 3_600_000;
/** @type {Record<string, {ms: number, stepMs: number}>} */
export const RANGES = { "1 hour": { ms: HOUR_MS, stepMs: 60_000 }, "24 hours": { ms: 24 * HOUR_MS, stepMs: HOUR_MS }, "7 days": { ms: 168 * HOUR_MS, stepMs: 24 * HOUR_MS } };

/**
 * Series of requests, as charts: one line for each class of answers and for each percentile.
 * @param {any} told the traffic of a workspace
 * @param {{from: number, to: number, stepMs: number}} how
 */
export const trafficCharts = (told, how) => {
  const series = (/** @type {string} */ name, /** @type {(figures: any) => number} */ value) =>
    ({ name, points: told.over_time.map((/** @type {any} */ one) => ({ at: Date.parse(one.at), value: value(one.figures) })) });
  return [
    chartOf("Requests", "", [series("all", (one) => one.requests), series("errors", (one) => one.status_codes["4xx"] + one.status_codes["5xx"])], how),
    chartOf("Answers", "", ["2xx", "3xx", "4xx", "5xx"].map((name) => series(name, (one) => one.status_codes[name])), how),
    chartOf("Time to answer", " ms", ["p50", "p90", "p95", "p99"].map((name) => series(name, (one) => one.latency_ms[name])), how),
    chartOf("Bytes", " KB", [series("sent", (one) => one.out_bytes / 1000), series("received", (one) => one.in_bytes / 1000)], how),
  ];
};

/** @param {any} figures */
export const errorShare = (figures) => (figures.requests ? (100 * (figures.status_codes["4xx"] + figures.status_codes["5xx"])) / figures.requests : 0);

/**
 * What a stretch came to, against the same stretch of the day before.
 * @param {any} told
 */
export const trafficWords = (told) => {
  const { total, day_before: before } = told;
  const than = before.requests ? `; the day before ${before.requests}` : "";
  return total.requests
    ? `${total.requests} requests${than}, ${errorShare(total).toFixed(1)} % answered with an error. Half took at most ${total.latency_ms.p50} ms, 95 of 100 at most ${total.latency_ms.p95} ms, 99 of 100 at most ${total.latency_ms.p99} ms.`
    : `No requests${than}.`;
};

/**
 * What an agent's NGINX served in the last hour.
 * @param {App} app
 * @param {() => Value | null} agent
 */
const agentCharts = (app, agent) => {
  const node = shareCursor(h("div", { class: "charts" }));
  return reread(app, node, async () => {
    const value = agent();
    const workspace = value && (await workspaceAt(value.metadata.scope));
    if (!value || !workspace) return [];
    const id = (await listed(`/v1/workspaces/${workspace}/agents`)).find((one) => one.name === value.metadata.name)?.id;
    const to = Date.now();
    const { ms, stepMs } = RANGES["1 hour"];
    const given = new URLSearchParams({ from: new Date(to - ms).toISOString(), to: new Date(to).toISOString(), agent_id: id ?? "" });
    const told = await (await answer(`/v1/workspaces/${workspace}/traffic?${given}`)).json();
    return [h("p", { class: "wide traffic-words" }, trafficWords(told)), ...trafficCharts(told, { from: to - ms, to, stepMs })];
  });
};

// Every other kind that keeps figures.

const MINUTE_SECONDS = 60; // Agents report at least so often: a wider gap is one.

/**
 * What one series of the resource API is as a chart: large numbers of bytes in kilobytes.
 * @param {any} series
 */
export const chartParts = (series) => {
  const isBytes = series.unit.startsWith("B");
  const unit = isBytes ? ` K${series.unit}` : series.unit === "" || series.unit.startsWith("/") ? series.unit : ` ${series.unit}`;
  const points = series.points.map((/** @type {any} */ one) => ({ at: Date.parse(one.at), value: isBytes ? one.average / 1000 : one.average }));
  return { title: series.title, unit, points, most: series.full ?? undefined, threshold: series.high ?? undefined };
};

/**
 * What was measured of an object in the last hour, as the resource API has it.
 * @param {App} app
 * @param {string} plural
 * @param {() => Value | null} object
 */
const historyCharts = (app, plural, object) => {
  const node = shareCursor(h("div", { class: "charts" }));
  return reread(app, node, async () => {
    const value = object();
    if (!value) return [];
    const { name, scope } = value.metadata;
    const told = await get(`${objectPath(plural, name)}/figures`, { ...(scope === "/" ? {} : { scope }), step: String(MINUTE_SECONDS) });
    const [from, to] = [Date.parse(told.since), Date.parse(told.until)];
    if (!told.series.length) return [h("p", { class: "empty" }, "Nothing was measured in the last hour: its agent reports no figures, or is away.")];
    return told.series.map((/** @type {any} */ one) => {
      const { title, unit, points, most, threshold } = chartParts(one);
      return chart(title, unit, points, { stepMs: told.stepSeconds * 1000, most, threshold, from, to });
    });
  });
};

/**
 * Figures of an object over time, where its kind has some of its own.
 * @type {Record<string, (app: App, value: () => Value | null) => Measured>}
 */
const OWN = {
  boards: (app, value) => boardCharts(app, () => value()?.status.number),
  "proxy-agents": agentCharts,
};

/**
 * Figures of an object over time, where its kind has some; else null.
 * @param {import("./model.mjs").Kind} kind
 * @returns {((app: App, value: () => Value | null) => Measured) | null}
 */
export const measuredOf = (kind) => OWN[kind.plural] ?? (kind.verbs.includes("history") ? (app, value) => historyCharts(app, kind.plural, value) : null);
