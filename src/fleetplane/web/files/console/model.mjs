// What the console knows, and how it follows from discovery and from the server's events. No document, no
// network, no clock.

import { age } from "../live.mjs";

export const RECENT = 100; // Changes that the overview shows.
export const MARK_MS = 2000; // A row that changed is marked for as long.
const HISTORY = new Set(["runs", "events"]); // What is over needs nobody.
export const MACHINE_KINDS = ["instances", "proxy-agents", "boards", "edge-nodes", "providers"]; // Those that have an agent.

/**
 * @typedef {{title: string, type: string, wide: boolean}} Column
 * @typedef {{name: string, summary: string, takesTime: boolean, body: any, may: boolean}} Action
 * @typedef {{name: string, type: "text" | "integer" | "number" | "boolean" | "words" | "json", required: boolean, help: string, initial: any}} Field
 * @typedef {{name: string, plural: string, shortNames: string[], summary: string, domains: string[], columns: Column[],
 *   verbs: string[], grows?: boolean, may: string[], scopes: string[], actions: Action[], relates: {resource: string, path: string}[], search: string[], schema?: any}} Kind
 * @typedef {{kind: string, metadata: {name: string, scope: string, uid: string, labels: Record<string, string>,
 *   revision: number, generation: number, createdAt: string}, spec: any, status: any, conditions: any[]}} Value
 * @typedef {{uid: string, plural: string, name: string, scope: string, cells: any[], value: Value | null,
 *   changedMs: number, text: string, place: number}} Item
 * @typedef {{type: string, plural: string, name: string, scope: string, atMs: number}} Recent
 * @typedef {{kinds: Map<string, Map<string, Item>>, revision: string, synced: boolean, seen: Set<string> | null,
 *   recent: Recent[], dirty: Set<string>, computed: Set<string>, more: Set<string>, measured: number}} World
 */

/** @returns {World} */
export const nothing = () => ({
  kinds: new Map(), revision: "", synced: false, seen: null, recent: [], dirty: new Set(), computed: new Set(), more: new Set(), measured: 0,
});

/**
 * What follows is everything that there is: what is not in it is gone.
 * @param {World} world
 */
export const beginSnapshot = (world) => {
  world.seen = new Set();
};

/**
 * A row of the API as an item.
 * @param {any} row
 * @param {number} changedMs
 * @returns {Item}
 */
export const itemOf = (row, changedMs) => {
  const { resource, name, scope, uid } = row.object;
  const labels = Object.entries(row.value?.metadata.labels ?? {}).map(([key, value]) => `${key}=${value}`);
  const text = [name, scope, ...row.cells.filter((/** @type {any} */ one) => one !== null), ...labels].join(" ").toLowerCase();
  return { uid, plural: resource, name, scope, cells: row.cells, value: row.value ?? null, changedMs, text, place: 0 };
};

/**
 * Take one event in; whether the stream has to be begun anew. A type that this page does not know changes nothing.
 * @param {World} world
 * @param {{kind: string, data: any, mark: string}} event
 * @param {number} nowMs
 * @returns {boolean}
 */
export const apply = (world, { kind, data, mark }, nowMs) => {
  if (kind === "compacted") {
    world.revision = "";
    return true;
  }
  if (kind === "added" || kind === "modified") {
    const { resource, uid } = data.object;
    const items = itemsOf(world, resource);
    const had = items.get(uid);
    const same = had?.value && data.value && had.value.metadata.revision === data.value.metadata.revision;
    const item = itemOf(data, world.synced && !same ? nowMs : had?.changedMs ?? 0);
    items.set(uid, item);
    world.dirty.add(resource);
    if (world.seen) world.seen.add(uid);
    else tellRecent(world, had ? "modified" : "added", item, nowMs);
  } else if (kind === "deleted") {
    const { resource, uid } = data.object;
    const item = itemsOf(world, resource).get(uid);
    itemsOf(world, resource).delete(uid);
    world.dirty.add(resource);
    if (item) tellRecent(world, "deleted", item, nowMs);
  } else if (kind === "bookmark" && world.seen) {
    for (const [plural, items] of world.kinds)
      if (!world.computed.has(plural)) for (const uid of items.keys()) if (!world.seen.has(uid)) items.delete(uid);
    world.seen = null;
    world.synced = true;
  } else if (kind === "measured") {
    world.measured += 1;
  }
  if (mark) world.revision = mark;
  return false;
};

/**
 * Take in the whole list of what is not stored, and so is not in the stream.
 * @param {World} world
 * @param {string} plural
 * @param {any[]} rows in the server's order, which is kept
 * @param {number} nowMs
 * @param {boolean} [more] whether the server has more than these
 */
