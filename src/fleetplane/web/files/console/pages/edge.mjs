// Edge daemons: who is there, one command on many of them with a live grid, what ran before, and how to enrol another.

import { answer, send } from "../api.mjs";
import { completing } from "../combobox.mjs";
import { factsOf, suggestions } from "../completion.mjs";
import { whyPart } from "../detail.mjs";
import { h, mark, put } from "../dom.mjs";
import { hashOfItem, itemsOf, quoted, since, tone } from "../model.mjs";
import { openObjectForm } from "../object_form.mjs";
import { button, choice, copyParts, field, fill, openDialog, closeDialog, getCommand, pageHash, propose, tableOf, words } from "../parts.mjs";
import { followEvents } from "../streams.mjs";

/**
 * @typedef {import("../main.mjs").App} App
 * @typedef {import("../main.mjs").Page} Page
 * @typedef {import("../model.mjs").Item} Item
 * @typedef {{id: string, outcome: string, output: string, message: string}} Cell
 */

const STATE = { title: "STATE", type: "text", wide: false };
const OUTPUT_LIMIT = 65_536; // Characters of one target that the page keeps.
const LETTERS = /** @type {Record<string, string>} */ ({ ok: "✓", err: "✗", timed_out: "T", cancelled: "C", not_started: "–", running: "…", pending: "·" });
const TONES = /** @type {Record<string, string>} */ ({ ok: "good", err: "bad", timed_out: "bad", cancelled: "waiting", not_started: "waiting" });

/**
 * Take one event of a run in; whether it was the last.
 * @param {Map<string, Cell>} cells
 * @param {{kind: string, data: any}} event
 */
export const takeRunEvent = (cells, { kind, data }) => {
  const id = data.node_id;
  if (id && !cells.has(id)) cells.set(id, { id, outcome: "pending", output: "", message: "" });
  const cell = id ? cells.get(id) : undefined;
  if (cell && kind === "command_started") cell.outcome = "running";
  else if (cell && kind === "command_progress") cell.output = (cell.output + Object.values(data.chunk ?? {}).join("")).slice(-OUTPUT_LIMIT);
  else if (cell && kind === "command_result") {
    const { result } = data;
    const failed = result.err;
    cell.outcome = failed ? (failed.code === "cancelled" || failed.code === "timed_out" ? failed.code : "err") : "ok";
    cell.message = failed ? `${failed.code}: ${failed.message}` : `exit code ${result.ok?.exit_code ?? 0}`;
  }
  return kind === "fleet_result";
};

/**
 * Whom a group means, in words.
 * @param {any} spec
 */
export const groupWords = (spec) => {
  const { selector = {}, pinnedMembers = [] } = spec ?? {};
  const parts = Object.entries(selector).flatMap(([key, value]) => (Array.isArray(value) ? (value.length ? [`${key}: ${value.join(", ")}`] : []) : value ? [`${key === "where" ? "" : `${key}=`}${value}`] : []));
  if (pinnedMembers.length) parts.push(`${pinnedMembers.length} named`);
  return parts.join("; ") || "all";
};

/**
 * @param {App} app
 * @param {Record<string, string>} query
 * @returns {Page}
 */
