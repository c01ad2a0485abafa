// Ctrl-K, which finds anything, and the help on keys.

import { by, h } from "./dom.mjs";
import { hashOf, hashOfItem, itemsOf, titleOf } from "./model.mjs";
import { PAGES } from "./pages.mjs";
import { pageHash } from "./parts.mjs";

const FOUND = 20;
const KEYS = [
  ["/", "to the filter"], ["j, k", "next and previous row"], ["Enter", "open the row"], ["Esc", "back"],
  ["Ctrl K", "find anything"], ["?", "this help"],
];

/** @typedef {import("./main.mjs").App} App */

/** @param {HTMLElement[]} children */
const open = (children) => {
  const dialog = by("dialog");
  dialog.replaceChildren(...children);
  if (!dialog.open) dialog.showModal();
};

export const openHelp = () => {
  open([
    h("h2", { id: "dialog-title" }, "Keys"),
    h("dl", null, KEYS.flatMap(([key, words]) => [h("dt", null, h("kbd", null, key)), h("dd", null, words)])),
    h("button", { type: "button", onclick: () => by("dialog").close() }, "Close"),
  ]);
};

/** @param {App} app */
export const openFind = (app) => {
  const list = h("ul", { class: "found" });
  const field = /** @type {HTMLInputElement} */ (h("input", { type: "search", "aria-label": "Name of a kind or of an object", autocomplete: "off" }));
  const show = () => {
    const wanted = field.value.trim().toLowerCase();
    list.replaceChildren(...found(app, wanted).map(([hash, text]) =>
      h("li", null, h("a", { href: hash, onclick: () => by("dialog").close() }, text))));
  };
  field.addEventListener("input", show);
  field.addEventListener("keydown", (event) => {
    const first = list.querySelector("a");
    if (event.key !== "Enter" || !first) return;
    event.preventDefault();
    first.click();
  });
  open([h("h2", { id: "dialog-title" }, "Find"), field, list]);
  show();
  field.focus();
};

/**
 * Kinds first, then objects whose name begins so, then those that have it somewhere.
 * @param {App} app
 * @param {string} wanted
 * @returns {string[][]}
 */
const found = (app, wanted) => {
  const kinds = app.kinds.filter((kind) =>
    [kind.plural, kind.name, ...kind.shortNames].some((word) => word.startsWith(wanted)));
  const pages = PAGES.filter((one) => one.title.toLowerCase().startsWith(wanted) && (!one.kinds.length || app.kinds.some((kind) => one.kinds.includes(kind.plural))));
  const result = [["#/", "Overview"], ...pages.map((one) => [pageHash(one.name), `${one.title} page`]), ...kinds.map((kind) => [hashOf(kind.plural), titleOf(kind.plural)])];
  if (!wanted) return result;
  if (!"overview".startsWith(wanted)) result.shift();
  const within = [];
  for (const kind of app.kinds)
    for (const item of itemsOf(app.world, kind.plural).values()) {
      if (result.length + within.length >= 20 * FOUND) break;
      const name = item.name.toLowerCase();
      const entry = [hashOfItem(item), `${titleOf(kind.name)} ${item.name}`];
      if (name.startsWith(wanted)) result.push(entry);
      else if (item.text.includes(wanted)) within.push(entry);
    }
  return [...result, ...within].slice(0, FOUND);
};