export const replaceComputed = (world, plural, rows, nowMs, more = false) => {
  const had = itemsOf(world, plural);
  const has = new Map();
  for (const row of rows) {
    const before = had.get(row.object.uid);
    const same = before && JSON.stringify(before.cells) === JSON.stringify(row.cells);
    has.set(row.object.uid, { ...itemOf(row, same ? before.changedMs : had.size ? nowMs : 0), place: has.size });
  }
  if (more) world.more.add(plural);
  else world.more.delete(plural);
  world.kinds.set(plural, has);
  world.computed.add(plural);
};

/**
 * @param {World} world
 * @param {string} plural
 * @returns {Map<string, Item>}
 */
export const itemsOf = (world, plural) => {
  let found = world.kinds.get(plural);
  if (!found) world.kinds.set(plural, (found = new Map()));
  return found;
};

/**
 * @param {World} world
 * @param {string} type
 * @param {Item} item
 * @param {number} atMs
 */
const tellRecent = (world, type, item, atMs) => {
  world.recent.unshift({ type, plural: item.plural, name: item.name, scope: item.scope, atMs });
  if (world.recent.length > RECENT) world.recent.length = RECENT;
};

// Words of states, in every domain's spelling.
const BAD = new Set([
  "absent", "degraded", "disconnected", "error", "expired", "failed", "halted", "not_ready", "offline", "rejected",
  "revoked", "rolled_back", "silent", "timed_out", "unable", "undeliverable", "unhealthy", "unheard",
]);
const WAITING = new Set([
  "applying", "behind", "connecting", "deleting", "discovered", "draining", "held", "installing", "issuing", "joining",
  "maintenance", "partially_registered", "partly_failed", "pending", "preparing", "provisioned", "provisioning", "queued", "rebooting",
  "renewing", "rolling_back", "running", "starting", "unknown", "validating", "verifying", "waiting",
]);
const GOOD = new Set([
  "active", "applied", "complete", "connected", "current", "done", "healthy", "ok", "online", "ready", "registered",
  "success", "usable",
]);
const STATES = new Set(["STATE", "HEALTH"]);

/**
 * How a cell looks: `bad`, `waiting`, `good` or nothing. The word stands beside the colour.
 * @param {Column} column
 * @param {any} cell
 */
export const tone = (column, cell) => {
  if (!STATES.has(column.title)) return "";
  const word = String(cell ?? "").toLowerCase();
  return BAD.has(word) ? "bad" : WAITING.has(word) ? "waiting" : GOOD.has(word) ? "good" : "";
};

/**
 * Why an object needs somebody, in a few words; empty if it does not.
 * @param {Kind} kind
 * @param {Item} item
 */
export const trouble = (kind, item) => {
  if (HISTORY.has(kind.plural)) return "";
  const words = kind.columns.flatMap((column, place) =>
    tone(column, item.cells[place]) === "bad" ? [`${column.title.toLowerCase()} ${item.cells[place]}`] : []);
  if (!words.length) return "";
  const told = (item.value?.conditions ?? []).filter((one) => one.status === "False").map((one) =>
    `${one.type} is False${one.reason ? ` (${one.reason})` : ""}${one.message ? `: ${one.message}` : ""}`);
  const error = item.value?.status?.lastError || item.value?.status?.error;
  return [...words, ...told, ...(error ? [error] : [])].join("; ");
};

/**
 * One cell as text: ages as the time since then or until then.
 * @param {Column} column
 * @param {any} cell
 * @param {number} nowMs
 */
export const cellText = (column, cell, nowMs) => {
  if (cell === null || cell === undefined || cell === "") return "";
  return column.type === "age" ? since(String(cell), nowMs) : String(cell);
};

/**
 * @param {string} moment
 * @param {number} nowMs
 */
export const since = (moment, nowMs) => {
  const at = Date.parse(moment);
  if (!Number.isFinite(at)) return moment;
  return at > nowMs + 1000 ? `in ${age(new Date(nowMs).toISOString(), at)}` : age(moment, nowMs);
};

// What was last heard of somebody who is silent now is old.
const SILENT = new Set(["disconnected", "not_ready", "offline", "silent", "stale", "unheard", "unknown"]);

/**
 * When what is shown of an object was observed, if that may not be so any more; else nothing.
 * @param {Value | null | undefined} value
 * @returns {string}
 */
export const staleSince = (value) => {
  const { state, health, lastSeenAt, lastHeartbeatAt, heardAt, observedAt } = value?.status ?? {};
  if (!SILENT.has(String(state ?? "").toLowerCase()) && !SILENT.has(String(health ?? "").toLowerCase())) return "";
  const at = lastSeenAt ?? lastHeartbeatAt ?? heardAt ?? observedAt ?? "";
  return Date.parse(at) > 0 ? at : "";
};