export const edgePage = (app, query) => {
  const nodes = () => [...itemsOf(app.world, "edge-nodes").values()].sort((one, other) => (nameOf(one) < nameOf(other) ? -1 : 1));
  /** @param {Item} one */
  const nameOf = (one) => one.value?.spec.displayName || one.name;
  const tenants = () => [...new Set(nodes().map((one) => one.scope.split("/")[2]))].sort();
  const tenant = () => query.tenant || tenants()[0] || "default";
  const header = () => ({ "X-Aegis-Tenant": tenant() });
  const say = h("p", { class: "sentence" });
  const why = whyPart(app);
  const chooser = h("p", { class: "tabs" });
  const list = tableOf("Daemons", (/** @type {Item} */ one) => one.name, [
    { title: "Daemon", text: nameOf, href: hashOfItem },
    { title: "State", text: (one) => one.value?.status.state, tone: (one) => tone(STATE, one.value?.status.state) },
    { title: "Since", at: (one) => one.value?.status.since },
    { title: "Tags", text: (one) => (one.value?.spec.tags ?? []).join(", ") },
    { title: "System", text: (one) => `${one.value?.status.os ?? ""} ${one.value?.status.arch ?? ""}` },
  ], () => getCommand("edge-nodes", `/tenants/${tenant()}`));
  const history = tableOf("Runs", (/** @type {Item} */ one) => one.name, [
    { title: "Run", text: (one) => one.name.slice(0, 8), href: (one) => pageHash("edge", { ...query, run: one.name }) },
    { title: "Command", text: (one) => one.cells[2] },
    { title: "State", text: (one) => one.cells[3] },
    { title: "Targets", text: (one) => String(one.cells[4]) },
    { title: "Age", at: (one) => String(one.cells[5]) },
  ], () => getCommand("runs", `/tenants/${tenant()}`));
  const groups = tableOf("Groups", (/** @type {Item} */ one) => one.name, [
    { title: "Group", text: (one) => one.name, href: hashOfItem },
    { title: "Means", text: (one) => groupWords(one.value?.spec) },
    { title: "By", text: (one) => one.value?.status?.createdBy ?? "" },
    { title: "", node: (one) => button("Choose", () => { target.input.value = `group:${one.name}`; showPreview(); command.input.focus(); }, { "aria-label": `Run a command on the group ${one.name}` }) },
  ], () => getCommand("edge-groups", `/tenants/${tenant()}`));
  const noGroups = h("p", { class: "empty" }, "There are no groups. The first: ", ...copyParts("fleetplane edge group create NAME --selector os=linux"));
  const groupKind = app.kinds.find((one) => one.plural === "edge-groups");
  const mayGroup = groupKind?.may.includes("put");
  const newGroup = groupKind ? h("p", { class: "tools" }, button("New group", () => { if (mayGroup) openObjectForm(app, groupKind, null, { scope: `/tenants/${tenant()}` }); },
    { class: "new-group", "aria-disabled": mayGroup ? null : "true", title: mayGroup ? null : app.reason() })) : null;
  const command = field("Command", "command", { placeholder: "uname -a", required: true });
  const target = field("Target", "target", { value: query.target ?? "all", required: true, placeholder: "all, @NODE, group:NAME or a selector" });
  const mode = choice("How", "mode", [["parallel", "all at once"], ["sequential", "one after another"]], "parallel");
  completing(target.input, (text) => suggestions(text, factsOf(nodes().map((one) => ({ os: one.value?.status.os ?? "", arch: one.value?.status.arch ?? "", tags: one.value?.spec.tags ?? [], ...(one.value?.status.labels ?? {}) }))),
    ["all", ...nodes().map((one) => `@${nameOf(one)}`), ...[...itemsOf(app.world, "edge-groups").values()].map((one) => `group:${one.name}`)], ", "));
  const mayRun = app.kinds.find((one) => one.plural === "edge-nodes")?.actions.find((one) => one.name === "run")?.may;
  const preview = h("p", { class: "preview", role: "status" });
  const grid = h("ul", { class: "grid run" });
  const totals = h("p", { class: "totals", role: "status" });
  const output = h("pre", { class: "output", tabindex: "0", "aria-label": "Output", hidden: true });
  const cancel = button("Cancel the run", () => stopRun(), { hidden: true, class: "cancel" });
  const refusal = h("p", { class: "error", role: "alert" });
  const form = h("form", { class: "filters" }, command.node, target.node, mode.node,
    button("Preview", () => showPreview(), { class: "preview-button" }), h("button", { type: "submit", class: "run-button", "aria-disabled": mayRun ? null : "true", title: mayRun ? null : app.reason() }, "Run"));
  const node = h("section", null, h("h1", null, "Edge"), say, why.node, chooser, h("h2", null, "Run a command"), form, preview, refusal, totals, h("p", { class: "tools" }, cancel), grid, output,
    h("h2", null, "Daemons"), list.node, h("p", { class: "tools" }, button("Enrol a daemon", () => enrol(), { class: "enrol" })), h("h2", null, "Groups"), groups.node, noGroups, newGroup, h("h2", null, "Runs"), history.node);
  /** @type {Map<string, Cell>} */
  const cells = new Map();
  /** @type {AbortController | null} */
  let reading = null;
  let run = "";
  let opened = "";
  let over = false;
  let previews = 0;

  /** Words and quoted parts, as a shell would split them; nothing else of a shell. */
  const split = () => [...command.input.value.matchAll(/"([^"]*)"|'([^']*)'|(\S+)/g)].map((one) => one[1] ?? one[2] ?? one[3]);
  const asked = () => ({ target: target.input.value.trim() });

  const resolved = async () => {
    const told = await send("/v1/edge/fleet/preview", "POST", asked(), header());
    const skipped = told.skipped.length ? `; ${told.skipped.length} left out: ${told.skipped.map((/** @type {any} */ one) => `${one.name || one.node_id} (${one.reason})`).join(", ")}` : "";
    return { told, text: `${told.resolved.length} ${told.resolved.length === 1 ? "daemon" : "daemons"}: ${told.resolved.map((/** @type {any} */ one) => one.name || one.node_id).join(", ")}${skipped}` };
  };

  const showPreview = async () => {
    const mine = (previews += 1);
    put(refusal, "");
    try {
      const { text } = await resolved();
      if (mine === previews) put(preview, text);
    } catch (error) {
      if (mine !== previews) return; // of a target that is not there any more
      put(preview, "");
      if (!app.isRefused(error)) put(refusal, words(error));
    }
  };

  target.input.addEventListener("change", () => showPreview());

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    put(refusal, mayRun ? "" : app.reason());
    if (!mayRun) return;
    try {
      const { text } = await resolved();
      const [program, ...args] = split();
      propose(app, {
        title: "Run a command",
        says: [`${[program, ...args].join(" ")} on ${text}.`, mode.input.value === "parallel" ? "On all of them at once." : "One after another; the first failure ends it."],
        label: "Run",
        command: `fleetplane edge run --target ${quoted(target.input.value.trim())} --mode ${mode.input.value} --on-error ${mode.input.value === "parallel" ? "continue" : "fail-fast"} --tenant ${quoted(tenant())} --server ${location.origin} -- ${[program, ...args].map(quoted).join(" ")}`,
        run: async () => {
          const policy = { mode: mode.input.value, failure_policy: mode.input.value === "parallel" ? "continue" : "fail-fast" };
          const begun = await send("/v1/edge/fleet/invoke", "POST", { ...asked(), tool: "cmd.run", args: { command: program, args }, policy }, { ...header(), Accept: "application/json" });
          openRun(begun.fleet_command_id);
          closeDialog();
          return "Begun.";
        },
      });
    } catch (error) {
      if (!app.isRefused(error)) put(refusal, words(error));
    }
  });

  /** @param {string} id */
  const openRun = async (id) => {
    reading?.abort();
    const stop = (reading = new AbortController());
    [run, opened, over] = [id, "", false];
    cells.clear();
    app.replace(pageHash("edge", { ...query, run: id }));
    try {
      await followEvents(`/v1/edge/fleet/runs/${id}/events`, stop.signal, (event) => {
        over = takeRunEvent(cells, event) || over;
        show();
        return over;
      }, header());
      const told = await (await answer(`/v1/edge/fleet/runs/${id}`, { headers: header() })).json();
      for (const one of told.per_node) {
        const cell = cells.get(one.node_id) ?? { id: one.node_id, outcome: "", output: "", message: "" };
        cells.set(one.node_id, { ...cell, outcome: one.outcome, message: one.message || `exit code ${one.exit_code}`, output: cell.output || one.stdout_tail + one.stderr_tail });
      }
    } catch (error) {
      if (!app.isRefused(error)) put(refusal, words(error));
    }
    over = true;
    show();
  };

  const stopRun = () => propose(app, {
    title: "Cancel the run", says: ["Targets that were already sent it are asked to stop; the others never get it."], label: "Cancel the run", command: `fleetplane edge cancel ${run} --tenant ${quoted(tenant())} --server ${location.origin}`,
    run: async () => { await send(`/v1/edge/fleet/${run}/cancel`, "POST", {}, header()); return "Asked."; },
  });

  const show = () => {
    const names = new Map(nodes().map((one) => [one.name, nameOf(one)]));
    const all = [...cells.values()];
    cancel.hidden = over || !run;
    const counted = new Map();
    for (const cell of all) counted.set(cell.outcome, (counted.get(cell.outcome) ?? 0) + 1);
    put(totals, run ? `${over ? "Over" : "Running"}: ${all.length} ${all.length === 1 ? "target" : "targets"}${[...counted].map(([key, count]) => `, ${count} ${key}`).join("")}.` : "");
    fill(grid, all, (cell) => cell.id, (cell) => h("li", null, button("", () => { opened = cell.id; show(); })), (row, cell) => {
      const link = row.firstElementChild;
      const name = names.get(cell.id) ?? cell.id;
      put(link, `${LETTERS[cell.outcome] ?? "?"} ${name}`);
      mark(link, "data-outcome", cell.outcome);
      mark(link, "data-tone", TONES[cell.outcome] ?? null);
      mark(link, "aria-label", `${name}, ${cell.outcome}: show its output`);
      mark(link, "aria-pressed", String(cell.id === opened));
    });
    const shown = cells.get(opened);
    output.hidden = !shown;
    if (shown) put(output, `${names.get(shown.id) ?? shown.id}: ${shown.message || shown.outcome}\n${shown.output}`);
  };

  const enrol = () => {
    const name = field("Name of the daemon", "daemon-name", { placeholder: "build-7" });
    propose(app, {
      title: "Enrol a daemon", says: [`A token for one new daemon of tenant ${tenant()} is made. It is good once, for a few minutes.`], fields: [name.node], label: "Make the token",
      command: () => `fleetplane edge token --name ${quoted(name.input.value.trim() || "NAME")} --tenant ${quoted(tenant())} --server ${location.origin}`,
      run: async () => {
        const made = await send("/v1/edge/enrollment-tokens", "POST", { name: name.input.value.trim() }, header());
        const line = `echo ${made.token} | fleetplane agent edge enroll -`;
        openDialog(h("h2", { id: "dialog-title" }, "Enrol a daemon"), h("p", null, "On its machine:"), h("pre", { class: "line", tabindex: "0", "aria-label": "The line to paste" }, line), button("Close", closeDialog));
        return "Made.";
      },
    });
  };

  /** @param {number} _nowMs */
  const update = (_nowMs) => {
    const all = nodes().filter((one) => one.scope.split("/")[2] === tenant());
    const bad = all.filter((one) => tone(STATE, one.value?.status.state) === "bad");
    put(say, !app.world.synced ? "Loading." : !all.length ? "There are no daemons. “Enrol a daemon” gives the line to paste on its machine."
      : bad.length ? `${bad.length} of ${all.length} daemons ${bad.length === 1 ? "is" : "are"} not connected: ${nameOf(bad[0])}, ${bad[0].value?.status.state}.` : `${all.length} ${all.length === 1 ? "daemon" : "daemons"}; all are connected or at rest.`);
    why.show(bad[0]);
    const names = tenants();
    if (chooser.childElementCount !== names.length)
      chooser.replaceChildren(...names.map((one) => h("a", { href: pageHash("edge", { tenant: one }), "aria-current": one === tenant() ? "page" : null }, one)));
    list.show(all.slice(0, 500));
    const named = [...itemsOf(app.world, "edge-groups").values()].filter((one) => one.scope.split("/")[2] === tenant()).sort((one, other) => (one.name < other.name ? -1 : 1));
    groups.show(named);
    noGroups.hidden = named.length > 0;
    history.show([...itemsOf(app.world, "runs").values()].filter((one) => one.cells[1] === "edge" && one.scope.split("/")[2] === tenant())
      .sort((one, other) => (String(one.cells[5]) < String(other.cells[5]) ? 1 : -1)).slice(0, 20));
    if (query.run && !run && app.world.synced) openRun(query.run);
    if (run) show();
  };
  return { node, title: "Edge", update, close: () => reading?.abort(), key: () => false };
};
