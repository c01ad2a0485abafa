// Rollouts: waves as they go, what each target came to, and the orders that people give.

import { address, answer, objectPath, send } from "../api.mjs";
import { h, mark, put } from "../dom.mjs";
import { hashOfItem, itemsOf, since } from "../model.mjs";
import { button, choice, curl, field, fill, getCommand, pageHash, propose, tableOf, words } from "../parts.mjs";

/**
 * @typedef {import("../main.mjs").App} App
 * @typedef {import("../main.mjs").Page} Page
 * @typedef {import("../model.mjs").Item} Item
 */

const OVER = new Set(["done", "aborted", "rolled_back", "superseded", "failed"]);
const TONES = /** @type {Record<string, string>} */ ({ confirmed: "good", failed: "bad", not_delivered: "bad", rolled_back: "waiting", asked: "waiting" });
const LETTERS = /** @type {Record<string, string>} */ ({ confirmed: "✓", failed: "✗", rolled_back: "↩", not_delivered: "?", skipped: "–", superseded: "–", never_started: "–", asked: "…" });
/** @type {Record<string, {label: string, says: string, isDangerous?: boolean}>} */
const ORDERS = {
  pause: { label: "Halt", says: "Nothing more is started until it is resumed; what is in flight ends." },
  resume: { label: "Resume", says: "It goes on, in spite of what has failed." },
  retry: { label: "Retry", says: "Targets that failed, or were not reached, are asked once more." },
  approve: { label: "Approve", says: "The next wave may start." },
  abort: { label: "Abort", says: "It ends: what has moved stays, the rest is never started.", isDangerous: true },
  undo: { label: "Roll back", says: "Everything that has moved goes back to the version that it had.", isDangerous: true },
};

/**
 * @param {App} app
 * @param {Record<string, string>} query
 * @returns {Page}
 */
