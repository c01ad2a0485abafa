// The first page: every fleet at a glance, what needs somebody and why, and what happens.

import { explainInto } from "./detail.mjs";
import { ago, h, mark, put } from "./dom.mjs";
import { fill } from "./parts.mjs";
import { hashOf, hashOfItem, itemsOf, since, titleOf, trouble } from "./model.mjs";

const ATTENTION = 50; // More than a person takes in; the lists have the others.
const RECENT = 30;
const PEOPLE = /^(?:account|oidc|operator|person|proxies-user|boards-user|token|user)\//;
const COUNT_MS = 500; // Everything is counted at most as often.

/**
 * @typedef {import("./main.mjs").App} App
 * @typedef {import("./main.mjs").Page} Page
 * @typedef {import("./model.mjs").Kind} Kind
 * @typedef {import("./model.mjs").Item} Item
 */

/**
 * What people and their programs did since midnight, of the newest entries of the audit log. What machines report is no change of anybody's.
 * @param {any[][]} rows number, when, who, what and how many objects
 * @param {number} nowMs
 */
export const changedToday = (rows, nowMs) => {
  const midnight = new Date(nowMs).setHours(0, 0, 0, 0);
  return rows.map(([number, at, actor, action, count]) => ({ number: String(number), at: String(at), actor: String(actor), action: String(action), count: Number(count) }))
    .filter((one) => Date.parse(one.at) >= midnight && PEOPLE.test(one.actor) && !one.action.endsWith("login"));
};

/**
 * @param {App} app
 * @returns {Page}
 */
export const overviewPage = (app) => {
  const say = h("p", { class: "sentence" });
  const counts = h("ul", { class: "counts" });
  const attention = h("ul", { class: "attention" });
  const recent = h("ol", { class: "recent" });
  const none = h("p", { class: "empty" }, "Nothing since this page was opened.");
  const today = h("ol", { class: "recent today" });
  const todaySay = h("p", { class: "empty" });
  const pages = h("p", { class: "pages" });
  const node = h("section", { class: "overview" }, h("h1", null, "Overview"), say,
    h("h2", null, "Fleets"), counts, h("h2", null, "Needs attention"), attention, h("h2", null, "What happens"), none, recent, h("h2", null, "What people changed today"), todaySay, today, pages);
  let countedMs = 0;
  app.otherPages().then((found) => {
    pages.replaceChildren(...found.flatMap((path, number) => [number ? ", " : "Other pages: ", h("a", { href: path }, path)]));
  });

  /** @param {number} nowMs */
  const showToday = (nowMs) => {
    const isShown = app.kinds.some((kind) => kind.plural === "audit-entries");
    const found = changedToday([...itemsOf(app.world, "audit-entries").values()].map((one) => one.cells), nowMs);
    put(todaySay, !isShown ? `The audit log is not shown. ${app.reason()}` : found.length ? "" : "Nothing, as far as the newest entries of the audit log tell.");
    fill(today, found.slice(0, RECENT), (one) => one.number, () => h("li", null, h("time"), h("span"), " ", h("a", { href: "#/" })), (row, one) => {
      put(row.children[0], `${since(one.at, nowMs)} ago`);
      mark(row.children[0], "datetime", one.at);
      put(row.children[1], ` ${one.actor}`);
      put(row.children[2], `${one.action}${one.count > 1 ? `, ${one.count} objects` : ""}`);
      mark(row.children[2], "href", hashOf("audit-entries", one.number));
    });
  };

  /** @param {number} nowMs */
  const update = (nowMs) => {
    if (nowMs - countedMs < COUNT_MS) return;
    countedMs = nowMs;
    const bad = app.kinds.flatMap((kind) =>
      [...itemsOf(app.world, kind.plural).values()].flatMap((item) => {
        const why = trouble(kind, item);
        return why ? [{ kind, item, why }] : [];
      }));
    const total = app.kinds.reduce((sum, kind) => sum + itemsOf(app.world, kind.plural).size, 0);
    put(say, !app.world.synced ? "Loading." : bad.length
      ? `${bad.length} of ${total} things need${bad.length === 1 ? "s" : ""} attention: ${titleOf(bad[0].kind.name)} ${bad[0].item.name}, ${bad[0].why}${bad.length > 1 ? "; …" : "."}`
      : `Nothing needs attention; ${total} things are looked after.`);
    fill(counts, app.kinds, (kind) => kind.plural, countRow, (row, kind) => {
      const found = bad.filter((one) => one.kind === kind).length;
      put(row.children[0], titleOf(kind.plural));
      put(row.children[1], String(itemsOf(app.world, kind.plural).size));
      put(row.children[2], found ? `${found} need${found === 1 ? "s" : ""} attention` : "");
    });
    fill(attention, bad.slice(0, ATTENTION), ({ item }) => item.uid, attentionRow, (row, { item, why }) => {
      put(row.children[1], why);
      mark(row.children[0], "href", hashOfItem(item));
    });
    mark(attention, "hidden", bad.length ? null : "");
    showToday(nowMs);
    const events = app.world.recent.slice(0, RECENT);
    none.hidden = events.length > 0;
    fill(recent, events, (one) => `${one.atMs} ${one.type} ${one.plural} ${one.scope} ${one.name}`, (one) => h("li", null, ago(new Date(one.atMs).toISOString(), " ago"),
      ` ${one.plural} `, h("a", { href: hashOf(one.plural, one.name, { scope: one.scope === "/" ? "" : one.scope }) }, one.name), ` ${one.type}`), () => {});
  };

  return { node, title: "Overview", update, close: () => {}, key: () => false };
};

/** @param {Kind} kind */
const countRow = (kind) =>
  h("li", null, h("a", { href: hashOf(kind.plural) }), h("strong"), h("span", { class: "bad" }));

/** @param {{kind: Kind, item: Item}} found */
const attentionRow = ({ kind, item }) => {
  const answer = h("div", { class: "answer" });
  const ask = h("button", { type: "button", "aria-label": `Why is ${item.name} as it is?`,
    onclick: () => explainInto(answer, kind, item.name, item.scope) }, "why?");
  return h("li", null, h("a", { href: "#" }, `${titleOf(kind.name)} ${item.name}`), h("span", { class: "bad" }),
    kind.may.includes("explain") ? ask : null, answer);
};
