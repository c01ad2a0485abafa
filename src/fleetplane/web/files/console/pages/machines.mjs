// Everything that has an agent, in one list.

import { listPage } from "../list.mjs";
import { MACHINE_KINDS, itemsOf } from "../model.mjs";
import { pageHash } from "../parts.mjs";

/**
 * @typedef {import("../main.mjs").App} App
 * @typedef {import("../main.mjs").Page} Page
 * @typedef {import("../model.mjs").Item} Item
 * @typedef {import("../model.mjs").Kind} Kind
 */

const COLUMNS = ["NAME", "KIND", "STATE", "HEALTH", "SINCE", "ADDRESS", "VERSION"];

/** @type {Kind} */
const MACHINES = {
  name: "machine", plural: "machines", shortNames: [], summary: "Everything that has an agent", domains: [],
  columns: COLUMNS.map((title) => ({ title, type: title === "SINCE" ? "age" : "text", wide: false })),
  verbs: ["list", "watch"], grows: false, may: ["list"], scopes: [], actions: [], relates: [], search: [],
};

/**
 * What a machine's columns hold, by its kind.
 * @type {Record<string, (item: Item) => any[]>}
 */
const CELLS = {
  instances: ({ name, value }) => [name, value?.status.state, value?.status.health, value?.metadata.createdAt, value?.status.privateIpv4, value?.status.agentVersion],
  "proxy-agents": ({ name, value }) => [name, value?.status.state, null, value?.status.since, value?.status.address, value?.status.version],
  boards: ({ name, value }) => [name, value?.status.state, null, value?.status.since, value?.spec.address, value?.status.agentVersion],
  "edge-nodes": ({ name, value }) => [value?.spec.displayName || name, value?.status.state, null, value?.status.since, null, null],
  providers: ({ name, cells }) => [name, cells[1], null, cells[3], null, null],
};
const WORDS = /** @type {Record<string, string>} */ ({
  instances: "instance", "proxy-agents": "proxy", boards: "board", "edge-nodes": "edge", providers: "GPU provider",
});

/** @type {WeakMap<Item, Item>} */
const made = new WeakMap();

/** @param {Item} item */
const machineOf = (item) => {
  let found = made.get(item);
  if (!found) {
    const [name, ...rest] = CELLS[item.plural](item);
    const cells = [name, WORDS[item.plural], ...rest];
    found = { ...item, cells, text: `${item.text} ${WORDS[item.plural]} ${name}`.toLowerCase() };
    made.set(item, found);
  }
  return found;
};

/**
 * @param {App} app
 * @param {Record<string, string>} query
 * @returns {Page}
 */
export const machinesPage = (app, query) => {
  const kinds = app.kinds.filter((kind) => MACHINE_KINDS.includes(kind.plural));
  return listPage(app, MACHINES, query, {
    items: () => {
      /** @type {Map<string, Item>} */
      const found = new Map();
      for (const kind of kinds)
        for (const item of itemsOf(app.world, kind.plural).values())
          if (item.value?.status?.state !== "deleted") found.set(item.uid, machineOf(item));
      return found;
    },
    isLoaded: () => app.world.synced,
    address: (filter) => pageHash("machines", filter),
    command: (filter) => `fleetplane get ${kinds.map((kind) => kind.plural).join(",")}${filter.labels ? ` -l '${filter.labels}'` : ""} -A --server ${location.origin}`,
    choices: ["KIND", "STATE"],
  });
};
