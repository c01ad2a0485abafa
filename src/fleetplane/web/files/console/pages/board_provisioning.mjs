// Provisioning of a board over SSH: what would be done, each step as it goes, its output, cancel and resume.

import { answer, send } from "../api.mjs";
import { h, put } from "../dom.mjs";
import { itemsOf, quoted, since, tone } from "../model.mjs";
import { linesOf } from "../schema_form.mjs";
import { button, choice, field, propose, tableOf, words } from "../parts.mjs";
import { followEvents } from "../streams.mjs";

/**
 * @typedef {import("../main.mjs").App} App
 * @typedef {import("../model.mjs").Item} Item
 */

const STATE = { title: "STATE", type: "text", wide: false };
const LINES = 500;
const REREAD_MS = 1000; // Steps are read again at most as often while output comes.
const SHOWN = "10";
const ORDERS = { check: "Check it", provision: "Install k3s", deprovision: "Remove k3s" };

/**
 * How far an operation is, in words.
 * @param {any} operation
 */
export const operationWords = (operation) => {
  const over = operation.steps.filter((/** @type {any} */ one) => one.finished_at).length;
  return `${operation.action}: ${operation.state}, ${over} of ${operation.steps.length} steps are over${operation.reason ? `; ${operation.reason}` : ""}.`;
};

/**
 * `NAME=VALUE` lines as options of k3s.
 * @param {string[]} lines
 * @returns {Record<string, string>}
 */
export const optionsOf = (lines) => Object.fromEntries(lines.map((line) => {
  const place = line.indexOf("=");
  if (place < 1) throw Object.assign(new Error(`“${line}” is no NAME=VALUE`), { field: "k3s_config" });
  return [line.slice(0, place), line.slice(place + 1)];
}));

/**
 * @param {App} app
 * @param {() => Item | undefined} chosen
 */
