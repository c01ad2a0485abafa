// The first page: every fleet at a glance, what needs somebody and why, and what happens.

import { explainInto } from "./detail.mjs";
import { ago, h, mark, put } from "./dom.mjs";
import { fill, pageHash } from "./parts.mjs";
import { MACHINE_KINDS, at, hashOf, hashOfItem, itemsOf, since, titleOf, trouble } from "./model.mjs";

/**
 * Each fleet with its page, the kinds whose trouble is its own, and which of them are counted.
 * @type {{page: string, title: string, counted: string, kinds: string[]}[]}
 */
const FLEETS = [
  { page: "groups", title: "Instances", counted: "instances", kinds: ["instances", "groups"] },
  { page: "proxies", title: "Proxies", counted: "proxy-agents", kinds: ["proxy-agents", "virtual-hosts", "certificates"] },
  { page: "boards", title: "Boards", counted: "boards", kinds: ["boards", "pins", "board-sets"] },
  { page: "edge", title: "Edge daemons", counted: "edge-nodes", kinds: ["edge-nodes"] },
  { page: "gpus", title: "GPUs", counted: "gpus", kinds: ["gpus", "providers"] },
];

const ATTENTION = 50; // More than a person takes in; the lists have the others.
const RECENT = 30;
const PEOPLE = /^(?:account|oidc|operator|person|proxies-user|boards-user|token|user)\//;
const COUNT_MS = 500; // Everything is counted at most as often.

/**
 * @typedef {import("./main.mjs").App} App
 * @typedef {import("./main.mjs").Page} Page
 * @typedef {import("./model.mjs").Kind} Kind
 * @typedef {import("./model.mjs").Item} Item
 * @typedef {import("./model.mjs").Recent} Recent
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
 * What happened, newest first, where the same that happened again to the same thing is one line.
 * @param {Recent[]} events
 * @returns {(Recent & {times: number})[]}
 */
export const folded = (events) => {
  /** @type {(Recent & {times: number})[]} */
  const found = [];
  for (const one of events) {
    const last = found.at(-1);
    if (last && last.type === one.type && last.plural === one.plural && last.scope === one.scope && last.name === one.name) last.times += 1;
    else found.push({ ...one, times: 1 });
  }
  return found;
};

/**
 * Which machine each object is or belongs to: a board is one machine, however many of its pins are in trouble.
 * @type {Record<string, (item: Item) => string>}
 */
const MACHINE = {
  ...Object.fromEntries(MACHINE_KINDS.map((plural) => [plural, (/** @type {Item} */ item) => `${plural} ${item.scope} ${item.name}`])),
  boards: (item) => `board ${item.name}`,
  pins: (item) => `board ${at(item.value, ".spec.board")}`,
  providers: (item) => `provider ${item.name}`,
  gpus: (item) => `provider ${at(item.value, ".status.provider")}`,
};

/**
 * How much needs attention: machines, and objects that belong to none.
 * @param {Item[]} bad
 * @param {number} [all] how many machines there are
 */
export const attentionWords = (bad, all) => {
  const machines = new Set(bad.flatMap((item) => MACHINE[item.plural]?.(item) ?? [])).size;
  const others = bad.filter((item) => !MACHINE[item.plural]).length;
  const words = [
    ...(machines ? [`${machines}${all === undefined ? "" : ` of ${all}`} ${(all ?? machines) === 1 ? "machine" : "machines"}`] : []),
    ...(others ? [`${others}${machines ? " other" : ""} ${others === 1 ? "object" : "objects"}`] : []),
  ];
  return `${words.join(" and ")} ${machines + others === 1 ? "needs" : "need"} attention`;
};

/**
 * @param {App} app
 * @returns {Page}
 */
export const overviewPage = (app) => {
  const say = h("p", { class: "sentence" });
  const fleets = h("ul", { class: "counts" });
  const calm = h("p", { class: "empty" }, "Nothing does.");
  const attention = h("ul", { class: "attention" });
  const recent = h("ol", { class: "recent" });
  const none = h("p", { class: "empty" }, "Nothing since this page was opened.");
  const today = h("ol", { class: "recent today" });
  const todaySay = h("p", { class: "empty" });
  const pages = h("p", { class: "pages" });
  const node = h("section", { class: "overview" }, h("h1", null, "Overview"), say,
    h("h2", null, "Fleets"), fleets, h("h2", null, "Needs attention"), calm, attention, h("h2", null, "What happens"), none, recent, h("h2", null, "What people changed today"), todaySay, today, pages);
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
    /** @param {string} plural */
    const living = (plural) => [...itemsOf(app.world, plural).values()].filter((item) => item.value?.status?.state !== "deleted").length;
    const machines = MACHINE_KINDS.reduce((sum, plural) => sum + living(plural), 0);
    put(say, !app.world.synced ? "Loading." : bad.length
      ? `${attentionWords(bad.map((one) => one.item), machines)}: ${titleOf(bad[0].kind.name)} ${bad[0].item.name}, ${bad[0].why}${bad.length > 1 ? "; …" : "."}`
      : `Nothing needs attention; ${total} things are looked after.`);
    const seen = FLEETS.filter((fleet) => app.kinds.some((kind) => kind.plural === fleet.counted));
    fill(fleets, seen, (fleet) => fleet.page, fleetRow, (row, fleet) => {
      const found = bad.flatMap(({ item }) => (fleet.kinds.includes(item.plural) ? [item] : []));
      const size = living(fleet.counted);
      put(row.children[1], String(size));
      put(row.children[2], found.length ? attentionWords(found) : size ? "all well" : "none yet");
      mark(row.children[2], "class", found.length ? "bad" : "quiet");
    });
    fill(attention, bad.slice(0, ATTENTION), ({ item }) => item.uid, attentionRow, (row, { item, why }) => {
      put(row.children[1], why);
      mark(row.children[0], "href", hashOfItem(item));
    });
    mark(attention, "hidden", bad.length ? null : "");
    calm.hidden = bad.length > 0 || !app.world.synced;
    showToday(nowMs);
    const events = folded(app.world.recent).slice(0, RECENT);
    none.hidden = events.length > 0;
    fill(recent, events, (one) => `${one.atMs} ${one.type} ${one.plural} ${one.scope} ${one.name} ${one.times}`, (one) => h("li", null, ago(new Date(one.atMs).toISOString(), " ago"),
      ` ${one.plural} `, h("a", { href: hashOf(one.plural, one.name, { scope: one.scope === "/" ? "" : one.scope }) }, one.name), ` ${one.type}${one.times > 1 ? ` ${one.times} times` : ""}`), () => {});
  };

  return { node, title: "Overview", update, close: () => {}, key: () => false };
};

/** @param {{page: string, title: string}} fleet */
const fleetRow = (fleet) =>
  h("li", null, h("a", { href: pageHash(fleet.page) }, fleet.title), h("strong"), h("span", { class: "quiet" }));

/** @param {{kind: Kind, item: Item}} found */
const attentionRow = ({ kind, item }) => {
  const answer = h("div", { class: "answer" });
  const ask = h("button", { type: "button", "aria-label": `Why is ${item.name} as it is?`,
    onclick: () => explainInto(answer, kind, item.name, item.scope) }, "why?");
  return h("li", null, h("a", { href: "#" }, `${titleOf(kind.name)} ${item.name}`), h("span", { class: "bad" }),
    kind.may.includes("explain") ? ask : null, answer);
};
