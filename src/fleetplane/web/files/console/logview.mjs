// The log of one thing, as it is written: filtered by the server, followed or paused, with as many lines as a person looks at.

import { copyButton, h, put } from "./dom.mjs";
import { button, choice, field, words } from "./parts.mjs";
import { followEvents } from "./streams.mjs";

const LINES = 1000; // Older ones go as newer ones come.
const TAIL = "200";
const BAD = new Set(["alert", "crit", "critical", "emerg", "emergency", "err", "error", "fatal"]);

/** @typedef {import("./main.mjs").App} App */

/**
 * How a line looks; the level stands in it as a word.
 * @param {string | undefined} level
 */
export const levelTone = (level) => (BAD.has(level ?? "") ? "bad" : level === "warn" || level === "warning" ? "waiting" : null);

/**
 * @param {App} app
 * @param {{label: string, sources: [string, string][], levels: string[], url: (given: URLSearchParams) => Promise<string> | string | null, given?: Record<string, string>}} what
 *   `url`: where the log is read, null while that is not known
 */
export const logView = (app, what) => {
  const list = h("ol", { class: "log", tabindex: "0", "aria-label": what.label });
  const source = choice("Source", "source", what.sources, what.given?.source ?? "");
  const level = choice("Level", "level", [["", "all"], ...what.levels.map((one) => /** @type {[string, string]} */ ([one, one]))], what.given?.level ?? "");
  const contains = field("Contains", "contains", { type: "search", value: what.given?.contains ?? "" });
  const wrap = field("wrap", "wrap", { type: "checkbox" });
  const follow = button("Follow", () => (reading ? stop() : start()), { class: "follow" });
  /** @type {AbortController | null} */
  let reading = null;
  wrap.input.addEventListener("change", () => list.classList.toggle("wrap", wrap.input.checked));
  // What is read is another log then: begun anew while it is followed, else with the next "Follow".
  for (const { input } of [source, level, contains]) input.addEventListener("change", () => { if (reading) restart(); });
  const text = () => [...list.children].map((one) => one.textContent).join("\n");
  const node = h("div", { class: "logs" }, h("p", { class: "filters" }, what.sources.length > 1 ? source.node : null, what.levels.length ? level.node : null, contains.node, wrap.node, follow, copyButton("Copy lines", text)), list);

  const stop = () => {
    reading?.abort();
    reading = null;
    put(follow, "Follow");
  };
  const restart = () => { stop(); start(); };

  /** @param {{at?: string, timestamp?: string, level?: string, unit?: string, source?: string, message?: string, dropped?: number}} one */
  const add = (one) => {
    const isAtEnd = list.scrollTop + list.clientHeight >= list.scrollHeight - 24;
    if (one.dropped) list.append(h("li", { "data-tone": "waiting" }, `${one.dropped} lines were left out.`));
    list.append(h("li", { "data-tone": levelTone(one.level) }, [one.at ?? one.timestamp, one.level, one.unit ?? one.source, one.message].filter(Boolean).join(" ")));
    while (list.childElementCount > LINES) list.firstElementChild?.remove();
    if (isAtEnd) list.scrollTop = list.scrollHeight; // whoever reads further up stays there
  };

  const start = async () => {
    const given = new URLSearchParams({ follow: "true", tail: TAIL });
    for (const { input } of [source, level, contains]) if (input.value.trim()) given.set(input.name, input.value.trim());
    const mine = (reading = new AbortController());
    put(follow, "Pause");
    list.replaceChildren();
    try {
      const url = await what.url(given);
      if (url && !mine.signal.aborted) await followEvents(url, mine.signal, ({ kind, data }) => {
        if (kind === "error") list.append(h("li", { class: "error" }, `${data.field ? `${data.field}: ` : ""}${data.message ?? JSON.stringify(data)}`));
        else if (kind !== "end") for (const one of data.entries ?? [data]) add(one);
        return kind === "end" || kind === "error";
      }, {}, () => list.replaceChildren());
      if (!mine.signal.aborted) list.append(h("li", null, "There is no more for now."));
    } catch (error) {
      if (!mine.signal.aborted && !app.isRefused(error)) list.append(h("li", { class: "error" }, words(error)));
    }
    if (reading === mine) stop();
  };

  return { node, start, stop, restart };
};
