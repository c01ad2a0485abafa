// What pages are made of: rows that stay in place, tables, and dialogs that say what will be done before it is.

import { Problem, address, send } from "./api.mjs";
import { ago, by, copyButton, h, mark, put } from "./dom.mjs";
import { MARK_MS, hashOf, quoted, since, staleSince } from "./model.mjs";
import { clearRefusals, refuseAt } from "./refusals.mjs";

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
 * A table of few rows. A column has a `text` that follows the thing, a moment `at` that is shown as its age, or a node that is made once. Rows
 * of objects that changed are marked for two seconds; those of who is silent say how old they are.
 * @template T
 * @param {string} label
 * @param {(thing: T) => string} key
 * @param {{title: string, text?: (thing: T) => string, tone?: (thing: T) => string, node?: (thing: T) => Node,
 *   href?: (thing: T) => string, at?: (thing: T) => string | null | undefined}[]} columns
 * @param {() => string} [command] the same list on the command line
 */
export const tableOf = (label, key, columns, command) => {
  const body = h("tbody");
  const node = h("div", { class: "table-part", hidden: true }, h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label },
    h("table", null, h("thead", null, h("tr", null, columns.map((one) => h("th", { scope: "col" }, one.title)))), body)),
  command ? h("p", { class: "tools" }, copyButton("Copy as command", command)) : null);
  /** @param {T[]} things */
  const show = (things) => {
    node.hidden = !things.length;
    fill(body, things, key,
      (thing) => h("tr", { "data-name": key(thing) }, columns.map((one) => h("td", null, one.node ? one.node(thing) : one.at ? ago("") : one.href ? h("a", { href: "#" }) : null))),
      (row, thing) => columns.forEach((one, place) => {
        const cell = row.children[place];
        if (!place) showAge(row, /** @type {any} */ (thing));
        if (one.at) {
          const at = one.at(thing) || null;
          mark(cell.firstElementChild, "datetime", at);
          mark(cell.firstElementChild, "title", at);
          put(cell.firstElementChild, at ? since(at, Date.now()) : "");
        }
        if (one.text) put(one.href ? cell.firstElementChild : cell, one.text(thing));
        if (one.href) mark(cell.firstElementChild, "href", one.href(thing));
        if (one.tone) mark(cell, "data-tone", one.tone(thing) || null);
      }));
  };
  return { node, show };
};

/**
 * Whether a row of an object has just changed, and how old it is if nobody says so any more.
 * @param {HTMLElement} row
 * @param {{changedMs?: number, value?: import("./model.mjs").Value | null}} thing
 */
const showAge = (row, { changedMs = 0, value = null }) => {
  row.classList.toggle("changed", Date.now() - changedMs < MARK_MS);
  const at = staleSince(value);
  row.classList.toggle("stale", at !== "");
  mark(row, "title", at ? `As of ${since(at, Date.now())} ago, ${at}: nothing was heard since` : null);
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

/** @param {...(Node | string | null)} children */
export const openDialog = (...children) => {
  by("dialog").replaceChildren(...children.filter((one) => one !== null));
  if (!by("dialog").open) by("dialog").showModal();
};

export const closeDialog = () => by("dialog").close();

/**
 * Say what will be done, do it when asked, tell the result, and offer to undo it.
 * @param {App} app
 * @param {{title: string, says: (string | Node)[], label: string, name?: string, command?: string | (() => string), fields?: HTMLElement[], back?: HTMLElement | null,
 *   run: () => Promise<string | Node>, undo?: () => Promise<string | Node>}} what `name`: to be written before it is done;
 *   `back`: leads to what it was made from, until it is done
 */
export const propose = (app, what) => {
  const outcome = h("div", { role: "alert", class: "outcome" });
  const typed = field(`To go on, write its name: ${what.name}`, "confirmation");
  const submit = /** @type {HTMLButtonElement} */ (h("button", { type: "submit" }, what.label));
  /** @param {() => Promise<string | Node>} doing */
  const attempt = async (doing) => {
    put(outcome, "Asking the server.");
    clearRefusals(form);
    try {
      outcome.replaceChildren(h("p", null, await doing()));
      return true;
    } catch (error) {
      if (app.isRefused(error)) return false;
      outcome.replaceChildren(h("p", { class: "error" }, words(error)));
      if (error instanceof Error) refuseAt(form, error);
      return false;
    }
  };
  const undo = button("Undo", async () => {
    undo.hidden = true;
    if (what.undo && !(await attempt(what.undo))) undo.hidden = false;
  }, { hidden: true, class: "undo" });
  const form = h("form", { class: "act" }, h("h2", { id: "dialog-title" }, what.title), ...what.says.map((one) => (one instanceof Node ? one : h("p", null, one))),
    ...(what.fields ?? []), what.name ? typed.node : null, outcome,
    h("p", { class: "tools" }, submit, undo, what.back ?? null, button("Close", closeDialog), what.command ? copyButton("Copy as command", () => (typeof what.command === "function" ? what.command() : what.command ?? "")) : null));
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (submit.disabled) return;
    if (what.name && typed.input.value.trim() !== what.name) return put(outcome, `Write ${what.name} to go on; nothing was done.`);
    submit.disabled = true;
    const done = await attempt(what.run);
    submit.disabled = false;
    submit.hidden = done;
    if (what.back) what.back.hidden = done;
    undo.hidden = !done || !what.undo;
  });
  openDialog(form);
};

