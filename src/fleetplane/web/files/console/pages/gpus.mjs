// GPUs: a grid of their health by provider, and one of them with its conditions and what happened to it.

import { ago, h, mark, put } from "../dom.mjs";
import { explainInto } from "../detail.mjs";
import { audited, momentList, ownMoments } from "../history.mjs";
import { hashOfItem, itemsOf, since } from "../model.mjs";
import { fill, pageHash, words } from "../parts.mjs";

/**
 * @typedef {import("../main.mjs").App} App
 * @typedef {import("../main.mjs").Page} Page
 * @typedef {import("../model.mjs").Item} Item
 */

const AUDIT_MS = 5000; // The audit log is read again at most as often, and only after a change.
const LETTERS = /** @type {Record<string, string>} */ ({ healthy: "✓", unhealthy: "✗" });
const TONES = /** @type {Record<string, string>} */ ({ healthy: "good", unhealthy: "bad" });

/**
 * @param {App} app
 * @param {Record<string, string>} query
 * @returns {Page}
 */
export const gpusPage = (app, query) => {
  const say = h("p", { class: "sentence" });
  const grid = h("div", { class: "grids" });
  const chosen = h("section", { class: "chosen-one", hidden: true });
  const conditions = h("ul", { class: "conditions" });
  const why = h("div", { class: "answer" });
  const timeline = h("div");
  const kind = app.kinds.find((one) => one.plural === "gpus");
  const node = h("section", null, h("h1", null, "GPUs"), say, grid, chosen);
  /** @type {[string, string][]} */
  let moments = [];
  let auditedOf = "";
  let auditedMs = 0;
  let drawn = "";

  const item = () => [...itemsOf(app.world, "gpus").values()].find((one) => one.name === query.gpu);
  if (query.gpu) {
    const found = h("a", { href: "#" }, "Everything about it");
    chosen.replaceChildren(h("h2", null, query.gpu), h("p", { class: "tools" }, found,
      kind?.may.includes("explain") ? h("button", { type: "button", onclick: () => explainInto(why, kind, query.gpu, "/") }, "why?") : null),
      why, h("h3", null, "Conditions"), conditions, h("h3", null, "Timeline"), timeline);
    chosen.hidden = false;
  }

  /** @param {Item} found */
  const loadAudit = async (found) => {
    const mark = `${found.uid} ${found.value?.metadata.revision}`;
    if (auditedOf === mark || Date.now() - auditedMs < AUDIT_MS || !kind || !found.value || !app.kinds.some((one) => one.plural === "audit-entries")) return;
    [auditedOf, auditedMs] = [mark, Date.now()];
    try {
      ({ moments } = await audited(kind, found.value));
    } catch (error) {
      if (!app.isRefused(error)) moments = [[new Date().toISOString(), words(error)]];
    }
    drawn = "";
    update(Date.now());
  };

  /** @param {number} nowMs */
  const update = (nowMs) => {
    const all = [...itemsOf(app.world, "gpus").values()];
    const bad = all.filter((one) => one.value?.status.health === "unhealthy");
    const unknown = all.filter((one) => one.value?.status.health !== "healthy").length - bad.length;
    put(say, !app.world.synced ? "Loading." : !all.length
      ? "There are no GPUs. On a machine with some: fleetplane agent gpu --address unix:PATH"
      : `${bad.length ? `${bad.length} of ${all.length} GPUs ${bad.length === 1 ? "is" : "are"} unhealthy: ${bad[0].name}` : `${all.length} GPUs; none is unhealthy`}${unknown ? `, ${unknown} unknown` : ""}.`);
    const providers = [...new Set(all.map((one) => one.value?.status.provider || "no provider"))].sort();
    fill(grid, providers, (name) => name, (name) => h("section", null, h("h2", null, name), h("ul", { class: "grid" })), (row, name) => {
      const own = all.filter((one) => (one.value?.status.provider || "no provider") === name).sort((one, other) => (one.name < other.name ? -1 : 1));
      put(row.firstElementChild, `${name}: ${own.length}`);
      fill(row.lastElementChild, own, (one) => one.uid, () => h("li", null, h("a", { href: "#" })), (cell, one) => {
        const health = one.value?.status.health ?? "unknown";
        const link = cell.firstElementChild;
        put(link, `${LETTERS[health] ?? "?"} ${one.name.slice(0, 12)}`);
        mark(link, "href", pageHash("gpus", { gpu: one.name }));
        mark(link, "data-tone", TONES[health] ?? "waiting");
        mark(link, "aria-label", `${one.name}, ${health}`);
        mark(link, "aria-current", one.name === query.gpu ? "true" : null);
      });
    });
    const found = item();
    if (!query.gpu || !found?.value) return;
    loadAudit(found);
    mark(/** @type {Element} */ (chosen.querySelector("a")), "href", hashOfItem(found));
    const version = JSON.stringify([found.value, moments.length, Math.floor(nowMs / 10_000)]);
    if (version === drawn) return;
    drawn = version;
    conditions.replaceChildren(...found.value.conditions.map((one) =>
      h("li", { "data-tone": one.status === "False" ? "bad" : one.status === "True" ? "good" : "waiting" }, h("strong", null, `${one.type} ${one.status}`),
        ` ${one.reason}${one.message ? `: ${one.message}` : ""}`, h("small", null, " for ", ago(one.changedAt), `, says ${one.observedBy || "nobody"}`))));
    timeline.replaceChildren(momentList([...ownMoments(found.value), ...moments], nowMs));
  };
  return { node, title: "GPUs", update, close: () => {}, key: () => false };
};
