// What pages are made of: rows that stay in place, tables, and dialogs that say what will be done before it is.

import { Problem, address, send } from "./api.mjs";
import { by, copyButton, h, mark, put } from "./dom.mjs";
import { hashOf } from "./model.mjs";

/**
 * @typedef {import("./main.mjs").App} App
 * @typedef {import("./main.mjs").Page} Page
 * @typedef {import("./model.mjs").Item} Item
 * @typedef {import("./model.mjs").Kind} Kind
 */

/**
 * The address of a page.
 * @param {string} name
 * @param {Record<string, string | undefined>} [query]
 */
export const pageHash = (name, query = {}) => hashOf("fleet", name, query);

/**
 * What a refusal or a failure says.
 * @param {unknown} error
 */
export const words = (error) => (error instanceof Problem ? error.line : error instanceof Error ? error.message : String(error));

/**
 * Rows that stay are not made anew, so that whoever is on one with the keyboard stays there.
 * @template T
 * @param {Element} list
 * @param {T[]} things
 * @param {(thing: T) => string} key
 * @param {(thing: T) => HTMLElement} make
 * @param {(row: any, thing: T) => void} write
 */
export const fill = (list, things, key, make, write) => {
  const before = new Map([...list.children].map((row) => [/** @type {HTMLElement} */ (row).dataset.key, row]));
  const rows = things.map((thing) => {
    const name = key(thing);
    let row = before.get(name);
    if (!row) {
      const made = make(thing);
      made.dataset.key = name;
      row = made;
    }
    write(row, thing);
    return row;
  });
  const still = new Set(rows);
  for (const row of before.values()) if (!still.has(row)) row.remove();
  rows.forEach((row, place) => {
    if (list.children[place] !== row) list.insertBefore(row, list.children[place] ?? null);
  });
};

/**
 * A table of few rows. A column has a `text` that follows the thing, or a node that is made once.
 * @template T
 * @param {string} label
 * @param {(thing: T) => string} key
 * @param {{title: string, text?: (thing: T) => string, tone?: (thing: T) => string, node?: (thing: T) => Node,
 *   href?: (thing: T) => string}[]} columns
 */
export const tableOf = (label, key, columns) => {
  const body = h("tbody");
  const node = h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label, hidden: true },
    h("table", null, h("thead", null, h("tr", null, columns.map((one) => h("th", { scope: "col" }, one.title)))), body));
  /** @param {T[]} things */
  const show = (things) => {
    node.hidden = !things.length;
    fill(body, things, key,
      (thing) => h("tr", { "data-name": key(thing) }, columns.map((one) => h("td", null, one.node ? one.node(thing) : one.href ? h("a", { href: "#" }) : null))),
      (row, thing) => columns.forEach((one, place) => {
        const cell = row.children[place];
        if (one.text) put(one.href ? cell.firstElementChild : cell, one.text(thing));
        if (one.href) mark(cell.firstElementChild, "href", one.href(thing));
        if (one.tone) mark(cell, "data-tone", one.tone(thing) || null);
      }));
  };
  return { node, show };
};

/**
 * @param {string} label
 * @param {() => void} press
 * @param {Record<string, any>} [props]
 */
export const button = (label, press, props = {}) => h("button", { type: "button", onclick: press, ...props }, label);

/**
 * A labelled field.
 * @param {string} label
 * @param {string} name
 * @param {Record<string, any>} [props]
 * @returns {{node: HTMLElement, input: HTMLInputElement}}
 */
export const field = (label, name, props = {}) => {
  const input = /** @type {HTMLInputElement} */ (h("input", { name, autocomplete: "off", spellcheck: "false", ...props }));
  if (props.value !== undefined) input.value = String(props.value);
  const isCheck = props.type === "checkbox";
  return { node: h("label", isCheck ? { class: "check" } : null, ...(isCheck ? [input, label] : [label, input])), input };
};

/**
 * @param {string} label
 * @param {string} name
 * @param {[string, string][]} options value and text
 * @param {string} [chosen]
 * @returns {{node: HTMLElement, input: HTMLSelectElement}}
 */
export const choice = (label, name, options, chosen = "") => {
  const input = /** @type {HTMLSelectElement} */ (h("select", { name }, options.map(([value, text]) => h("option", { value }, text))));
  input.value = chosen;
  return { node: h("label", null, label, input), input };
};

/** @param {(Node | string | null)[]} children */
export const openDialog = (...children) => {
  by("dialog").replaceChildren(...children.filter((one) => one !== null));
  if (!by("dialog").open) by("dialog").showModal();
};

export const closeDialog = () => by("dialog").close();