export const boardProvisioning = (app, chosen) => {
  const say = h("p", { class: "provisioning-words", role: "status" });
  const tools = h("p", { class: "tools" }, Object.entries(ORDERS).map(([order, label]) => button(label, () => ask(order, label), { "data-order": order })));
  const steps = tableOf("Steps", (/** @type {any} */ one) => `${one.node_id}/${one.name}`, [
    { title: "Step", text: (one) => one.name },
    { title: "State", text: (one) => one.state, tone: (one) => tone(STATE, one.state) },
    { title: "Took", text: (one) => (one.started_at ? since(one.started_at, one.finished_at ? Date.parse(one.finished_at) : Date.now()) : "") },
    { title: "Says", text: (one) => one.message },
  ], () => `fleetplane boards operation show ${opened} --server ${location.origin}`);
  const output = h("ol", { class: "log", tabindex: "0", "aria-label": "Output of provisioning", hidden: true });
  const operations = tableOf("Operations", (/** @type {any} */ one) => one.id, [
    { title: "Operation", text: (one) => one.action },
    { title: "State", text: (one) => one.state, tone: (one) => tone(STATE, one.state) },
    { title: "By", text: (one) => one.requested_by },
    { title: "Age", at: (one) => one.created_at },
    { title: "", node: (one) => button("Steps", () => open(one.id), { "aria-label": `Steps of ${one.action}, ${one.created_at}` }) },
  ], () => `fleetplane boards operation list --board ${quoted(chosen()?.name ?? "")} --server ${location.origin}`);
  const node = h("div", null, tools, say, steps.node, output, operations.node);
  /** @type {AbortController | null} */
  let reading = null;
  /** @type {any[]} */
  let known = [];
  let knownOf = "";
  /** @type {any[]} the steps of the open one */
  let shown = [];
  let opened = "";

  const load = async () => {
    const number = chosen()?.value?.status.number;
    try {
      known = (await (await answer(`/api/v1/operations?node_id=${number}&limit=${SHOWN}`)).json()).data;
      operations.show(known);
      const going = known.find((one) => !one.finished);
      if (!known.length) put(say, "It was never provisioned. Installing needs a login for the board that the server keeps, see “credential”.");
      else if (!opened || (going && going.id !== opened)) open((going ?? known[0]).id);
    } catch (error) {
      if (!app.isRefused(error)) put(say, words(error));
    }
  };

  /** @param {any} operation */
  const show = (operation) => {
    put(say, operationWords(operation));
    shown = operation.steps;
    steps.show(shown);
    known = known.map((one) => (one.id === operation.id ? operation : one));
    operations.show(known);
    tools.querySelector(".cancel")?.remove();
    tools.querySelector(".resume")?.remove();
    if (!operation.finished) tools.append(button("Cancel", () => order(operation, "cancel", "Cancel", "The step that runs is ended; what was done stays."), { class: "cancel" }));
    else if (operation.state === "failed" && operation.request_id) tools.append(button("Resume", () => order(operation, "resume", "Resume", "It goes on at the step that failed."), { class: "resume" }));
  };

  /** @param {string} id */
  const open = async (id) => {
    opened = id;
    reading?.abort();
    const stop = (reading = new AbortController());
    output.replaceChildren();
    output.hidden = true;
    let readMs = 0;
    /** @type {number | undefined} */
    let again;
    let [asked, seen] = [0, 0];
    const read = async () => {
      const mine = (asked += 1);
      readMs = Date.now();
      const { data } = await (await answer(`/api/v1/operations/${id}`)).json();
      if (stop.signal.aborted || mine < seen) return; // what was asked before may come after what was asked later, or after the end
      seen = mine;
      show(data);
    };
    try {
      await read();
      await followEvents(`/api/v1/operations/${id}/log`, stop.signal, ({ kind, data }) => {
        if (kind === "end") {
          seen = Infinity;
          show(data);
          return true;
        }
        output.hidden = false;
        output.append(h("li", null, data.text));
        while (output.childElementCount > LINES) output.firstElementChild?.remove();
        output.scrollTop = output.scrollHeight;
        // After the last line, too: a step that begins is written down before its line comes, and may then be silent for long.
        again ??= setTimeout(() => {
          again = undefined;
          if (!stop.signal.aborted) read().catch(() => {}); // the end tells all of it once more
        }, Math.max(0, readMs + REREAD_MS - Date.now()));
        return false;
      });
      if (!stop.signal.aborted) load();
    } catch (error) {
      if (!stop.signal.aborted && !app.isRefused(error)) put(say, words(error));
    }
  };

  /**
   * @param {any} operation
   * @param {string} verb
   * @param {string} label
   * @param {string} says
   */
  const order = (operation, verb, label, says) => propose(app, {
    title: `${label} ${operation.action}`, says: [says], label, command: `fleetplane boards operation ${verb} ${operation.id} --server ${location.origin}`,
    run: async () => {
      const told = await send(`/api/v1/operations/${operation.id}/${verb}`, "POST");
      open(operation.id);
      return told.message || "Done.";
    },
  });

  /**
   * Ask what would be done, then do it.
   * @param {string} kind
   * @param {string} label
   */
  const ask = (kind, label) => {
    const board = chosen();
    if (!board) return;
    const number = board.value?.status.number;
    const address = field("Address, as you confirm it", "address", { value: board.value?.spec.address ?? "", required: true });
    const credential = field("Credential, by which the server logs in", "credential", { placeholder: "name of a stored login" });
    const role = choice("Role", "role", [["master", "master"], ["worker", "worker"]], board.value?.spec.role || "worker");
    const clusters = [...itemsOf(app.world, "clusters").values()];
    const cluster = choice("Cluster", "cluster_id", [["", "of its own"], ...clusters.map((one) => /** @type {[string, string]} */ ([String(one.value?.status.number ?? one.name), one.name]))], "");
    const options = /** @type {HTMLTextAreaElement} */ (h("textarea", { name: "k3s_config", rows: "3", spellcheck: "false", placeholder: "version=v1.31.4+k3s1" }));
    const plan = h("div", { class: "steps-planned", role: "status" });
    const settings = () => linesOf(options.value).map((line) => line.trim());
    const body = () => ({
      addresses: { [number]: address.input.value.trim() }, k3s_config: optionsOf(settings()), ...(credential.input.value.trim() ? { credential: credential.input.value.trim() } : {}),
      ...(kind === "provision" ? { role: role.input.value, ...(cluster.input.value ? { cluster_id: Number(cluster.input.value) } : {}) } : {}),
    });
    const command = () => ["fleetplane boards provision", quoted(board.name), ...(kind === "check" ? ["--check"] : kind === "deprovision" ? ["--undo"] : ["--role", role.input.value]),
      ...(kind === "provision" && cluster.input.value ? ["--cluster", quoted(cluster.input.selectedOptions[0].text)] : []),
      ...settings().flatMap((one) => ["--k3s", quoted(one)]), ...(credential.input.value.trim() ? ["--credential", quoted(credential.input.value.trim())] : []),
      "--address", quoted(address.input.value.trim()), "--server", location.origin].join(" ");
    const url = `/api/v1/nodes/${number}/${kind}`;
    const preview = async () => {
      put(plan, "Asking the server.");
      try {
        const told = await send(url, "POST", { ...body(), dry_run: true });
        plan.replaceChildren(h("p", null, told.message || "It would do this:"), h("ol", { class: "plan" }, told.steps.map((/** @type {any} */ one) => h("li", null, one.name, one.message ? h("pre", { class: "output", tabindex: "0", "aria-label": `Commands of ${one.name}` }, one.message) : null))));
      } catch (error) {
        if (!app.isRefused(error)) plan.replaceChildren(h("p", { class: "error" }, words(error)));
      }
    };
    propose(app, {
      title: `${label}: ${board.name}`,
      says: [kind === "check" ? "The server logs in over SSH and looks whether the board can be provisioned; nothing is changed." : `The server logs in over SSH and changes the board: ${label.toLowerCase()}. Programs on it may be interrupted.`],
      fields: [address.node, credential.node, ...(kind === "provision" ? [role.node, cluster.node] : []), h("label", null, "Options of k3s, NAME=VALUE each line", options), h("p", { class: "tools" }, button("Show the steps", preview, { class: "show-steps" })), plan],
      label, name: kind === "check" ? undefined : board.name, command,
      run: async () => {
        const told = await send(url, "POST", body());
        if (told.operation_id) open(told.operation_id);
        return "Begun: its steps are shown on the page.";
      },
    });
  };

  const update = () => {
    const board = chosen();
    steps.show(shown); // what runs takes longer each second
    // The state of a board changes with its operations, so somebody else's are seen, too.
    const mark = `${board?.uid} ${board?.value?.metadata.revision}`;
    if (!board || mark === knownOf) return;
    if (!knownOf.startsWith(board.uid)) [opened, shown] = ["", []];
    knownOf = mark;
    load();
  };
  return { node, update, stop: () => reading?.abort() };
};
