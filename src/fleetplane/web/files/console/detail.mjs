// One object: what is known of it, what it has to do with others, its log and figures, what happened to it, why it is as it is, and all of it as text.

import { actionButtons } from "./actions.mjs";
import { Problem, get, objectPath } from "./api.mjs";
import { ago, copyButton, h, mark, put } from "./dom.mjs";
import { specEditor } from "./editor.mjs";
import { audited, momentList, ownMoments } from "./history.mjs";
import { hashOf, itemsOf, leaves, quoted, related, since, staleSince, titleOf, trouble } from "./model.mjs";
import { writingButtons } from "./object_form.mjs";
import { measuredOf, objectLog } from "./observed.mjs";
import { words } from "./parts.mjs";
import { yaml } from "./yaml.mjs";

/**
 * @typedef {import("./main.mjs").App} App
 * @typedef {import("./main.mjs").Page} Page
 * @typedef {import("./model.mjs").Kind} Kind
 * @typedef {import("./model.mjs").Value} Value
 */

const AUDIT_MS = 5000; // The audit log is read again at most as often, and only after a change.

/**
 * @param {App} app
 * @param {Kind} kind
 * @param {string} name
 * @param {Record<string, string>} query
 * @returns {Page}
 */
export const detailPage = (app, kind, name, query) => {
  const scope = query.scope ?? "/";
  const has = (/** @type {string} */ verb) => kind.verbs.includes(verb);
  const measured = measuredOf(kind);
  const tabs = ["overview", "related", ...(has("logs") ? ["logs"] : []), ...(measured ? ["metrics"] : []), "history",
    ...(has("explain") ? ["explain"] : []), ...(has("put") ? ["edit"] : []), "yaml"];
  const tab = tabs.includes(query.tab) ? query.tab : "overview";
  const say = h("p", { class: "sentence" });
  const why = whyPart(app);
  const body = h("div", { class: "tab" });
  const node = h("section", { class: "detail" },
    h("p", { class: "crumbs" }, h("a", { href: hashOf(kind.plural) }, titleOf(kind.plural)), ` in ${scope}`),
    h("h1", null, name), say, why.node,
    h("nav", { class: "tabs", "aria-label": "Parts" }, tabs.map((one) =>
      h("a", { href: hashOf(kind.plural, name, { ...query, tab: one === "overview" ? "" : one }), "aria-current": one === tab ? "page" : null },
        one === "yaml" ? "YAML" : one[0].toUpperCase() + one.slice(1)))),
    h("p", { class: "tools" }, actionButtons(app, kind, name, scope), writingButtons(app, kind, () => value), copyButton("Copy as command", () => command(kind, name, scope))),
    body);
  /** @type {Value | null} */
  let value = null;
  let drawn = "";
  let asked = false;
  let gone = false;
  /** @type {{update: (nowMs: number) => void, stop: () => void} | null} what the open tab shows, where it goes on by itself */
  let live = null;

  const item = () => [...itemsOf(app.world, kind.plural).values()].find(
    (one) => (one.name === name || one.uid === name) && (!query.scope || one.scope === scope));

  const load = async () => {
    asked = true;
    try {
      value = await get(objectPath(kind.plural, name), { scope: query.scope });
      gone = false;
    } catch (error) {
      if (app.isRefused(error)) return;
      gone = true;
      put(say, error instanceof Problem ? error.line : "The server cannot be reached; this is tried again by itself.");
    }
    update(Date.now());
  };

  /** @param {number} nowMs */
  const update = (nowMs) => {
    const found = item();
    if (found?.value) [value, gone] = [found.value, false];
    else if (!asked && app.isLoaded(kind)) load();
    else if (!found && value && app.isWatched(kind) && app.isLoaded(kind)) gone = true;
    if (!value) {
      if (!gone) put(say, "Loading.");
      return;
    }
    const wrong = found ? trouble(kind, found) : "";
    const old = staleSince(value);
    put(say, gone ? `${name} is gone; this is how it was.` : `${wrong || "As it should be, as far as is known"}${old ? `; nothing was heard for ${since(old, nowMs)}, what is shown is as of then` : ""}.`);
    why.show(!gone && wrong && tab !== "explain" ? { plural: kind.plural, name, scope } : null);
    body.classList.toggle("stale", Boolean(old) || gone);
    if (live) return live.update(nowMs);
    const version = JSON.stringify([value, gone, tab === "related" ? relations().length : 0]);
    if (version === drawn) return;
    drawn = version;
    if (tab === "overview") body.replaceChildren(...overview(value));
    else if (tab === "related") body.replaceChildren(relatedList());
    else if (tab === "yaml") body.replaceChildren(h("pre", { tabindex: "0", "aria-label": "YAML" }, yaml(value)));
    else if (tab === "explain") {
      if (!body.childElementCount) explainInto(body, kind, name, scope, app);
    } else live = open(value, nowMs);
  };

  /**
   * The tabs that go on by themselves once they are open.
   * @param {Value} first
   * @param {number} nowMs
   */
  const open = (first, nowMs) => {
    if (tab === "logs" && !kind.may.includes("logs")) {
      body.replaceChildren(h("p", { class: "why-not error" }, app.reason()));
      return { update: () => {}, stop: () => {} };
    }
    if (tab === "logs") {
      const log = objectLog(app, kind.plural, () => ({ name, scope: first.metadata.scope }), query);
      body.replaceChildren(log.node);
      log.start();
      return { update: () => {}, stop: log.stop };
    }
    if (tab === "metrics" && measured) {
      const charts = measured(app, () => value);
      body.replaceChildren(h("p", null, "In the last hour:"), charts.node);
      charts.update(nowMs);
      return { update: charts.update, stop: () => {} };
    }
    if (tab === "edit") {
      const editor = specEditor(app, kind, first);
      body.replaceChildren(editor.node);
      return { update: () => { if (value) editor.follow(value); }, stop: editor.stop };
    }
    return historyInto(app, body, kind, () => value ?? first);
  };

  const relations = () => (value ? related(app.world, app.kinds, kind, value) : []);

  const relatedList = () => {
    const found = relations();
    if (!found.length) return h("p", null, "Nothing that names it, and nothing that it names.");
    return h("ul", { class: "related" }, found.map((one) =>
      h("li", null, `${titleOf(one.plural)}: `, h("a", { href: hashOf(one.plural, one.name, { scope: one.scope === "/" ? "" : one.scope }) }, one.name))));
  };

  return {
    node,
    title: name,
    update,
    close: () => live?.stop(),
    changed: () => { if (!app.isWatched(kind)) load(); },
    key: (key) => {
      if (key !== "Escape") return false;
      app.go(hashOf(kind.plural));
      return true;
    },
  };
};

