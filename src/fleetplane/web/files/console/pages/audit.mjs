// The audit log: who did what to what, newest first, and whether its checkpoints keep up.

import { answer, get } from "../api.mjs";
import { h, put } from "../dom.mjs";
import { itemsOf, since } from "../model.mjs";
import { brief, button, closeDialog, copyParts, field, getCommand, openDialog, pageHash, tableOf, words } from "../parts.mjs";

/**
 * @typedef {import("../main.mjs").App} App
 * @typedef {import("../main.mjs").Page} Page
 */

const ROWS = 500;

/**
 * What the server's figures say about the log.
 * @param {string} text in the exposition of Prometheus
 */
export const auditFigures = (text) => {
  const value = (/** @type {RegExp} */ line) => [...text.matchAll(line)];
  const entries = Number(value(/^fleetplane_audit_entries (\S+)$/gm)[0]?.[1] ?? NaN);
  const anchors = value(/^fleetplane_audit_anchor_behind\{anchor="([^"]*)"\} (\S+)$/gm).map((one) => ({ anchor: one[1], behind: Number(one[2]) }));
  return { entries, anchors };
};

/**
 * The organisation of proxies that an entry is about, if it is one of somebody's; empty otherwise.
 * @param {any} entry
 */
export const organizationOf = (entry) =>
  (/^(?:agent|system)/.test(entry.spec.actor) ? "" : entry.spec.changes.map((/** @type {any} */ one) => /^org\/([^/]+)/.exec(one.scope)?.[1]).find(Boolean) ?? "");

/** @param {Record<string, [any, any]> | null | undefined} changes what each field was and is */
const valueList = (changes) => {
  const fields = Object.entries(changes ?? {});
  if (!fields.length) return h("p", null, "Values of it are not kept: it has none, or nobody's request did it.");
  return h("ul", { class: "plan" }, fields.map(([name, [before, after]]) => h("li", null, h("code", null, name), ": ", h("del", null, brief(before)), " → ", h("ins", null, brief(after)))));
};

/**
 * @param {App} app
 * @param {Record<string, string>} query
 * @returns {Page}
 */
export const auditPage = (app, query) => {
  const filter = { ...query };
  const say = h("p", { class: "sentence" }, "Loading.");
  const verify = h("p", { class: "verify" });
  const rows = tableOf("Audit log", (/** @type {any} */ one) => one.metadata.name, [
    { title: "Number", text: (one) => one.metadata.name },
    { title: "When", at: (one) => one.spec.at },
    { title: "Who", text: (one) => one.spec.actor },
    { title: "Did", text: (one) => one.spec.action },
    { title: "To", text: (one) => one.spec.changes.map((/** @type {any} */ change) => `${change.operation} ${change.kind} ${change.name}`).join(", ") },
    { title: "", node: (one) => (organizationOf(one) ? button("Old and new", () => values(one), { class: "values", "aria-label": `Old and new values of entry ${one.metadata.name}` }) : h("span")) },
  ], () => getCommand("audit-entries"));
  const inputs = [["actor", "Who"], ["action", "Did"], ["about", "To"]].map(([key, label]) => {
    const one = field(label, key, { type: "search", value: filter[key] ?? "" });
    one.input.addEventListener("input", () => {
      if (one.input.value) filter[key] = one.input.value.trim();
      else delete filter[key];
      app.replace(pageHash("audit", filter));
      show();
    });
    return one;
  });
  const node = h("section", null, h("h1", null, "Audit"), say, verify, h("p", { class: "filters" }, ...inputs.map((one) => one.node), button("Read on", () => load(true), { class: "more" })), rows.node);
  /** @type {any[]} */
  let known = [];
  let seen = "";
  let more = "";

  /**
   * What a change of proxies set, field by field: their own log keeps it, by the same number.
   * @param {any} one
   */
  const values = async (one) => {
    const number = Number(one.metadata.name);
    const title = h("h2", { id: "dialog-title" }, `Entry ${number}: ${one.spec.action} by ${one.spec.actor}`);
    openDialog(title, h("p", null, "Asking the server."), button("Close", closeDialog));
    try {
      const told = await (await answer(`/v1/organizations/${organizationOf(one)}/audit-log?limit=1&cursor=${number + 1}`)).json();
      openDialog(title, valueList(told.data.find((/** @type {any} */ entry) => entry.id === String(number))?.changes), button("Close", closeDialog));
    } catch (error) {
      if (!app.isRefused(error)) openDialog(title, h("p", { class: "error", role: "alert" }, words(error)), button("Close", closeDialog));
    }
  };

  /** @param {boolean} [further] */
  const load = async (further = false) => {
    try {
      const found = await get("/audit-entries", { limit: String(ROWS), continue: further ? more : "" });
      more = found.continue ?? "";
      known = further ? [...known, ...found.items] : found.items;
      if (!further) await figures();
    } catch (error) {
      if (!app.isRefused(error)) put(say, words(error));
      return;
    }
    show();
  };

  const figures = async () => {
    const { entries, anchors } = auditFigures(await (await answer("/metrics")).text());
    const kept = anchors.map((one) => `${one.anchor} (${one.behind ? `${one.behind} entries behind` : "up to date"})`).join(", ");
    verify.replaceChildren(`Every entry is hashed with the one before it; the log has ${Number.isFinite(entries) ? entries : "some"} entries. Checkpoints: ${kept || "nowhere beside the database"}. To check all of it: `,
      ...copyParts("fleetplane audit verify"));
  };

  const show = () => {
    const fits = (/** @type {any} */ one) =>
      [["actor", one.spec.actor], ["action", one.spec.action], ["about", one.spec.changes.map((/** @type {any} */ change) => `${change.kind} ${change.scope} ${change.name}`).join(" ")]]
        .every(([key, text]) => !filter[key] || text.toLowerCase().includes(filter[key].toLowerCase()));
    const found = known.filter(fits);
    put(say, `${found.length} of the newest ${known.length} entries${Object.keys(filter).length ? " fit the filter" : ""}${more ? "; there are older ones" : ""}.`);
    rows.show(found.slice(0, ROWS));
  };

  /** @param {number} _nowMs */
  const update = (_nowMs) => {
    const newest = [...itemsOf(app.world, "audit-entries").values()][0]?.name ?? "";
    if (newest !== seen || !known.length) {
      if (seen === newest && seen) return;
      seen = newest || " ";
      load();
    }
  };
  return { node, title: "Audit", update, close: () => {}, key: () => false };
};
