// The list of one kind: a filter in the address, and rows that change in place. Only rows in view are elements.

import { completing } from "./combobox.mjs";
import { factsOf, suggestions } from "./completion.mjs";
import { isDense } from "./density.mjs";
import { copyButton, h, mark, put } from "./dom.mjs";
import { firstCommand } from "./first.mjs";
import { openObjectForm } from "./object_form.mjs";
import { copyParts } from "./parts.mjs";
import { saveFilter, savedFilters } from "./saved.mjs";
import { MARK_MS, cellText, hashOf, hashOfItem, itemsOf, quoted, selected, sentence, since, staleSince, titleOf, tone } from "./model.mjs";

const AROUND = 8; // Rows above and below what is seen.
const SELECT_MS = 200; // Which rows there are is found out at most as often.
const WIDTH_ROWS = 200; // Rows that decide on the width of columns.
const COLUMN_CHARACTERS = 40;
const STATES = new Set(["STATE", "HEALTH"]);
const PHONE = matchMedia("(max-width: 640px)");

/** Of a row, as the styles have it. */
const rowHeight = () => (PHONE.matches ? 56 : isDense() ? 24 : 32);

/**
 * @typedef {import("./main.mjs").App} App
 * @typedef {import("./main.mjs").Page} Page
 * @typedef {import("./model.mjs").Kind} Kind
 * @typedef {import("./model.mjs").Item} Item
 */

/**
 * Where rows come from, and where the list is, if that is not the list of one kind.
 * @typedef {{items: () => Map<string, Item>, isLoaded: () => boolean, address: (filter: Record<string, string>) => string,
 *   command: (filter: Record<string, string>) => string, choices: string[]}} Source `choices`: columns whose values are filters
 */

/**
 * @param {App} app
 * @param {Kind} kind
 * @param {Record<string, string>} query
 * @param {Source} [source]
 * @returns {Page}
 */