/**
 * @param {Value} value
 */
const overview = (value) => {
  const { metadata, conditions, spec, status } = value;
  const labels = Object.entries(metadata.labels);
  const parts = [section("Object", [
    ["scope", metadata.scope], ["age", ago(metadata.createdAt)], ["created", metadata.createdAt],
    ["revision", String(metadata.revision)], ["generation", String(metadata.generation)],
    ...(labels.length ? [["labels", labels.map(([key, one]) => `${key}=${one}`).join(", ")]] : []),
  ])];
  if (conditions.length)
    parts.unshift(h("h2", null, "Conditions"), h("ul", { class: "conditions" }, conditions.map((one) =>
      h("li", { "data-tone": one.status === "False" ? "bad" : one.status === "True" ? "good" : "waiting" },
        h("strong", null, `${one.type} ${one.status}`), one.reason ? ` ${one.reason}` : "", one.message ? `: ${one.message}` : "",
        h("small", null, ...(one.changedAt ? [" for ", ago(one.changedAt)] : []), one.observedBy ? `, says ${one.observedBy}` : "")))));
  if (status) parts.push(section("Status", leaves(status)));
  parts.push(section("Specification", leaves(spec)));
  return parts;
};

/**
 * @param {string} title
 * @param {(string | Node)[][]} pairs
 */
const section = (title, pairs) =>
  h("section", null, h("h2", null, title),
    pairs.length ? h("dl", null, pairs.flatMap(([key, text]) => [h("dt", null, key), h("dd", null, text)])) : h("p", null, "Nothing."));

/**
 * What happened to an object: what it says itself at once, and what the audit log has as soon as it was read. It is read again when the
 * object has changed.
 * @param {App} app
 * @param {Element} node
 * @param {Kind} kind
 * @param {() => Value} value
 */