/**
 * Make a plan, show what it would change and disturb, and apply it when asked. Undoing is a plan, too.
 * @param {App} app
 * @param {{title: string, scope: string, objects: any[], before?: any[], form?: HTMLElement, undo?: () => Promise<string | Node>}} what
 *   `before`: the same objects as they were; `form`: where they were written, which stays as it is until the plan is applied;
 *   `undo`: how to undo it where that is no plan
 */
export const proposePlan = async (app, what) => {
  const { form } = what;
  const back = form ? button("Back to the form", () => openDialog(form), { class: "back" }) : null;
  const told = (/** @type {Node} */ child) => openDialog(h("h2", { id: "dialog-title" }, what.title), child, h("p", { class: "tools" }, back, button("Close", closeDialog)));
  told(h("p", null, "Asking the server what this would change."));
  /** @type {any} */
  let plan;
  try {
    plan = await send(address("/plans"), "POST", { scope: what.scope, objects: what.objects });
  } catch (error) {
    if (app.isRefused(error)) return;
    if (!form) return told(h("p", { class: "error", role: "alert" }, words(error)));
    openDialog(form);
    const at = error instanceof Problem && refuseAt(form, error);
    const place = form.querySelector("[role=alert].error");
    if (place) put(place, at ? "" : words(error));
    return;
  }
  const counts = plan.summary;
  if (!(counts.create + counts.change + counts.delete)) return told(h("p", null, "Nothing would change."));
  propose(app, {
    title: what.title,
    says: [`${counts.create} to be made, ${counts.change} to be changed, ${counts.delete} to be deleted.`, stepsOf(plan)],
    label: "Apply", back, undo: what.undo, command: applyCommand(what.objects),
    run: async () => {
      await send(address(`/plans/${plan.id}/apply`), "POST");
      const { before } = what;
      if (!before) return "Done.";
      return h("span", null, "Done. ", button("Undo", () => proposePlan(app, { title: `Undo: ${what.title}`, scope: what.scope, objects: before }), { class: "undo" }));
    },
  });
};

/**
 * A request on the command line, where no command of ours does the same.
 * @param {string} method
 * @param {string} url
 * @param {any} [body]
 * @param {Record<string, string>} [headers]
 */
export const curl = (method, url, body, headers = {}) =>
  `curl -X ${method} -H "Authorization: Bearer $FLEETPLANE_TOKEN"${Object.entries(headers).map(([name, value]) => ` -H ${quoted(`${name}: ${value}`)}`).join("")}${
    body === undefined ? "" : ` -H 'Content-Type: application/json' -d ${quoted(JSON.stringify(body))}`} ${quoted(location.origin + url)}`;

/**
 * A list of the resource API on the command line.
 * @param {string} plural
 * @param {string} [scope]
 */
export const getCommand = (plural, scope = "") => `fleetplane get ${plural} ${scope ? `--scope ${quoted(scope)}` : "-A"} --server ${location.origin}`;

/**
 * The same objects on the command line.
 * @param {any[]} objects
 */
export const applyCommand = (objects) =>
  `printf '%s' ${quoted(objects.map((one) => JSON.stringify(one)).join("\n---\n"))} | fleetplane apply -f - --server ${location.origin}`;

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