// Filters.

const REQUIREMENT = /^(?<not>!)?(?<key>[A-Za-z0-9][\w./-]*)\s*(?:(?<op>==|!=|=)\s*(?<value>[^\s,()]*)|\s(?<set>in|notin)\s*\((?<values>[^()]*)\))?$/;

/**
 * A selector of labels as on the command line, as a function of labels; raises where it is none.
 * @param {string} text
 * @returns {(labels: Record<string, string>) => boolean}
 */
export const selectorOf = (text) => {
  const parts = text.split(/,(?![^(]*\))/).map((part) => part.trim()).filter(Boolean);
  const tests = parts.map((part) => {
    const found = REQUIREMENT.exec(part)?.groups;
    if (!found || (found.not && (found.op || found.set)))
      throw new Error(`“${part}” is no requirement: write key=value, key!=value, key in (a, b), key or !key`);
    const { key, value } = found;
    const values = found.values?.split(",").map((one) => one.trim());
    /** @param {Record<string, string>} labels */
    return (labels) => {
      const has = Object.hasOwn(labels, key);
      if (values) return (has && values.includes(labels[key])) === (found.set === "in");
      if (found.op === "!=") return !has || labels[key] !== value;
      if (found.op) return has && labels[key] === value;
      return has !== Boolean(found.not);
    };
  });
  return (labels) => tests.every((test) => test(labels));
};

/**
 * The items that a filter means, in its order: by scope and name, or by a column.
 * @param {Iterable<Item>} items
 * @param {Kind} kind
 * @param {{q?: string, labels?: string, scope?: string, trouble?: boolean, sort?: string, where?: Record<string, string>}} filter
 * @returns {Item[]}
 */
export const selected = (items, kind, filter) => {
  const words = (filter.q ?? "").toLowerCase().split(/\s+/).filter(Boolean);
  const fits = filter.labels ? selectorOf(filter.labels) : null;
  const scope = filter.scope && filter.scope !== "/" ? filter.scope : "";
  const where = Object.entries(filter.where ?? {}).map(([title, value]) =>
    /** @type {[number, string]} */ ([kind.columns.findIndex((column) => column.title === title), value]));
  const found = [...items].filter(
    (item) =>
      where.every(([column, value]) => String(item.cells[column] ?? "") === value) &&
      words.every((word) => item.text.includes(word)) &&
      (!fits || fits(item.value?.metadata.labels ?? {})) &&
      (!scope || item.scope === scope || item.scope.startsWith(`${scope}/`)) &&
      (!filter.trouble || trouble(kind, item)),
  );
  const descending = (filter.sort ?? "").startsWith("-");
  const title = (filter.sort ?? "").replace(/^-/, "");
  const place = kind.columns.findIndex((column) => column.title === title);
  found.sort((one, other) =>
    (place < 0 ? 0 : compare(one.cells[place], other.cells[place]) * (descending ? -1 : 1)) ||
    one.place - other.place || compare(one.scope, other.scope) || compare(one.name, other.name) || compare(one.uid, other.uid));
  return found;
};

/**
 * @param {any} one
 * @param {any} other
 */
const compare = (one, other) => {
  if (one === other) return 0;
  if (one === null || one === undefined) return -1;
  if (other === null || other === undefined) return 1;
  return one < other ? -1 : 1;
};

/**
 * The sentence with which a list begins.
 * @param {Kind} kind
 * @param {Item[]} items
 */
export const sentence = (kind, items) => {
  const bad = items.filter((item) => trouble(kind, item));
  const many = items.length === 1 ? kind.name : kind.plural;
  if (!items.length) return `There are no ${titleOf(kind.plural).toLowerCase()} here.`;
  if (!bad.length) return `${items.length} ${spaced(many)}; none needs attention.`;
  return `${bad.length} of ${items.length} ${spaced(many)} need${bad.length === 1 ? "s" : ""} attention: ` +
    `${bad[0].name}, ${trouble(kind, bad[0])}${bad.length > 1 ? "; …" : ""}`;
};

/** @param {string} word */
const spaced = (word) => word.replaceAll("-", " ");

/** @type {Record<string, string>} */
const TITLES = { gpu: "GPU", gpus: "GPUs", "dns-zone": "DNS zone", "dns-zones": "DNS zones" };

/** @param {string} plural */
export const titleOf = (plural) => TITLES[plural] ?? spaced(plural[0].toUpperCase() + plural.slice(1));

// Addresses: every filter and detail can be shared.