const historyInto = (app, node, kind, value) => {
  const list = h("div");
  const told = h("p", { class: "empty", role: "status" });
  node.replaceChildren(told, list);
  /** @type {[string, string][]} */
  let moments = [];
  let [readAt, readMs, drawn] = [-1, 0, ""];
  const read = async () => {
    [readAt, readMs] = [value().metadata.revision, Date.now()];
    if (!app.kinds.some((one) => one.plural === "audit-entries")) return put(told, `The audit log is not shown. ${app.reason()}`);
    put(told, "Reading the audit log.");
    try {
      const found = await audited(kind, value());
      moments = found.moments;
      put(told, `${moments.length} of the newest ${found.looked} entries of the audit log are about it${found.more ? "; there are older ones" : ""}.`);
    } catch (error) {
      if (!app.isRefused(error)) put(told, words(error));
    }
    update(Date.now());
  };
  /** @param {number} nowMs */
  const update = (nowMs) => {
    if (value().metadata.revision !== readAt && nowMs - readMs >= AUDIT_MS) read();
    const all = [...ownMoments(value()), ...moments];
    const mark = JSON.stringify([all, Math.floor(nowMs / 10_000)]);
    if (mark === drawn) return;
    drawn = mark;
    list.replaceChildren(momentList(all, nowMs));
  };
  update(Date.now());
  return { update, stop: () => {} };
};

/**
 * A button that asks why something is as it is, and the answer, beside a sentence; `show` is told of whom, or of nobody.
 * @param {App} app
 */
export const whyPart = (app) => {
  const answer = h("div", { class: "answer" });
  /** @type {{plural: string, name: string, scope: string} | null} */
  let about = null;
  const ask = h("button", { type: "button", class: "why", onclick: () => {
    const kind = app.kinds.find((one) => one.plural === about?.plural);
    if (kind && about) explainInto(answer, kind, about.name, about.scope, app);
  } }, "why?");
  const node = h("div", { class: "why-part", hidden: true }, ask, answer);
  /** @param {{plural: string, name: string, scope: string} | null | undefined} item */
  const show = (item) => {
    const kind = app.kinds.find((one) => one.plural === item?.plural);
    const next = kind?.verbs.includes("explain") ? item ?? null : null;
    if (next?.name !== about?.name || next?.scope !== about?.scope) answer.replaceChildren();
    about = next;
    node.hidden = !next;
    if (next) mark(ask, "aria-label", `Why is ${next.name} as it is?`);
  };
  return { node, show };
};

/**
 * Ask why, and answer in place.
 * @param {Element} node
 * @param {Kind} kind
 * @param {string} name
 * @param {string} scope
 * @param {App} [app] to say why somebody may not ask
 */
export const explainInto = async (node, kind, name, scope, app) => {
  if (app && !kind.may.includes("explain")) return node.replaceChildren(h("p", { class: "why-not error" }, app.reason()));
  node.replaceChildren(h("p", null, "Asking the server."));
  try {
    const told = await get(`${objectPath(kind.plural, name)}/explain`, { scope: scope === "/" ? "" : scope });
    const lines = reasons(told);
    node.replaceChildren(h("ul", { class: "reasons" }, lines.map((line) => h("li", null, line))));
  } catch (error) {
    node.replaceChildren(h("p", { class: "error" }, error instanceof Problem ? error.line : String(error)));
  }
};

/**
 * @param {any} told
 * @returns {string[]}
 */
const reasons = (told) => {
  const lines = told.frozen ? [`Frozen by ${told.frozen.frozenBy}: ${told.frozen.reason}`] : [];
  for (const finding of told.findings) {
    if (finding.lastError) lines.push(`${finding.failures} passes failed in a row: ${finding.lastError}`);
    for (const reason of finding.reasons) lines.push(`${reason.subject ? `${reason.subject}: ` : ""}${reason.message} [${reason.code}]`);
  }
  return lines.length ? lines : ["Nothing is known to be in the way."];
};

/**
 * @param {Kind} kind
 * @param {string} name
 * @param {string} scope
 */
const command = (kind, name, scope) => {
  return `fleetplane get ${quoted(`${kind.name}/${name}`)} ${scope === "/" ? "-A" : `--scope ${quoted(scope)}`} -o yaml --server ${location.origin}`;
};