export const rolloutsPage = (app, query) => {
  const say = h("p", { class: "sentence" });
  const all = () => [...itemsOf(app.world, "rollouts").values()].sort((one, other) => (String(one.value?.status.startedAt) < String(other.value?.status.startedAt) ? 1 : -1));
  const list = tableOf("Rollouts", (/** @type {Item} */ one) => one.name, [
    { title: "Rollout", text: (one) => one.name.slice(0, 8), href: (one) => pageHash("rollouts", { rollout: one.name }) },
    { title: "Of", text: (one) => `${one.value?.spec.subject} to ${one.value?.spec.to}` },
    { title: "Phase", text: (one) => one.value?.status.phase, tone: (one) => (one.value?.status.halted.length ? "bad" : "") },
    { title: "Wave", text: (one) => `${one.value?.status.wave} of ${one.value?.spec.waves.length}` },
    { title: "Targets", text: (one) => countsOf(one.value?.status.counts ?? {}) },
    { title: "Age", at: (one) => one.value?.status.startedAt },
  ], () => getCommand("rollouts"));
  const detail = h("section", { hidden: true });
  const heading = h("h2");
  const facts = h("p");
  const orders = h("p", { class: "tools orders" });
  const waves = h("div", { class: "grids" });
  const story = h("ol", { class: "recent" });
  detail.append(heading, facts, orders, waves, h("h3", null, "What happened"), story);
  const node = h("section", null, h("h1", null, "Rollouts"), say, list.node, h("p", { class: "tools" }, button("Start a rollout", () => start(), { class: "start" })), detail);
  let loadedOf = "";
  /** @type {any} */
  let told = null;

  const load = async () => {
    try {
      told = await (await answer(`/v1/fleet/rollouts/${encodeURIComponent(query.rollout)}`)).json();
    } catch (error) {
      if (!app.isRefused(error)) put(facts, words(error));
      return;
    }
    draw();
  };

  const draw = () => {
    if (!told) return;
    const nowMs = Date.now();
    const numbers = [...new Set([...told.waves.map((/** @type {any} */ _, /** @type {number} */ place) => place + 1), ...told.targets.map((/** @type {any} */ one) => one.wave)])].sort((one, other) => one - other);
    fill(waves, numbers, String, (number) => h("section", null, h("h3", null, number ? `Wave ${number}: ${told.waves[number - 1] ?? "late"}` : "Not started yet"), h("ul", { class: "grid" })), (row, number) => {
      const own = told.targets.filter((/** @type {any} */ one) => one.wave === number);
      mark(row, "hidden", own.length || number ? null : "");
      fill(row.lastElementChild, own, (/** @type {any} */ one) => one.id, () => h("li", null, h("span", { class: "cell" })), (cell, one) => {
        put(cell.firstElementChild, `${LETTERS[one.state] ?? "·"} ${one.name} ${one.state}`);
        mark(cell.firstElementChild, "data-tone", TONES[one.state] ?? null);
        mark(cell.firstElementChild, "title", one.error || null);
      });
    });
    const reasons = [...told.halt, ...told.reasons].map((/** @type {any} */ one) => one.message);
    put(facts, `${told.phase}, wave ${told.wave} of ${told.waves.length}, ${countsOf(told.counts)}.${reasons.length ? ` ${reasons.join("; ")}.` : ""}`);
    story.replaceChildren(...[...told.history].reverse().slice(0, 50).map((/** @type {any} */ one) =>
      h("li", null, h("time", { datetime: one.at, title: one.at }, `${since(one.at, nowMs)} ago`), ` ${one.before} → ${one.after} by ${one.actor}${one.reason ? `: ${one.reason}` : ""}`)));
  };

  /**
   * @param {Item} item
   * @param {string} verb
   */
  const order = (item, verb) => {
    const reason = field("Reason", "reason", { maxlength: "200" });
    const { label, says, isDangerous } = ORDERS[verb];
    const ask = async (/** @type {string} */ what) => {
      await send(address(`${objectPath("rollouts", item.name)}/actions/${what}`, { scope: item.scope === "/" ? "" : item.scope }), "POST", { reason: reason.input.value.trim() });
      return "Done.";
    };
    propose(app, {
      title: `${label} rollout ${item.name.slice(0, 8)}`, says: [says, `${item.value?.spec.subject} to ${item.value?.spec.to}: ${countsOf(item.value?.status.counts ?? {})}.`], fields: [reason.node],
      label, name: isDangerous ? item.name.slice(0, 8) : undefined, command: `fleetplane rollout ${verb} ${item.name.slice(0, 8)} --server ${location.origin}`,
      run: () => ask(verb), undo: verb === "pause" ? () => ask("resume") : verb === "resume" ? () => ask("pause") : undefined,
    });
  };

  const start = async () => {
    const subject = choice("What", "subject", [["proxies.config", "proxies.config"]], "proxies.config");
    const scope = field("Where (the id of a workspace)", "scope", { required: true, value: query.at ?? "" });
    const list = field("Waves", "waves", { required: true, value: "1, rest" });
    const soak = field("Soak, in seconds", "soak", { type: "number", min: "0", value: 60 });
    const reason = field("Reason", "reason");
    const body = () => ({ subject: subject.input.value, scope: scope.input.value.trim(), reason: reason.input.value.trim(),
      policy: { waves: list.input.value.split(",").map((one) => one.trim()), soak_seconds: Number(soak.input.value) } });
    const preview = h("ul", { class: "plan" });
    propose(app, {
      title: "Start a rollout", says: ["Which target is in which wave is told before anything moves."], fields: [subject.node, scope.node, list.node, soak.node, reason.node,
        button("Show the waves", async () => {
          try {
            const plan = await send("/v1/fleet/rollout-plans", "POST", body());
            preview.replaceChildren(...plan.waves.map((/** @type {any} */ one) => h("li", null, `${one.wave}: ${one.targets.join(", ") || "nobody"}`)));
          } catch (error) {
            if (!app.isRefused(error)) preview.replaceChildren(h("li", { class: "error" }, words(error)));
          }
        }), preview],
      label: "Start", command: () => curl("POST", "/v1/fleet/rollouts", body()),
      run: async () => {
        const begun = await send("/v1/fleet/rollouts", "POST", body());
        return h("a", { href: pageHash("rollouts", { rollout: begun.id.replaceAll("-", "") }) }, "Begun: watch it");
      },
    });
  };

  /** @param {number} _nowMs */
  const update = (_nowMs) => {
    const found = all();
    const halted = found.filter((one) => one.value?.status.halted.length && !OVER.has(one.value.status.phase));
    const going = found.filter((one) => !OVER.has(one.value?.status.phase));
    put(say, !app.world.synced ? "Loading." : halted.length ? `${halted.length} ${halted.length === 1 ? "rollout has" : "rollouts have"} halted: ${halted[0].value?.status.halted.join("; ")}.`
      : going.length ? `${going.length} ${going.length === 1 ? "rollout is" : "rollouts are"} under way.` : "No rollout is under way.");
    list.show(found.slice(0, 200));
    const one = found.find((item) => item.name === query.rollout);
    detail.hidden = !one;
    if (!one?.value) return;
    put(heading, `${one.value.spec.subject} to ${one.value.spec.to}`);
    const kind = app.kinds.find((each) => each.plural === "rollouts");
    if (!orders.childElementCount)
      orders.replaceChildren(...Object.keys(ORDERS).map((verb) => {
        const may = kind?.actions.find((each) => each.name === verb)?.may;
        return button(ORDERS[verb].label, () => { const newest = itemsOf(app.world, "rollouts").get(one.uid); if (newest && may) order(newest, verb); },
          { "data-order": verb, "aria-disabled": may ? null : "true", title: may ? null : app.reason() });
      }), h("a", { href: hashOfItem(one) }, "Everything about it"));
    const mark = JSON.stringify(one.value);
    if (mark !== loadedOf) {
      loadedOf = mark;
      load();
    }
  };
  return { node, title: "Rollouts", update, close: () => {}, key: () => false };
};

/** @param {Record<string, number>} counts */
const countsOf = (counts) => Object.entries(counts).filter(([, count]) => count).map(([state, count]) => `${count} ${state}`).join(", ") || "no targets";