export const listPage = (app, kind, query, source = ofKind(app, kind)) => {
  const filter = { ...query };
  /** @type {Item[]} */
  let shown = [];
  /** @type {Map<string, HTMLElement>} */
  const rows = new Map();
  /** @type {Map<string, Item>} */
  let current = new Map();
  let chosen = -1;
  let selectedMs = 0;
  let withScope = false;
  let columns = columnsOf(kind, Boolean(filter.wide));

  const address = () => source.address(filter);
  const say = h("p", { class: "sentence" });
  const error = h("p", { class: "error", role: "alert" });
  const search = input("search", "q", "Filter", "words of any column");
  const labels = input("search", "labels", "Labels", "role=web,env!=test");
  completing(/** @type {HTMLInputElement} */ (labels.querySelector("input")), (text) =>
    suggestions(text, factsOf([...source.items().values()].map((one) => one.value?.metadata.labels ?? {}))));
  const saved = h("ul", { class: "saved", "aria-label": "Saved filters" });
  const choices = source.choices.map((title) => {
    const key = title.toLowerCase();
    const select = /** @type {HTMLSelectElement} */ (h("select", { name: key }));
    select.addEventListener("change", () => changed(key, select.value));
    return { title, key, select, node: h("label", null, title[0] + title.slice(1).toLowerCase(), select) };
  });
  const attention = check("trouble", "needs attention");
  const wide = check("wide", "all columns");
  const head = h("div", { role: "row", class: "row head" });
  const space = h("div", { role: "rowgroup", class: "space" });
  const table = h("div", { role: "table", class: "table", tabindex: "0", "aria-label": titleOf(kind.plural) },
    h("div", { role: "rowgroup", class: "heads" }, head), space);
  const empty = h("p", { class: "empty", hidden: true });
  const mayMake = kind.may.includes("put");
  const make = !kind.verbs.includes("put") || !kind.schema ? null : h("button", { type: "button", class: "new", "aria-disabled": mayMake ? null : "true", title: mayMake ? null : app.reason(),
    onclick: () => { if (mayMake) openObjectForm(app, kind, null, { scope: filter.scope }); } }, `New ${kind.name.replaceAll("-", " ")}`);
  const node = h("section", { class: "list" },
    h("h1", null, titleOf(kind.plural)), say,
    h("div", { class: "filters" }, search, app.isWatched(kind) ? labels : null, attention, wide,
      choices.map(({ node: one }) => one),
      copyButton("Copy as command", () => source.command(filter)),
      h("button", { type: "button", onclick: () => saveFilter(address(), showSaved) }, "Save filter"), make),
    saved, error, table, empty);
  const showSaved = () => saved.replaceChildren(...savedFilters(showSaved));
  showSaved();

  /**
   * @param {string} type
   * @param {string} key
   * @param {string} label
   * @param {string} placeholder
   */
  function input(type, key, label, placeholder) {
    const field = /** @type {HTMLInputElement} */ (
      h("input", { type, name: key, placeholder, autocomplete: "off", spellcheck: "false" }));
    field.value = filter[key] ?? "";
    field.addEventListener("input", () => changed(key, field.value.trim()));
    return h("label", null, label, field);
  }

  /**
   * @param {string} key
   * @param {string} label
   */
  function check(key, label) {
    const field = /** @type {HTMLInputElement} */ (h("input", { type: "checkbox", name: key }));
    field.checked = Boolean(filter[key]);
    field.addEventListener("change", () => changed(key, field.checked ? "1" : ""));
    return h("label", { class: "check" }, field, label);
  }

  /**
   * @param {string} key
   * @param {string} value
   */
  const changed = (key, value) => {
    if (value) filter[key] = value;
    else delete filter[key];
    app.replace(address());
    columns = columnsOf(kind, Boolean(filter.wide));
    chosen = -1;
    select(true);
    for (const row of rows.values()) row.remove();
    rows.clear();
    update(Date.now());
  };

  /** @param {boolean} anew whether the order is made anew, too */
  const select = (anew) => {
    try {
      const items = source.items();
      current = items;
      for (const one of choices) offer(one, items);
      const found = selected(items.values(), kind, {
        q: filter.q, labels: filter.labels, scope: filter.scope, sort: filter.sort, trouble: Boolean(filter.trouble),
        where: Object.fromEntries(choices.filter(({ key }) => filter[key]).map(({ title, key }) => [title, filter[key]])),
      });
      put(error, "");
      // Rows keep their order while somebody reads, whatever their cells become.
      shown = anew || !filter.sort ? found : kept(shown, found);
    } catch (problem) {
      put(error, problem instanceof Error ? problem.message : String(problem));
    }
    selectedMs = Date.now();
    withScope = shown.some((item) => item.scope !== "/");
    heading();
  };

  /**
   * @param {{title: string, key: string, select: HTMLSelectElement}} one
   * @param {Map<string, Item>} items
   */
  const offer = ({ title, key, select }, items) => {
    const place = kind.columns.findIndex((column) => column.title === title);
    const values = new Set([...items.values()].map((item) => item.cells[place]).filter(Boolean));
    if (filter[key]) values.add(filter[key]);
    const wanted = ["", ...[...values].sort()];
    if (wanted.join("\n") !== [...select.options].map((option) => option.value).join("\n"))
      select.replaceChildren(...wanted.map((value) => h("option", { value }, value || "any")));
    if (select.value !== (filter[key] ?? "")) select.value = filter[key] ?? "";
  };

  const heading = () => {
    const widths = columns.map(({ column, place }) => {
      const lengths = shown.slice(0, WIDTH_ROWS).map((item) =>
        column.type === "age" ? 7 : String(item.cells[place] ?? "").length);
      return Math.min(COLUMN_CHARACTERS, Math.max(column.title.length + 2, ...lengths) + 2);
    });
    if (withScope) widths.push(Math.min(COLUMN_CHARACTERS, Math.max(7, ...shown.slice(0, WIDTH_ROWS).map((one) => one.scope.length)) + 2));
    table.style.setProperty("--columns", widths.map((width) => `minmax(${Math.min(width, 10)}ch, ${width}fr)`).join(" "));
    table.style.setProperty("--least", `${widths.reduce((sum, width) => sum + Math.min(width, 10), 0)}ch`);
    const titles = [...columns.map(({ column }) => column.title), ...(withScope ? ["SCOPE"] : [])];
    if (head.childElementCount !== titles.length || head.dataset.sort !== (filter.sort ?? "")) {
      head.dataset.sort = filter.sort ?? "";
      head.replaceChildren(...titles.map(columnHead));
    }
  };

  /** @param {string} title */
  const columnHead = (title) => {
    if (title === "SCOPE") return h("span", { role: "columnheader" }, title);
    const order = filter.sort === title ? "ascending" : filter.sort === `-${title}` ? "descending" : "none";
    const sign = order === "ascending" ? " ↑" : order === "descending" ? " ↓" : "";
    const next = order === "ascending" ? `-${title}` : order === "descending" ? "" : title;
    return h("span", { role: "columnheader", "aria-sort": order },
      h("button", { type: "button", onclick: () => changed("sort", next) }, title + sign));
  };

  /** @param {number} nowMs */
  const update = (nowMs) => {
    if (nowMs - selectedMs >= SELECT_MS) select(false);
    put(say, source.isLoaded() ? sentence(kind, shown) + (app.world.more.has(kind.plural) ? " There are more: the command line shows them all." : "") : "Loading.");
    const height = rowHeight();
    space.style.height = `${shown.length * height}px`;
    mark(table, "aria-rowcount", String(shown.length + 1));
    empty.hidden = shown.length > 0 || !source.isLoaded();
    table.hidden = !shown.length;
    if (!shown.length && !empty.hidden) showEmpty();
    const first = Math.max(0, Math.floor((table.scrollTop - height) / height) - AROUND);
    const last = Math.min(shown.length, Math.ceil((table.scrollTop + table.clientHeight) / height) + AROUND);
    const inView = new Set();
    for (let place = first; place < last; place += 1) {
      // The newest of what is known, which may be newer than the order.
      const item = newest(shown[place]);
      inView.add(item.uid);
      let row = rows.get(item.uid);
      if (!row) rows.set(item.uid, (row = makeRow()));
      write(row, item, place, nowMs);
      row.style.transform = `translateY(${place * height}px)`;
      if (!row.isConnected) space.append(row);
    }
    for (const [uid, row] of rows)
      if (!inView.has(uid)) {
        row.remove();
        rows.delete(uid);
      }
  };

  const showEmpty = () => {
    const isFiltered = Object.keys(filter).length > 0;
    const words = isFiltered ? "Nothing fits the filter." : `${kind.summary}. There is none yet, or none that you may see.`;
    if (empty.dataset.words === words) return;
    empty.dataset.words = words;
    const command = isFiltered ? "" : firstCommand(kind.plural);
    empty.replaceChildren(words, ...(command ? [" To get the first: ", ...copyParts(`${command}${command.startsWith("fleetplane agent") ? "" : ` --server ${location.origin}`}`)] : []));
  };

  /** @param {Item} item */
  const newest = (item) => (source.choices.length ? current : source.items()).get(item.uid) ?? item;

  const makeRow = () =>
    h("div", { role: "row", class: "row" },
      h("span", { role: "cell" }, h("a", { href: "#" })),
      h("span", { role: "presentation", class: "rest" },
        ...columns.slice(1).map(() => h("span", { role: "cell" })), h("span", { role: "cell", class: "scope" })));

  /**
   * @param {HTMLElement} row
   * @param {Item} item
   * @param {number} place
   * @param {number} nowMs
   */
  const write = (row, item, place, nowMs) => {
    mark(row, "aria-rowindex", String(place + 2));
    mark(row, "data-name", item.name);
    row.classList.toggle("changed", nowMs - item.changedMs < MARK_MS);
    row.classList.toggle("chosen", place === chosen);
    const at = staleSince(item.value);
    row.classList.toggle("stale", at !== "");
    const cells = row.querySelectorAll("[role=cell]");
    columns.forEach(({ column, place: of }, number) => {
      const cell = item.cells[of];
      const text = cellText(column, cell, nowMs);
      if (number) put(cells[number], at && STATES.has(column.title) && text ? `${text}, as of ${since(at, nowMs)} ago` : text);
      else {
        const link = /** @type {Element} */ (cells[0].firstElementChild);
        put(link, text || item.name);
        mark(link, "href", hashOfItem(item));
      }
      mark(cells[number], "data-tone", tone(column, cell) || null);
      mark(cells[number], "data-type", column.type);
      mark(cells[number], "title", column.type === "age" && cell ? String(cell) : text.length > 20 ? text : null);
    });
    const scope = /** @type {HTMLElement} */ (cells[cells.length - 1]);
    scope.hidden = !withScope;
    put(scope, item.scope);
  };

  /** @param {number} by */
  const move = (by) => {
    if (!shown.length) return;
    chosen = Math.max(0, Math.min(shown.length - 1, chosen + by));
    const height = rowHeight();
    const top = chosen * height;
    if (top < table.scrollTop) table.scrollTop = top;
    else if (top + 2 * height > table.scrollTop + table.clientHeight) table.scrollTop = top + 2 * height - table.clientHeight;
    update(Date.now());
    const link = rows.get(shown[chosen].uid)?.querySelector("a");
    if (link) link.focus({ preventScroll: true });
  };

  table.addEventListener("scroll", () => update(Date.now()), { passive: true });
  const resized = new ResizeObserver(() => update(Date.now()));
  resized.observe(table);
  select(true);
  return {
    node,
    title: titleOf(kind.plural),
    update,
    close: () => resized.disconnect(),
    key: (key) => {
      if (key === "j") move(1);
      else if (key === "k") move(-1);
      else if (key === "/") search.querySelector("input")?.focus();
      else if (key === "Enter" && chosen >= 0 && shown[chosen]) app.go(hashOfItem(shown[chosen]));
      else if (key === "Escape") app.go("#/");
      else return false;
      return true;
    },
  };
};

