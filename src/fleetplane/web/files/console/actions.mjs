// What can be done to an object. Each action says what it will do, and on what, before it does it.

import { Problem, address, objectPath, send } from "./api.mjs";
import { by, copyButton, h, put } from "./dom.mjs";
import { fieldsOf, hashOf, isDangerous } from "./model.mjs";
import { curl } from "./parts.mjs";
import { clearRefusals, refuseAt } from "./refusals.mjs";

/**
 * @typedef {import("./main.mjs").App} App
 * @typedef {import("./model.mjs").Kind} Kind
 * @typedef {import("./model.mjs").Action} Action
 * @typedef {import("./model.mjs").Field} Field
 */

/**
 * A button for each action; one that the caller may not ask for says so.
 * @param {App} app
 * @param {Kind} kind
 * @param {string} name
 * @param {string} scope
 */
export const actionButtons = (app, kind, name, scope) =>
  (kind.actions ?? []).map((action) => {
    const button = h("button", { type: "button", class: "action", "data-action": action.name, "aria-disabled": action.may ? null : "true",
      title: action.may ? action.summary : `${action.summary}. ${app.reason()}` }, action.name);
    button.addEventListener("click", () => openAction(app, kind, action, name, scope));
    return button;
  });

/**
 * @param {App} app
 * @param {Kind} kind
 * @param {Action} action
 * @param {string} name
 * @param {string} scope
 */
export const openAction = (app, kind, action, name, scope) => {
  const fields = fieldsOf(action.body).map((field) => ({ field, ...control(field) }));
  const url = address(`${objectPath(kind.plural, name)}/actions/${action.name}`, { scope: scope === "/" ? "" : scope });
  const typed = /** @type {HTMLInputElement} */ (h("input", { autocomplete: "off", spellcheck: "false", name: "confirmation" }));
  const outcome = h("div", { role: "alert", class: "outcome" });
  const submit = /** @type {HTMLButtonElement} */ (h("button", { type: "submit", disabled: !action.may }, action.name));
  const body = () => Object.fromEntries(fields.flatMap(({ field, read }) => {
    const value = read();
    return value === undefined ? [] : [[field.name, value]];
  }));
  const form = h("form", { class: "act" },
    h("h2", { id: "dialog-title" }, `${action.name} ${name}`),
    h("p", null, `${action.summary}. This is done to one object: ${kind.name} ${name} in ${scope}.`,
      action.takesTime ? " It takes a while; what it begins is shown afterwards." : ""),
    action.may ? null : h("p", { class: "error" }, app.reason()),
    ...fields.map(({ node }) => node),
    isDangerous(action) ? h("label", null, `To go on, write its name: ${name}`, typed) : null,
    outcome,
    h("p", { class: "tools" }, submit, h("button", { type: "button", onclick: () => by("dialog").close() }, "Close"),
      copyButton("Copy as command", () => curl("POST", url, action.body ? body() : undefined))));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (!action.may || submit.disabled) return;
    if (isDangerous(action) && typed.value.trim() !== name) return put(outcome, `Write ${name} to go on; nothing was done.`);
    submit.disabled = true;
    put(outcome, "Asking the server.");
    clearRefusals(form);
    try {
      const told = await send(url, "POST", action.body ? body() : undefined);
      outcome.replaceChildren(told.begun
        ? h("p", null, "Begun: ", h("a", { href: hashOf(told.begun.resource, told.begun.name, { scope: told.begun.scope === "/" ? "" : told.begun.scope }), onclick: () => by("dialog").close() }, `${told.begun.resource} ${told.begun.name}`))
        : h("p", null, "Done."));
    } catch (error) {
      submit.disabled = false;
      if (app.isRefused(error)) return;
      outcome.replaceChildren(h("p", { class: "error" }, error instanceof Problem ? error.line : String(error)));
      if (error instanceof Problem) refuseAt(form, error);
    }
  });
  by("dialog").replaceChildren(form);
  if (!by("dialog").open) by("dialog").showModal();
};

/**
 * The control of one field, and how it is read; what is left empty is not sent.
 * @param {Field} field
 * @returns {{node: HTMLElement, read: () => any}}
 */
const control = (field) => {
  const label = `${field.name}${field.required ? "" : " (optional)"}`;
  const given = { name: field.name, required: field.required, autocomplete: "off", spellcheck: "false" };
  if (field.type === "boolean") {
    const input = /** @type {HTMLInputElement} */ (h("input", { type: "checkbox", name: field.name, checked: field.initial === true }));
    return { node: h("label", { class: "check" }, input, field.name, help(field)), read: () => input.checked };
  }
  const isNumber = field.type === "integer" || field.type === "number";
  const input = /** @type {HTMLInputElement} */ (h(field.type === "json" ? "textarea" : "input",
    { ...given, type: isNumber ? "number" : field.type === "json" ? null : "text", step: field.type === "number" ? "any" : null,
      placeholder: field.type === "json" ? "JSON" : field.type === "words" ? "one or more words" : null }));
  const read = () => {
    const text = input.value.trim();
    if (!text) return field.required && field.type === "text" ? "" : undefined;
    if (isNumber) return Number(text);
    if (field.type === "words") return text.split(/\s+/);
    return field.type === "json" ? JSON.parse(text) : text;
  };
  return { node: h("label", null, label, input, help(field)), read };
};

/** @param {Field} field */
const help = (field) => (field.help ? h("small", null, field.help) : null);
