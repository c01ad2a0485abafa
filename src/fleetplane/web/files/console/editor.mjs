// The specification of an object as text: checked by the server while it is written, each complaint at its line, and the plan before anything changes.

import { Problem, address, objectPath, send } from "./api.mjs";
import { h, mark, put } from "./dom.mjs";
import { LineError, lineOfField, parseLines } from "./json_lines.mjs";
import { button, proposePlan, words } from "./parts.mjs";

/**
 * @typedef {import("./main.mjs").App} App
 * @typedef {import("./model.mjs").Kind} Kind
 * @typedef {import("./model.mjs").Value} Value
 */

const CHECK_MS = 500; // After the last key.

/**
 * @param {App} app
 * @param {Kind} kind
 * @param {Value} value
 */
export const specEditor = (app, kind, value) => {
  const text = /** @type {HTMLTextAreaElement} */ (h("textarea", { class: "code", name: "spec", "aria-label": `Specification of ${value.metadata.name}, as JSON`, "aria-describedby": "spec-verdict", spellcheck: "false", wrap: "off" }));
  const numbers = h("ol", { class: "numbers", "aria-hidden": "true" });
  const verdict = h("p", { id: "spec-verdict", class: "verdict", role: "status" });
  const { metadata } = value;
  const may = kind.may.includes("put");
  const object = (/** @type {any} */ spec) => ({ kind: kind.name, metadata: { name: metadata.name, scope: metadata.scope, labels: metadata.labels }, spec });
  let original = JSON.stringify(value.spec, null, 2);
  let checked = 0;
  /** @type {number | undefined} */
  let timer;
  text.value = original;

  /** @param {number} bad */
  const count = (bad) => {
    const rows = text.value.split("\n").length;
    if (numbers.childElementCount !== rows) numbers.replaceChildren(...Array.from({ length: rows }, () => h("li")));
    [...numbers.children].forEach((one, place) => mark(one, "class", place + 1 === bad ? "wrong" : null));
    mark(text, "aria-invalid", bad ? "true" : null);
    mark(text, "rows", String(Math.min(30, Math.max(6, rows + 1))));
  };

  /**
   * @param {number} line
   * @param {string} message
   */
  const wrong = (line, message) => {
    count(line);
    put(verdict, `Line ${line}: ${message}`);
    mark(verdict, "data-tone", "bad");
    return null;
  };

  /** What is written, if the server would take it; else it is marked. */
  const check = async () => {
    const mine = (checked += 1);
    let parsed;
    try {
      parsed = parseLines(text.value);
    } catch (error) {
      return wrong(error instanceof LineError ? error.line : 1, words(error));
    }
    try {
      await send(address(objectPath(kind.plural, metadata.name), { scope: metadata.scope === "/" ? "" : metadata.scope, dryRun: "1" }), "PUT", object(parsed.value), { "If-Match": "*" });
    } catch (error) {
      if (mine !== checked || app.isRefused(error)) return null;
      if (error instanceof Problem && error.field) return wrong(lineOfField(parsed.lines, error.field), `${error.field.replace(/^(objects\[\d+\]\.)?spec\.?/, "")}: ${error.message}${error.hint ? `; ${error.hint}` : ""}`);
      count(0);
      put(verdict, words(error));
      mark(verdict, "data-tone", "bad");
      return null;
    }
    if (mine !== checked) return null;
    count(0);
    put(verdict, text.value === original ? "As it is now." : "The server would take this.");
    mark(verdict, "data-tone", "good");
    return parsed.value;
  };

  text.addEventListener("input", () => {
    count(0);
    put(verdict, "…");
    mark(verdict, "data-tone", null);
    clearTimeout(timer);
    timer = setTimeout(check, CHECK_MS);
  });
  text.addEventListener("scroll", () => { numbers.scrollTop = text.scrollTop; });
  const plan = async () => {
    clearTimeout(timer);
    const spec = await check();
    if (spec) proposePlan(app, { title: `Change ${metadata.name}`, scope: metadata.scope, objects: [object(spec)], before: [object(value.spec)] });
  };
  const node = h("div", { class: "spec-editor" },
    may ? null : h("p", { class: "why-not error" }, app.reason()),
    h("div", { class: "code-lines" }, numbers, text), verdict,
    h("p", { class: "tools" }, button("Show the plan", plan, { class: "show-plan", "aria-disabled": may ? null : "true" }), button("As it is now", () => { text.value = original; check(); }, { class: "reset" })));
  text.readOnly = !may;
  count(0);
  return {
    node,
    /**
     * What somebody else made of it meanwhile: shown at once unless something is being written here.
     * @param {Value} newest
     */
    follow: (newest) => {
      const after = JSON.stringify(newest.spec, null, 2);
      if (after === original) return;
      const untouched = text.value === original;
      [original, value] = [after, newest];
      if (untouched) {
        text.value = after;
        count(0);
        put(verdict, "As it is now.");
      } else put(verdict, "It was changed meanwhile; “As it is now” shows how.");
    },
    stop: () => clearTimeout(timer),
  };
};