/**
 * @typedef {{plural: string, name: string, query: Record<string, string>}} Place
 * @param {string} hash
 * @returns {Place}
 */
export const placeOf = (hash) => {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?", 2);
  const [plural = "", name = ""] = path.split("/").map(decoded);
  return { plural, name, query: Object.fromEntries(new URLSearchParams(query)) };
};

/** @param {string} text */
const decoded = (text) => {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
};

/**
 * @param {string} plural
 * @param {string} [name]
 * @param {Record<string, string | undefined>} [query]
 */
export const hashOf = (plural, name = "", query = {}) => {
  const given = new URLSearchParams();
  for (const [key, value] of Object.entries(query)) if (value) given.set(key, value);
  return `#/${plural}${name ? `/${encodeURIComponent(name)}` : ""}${given.size ? `?${given}` : ""}`;
};

/**
 * @param {Item} item
 */
export const hashOfItem = (item) => hashOf(item.plural, item.name, { scope: item.scope === "/" ? "" : item.scope });

// Related objects.

/**
 * What lies at a path such as `.status.provider`.
 * @param {any} value
 * @param {string} path
 * @returns {any}
 */
export const at = (value, path) =>
  path.replace(/^\./, "").split(".").reduce((found, key) => (found === null || found === undefined ? undefined : found[key]), value);

/**
 * Whether a scope is another or lies around it.
 * @param {string} around
 * @param {string} scope
 */
const covers = (around, scope) => around === "/" || scope === around || scope.startsWith(`${around}/`);

/**
 * The objects that an object names, and those that name it.
 * @param {World} world
 * @param {Kind[]} kinds
 * @param {Kind} kind
 * @param {Value} value
 * @returns {{plural: string, name: string, scope: string}[]}
 */
export const related = (world, kinds, kind, value) => {
  const found = [];
  for (const link of kind.relates) {
    const other = kinds.find((one) => one.name === link.resource);
    const name = at(value, link.path);
    if (other && typeof name === "string" && name) {
      const near = [...itemsOf(world, other.plural).values()].find(
        (one) => one.name === name && (covers(one.scope, value.metadata.scope) || covers(value.metadata.scope, one.scope)));
      found.push({ plural: other.plural, name, scope: near ? near.scope : "" });
    }
  }
  for (const other of kinds)
    for (const link of other.relates) {
      if (link.resource !== kind.name) continue;
      for (const item of itemsOf(world, other.plural).values())
        if (at(item.value, link.path) === value.metadata.name &&
            (covers(value.metadata.scope, item.scope) || covers(item.scope, value.metadata.scope)))
          found.push({ plural: item.plural, name: item.name, scope: item.scope });
    }
  return found;
};

/**
 * The leaves of an object, path by path.
 * @param {any} value
 * @param {string} [path]
 * @returns {[string, string][]}
 */
export const leaves = (value, path = "") => {
  if (value === null || value === undefined || value === "") return [];
  if (Array.isArray(value) && value.every((one) => typeof one !== "object")) return value.length ? [[path, value.join(", ")]] : [];
  if (typeof value === "object")
    return Object.entries(value).flatMap(([key, inner]) => leaves(inner, path ? `${path}.${key}` : key));
  return [[path, String(value)]];
};

// Actions.

const DANGEROUS = new Set(["delete", "drain", "restart", "revoke", "roll-back", "stop"]);

/**
 * Whether an action asks for the name of what it is done to.
 * @param {Action} action
 */
export const isDangerous = (action) => DANGEROUS.has(action.name);

/**
 * The fields that the JSON Schema of an action's body has; what is no single value is written as JSON.
 * @param {any} schema
 * @returns {Field[]}
 */
export const fieldsOf = (schema) => {
  if (!schema) return [];
  const resolved = (/** @type {any} */ part) =>
    part.$ref ? schema.$defs[part.$ref.split("/").at(-1)] : part;
  const body = resolved(schema);
  return Object.entries(body.properties ?? {}).map(([name, found]) => {
    const given = /** @type {any} */ (found);
    const part = resolved(given);
    const choices = (part.anyOf ?? [part]).map(resolved).filter((/** @type {any} */ one) => one.type !== "null");
    const one = choices.length === 1 ? choices[0] : {};
    const words = one.type === "array" && one.items && resolved(one.items).type === "string";
    const type = words ? "words" : one.type === "string" || one.enum ? "text"
      : ["integer", "number", "boolean"].includes(one.type) ? one.type : "json";
    return { name, type, required: (body.required ?? []).includes(name), help: given.description ?? "", initial: given.default };
  });
};

/** @param {string} text */
export const quoted = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`);
