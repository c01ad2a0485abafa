// Ctrl-K, which finds anything and does what can be done to it, and the help on keys.

import { openAction } from "./actions.mjs";
import { isDense, toggleDensity } from "./density.mjs";
import { by, h } from "./dom.mjs";
import { hashOf, hashOfItem, itemsOf, titleOf } from "./model.mjs";
import { PAGES } from "./pages.mjs";
import { pageHash } from "./parts.mjs";

const FOUND = 20;
const KEYS = [
  ["/", "to the filter"], ["j, k", "next and previous row"], ["Enter", "open the row"], ["Esc", "back"],
  ["Ctrl K", "find anything, or write what to do, such as scale workers"], ["?", "this help"],
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
  const field = /** @type {HTMLInputElement} */ (h("input", { type: "search", "aria-label": "Name of a kind or of an object, or what to do to one", autocomplete: "off" }));
  const show = () => {
    const wanted = field.value.trim().toLowerCase();
    list.replaceChildren(...found(app, wanted).map(([what, text]) => h("li", null, typeof what === "string"
      ? h("a", { href: what, onclick: () => by("dialog").close() }, text)
      : h("a", { href: "#", role: "button", onclick: (/** @type {Event} */ event) => { event.preventDefault(); by("dialog").close(); what(); } }, text))));
  };
  const move = (/** @type {KeyboardEvent} */ event) => {
    if (event.key !== "ArrowDown" && event.key !== "ArrowUp") return;
    event.preventDefault();
    const stops = [field, ...list.querySelectorAll("a")];
    const at = stops.indexOf(/** @type {any} */ (document.activeElement));
    /** @type {HTMLElement} */ (stops[(at + (event.key === "ArrowDown" ? 1 : -1) + stops.length) % stops.length]).focus();
  };
  list.addEventListener("keydown", move);
  field.addEventListener("keydown", move);
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
 * What can be done to an object, by the name of the action and words of the object.
 * @param {App} app
 * @param {string} wanted
 * @returns {[() => void, string][]}
 */
const doable = (app, wanted) => {
  const [verb, ...words] = wanted.split(/\s+/);
  /** @type {[() => void, string][]} */
  const found = [];
  if (verb.length < 2) return found;
  const own = /** @type {[() => void, string][]} */ ([[() => by("sign-out").click(), "Sign out"], [toggleDensity, isDense() ? "Roomy rows" : "Dense rows"], [openHelp, "Keys"]]);
  found.push(...own.filter(([, text]) => text.toLowerCase().startsWith(wanted)));
  for (const kind of app.kinds)
    for (const action of kind.actions.filter((one) => one.may && one.name.startsWith(verb)))
      for (const item of itemsOf(app.world, kind.plural).values()) {
        if (found.length >= FOUND / 2) return found;
        if (words.every((word) => item.text.includes(word) || kind.name.includes(word)))
          found.push([() => openAction(app, kind, action, item.name, item.scope), `${action.name} ${titleOf(kind.name)} ${item.name}`]);
      }
  return found;
};

/**
 * Kinds first, then objects whose name begins so, then those that have it somewhere, then what can be done.
 * @param {App} app
 * @param {string} wanted
 * @returns {[string | (() => void), string][]}
 */
const found = (app, wanted) => {
  const kinds = app.kinds.filter((kind) =>
    [kind.plural, kind.name, ...kind.shortNames].some((word) => word.startsWith(wanted)));
  const pages = PAGES.filter((one) => one.title.toLowerCase().startsWith(wanted) && (!one.kinds.length || app.kinds.some((kind) => one.kinds.includes(kind.plural))));
  /** @type {[string | (() => void), string][]} */
  const result = [["#/", "Overview"], ...pages.map((one) => /** @type {[string, string]} */ ([pageHash(one.name), `${one.title} page`])), ...kinds.map((kind) => /** @type {[string, string]} */ ([hashOf(kind.plural), titleOf(kind.plural)]))];
  if (!wanted) return result;
  if (!"overview".startsWith(wanted)) result.shift();
  /** @type {[string, string][]} */
  const within = [];
  for (const kind of app.kinds)
    for (const item of itemsOf(app.world, kind.plural).values()) {
      if (result.length + within.length >= 20 * FOUND) break;
      const name = item.name.toLowerCase();
      const entry = /** @type {[string, string]} */ ([hashOfItem(item), `${titleOf(kind.name)} ${item.name}`]);
      if (name.startsWith(wanted)) result.push(entry);
      else if (item.text.includes(wanted)) within.push(entry);
    }
  const orders = doable(app, wanted);
  return [...[...result, ...within].slice(0, FOUND - orders.length), ...orders];
};
