// Making, changing and deleting what the resource API writes: a form of its fields, the plan before anything changes, and undoing it.

import { address, objectPath, send } from "./api.mjs";
import { h, put } from "./dom.mjs";
import { hashOf, itemsOf, quoted, related } from "./model.mjs";
import { button, closeDialog, field, openDialog, propose, proposePlan, words } from "./parts.mjs";
import { clearRefusals, refuseAt } from "./refusals.mjs";
import { group } from "./schema_form.mjs";

/**
 * @typedef {import("./main.mjs").App} App
 * @typedef {import("./model.mjs").Kind} Kind
 * @typedef {import("./model.mjs").Value} Value
 */

/**
 * What is written of an object.
 * @param {Kind} kind
 * @param {Value} value
 */
const written = (kind, { metadata, spec }) => ({ kind: kind.name, metadata: { name: metadata.name, scope: metadata.scope, labels: metadata.labels }, spec });

/**
 * Where an object of a kind would lie: beside the others of it.
 * @param {App} app
 * @param {Kind} kind
 */
const usualScope = (app, kind) => [...itemsOf(app.world, kind.plural).values()][0]?.scope ?? "/tenants/default";

/**
 * @param {App} app
 * @param {Kind} kind
 * @param {Value | null} value null for a new one
 * @param {{scope?: string, says?: string, extra?: HTMLElement, read?: (spec: () => any) => void} & import("./schema_form.mjs").More} [more]
 */
export const openObjectForm = (app, kind, value, more = {}) => {
  const name = field("Name", "name", { required: true, value: value?.metadata.name ?? "", readonly: Boolean(value), "data-field": "name" });
  const scope = field("Scope", "scope", { required: true, value: value?.metadata.scope ?? more.scope ?? usualScope(app, kind), readonly: Boolean(value), "data-field": "scope" });
  const root = kind.schema;
  const whole = root.$defs[root.$ref.split("/").at(-1)];
  const spec = group(root, root.$defs[whole.properties.spec.$ref.split("/").at(-1)], "", value?.spec, more);
  const refusal = h("p", { class: "error", role: "alert" });
  const may = kind.may.includes("put");
  const form = h("form", { class: "act editor object-form" }, h("h2", { id: "dialog-title" }, value ? `Change ${kind.name.replaceAll("-", " ")} ${value.metadata.name}` : `New ${kind.name.replaceAll("-", " ")}`),
    h("p", null, more.says ?? `${kind.summary}.`), may ? null : h("p", { class: "why-not error" }, app.reason()), name.node, scope.node, spec.node, more.extra ?? null, refusal,
    h("p", { class: "tools" }, h("button", { type: "submit", disabled: !may }, "Show the plan"), button("Close", closeDialog)));
  more.read?.(spec.read);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    clearRefusals(form);
    put(refusal, "");
    try {
      const metadata = { name: name.input.value.trim(), scope: scope.input.value.trim(), ...(value ? { labels: value.metadata.labels } : {}) };
      const object = { kind: kind.name, metadata, spec: spec.read() };
      proposePlan(app, { title: `${value ? "Change" : "Make"} ${metadata.name}`, scope: metadata.scope, objects: [object], before: value ? [written(kind, value)] : undefined, form,
        undo: value ? undefined : () => removed(kind, metadata.name, metadata.scope) });
    } catch (error) {
      if (!(error instanceof Error && refuseAt(form, error))) put(refusal, words(error));
    }
  });
  openDialog(form);
};

/**
 * @param {Kind} kind
 * @param {string} name
 * @param {string} scope
 * @param {boolean} [rehearse]
 */
const removed = async (kind, name, scope, rehearse = false) => {
  await send(address(objectPath(kind.plural, name), { scope: scope === "/" ? "" : scope, dryRun: rehearse ? "1" : "" }), "DELETE", undefined, { "If-Match": "*" });
  return `${name} is deleted.`;
};

/**
 * Delete an object after its name was written; undoing makes it anew as it was.
 * @param {App} app
 * @param {Kind} kind
 * @param {Value} value
 * @param {string} [disturbs] what happens besides
 */
export const proposeDelete = (app, kind, value, disturbs = "") => {
  const { name, scope } = value.metadata;
  const others = related(app.world, app.kinds, kind, value).length;
  const verdict = h("p", { role: "status" }, "Asking the server whether it would.");
  propose(app, {
    title: `Delete ${name}`, name, label: "Delete",
    says: [`One object is deleted: ${kind.name} ${name} in ${scope}.${disturbs ? ` ${disturbs}` : ""}${others ? ` ${others} other ${others === 1 ? "thing has" : "things have"} to do with it.` : ""}`, verdict],
    command: `fleetplane delete ${quoted(`${kind.name}/${name}`)} ${scope === "/" ? "" : `--scope ${quoted(scope)} `}--server ${location.origin}`,
    run: () => removed(kind, name, scope),
    undo: async () => {
      await send(address(objectPath(kind.plural, name), { scope: scope === "/" ? "" : scope }), "PUT", written(kind, value), { "If-None-Match": "*" });
      return h("a", { href: hashOf(kind.plural, name, { scope: scope === "/" ? "" : scope }), onclick: closeDialog }, `${name} is there again`);
    },
  });
  removed(kind, name, scope, true).then(() => put(verdict, "The server would do it."), (error) => {
    if (!app.isRefused(error)) verdict.replaceChildren(h("span", { class: "error" }, words(error)));
  });
};

/**
 * Buttons that change and delete an object, where its kind is written at all; who may not reads why.
 * @param {App} app
 * @param {Kind} kind
 * @param {() => Value | null} value
 */
export const writingButtons = (app, kind, value) =>
  /** @type {[string, string, (found: Value) => void][]} */ ([
    ["put", "Change", (found) => openObjectForm(app, kind, found)], ["delete", "Delete", (found) => proposeDelete(app, kind, found)],
  ]).filter(([verb]) => kind.verbs.includes(verb)).map(([verb, label, press]) => {
    const may = kind.may.includes(verb);
    return button(label, () => { const found = value(); if (found && may) press(found); }, { class: `write-${verb}`, "aria-disabled": may ? null : "true", title: may ? null : app.reason() });
  });