/**
 * @param {Kind} kind
 * @param {boolean} wide
 */
const columnsOf = (kind, wide) =>
  kind.columns.map((column, place) => ({ column, place })).filter(({ column }) => wide || !column.wide);

/**
 * What is still there in the order in which it was, then what is new.
 * @param {Item[]} before
 * @param {Item[]} after
 */
const kept = (before, after) => {
  const still = new Map(after.map((item) => [item.uid, item]));
  const known = before.flatMap((item) => still.get(item.uid) ?? []);
  for (const item of known) still.delete(item.uid);
  return [...known, ...still.values()];
};

/**
 * @param {App} app
 * @param {Kind} kind
 * @returns {Source}
 */
const ofKind = (app, kind) => ({
  items: () => itemsOf(app.world, kind.plural),
  isLoaded: () => app.isLoaded(kind),
  address: (filter) => hashOf(kind.plural, "", filter),
  command: (filter) => command(kind, filter),
  choices: [],
});

/**
 * The list on the command line.
 * @param {Kind} kind
 * @param {Record<string, string>} filter
 */
const command = (kind, filter) => {
  const labels = filter.labels ? ` -l ${quoted(filter.labels)}` : "";
  const scope = filter.scope ? ` --scope ${quoted(filter.scope)}` : " -A";
  return `fleetplane get ${kind.plural}${labels}${scope}${filter.wide ? " -o wide" : ""} --server ${location.origin}`;
};
