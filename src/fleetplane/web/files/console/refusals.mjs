// What the server refused, told at the field that it is about; what was written stays.

import { h, mark } from "./dom.mjs";

let made = 0; // ids of what is told, which fields are described by

/**
 * Take away what was told at fields.
 * @param {Element} form
 */
export const clearRefusals = (form) => {
  for (const told of form.querySelectorAll(".field-error")) {
    const control = form.querySelector(`[aria-describedby="${told.id}"]`);
    control?.removeAttribute("aria-describedby");
    control?.removeAttribute("aria-invalid");
    told.remove();
  }
};

/**
 * The names of a field from the whole to its parts: `objects[0].spec.pins[1].pin` is `pins[1].pin`, else `pins[1]`, else `pins`, else `pin`.
 * @param {string} field as the server spells it
 * @returns {string[]}
 */
export const fieldNames = (field) => {
  const own = field.replace(/^objects\[\d+\]\./, "").replace(/^(?:spec|metadata)\.?/, "");
  if (!own) return [];
  const names = [own];
  for (let rest = own; /[.[]/.test(rest); ) {
    rest = rest.replace(/(?:\.[^.[]*|\[\d+\])$/, "");
    names.push(rest);
  }
  const last = own.split(/[.[]/).at(-1) ?? "";
  return [...new Set([...names, last.replace(/\]$/, ""), camel(last)])].filter(Boolean);
};

/** @param {string} name */
const camel = (name) => name.replace(/_([a-z])/g, (_, letter) => letter.toUpperCase());

/**
 * Tell a refusal at its field, and go there; whether the form has that field.
 * @param {Element} form
 * @param {{field?: string, message?: string, hint?: string}} problem
 */
export const refuseAt = (form, { field = "", message = "", hint = "" }) => {
  clearRefusals(form);
  const controls = /** @type {HTMLElement[]} */ ([...form.querySelectorAll("input, select, textarea")]);
  const control = fieldNames(field).flatMap((name) => controls.find((one) => (one.dataset.field ?? one.getAttribute("name")) === name) ?? [])[0];
  if (!control) return false;
  const told = h("small", { class: "error field-error", id: `refused-${(made += 1)}` }, `${message}${hint ? `; ${hint}` : ""}`);
  mark(control, "aria-invalid", "true");
  mark(control, "aria-describedby", told.id);
  control.after(told);
  control.focus();
  return true;
};
