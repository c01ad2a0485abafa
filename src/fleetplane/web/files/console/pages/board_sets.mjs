// Sets of boards: what the boards of a selector run and drive. Who is meant is told before anything is planned.

import { send } from "../api.mjs";
import { completing } from "../combobox.mjs";
import { factsOf, suggestions } from "../completion.mjs";
import { h, mark, put } from "../dom.mjs";
import { itemsOf } from "../model.mjs";
import { openObjectForm, proposeDelete } from "../object_form.mjs";
import { button, words } from "../parts.mjs";

/**
 * @typedef {import("../main.mjs").App} App
 * @typedef {import("../model.mjs").Item} Item
 * @typedef {import("../model.mjs").Value} Value
 */

const HELP = {
  selector: "By labels, name, role, cluster, architecture or model, such as room=attic,role!=master; empty means every board",
  priority: "A board that several sets select belongs to the one with the highest",
  programs: "Kept running, as far as the board's own configuration allows them",
  "programs.command": "An absolute path; no shell",
  "programs.upSeconds": "It is up once it has run so long",
  "pins.pin": "0 to 27, as the processor counts them (BCM)",
  "pins.level": "0 is low, 1 is high",
};

/** @param {App} app */
const kindOf = (app) => app.kinds.find((one) => one.plural === "board-sets");

/**
 * What boards can be selected by.
 * @param {App} app
 */
const boardFacts = (app) => factsOf([...itemsOf(app.world, "boards").values()].map(({ name, value }) =>
  ({ name, role: value?.spec.role ?? "", cluster: value?.spec.cluster ?? "", architecture: value?.status.architecture ?? "", model: value?.status.model ?? "", ...value?.metadata.labels })));

/**
 * Whom a selector means, in words.
 * @param {App} app
 * @param {string} selector
 */
const meant = async (app, selector) => {
  const boards = [...itemsOf(app.world, "boards").values()];
  const names = new Map(boards.map((one) => [String(one.value?.status.number), one.name]));
  if (!selector) return `Every board: ${boards.length} now.`;
  const told = await send("/api/v1/runs/preview", "POST", { target: { selector } });
  const all = [...told.resolved, ...told.skipped.map((/** @type {any} */ one) => one.name)];
  return all.length ? `${all.length} ${all.length === 1 ? "board" : "boards"} now: ${all.map((one) => names.get(String(one)) ?? one).join(", ")}.` : "No board now; those that come and fit are taken in.";
};

/**
 * @param {App} app
 * @param {Value | null} value
 */
const openForm = (app, value) => {
  const kind = kindOf(app);
  if (!kind) return;
  const who = h("p", { class: "meant", role: "status" });
  let asked = 0;
  const ask = async (/** @type {string} */ selector) => {
    const mine = (asked += 1);
    try {
      const text = await meant(app, selector);
      if (mine !== asked) return;
      put(who, text);
      mark(who, "data-tone", null);
    } catch (error) {
      if (mine !== asked || app.isRefused(error)) return;
      put(who, words(error));
      mark(who, "data-tone", "bad");
    }
  };
  openObjectForm(app, kind, value, {
    scope: "/tenants/default", help: HELP, says: "What boards keep running and which pins they drive, from now on and after each restart. Nothing is sent before you apply the plan.",
    follow: (path, input) => {
      if (path !== "selector") return;
      queueMicrotask(() => {
        completing(input, (text) => suggestions(text, boardFacts(app)));
        input.parentElement?.after(who);
      });
      input.addEventListener("change", () => ask(input.value.trim()));
      ask(input.value.trim());
    },
  });
};

/**
 * @param {App} app
 * @param {Item} item
 */
export const changeSet = (app, item) => openForm(app, item.value);

/**
 * @param {App} app
 * @param {Item} item
 */
export const deleteSet = (app, item) => {
  const kind = kindOf(app);
  const boards = item.value?.status.boards ?? 0;
  if (kind && item.value) proposeDelete(app, kind, item.value, `Its boards, ${boards} now, end its programs and release its pins at once.`);
};

/** @param {App} app */
export const newSetButton = (app) => {
  const may = kindOf(app)?.may.includes("put");
  return h("p", { class: "tools" }, button("New set", () => { if (may) openForm(app, null); }, { class: "new-set", "aria-disabled": may ? null : "true", title: may ? null : app.reason() }));
};
