// Filters that somebody keeps in this browser: a name for an address of the console, and nothing else.

import { h } from "./dom.mjs";
import { button, closeDialog, field, openDialog } from "./parts.mjs";

const KEY = "console-filters";
const LIMIT = 50;

/** @returns {{name: string, hash: string}[]} */
const kept = () => {
  try {
    const found = JSON.parse(localStorage.getItem(KEY) ?? "[]");
    return Array.isArray(found) ? found.filter((one) => typeof one?.name === "string" && String(one?.hash).startsWith("#/")) : [];
  } catch {
    return [];
  }
};

/** @param {{name: string, hash: string}[]} filters */
const keep = (filters) => localStorage.setItem(KEY, JSON.stringify(filters.slice(0, LIMIT)));

/**
 * @param {string} hash
 * @param {() => void} changed
 */
export const saveFilter = (hash, changed) => {
  const name = field("Name", "filter-name", { required: true, maxlength: "64" });
  const form = h("form", { class: "act" }, h("h2", { id: "dialog-title" }, "Save this filter"), h("p", null, "It is kept in this browser."), name.node,
    h("p", { class: "tools" }, h("button", { type: "submit" }, "Save"), button("Close", closeDialog)));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    keep([{ name: name.input.value.trim(), hash }, ...kept().filter((one) => one.name !== name.input.value.trim())]);
    closeDialog();
    changed();
  });
  openDialog(form);
};

/** @param {() => void} changed */
export const savedFilters = (changed) =>
  kept().map((one) => h("li", null, h("a", { href: one.hash }, one.name),
    button("×", () => { keep(kept().filter((other) => other.name !== one.name)); changed(); }, { "aria-label": `Forget the filter ${one.name}` })));
