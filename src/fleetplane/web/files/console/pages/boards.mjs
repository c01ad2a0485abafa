// Boards: what each measures, its pins as switches with who holds them, programs, provisioning, and its log.

import { address, objectPath, send } from "../api.mjs";
import { whyPart } from "../detail.mjs";
import { copyButton, h, mark, put } from "../dom.mjs";
import { hashOfItem, itemsOf, since, staleSince, tone } from "../model.mjs";
import { boardCharts, objectLog } from "../observed.mjs";
import { fill, pageHash, propose } from "../parts.mjs";
import { boardPrograms } from "./board_programs.mjs";
import { boardProvisioning } from "./board_provisioning.mjs";

/**
 * @typedef {import("../main.mjs").App} App
 * @typedef {import("../main.mjs").Page} Page
 * @typedef {import("../model.mjs").Item} Item
 */

const STATE = { title: "STATE", type: "text", wide: false };

/**
 * @param {App} app
 * @param {Record<string, string>} query
 * @returns {Page}
 */
export const boardsPage = (app, query) => {
  const boards = () => [...itemsOf(app.world, "boards").values()].sort((one, other) => (one.name < other.name ? -1 : 1));
  const chosen = () => boards().find((one) => one.name === query.board) ?? boards()[0];
  const say = h("p", { class: "sentence" });
  const why = whyPart(app);
  const chooser = h("p", { class: "tabs" });
  const facts = h("p", { class: "facts" });
  const number = () => chosen()?.value?.status.number;
  const charts = boardCharts(app, number);
  const pins = h("ul", { class: "pins" });
  const noPins = h("p", { class: "empty" });
  const log = objectLog(app, "boards", chosen, query);
  const programs = boardPrograms(app, chosen);
  const provisioning = boardProvisioning(app, chosen);
  const more = h("div", null, facts, h("h2", null, "Pins"), pins, noPins, h("p", { class: "tools" }, copyButton("Copy as command", () => `fleetplane get pins -A --server ${location.origin}`)), h("h2", null, "Measured in the last hour"), charts.node,
    h("h2", null, "Programs"), programs.node, h("h2", null, "Provisioning"), provisioning.node, h("h2", null, "Log"), log.node);
  const node = h("section", null, h("h1", null, "Boards"), say, why.node, chooser, more);

  /** @param {Item} pin */
  const drive = (pin) => {
    const now = pin.value?.status.value ?? pin.value?.spec.level ?? 0;
    const next = now ? 0 : 1;
    const url = address(`${objectPath("pins", pin.name)}/actions/write`, { scope: pin.scope });
    const set = async (/** @type {number} */ value) => {
      await send(url, "POST", { value });
      return `Done: ${pin.name} is driven ${value ? "high" : "low"}.`;
    };
    const held = pin.value?.status.heldBy;
    propose(app, {
      title: `Drive ${pin.name} ${next ? "high" : "low"}`,
      says: [`Pin ${pin.value?.spec.pin} of board ${pin.value?.spec.board} goes from ${now ? "high" : "low"} to ${next ? "high" : "low"}, at once.`, ...(held ? [`It is reserved by ${held}.`] : [])],
      label: next ? "Drive high" : "Drive low",
      command: `fleetplane boards gpio write ${pin.value?.spec.board}:${pin.value?.spec.pin} ${next ? "high" : "low"} --server ${location.origin}`,
      run: () => set(next),
      undo: () => set(now),
    });
  };

  /** @param {number} nowMs */
  const update = (nowMs) => {
    const all = boards();
    const bad = all.filter((one) => tone(STATE, one.value?.status.state) === "bad");
    put(say, !app.world.synced ? "Loading." : !all.length ? "There are no boards. On the server: fleetplane boards join-token create --name NAME; on the board: fleetplane agent board join"
      : bad.length ? `${bad.length} of ${all.length} boards ${bad.length === 1 ? "needs" : "need"} attention: ${bad[0].name} is ${bad[0].value?.status.state}.` : `${all.length} ${all.length === 1 ? "board" : "boards"}; none needs attention.`);
    why.show(bad[0]);
    const one = chosen();
    more.hidden = !one;
    if (!one?.value) return;
    const { status } = one.value;
    if (chooser.childElementCount !== all.length)
      chooser.replaceChildren(...all.map((item) => h("a", { href: pageHash("boards", { board: item.name }), "aria-current": item === one ? "page" : null }, item.name)));
    const degraded = one.value.conditions.filter((each) => each.status !== "OK" && each.status !== "True").map((each) => `${each.type} ${each.status}${each.message ? `: ${each.message}` : ""}`);
    const old = staleSince(one.value);
    more.classList.toggle("stale", old !== "");
    put(facts, `${one.name} is ${status.state} for ${since(status.since, nowMs)}${old ? `, and what follows is ${since(old, nowMs)} old` : ""}: ${status.model || "unknown model"}, ${status.cpuCores} cores, ${status.osVersion}.${degraded.length ? ` ${degraded.join("; ")}.` : ""}`);
    const own = [...itemsOf(app.world, "pins").values()].filter((item) => item.value?.spec.board === one.name).sort((left, right) => left.value?.spec.pin - right.value?.spec.pin);
    noPins.hidden = own.length > 0;
    put(noPins, `No pin is configured: fleetplane boards gpio add ${one.name}:17 --direction output`);
    const may = app.kinds.find((kind) => kind.plural === "pins")?.actions.find((action) => action.name === "write")?.may;
    fill(pins, own, (item) => item.uid, (item) => h("li", { "data-name": item.name },
      h("button", { type: "button", role: "switch", class: "switch", onclick: () => { const newest = itemsOf(app.world, "pins").get(item.uid); if (newest && may) drive(newest); } }),
      h("a", { href: hashOfItem(item) }, item.name), h("span"), h("small")), (row, item) => {
      const isOn = Boolean(item.value?.status.value ?? item.value?.spec.level);
      const isOutput = item.value?.spec.direction === "output";
      mark(row.children[0], "aria-checked", String(isOn));
      mark(row.children[0], "aria-label", `${item.name} ${isOn ? "high" : "low"}`);
      mark(row.children[0], "aria-disabled", isOutput && may ? null : "true");
      mark(row.children[0], "title", may ? null : app.reason());
      row.children[0].disabled = !isOutput;
      put(row.children[0], isOn ? "high" : "low");
      put(row.children[2], `${item.value?.spec.direction}${item.value?.spec.description ? `, ${item.value.spec.description}` : ""}`);
      put(row.children[3], `${item.value?.status.heldBy ? `held by ${item.value.status.heldBy}` : "held by nobody"}${item.value?.status.message ? `; ${item.value.status.message}` : ""}`);
    });
    if (app.world.synced) for (const part of [charts, programs, provisioning]) part.update(nowMs);
  };
  const close = () => { for (const part of [log, programs, provisioning]) part.stop(); };
  return { node, title: "Boards", update, close, key: () => false };
};
