// Programs on a board: what sets of boards keep running, and one that is run once: what it printed, and what was run before.

import { send } from "../api.mjs";
import { h, mark, put } from "../dom.mjs";
import { hashOfItem, itemsOf, quoted, since } from "../model.mjs";
import { button, field, getCommand, propose, tableOf, words } from "../parts.mjs";
import { changeSet, deleteSet, newSetButton } from "./board_sets.mjs";
import { followEvents } from "../streams.mjs";

/**
 * @typedef {import("../main.mjs").App} App
 * @typedef {import("../model.mjs").Item} Item
 */

const SHOWN = 10;

/**
 * What came of a program on a board, in words.
 * @param {any} outcome
 */
export const outcomeWords = (outcome) => {
  if (outcome.message && !outcome.success) return `${outcome.state}: ${outcome.message}`;
  const code = outcome.exit_code === undefined ? "" : `, exit code ${outcome.exit_code}`;
  return `${outcome.state}${code}${outcome.duration_seconds === undefined ? "" : ` after ${outcome.duration_seconds} s`}`;
};

/**
 * What is wrong on boards of a set.
 * @param {Record<string, string> | undefined} problems
 */
export const setTrouble = (problems) => Object.entries(problems ?? {}).map(([board, why]) => `${board}: ${why}`).join("; ");

/**
 * @param {App} app
 * @param {() => Item | undefined} chosen
 */
export const boardPrograms = (app, chosen) => {
  const command = field("Program and arguments", "program", { placeholder: "uptime", required: true });
  const refusal = h("p", { class: "error", role: "alert" });
  const told = h("p", { class: "program-outcome", role: "status" });
  const output = h("pre", { class: "output", tabindex: "0", "aria-label": "Output of the program", hidden: true });
  const may = app.kinds.find((kind) => kind.plural === "boards")?.actions.find((action) => action.name === "run")?.may;
  const form = h("form", { class: "filters" }, command.node, h("button", { type: "submit", class: "run-program", "aria-disabled": may ? null : "true", title: may ? null : app.reason() }, "Run"));
  const runs = tableOf("Programs run", (/** @type {Item} */ one) => one.name, [
    { title: "Program", text: (one) => one.value?.spec.command },
    { title: "State", text: (one) => `${one.value?.status.state}${one.value?.status.failed ? ", failed" : ""}`, tone: (one) => (one.value?.status.failed ? "bad" : "") },
    { title: "By", text: (one) => one.value?.spec.startedBy },
    { title: "Age", at: (one) => one.value?.status.startedAt },
    { title: "", node: (one) => button("Outcome", () => show(one.name), { "aria-label": `Outcome of ${one.value?.spec.command}` }) },
  ], () => `fleetplane boards runs --server ${location.origin}`);
  const sets = tableOf("Sets of boards", (/** @type {Item} */ one) => one.name, [
    { title: "Set", text: (one) => one.name, href: hashOfItem },
    { title: "Boards", text: (one) => one.value?.spec.selector || "all" },
    { title: "Keeps running", text: (one) => (one.value?.spec.programs ?? []).map((/** @type {any} */ program) => [program.name, program.command, ...program.args].join(" ")).join("; ") },
    { title: "Drives", text: (one) => (one.value?.spec.pins ?? []).map((/** @type {any} */ pin) => `${pin.pin} ${pin.level ? "high" : "low"}`).join(", ") },
    { title: "In place", text: (one) => `${one.value?.status.inPlace} of ${one.value?.status.boards}`, tone: (one) => (one.value?.status.inPlace < one.value?.status.boards ? "waiting" : "good") },
    { title: "Wrong", text: (one) => setTrouble(one.value?.status.problems), tone: () => "bad" },
    { title: "", node: (one) => h("span", { class: "tools" }, button("Change", () => changeSet(app, newest(one)), { class: "change-set", "aria-label": `Change the set ${one.name}` }),
      button("Delete", () => deleteSet(app, newest(one)), { class: "delete-set", "aria-label": `Delete the set ${one.name}` })) },
  ], () => getCommand("board-sets"));
  const newest = (/** @type {Item} */ one) => itemsOf(app.world, "board-sets").get(one.uid) ?? one;
  const noSets = h("p", { class: "empty" }, "No set keeps programs running on boards. “New set” makes the first; so does fleetplane apply, from a file.");
  const none = h("p", { class: "empty" }, "Nothing was run on it yet. What may be run is listed by the board's owner, in the agent's profiles.");
  const hasSets = app.kinds.some((kind) => kind.plural === "board-sets");
  const node = h("div", null, hasSets ? [h("h3", null, "Kept running"), sets.node, noSets, newSetButton(app), h("h3", null, "Run once")] : null, form, may ? null : h("p", { class: "why-not" }, app.reason()), refusal, told, output, runs.node, none);
  /** @type {AbortController | null} */
  let reading = null;

  /** @param {any} outcome */
  const showOutcome = (outcome) => {
    put(told, outcomeWords(outcome));
    mark(told, "data-tone", outcome.success ? "good" : "bad");
    const text = `${outcome.stdout ?? ""}${outcome.stderr ?? ""}`;
    output.hidden = !text;
    put(output, text);
  };

  /** @param {string} id */
  const show = async (id) => {
    reading?.abort();
    const stop = (reading = new AbortController());
    const number = chosen()?.value?.status.number;
    put(told, "Waiting for the board.");
    mark(told, "data-tone", null);
    output.hidden = true;
    try {
      await followEvents(`/api/v1/commands/${encodeURIComponent(id)}/events`, stop.signal, ({ kind, data }) => {
        if (kind === "outcome" && data.node_id === number) showOutcome(data);
        return kind === "end";
      });
    } catch (error) {
      if (!stop.signal.aborted && !app.isRefused(error)) put(told, words(error));
    }
  };

  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const board = chosen();
    if (!board || !may) return put(refusal, may ? "" : app.reason());
    put(refusal, "");
    const [program, ...args] = command.input.value.trim().split(/\s+/);
    propose(app, {
      title: "Run a program", says: [`${[program, ...args].join(" ")} on board ${board.name}, once. The board refuses what its owner does not allow.`], label: "Run",
      command: `fleetplane boards exec --board ${quoted(board.name)} --server ${location.origin} -- ${[program, ...args].map(quoted).join(" ")}`,
      run: async () => {
        const begun = await send("/api/v1/exec", "POST", { command: program, args, target: { node_ids: [board.value?.status.number] } });
        show(begun.command_id);
        return "Begun: what comes of it is shown on the page.";
      },
    });
  });

  const update = () => {
    const board = chosen();
    const all = [...itemsOf(app.world, "board-sets").values()].sort((one, other) => (one.name < other.name ? -1 : 1));
    sets.show(all);
    noSets.hidden = all.length > 0;
    const number = String(board?.value?.status.number);
    const own = [...itemsOf(app.world, "runs").values()].filter((one) => one.value?.spec.domain === "boards" && String(one.value.spec.target).split(/[\s,]+/).includes(number))
      .sort((one, other) => (String(one.value?.status.startedAt) < String(other.value?.status.startedAt) ? 1 : -1));
    runs.show(own.slice(0, SHOWN));
    none.hidden = own.length > 0;
  };
  return { node, update, stop: () => reading?.abort() };
};
