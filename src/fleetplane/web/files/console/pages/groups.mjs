// Groups of instances: what is wanted against what is there, and how to change it.

import { address, objectPath, send } from "../api.mjs";
import { actionButtons } from "../actions.mjs";
import { whyPart } from "../detail.mjs";
import { copyButton, h, mark, put } from "../dom.mjs";
import { hashOf, hashOfItem, itemsOf, quoted, tone } from "../model.mjs";
import { button, field, fill, getCommand, propose, tableOf } from "../parts.mjs";

/**
 * @typedef {import("../main.mjs").App} App
 * @typedef {import("../main.mjs").Page} Page
 * @typedef {import("../model.mjs").Item} Item
 */

const STATE = { title: "STATE", type: "text", wide: false };

/**
 * What scaling would do, in words.
 * @param {number} from
 * @param {number} to
 */
export const scaleWords = (from, to) =>
  to === from ? `It has ${from} already; nothing would change.`
    : to > from ? `${to - from} more ${to - from === 1 ? "instance is" : "instances are"} created: ${from} become ${to}.`
      : `${from - to} ${from - to === 1 ? "instance is" : "instances are"} drained and deleted: ${from} become ${to}.`;

/**
 * @param {App} app
 * @returns {Page}
 */
export const groupsPage = (app) => {
  const say = h("p", { class: "sentence" });
  const why = whyPart(app);
  const list = h("div", { class: "cards" });
  const instanceKind = app.kinds.find((one) => one.plural === "instances");
  const instances = tableOf("Instances", (/** @type {Item} */ one) => one.uid, [
    { title: "Instance", text: (one) => one.name, href: hashOfItem },
    { title: "Group", text: (one) => one.value?.spec.group },
    { title: "State", text: (one) => one.value?.status.state, tone: (one) => tone(STATE, one.value?.status.state) },
    { title: "Health", text: (one) => one.value?.status.health || "" },
    { title: "Age", at: (one) => one.value?.metadata.createdAt },
    { title: "Address", text: (one) => one.value?.status.privateIpv4 || "" },
    { title: "On demand", text: (one) => (one.value?.spec.onDemand ? "yes" : "") },
    { title: "Error", text: (one) => one.value?.status.lastError || "", tone: () => "bad" },
    { title: "", node: (one) => h("span", { class: "tools" }, instanceKind ? actionButtons(app, instanceKind, one.name, one.scope) : null) },
  ], () => getCommand("instances"));
  const kind = app.kinds.find((one) => one.plural === "groups");
  const node = h("section", null, h("h1", null, "Groups"), say, why.node, list, h("p", { class: "tools" }, copyButton("Copy as command", () => getCommand("groups"))), h("h2", null, "Instances"), instances.node);

  /** @param {Item} item */
  const scale = (item) => {
    const now = Number(item.cells[1]?.split("/")[1] ?? 0);
    const size = field("Instances", "size", { type: "number", min: "0", required: true, value: now });
    const told = h("p", { class: "words" }, scaleWords(now, now));
    size.input.addEventListener("input", () => put(told, scaleWords(now, Number(size.input.value))));
    const url = address(`${objectPath("groups", item.name)}/actions/scale`, { scope: item.scope });
    propose(app, {
      title: `Scale ${item.name}`,
      says: [`Group ${item.name} in ${item.scope}.`, told],
      fields: [size.node],
      label: "Scale",
      command: () => `fleetplane instances scale ${quoted(item.name)} ${size.input.value} --tenant ${quoted(item.scope.split("/")[2])} --server ${location.origin}`,
      run: async () => {
        await send(url, "POST", { size: Number(size.input.value) });
        return `Done: ${item.name} is to have ${size.input.value}.`;
      },
      undo: async () => {
        await send(url, "POST", { size: now });
        return `Undone: ${item.name} is to have ${now} again.`;
      },
    });
    size.input.focus();
  };

  /** @param {number} _nowMs */
  const update = (_nowMs) => {
    const groups = [...itemsOf(app.world, "groups").values()].sort((one, other) => (one.scope + one.name < other.scope + other.name ? -1 : 1));
    const short = groups.filter((one) => counts(one).ready < counts(one).wanted);
    put(say, !kind || !app.isLoaded(kind) ? "Loading." : !groups.length ? "There are no groups; the configuration of instances names them."
      : short.length ? `${short.length} of ${groups.length} groups ${short.length === 1 ? "has" : "have"} fewer instances than wanted: ${short[0].name}, ${counts(short[0]).ready} of ${counts(short[0]).wanted}.`
        : `${groups.length} ${groups.length === 1 ? "group has" : "groups have"} what is wanted.`);
    why.show(short[0]);
    fill(list, groups, (one) => one.uid, (one) => {
      const may = kind?.actions.find((action) => action.name === "scale")?.may;
      return h("article", { class: "group", "data-name": one.name }, h("h2", null, h("a", { href: hashOfItem(one) }, one.name), h("small", null, ` ${one.scope}`)),
        h("p", { class: "counts-line" }), h("meter", { min: "0", "aria-label": `Ready instances of ${one.name}` }),
        h("p", { class: "tools" }, button("Scale", () => scale(itemsOf(app.world, "groups").get(one.uid) ?? one), { class: "scale", "aria-disabled": may ? null : "true", title: may ? null : app.reason() }),
          h("a", { class: "configure", href: hashOf("groups", one.name, { scope: one.scope, tab: "edit" }), "aria-label": `Configuration of ${one.name} in ${one.scope}` }, "Configuration"),
          kind ? actionButtons(app, { ...kind, actions: kind.actions.filter((action) => action.name !== "scale") }, one.name, one.scope) : null));
    }, (card, one) => {
      const { ready, wanted } = counts(one);
      const [, , pending, draining, unhealthy] = one.cells;
      put(card.children[1], `${ready} of ${wanted} ready${pending ? `, ${pending} pending` : ""}${draining ? `, ${draining} draining` : ""}${unhealthy ? `, ${unhealthy} unhealthy` : ""}${one.value?.status.onDemand ? `, ${one.value.status.onDemand} on demand` : ""}${one.cells[7] === true ? ", asleep" : ""}`);
      mark(card.children[1], "data-tone", ready < wanted ? "waiting" : "good");
      mark(card.children[2], "max", String(Math.max(wanted, ready, 1)));
      mark(card.children[2], "value", String(ready));
    });
    instances.show([...itemsOf(app.world, "instances").values()].filter((one) => one.value?.status.state !== "deleted").sort((one, other) => (one.name < other.name ? -1 : 1)).slice(0, 500));
  };
  return { node, title: "Groups", update, close: () => {}, key: () => false };
};

/** @param {Item} item */
const counts = (item) => {
  const [ready, wanted] = String(item.cells[1] ?? "0/0").split("/").map(Number);
  return { ready, wanted };
};