/**
 * Say what will be done, do it when asked, tell the result, and offer to undo it.
 * @param {App} app
 * @param {{title: string, says: (string | Node)[], label: string, name?: string, command?: string, fields?: HTMLElement[],
 *   run: () => Promise<string | Node>, undo?: () => Promise<string | Node>}} what `name`: to be written before it is done
 */
export const propose = (app, what) => {
  const outcome = h("div", { role: "alert", class: "outcome" });
  const typed = field(`To go on, write its name: ${what.name}`, "confirmation");
  const submit = /** @type {HTMLButtonElement} */ (h("button", { type: "submit" }, what.label));
  /** @param {() => Promise<string | Node>} doing */
  const attempt = async (doing) => {
    put(outcome, "Asking the server.");
    try {
      outcome.replaceChildren(h("p", null, await doing()));
      return true;
    } catch (error) {
      if (!app.isRefused(error)) outcome.replaceChildren(h("p", { class: "error" }, words(error)));
      return false;
    }
  };
  const undo = button("Undo", async () => {
    undo.hidden = true;
    if (what.undo && !(await attempt(what.undo))) undo.hidden = false;
  }, { hidden: true, class: "undo" });
  const form = h("form", { class: "act" }, h("h2", { id: "dialog-title" }, what.title), ...what.says.map((one) => (one instanceof Node ? one : h("p", null, one))),
    ...(what.fields ?? []), what.name ? typed.node : null, outcome,
    h("p", { class: "tools" }, submit, undo, button("Close", closeDialog), what.command ? copyButton("Copy as command", () => what.command ?? "") : null));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (submit.disabled) return;
    if (what.name && typed.input.value.trim() !== what.name) return put(outcome, `Write ${what.name} to go on; nothing was done.`);
    submit.disabled = true;
    const done = await attempt(what.run);
    submit.disabled = false;
    submit.hidden = done;
    undo.hidden = !done || !what.undo;
  });
  openDialog(form);
};

/**
 * Make a plan, show what it would change and disturb, and apply it when asked. Undoing is a plan, too.
 * @param {App} app
 * @param {{title: string, scope: string, objects: any[], before?: any[]}} what `before`: the same objects as they were
 */
export const proposePlan = async (app, what) => {
  openDialog(h("h2", { id: "dialog-title" }, what.title), h("p", null, "Asking the server what this would change."), button("Close", closeDialog));
  /** @type {any} */
  let plan;
  try {
    plan = await send(address("/plans"), "POST", { scope: what.scope, objects: what.objects });
  } catch (error) {
    if (app.isRefused(error)) return;
    openDialog(h("h2", { id: "dialog-title" }, what.title), h("p", { class: "error", role: "alert" }, words(error)), button("Close", closeDialog));
    return;
  }
  const counts = plan.summary;
  const moves = counts.create + counts.change + counts.delete;
  if (!moves) {
    openDialog(h("h2", { id: "dialog-title" }, what.title), h("p", null, "Nothing would change."), button("Close", closeDialog));
    return;
  }
  propose(app, {
    title: what.title,
    says: [`${counts.create} to be made, ${counts.change} to be changed, ${counts.delete} to be deleted.`, stepsOf(plan)],
    label: "Apply",
    run: async () => {
      await send(address(`/plans/${plan.id}/apply`), "POST");
      const { before } = what;
      if (!before) return "Done.";
      return h("span", null, "Done. ", button("Undo", () => proposePlan(app, { title: `Undo: ${what.title}`, scope: what.scope, objects: before }), { class: "undo" }));
    },
  });
};

/** @param {any} plan */
const stepsOf = (plan) =>
  h("ul", { class: "plan" }, plan.steps.filter((/** @type {any} */ step) => step.operation !== "nothing").map((/** @type {any} */ step) =>
    h("li", null, `${step.operation} ${step.kind} ${step.name}`,
      h("ul", null,
        ...step.changes.map((/** @type {any} */ one) => h("li", null, h("code", null, one.field), ": ",
          h("del", null, brief(one.old)), " → ", h("ins", null, brief(one.new)))),
        ...step.warnings.map((/** @type {string} */ one) => h("li", { class: "warning" }, one)),
        ...step.disturbs.map((/** @type {string} */ one) => h("li", { class: "warning" }, `Disturbs: ${one}`))))));

/**
 * A value in a line.
 * @param {any} value
 */
export const brief = (value) => (value === null || value === undefined ? "nothing" : typeof value === "string" ? value : JSON.stringify(value));

/**
 * A command, and a button that copies it.
 * @param {string} command
 */
export const copyParts = (command) => [h("code", null, command), " ", copyButton("Copy", () => command)];
