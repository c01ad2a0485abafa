// What happened to an object: its entries of the audit log, and the moments that the object itself tells.

import { get, listed } from "./api.mjs";
import { ago, h } from "./dom.mjs";
import { since } from "./model.mjs";

/**
 * @typedef {import("./main.mjs").App} App
 * @typedef {import("./model.mjs").Kind} Kind
 * @typedef {import("./model.mjs").Value} Value
 * @typedef {[string, string]} Moment when and what
 */

const PAGE = 500;
const PAGES = 4; // More than that is read with `fleetplane audit list`.
const SHOWN = 200;

/**
 * The names by which the audit log knows an object: its own, its number, and the id that the fleet's own API has.
 * @param {Kind} kind
 * @param {Value} value
 */
const namesOf = async (kind, value) => {
  const names = new Set([value.metadata.name]);
  if (typeof value.status?.number === "number") names.add(String(value.status.number));
  const list = kind.plural === "proxy-agents" ? "agents" : ["virtual-hosts", "upstreams", "certificates"].includes(kind.plural) ? kind.plural : "";
  if (list) {
    const workspace = await workspaceAt(value.metadata.scope);
    const found = workspace ? await listed(`/v1/workspaces/${workspace}/${list}`) : [];
    for (const one of found) if ((one.name ?? one.domain) === value.metadata.name) names.add(one.id);
  }
  return names;
};

/**
 * The id of the workspace at a scope such as `/tenants/demo/workspaces/main`.
 * @param {string} scope
 * @returns {Promise<string | undefined>}
 */
export const workspaceAt = async (scope) => {
  const [, , tenant, , slug] = scope.split("/");
  const owner = (await listed("/v1/organizations")).find((each) => each.slug === tenant);
  if (!owner) return undefined;
  return (await listed(`/v1/organizations/${owner.id}/workspaces`)).find((each) => each.slug === slug)?.id;
};

/**
 * Whether a change of the audit log is one of these names.
 * @param {{scope: string, name: string}} change
 * @param {Set<string>} names
 */
export const isAbout = (change, names) => names.has(change.name) || change.scope.split("/").some((part) => names.has(part));

/**
 * What the log has of an object, newest first; and how many entries were looked at.
 * @param {Kind} kind
 * @param {Value} value
 * @returns {Promise<{moments: Moment[], looked: number, more: boolean}>}
 */
export const audited = async (kind, value) => {
  const names = await namesOf(kind, value);
  /** @type {Moment[]} */
  const moments = [];
  let [looked, more] = [0, ""];
  for (let page = 0; page < PAGES; page += 1) {
    const told = await get("/audit-entries", { limit: String(PAGE), continue: more });
    looked += told.items.length;
    for (const { spec } of told.items) {
      const changes = spec.changes.filter((/** @type {any} */ one) => isAbout(one, names));
      if (changes.length) moments.push([spec.at, `${spec.action} by ${spec.actor}: ${[...new Set(changes.map((/** @type {any} */ one) => `${one.operation} ${one.kind}`))].join(", ")}`]);
    }
    more = told.continue ?? "";
    if (!more || moments.length >= SHOWN) break;
  }
  return { moments: moments.slice(0, SHOWN), looked, more: Boolean(more) };
};

/**
 * The moments that an object itself tells of.
 * @param {Value} value
 * @returns {Moment[]}
 */
export const ownMoments = (value) => {
  /** @type {Moment[]} */
  const found = [[value.metadata.createdAt, "created"]];
  for (const one of value.conditions ?? []) if (one.changedAt) found.push([one.changedAt, `${one.type} became ${one.status}${one.reason ? ` (${one.reason})` : ""}`]);
  for (const [key, text] of /** @type {[string, string][]} */ ([["since", `became ${value.status?.state}`], ["registeredAt", "registered"], ["enrolledAt", "enrolled"], ["deletedAt", "deleted"]]))
    if (value.status?.[key]) found.push([value.status[key], text]);
  return found.filter(([at]) => Date.parse(at) > 0);
};

/**
 * @param {Moment[]} moments
 * @param {number} nowMs
 */
export const momentList = (moments, nowMs) =>
  h("ol", { class: "recent" }, [...moments].sort((one, other) => (one[0] < other[0] ? 1 : -1)).map(([at, text]) =>
    h("li", null, ago(at, " ago"), ` ${text}`)));
