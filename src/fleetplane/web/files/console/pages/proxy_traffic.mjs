// The requests of a workspace: charts over time by host and agent, percentiles, and who asks most often for what.

import { answer } from "../api.mjs";
import { shareCursor } from "../chart.mjs";
import { h, put } from "../dom.mjs";
import { RANGES, errorShare, reread, trafficCharts, trafficWords } from "../observed.mjs";
import { choice, tableOf } from "../parts.mjs";

/**
 * @typedef {import("../main.mjs").App} App
 * @typedef {{name: string, id: string, figures: any}} Part
 */

const PLACES = 50; // Of locations and upstreams, the busiest.
const TOPS = [["clients", "Addresses"], ["paths", "Paths"], ["referrers", "Referrers"], ["user_agents", "Programs"]];

/** @param {string} title */
const partTable = (title) => tableOf(`Traffic by ${title.toLowerCase()}`, (/** @type {Part} */ one) => one.id, [
  { title, text: (one) => one.name || one.id },
  { title: "Requests", text: (one) => String(one.figures.requests) },
  { title: "Errors", text: (one) => `${errorShare(one.figures).toFixed(1)} %`, tone: (one) => (one.figures.status_codes["5xx"] ? "bad" : "") },
  { title: "p50", text: (one) => `${one.figures.latency_ms.p50} ms` },
  { title: "p95", text: (one) => `${one.figures.latency_ms.p95} ms` },
  { title: "p99", text: (one) => `${one.figures.latency_ms.p99} ms` },
  { title: "Sent", text: (one) => `${(one.figures.out_bytes / 1000).toFixed(1)} KB` },
]);

/**
 * @param {App} app
 * @param {() => Promise<string>} workspaceId
 */
export const trafficPart = (app, workspaceId) => {
  const range = choice("Of the last", "range", Object.keys(RANGES).map((one) => [one, one]), "1 hour");
  const host = choice("Virtual host", "traffic-host", [["", "all"]]);
  const agent = choice("Agent", "traffic-agent", [["", "all"]]);
  const summary = h("p", { class: "traffic-words" });
  const charts = shareCursor(h("div", { class: "charts traffic" }));
  const [hosts, agents, locations, upstreams] = [partTable("Virtual host"), partTable("Agent"), partTable("Location"), partTable("Upstream")];
  const tops = h("div", { class: "cards tops" });

  /**
   * Offer what there is, and keep what was chosen.
   * @param {HTMLSelectElement} select
   * @param {Part[]} parts
   */
  const offer = (select, parts) => {
    for (const { id, name } of parts)
      if (![...select.options].some((one) => one.value === id)) select.append(h("option", { value: id }, name || id));
  };

  const measured = reread(app, charts, async () => {
    const { ms, stepMs } = RANGES[range.input.value];
    const to = Date.now();
    const given = new URLSearchParams({ from: new Date(to - ms).toISOString(), to: new Date(to).toISOString(), by: "location" });
    if (host.input.value) given.set("virtual_host_id", host.input.value);
    if (agent.input.value) given.set("agent_id", agent.input.value);
    const told = await (await answer(`/v1/workspaces/${await workspaceId()}/traffic?${given}`)).json();
    put(summary, trafficWords(told));
    const hostParts = told.virtual_hosts.map((/** @type {any} */ one) => ({ id: one.virtual_host_id, name: one.name, figures: one.figures }));
    const agentParts = told.agents.map((/** @type {any} */ one) => ({ id: one.agent_id, name: one.name, figures: one.figures }));
    offer(host.input, hostParts);
    offer(agent.input, agentParts);
    hosts.show(hostParts);
    agents.show(agentParts);
    locations.show(told.locations.slice(0, PLACES).map((/** @type {any} */ one) => ({ id: `${one.virtual_host_id} ${one.location} ${one.upstream_id}`, name: `${one.virtual_host || one.virtual_host_id} ${one.location}`, figures: one.figures })));
    upstreams.show(told.upstreams.slice(0, PLACES).map((/** @type {any} */ one) => ({ id: one.upstream_id, name: one.name, figures: one.figures })));
    tops.replaceChildren(...TOPS.filter(([key]) => told.top[key]?.values.length).map(([key, title]) => topList(title, told.top[key])));
    return trafficCharts(told, { from: to - ms, to, stepMs });
  });
  for (const { input } of [range, host, agent]) input.addEventListener("change", () => measured.again());
  const node = h("div", null, h("p", { class: "filters" }, range.node, host.node, agent.node), summary, charts, h("div", { class: "tables" }, hosts.node, locations.node, upstreams.node, agents.node), tops);
  return { node, update: measured.update, again: measured.again };
};

/**
 * @param {string} title
 * @param {{values: {value: string, requests: number}[], missed: number}} top
 */
const topList = (title, top) =>
  h("section", { class: "top", "aria-label": title }, h("h3", null, title),
    h("ol", { class: "related" }, top.values.map((one) => h("li", null, `${one.value || "none"} `, h("small", null, `${one.requests}`)))),
    top.missed ? h("p", { class: "empty" }, `Any of them may have had ${top.missed} more.`) : null);
