// The frame of the console: who looks, what is open, and the one stream that keeps it up to date.

import { Problem, get, session } from "./api.mjs";
import { detailPage } from "./detail.mjs";
import { openFind, openHelp } from "./dialogs.mjs";
import { restoreDensity, isDense, toggleDensity } from "./density.mjs";
import { by, h, mark, put, refreshAges } from "./dom.mjs";
import { follow } from "./following.mjs";
import { pageKey } from "./keys.mjs";
import { listPage } from "./list.mjs";
import { itemsOf, nothing, placeOf, replaceComputed, since, titleOf, trouble } from "./model.mjs";
import { overviewPage } from "./overview.mjs";
import { offerProvider } from "./providers.mjs";
import { PAGES } from "./pages.mjs";
import { button, closeDialog, openDialog, pageHash } from "./parts.mjs";

const COMPUTED_MS = 3000; // What is not stored is asked for again at most as often, and only after a change.
const PAGE_ROWS = 500;
const COMPUTED_ROWS = 2000; // Of what is not stored, such as entries of the audit log, which may be millions.
const NAV_MS = 1000;

/**
 * @typedef {import("./model.mjs").Kind} Kind
 * @typedef {import("./model.mjs").World} World
 * @typedef {{node: HTMLElement, title: string, update: (nowMs: number) => void, close: () => void,
 *   key: (key: string) => boolean, changed?: () => void}} Page
 * @typedef {{world: World, kinds: Kind[], go: (hash: string) => void, replace: (hash: string) => void,
 *   isWatched: (kind: Kind) => boolean, isLoaded: (kind: Kind) => boolean, isRefused: (error: unknown) => boolean,
 *   otherPages: () => Promise<string[]>, reason: () => string}} App `reason`: why somebody may not do a thing
 */

/** @type {AbortController | null} */
let running = null;
/** @type {Page | null} */
let page = null;
let scheduled = false;
let navMs = 0;
/** @type {Map<string, number>} */
const asked = new Map();
/** @type {Set<string>} */
const loaded = new Set();
let held = "";
let liveMs = 0; // when what is shown was last known to be so
/** @type {{caller: string, form: Element[]} | null} what was being written when the session ended, for the same person */
let unfinished = null;

/** @type {App} */
const app = {
  world: nothing(),
  kinds: [],
  go: (hash) => { location.hash = hash; },
  replace: (hash) => history.replaceState(null, "", hash),
  isWatched: (kind) => kind.verbs.includes("watch") && !kind.grows,
  isLoaded: (kind) => (app.isWatched(kind) ? app.world.synced : loaded.has(kind.plural)),
  isRefused: (error) => {
    if (!(error instanceof Problem) || error.status !== 401) return false;
    signOut(error.line);
    return true;
  },
  reason: () => (held ? `None of your roles includes this: you are ${held}.` : "None of your roles includes this."),
  otherPages: async () => {
    try {
      return (await (await fetch("/")).json()).pages ?? [];
    } catch {
      return []; // the links are not worth a message
    }
  },
};

// Who looks.

/** @param {string} why */
const signOut = (why) => {
  const caller = by("caller").textContent;
  if (by("dialog").open && caller) unfinished = { caller, form: [...by("dialog").children] };
  by("dialog").replaceChildren();
  running?.abort();
  running = null;
  page?.close();
  page = null;
  app.world = nothing();
  app.kinds = [];
  asked.clear();
  loaded.clear();
  by("content").replaceChildren();
  by("kinds").replaceChildren();
  delete by("kinds").dataset.shown;
  if (by("dialog").open) by("dialog").close();
  frame(false);
  tell("", "");
  put(by("caller"), "");
  put(by("refusal"), why);
  by("name").focus();
};

/** @param {boolean} inside */
const frame = (inside) => {
  by("sign-in").hidden = inside;
  for (const id of ["body", "menu", "find", "density", "sign-out"]) by(id).hidden = !inside;
  if (!inside) by("banner").hidden = true;
};

/** @param {() => Promise<void>} [opening] how the session begins; else the one that the cookie is of goes on */
const signIn = async (opening = session.resume) => {
  running?.abort();
  const stop = new AbortController();
  running = stop;
  tell("connecting", "connecting");
  try {
    await opening();
    // Why somebody may not do a thing can be said without the second, too.
    const [discovery, who] = await Promise.all([get(""), get("/people/whoami").catch(() => null)]);
    if (stop.signal.aborted) return;
    app.world = nothing();
    app.kinds = discovery.resources.filter((/** @type {Kind} */ kind) => kind.may.includes("list"));
    put(by("caller"), discovery.caller);
    held = (who?.roles ?? []).map((/** @type {any} */ one) => `${one.role} at ${one.scope}`).join(", ");
  } catch (error) {
    if (stop.signal.aborted) return;
    const isNew = opening === session.resume && error instanceof Problem && error.status === 401;
    return signOut(isNew ? "" : error instanceof Problem ? error.line : "the server cannot be reached");
  }
  put(by("refusal"), "");
  frame(true);
  for (const kind of app.kinds) if (!app.isWatched(kind)) loadComputed(kind);
  route();
  if (unfinished?.caller === by("caller").textContent) {
    by("dialog").replaceChildren(...(unfinished?.form ?? []));
    by("dialog").showModal();
  }
  unfinished = null;
  follow(app.world, stop.signal, { changed, state: tell, refused: (problem) => signOut(problem.line) });
};

// What the stream says.

/**
 * @param {string} word
 * @param {string} [why]
 */
const tell = (word, why = "") => {
  const status = by("status");
  mark(status, "data-state", word);
  mark(document.body, "data-state", word || null);
  if (word === "live") liveMs = Date.now();
  put(status, word === "live" ? "live" : word === "cut" ? "not connected" : word);
  const banner = by("banner");
  banner.hidden = word !== "cut";
  if (word === "cut") put(banner, `Not connected: ${why}. What is shown is as of ${new Date(liveMs || Date.now()).toLocaleTimeString()} and may be old; this goes on by itself when the server answers.`);
  else if (word === "live" && !banner.hidden) put(banner, "");
};

const changed = () => {
  const domains = new Set(app.kinds.filter((kind) => app.world.dirty.has(kind.plural)).flatMap((kind) => kind.domains));
  const any = app.world.dirty.size > 0;
  app.world.dirty.clear();
  for (const kind of app.kinds)
    if (!app.isWatched(kind) && (kind.domains.some((one) => domains.has(one)) || (any && isOpen(kind)))) askLater(kind);
  later();
};

const later = () => {
  if (scheduled) return;
  scheduled = true;
  setTimeout(() => { scheduled = false; show(); }, 50);
};

const show = () => {
  if (!running) return;
  const nowMs = Date.now();
  page?.update(nowMs);
  refreshAges(by("content"), (at) => since(at, nowMs));
  if (nowMs - navMs >= NAV_MS) {
    navMs = nowMs;
    showKinds();
  }
};

// What only grows is not in the stream: it is asked for again when something of its domain changed.

/** @param {Kind} kind */
const isOpen = (kind) => {
  const { plural, name } = placeOf(location.hash);
  return plural === kind.plural || (plural === "fleet" && Boolean(PAGES.find((one) => one.name === name)?.kinds.includes(kind.plural)));
};

/** @param {Kind} kind */
const askLater = (kind) => {
  const before = asked.get(kind.plural) ?? 0;
  if (before > Date.now()) return; // already to come
  const wait = Math.max(0, before + COMPUTED_MS - Date.now());
  asked.set(kind.plural, Date.now() + wait);
  setTimeout(() => loadComputed(kind), wait);
};

/** @param {Kind} kind */
const loadComputed = async (kind) => {
  const stop = running;
  if (!stop) return;
  try {
    const rows = [];
    const most = isOpen(kind) ? COMPUTED_ROWS : PAGE_ROWS;
    let more = "";
    do {
      const found = await get(`/table/${kind.plural}`, { limit: String(PAGE_ROWS), continue: more });
      rows.push(...found.rows);
      more = found.continue ?? "";
    } while (more && rows.length < most);
    if (stop !== running) return;
    replaceComputed(app.world, kind.plural, rows, Date.now(), Boolean(more));
    loaded.add(kind.plural);
    page?.changed?.();
    later();
  } catch (error) {
    if (stop === running) app.isRefused(error); // anything else is tried again with the next change
  }
};

// Which page.

const route = () => {
  const opening = openingInAddress();
  if (opening) return running ? askBefore(opening) : signIn(opening);
  if (!running) return;
  const { plural, name, query } = placeOf(location.hash);
  const fleet = plural === "fleet" ? pagesOf().find((one) => one.name === name) : undefined;
  const kind = app.kinds.find((one) => one.plural === plural || one.name === plural || one.shortNames.includes(plural));
  page?.close();
  page = null;
  by("kinds").classList.remove("open");
  mark(by("menu"), "aria-expanded", "false");
  if (plural && !kind && !fleet) {
    by("content").replaceChildren(h("h1", null, "Not found"), h("p", null, `There is no ${plural === "fleet" ? `page “${name}”` : `kind “${plural}”`} that you may see. `, h("a", { href: "#/" }, "Overview")));
    return;
  }
  page = fleet ? fleet.make(app, query) : !kind ? overviewPage(app) : name ? detailPage(app, kind, name, query) : listPage(app, kind, query);
  by("content").replaceChildren(page.node);
  if (kind && !app.isWatched(kind) && loaded.has(kind.plural)) askLater(kind); // as of now
  document.title = `${page.title} · Fleetplane`;
  navMs = 0;
  show();
};

/** The pages that have something for this caller. */
const pagesOf = () => PAGES.filter((one) => !one.kinds.length || app.kinds.some((kind) => one.kinds.includes(kind.plural)));

const showKinds = () => {
  const { plural, name } = placeOf(location.hash);
  const nav = by("kinds");
  const pages = pagesOf();
  const wanted = `${pages.length} ${app.kinds.map((kind) => kind.plural)}`;
  if (nav.dataset.shown !== wanted) {
    nav.dataset.shown = wanted;
    const link = (/** @type {string} */ href, /** @type {string} */ text, /** @type {string | null} */ title) =>
      h("a", { href, title }, h("span", null, text), h("span", { class: "number" }), h("span", { class: "bad" }));
    nav.replaceChildren(link("#/", "Overview", null), ...pages.map((one) => link(pageHash(one.name), one.title, one.summary)),
      h("h2", null, "All kinds"), ...app.kinds.map((kind) => link(`#/${kind.plural}`, titleOf(kind.plural), kind.summary)));
  }
  const counted = new Map(app.kinds.map((kind) => {
    const items = itemsOf(app.world, kind.plural);
    let bad = 0;
    for (const item of items.values()) if (trouble(kind, item)) bad += 1;
    return [kind.plural, { plural: kind.plural, size: items.size, bad }];
  }));
  mark(nav.children[0], "aria-current", plural ? null : "page");
  pages.forEach((one, place) => {
    const link = nav.children[place + 1];
    mark(link, "aria-current", plural === "fleet" && name === one.name ? "page" : null);
    const bad = one.kinds.reduce((sum, kind) => sum + (counted.get(kind)?.bad ?? 0), 0);
    put(link.children[2], bad ? `${bad}!` : "");
    mark(link.children[2], "aria-label", bad ? `${bad} need attention` : null);
  });
  app.kinds.forEach((kind, place) => {
    const link = nav.children[pages.length + 2 + place];
    mark(link, "aria-current", kind.plural === plural ? "page" : null);
    const { size, bad } = counted.get(kind.plural) ?? { size: 0, bad: 0 };
    put(link.children[1], `${size}${app.world.more.has(kind.plural) ? "+" : ""}`);
    put(link.children[2], bad ? `${bad}!` : "");
    mark(link.children[2], "aria-label", bad ? `${bad} need attention` : null);
  });
};

/**
 * Somebody who is signed in is not made somebody else by a link that another wrote.
 * @param {() => Promise<void>} opening
 */
const askBefore = (opening) => {
  openDialog(h("h2", { id: "dialog-title" }, "Sign in anew?"), h("p", null, `The link that you followed signs in, perhaps as somebody else. You are ${by("caller").textContent} now.`),
    h("p", { class: "tools" }, button("Stay", closeDialog, { class: "stay" }), button("Sign in with the link", () => { closeDialog(); signIn(opening); }, { class: "anew" })));
  route();
};

/** A link signs in by itself; what it holds is taken out of the address at once. */
const openingInAddress = () => {
  const given = new URLSearchParams(location.hash.replace(/^#/, ""));
  const [code, token] = [given.get("link"), given.get("token")];
  if (!code && !token) return null;
  history.replaceState(null, "", location.pathname);
  return () => (code ? session.byLink(code) : session.byToken((token ?? "").trim()));
};

// Keys.

addEventListener("keydown", (event) => {
  if (!running || event.defaultPrevented) return;
  if ((event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "k") {
    event.preventDefault();
    openFind(app);
    return;
  }
  if (event.ctrlKey || event.metaKey || event.altKey || by("dialog").open) return;
  const target = /** @type {HTMLElement} */ (event.target);
  // A dialog that was just closed, or a form that was just hidden, may hold the focus for a moment.
  if (target.matches("input, textarea, select") && !target.closest("dialog:not([open]), [hidden]")) {
    if (event.key === "Escape") target.blur();
    return;
  }
  if (event.key === "Enter" && target.matches("a, button")) return;
  if (event.key === "?") openHelp();
  else if (!page?.key(event.key) && !pageKey(by("content"), event.key, () => app.go("#/"))) return;
  event.preventDefault();
});

/**
 * @param {string} form
 * @param {string[]} fields
 * @param {(...values: string[]) => Promise<void>} opening
 */
const signsIn = (form, fields, opening) =>
  by(form).addEventListener("submit", (/** @type {Event} */ event) => {
    event.preventDefault();
    const values = fields.map((id) => by(id).value);
    by(fields[fields.length - 1]).value = "";
    signIn(() => opening(...values));
  });
signsIn("by-password", ["name", "password"], (name, password) => session.byPassword(name.trim(), password));
signsIn("by-token", ["token"], (token) => session.byToken(token.trim()));
offerProvider(by("providers"), () => `/ui/${location.hash}`);
by("sign-out").addEventListener("click", async () => {
  // The form is there only when the server has answered: its answer takes the cookie away, which may be another's by then.
  by("dialog").close(); // what is being written is not kept for the next one
  const why = await session.end().then(() => "", () => "the server was not reached: the session may still be open");
  signOut(why);
});
const showDensity = () => {
  put(by("density"), isDense() ? "Roomy" : "Dense");
  mark(by("density"), "aria-label", isDense() ? "Roomy rows" : "Dense rows");
};
restoreDensity();
showDensity();
addEventListener("resize", () => { showDensity(); later(); });
by("density").addEventListener("click", toggleDensity);
by("find").addEventListener("click", () => openFind(app));
by("skip").addEventListener("click", (/** @type {Event} */ event) => { event.preventDefault(); by("content").focus(); });
by("menu").addEventListener("click", () => {
  const isOpen = by("kinds").classList.toggle("open");
  mark(by("menu"), "aria-expanded", String(isOpen));
});
addEventListener("hashchange", route);
setInterval(later, 1000); // ages grow

/** A link that was opened: who has a session already is asked first. */
const begin = async () => {
  const opening = openingInAddress();
  const isIn = opening !== null && (await session.resume().then(() => true, () => false));
  if (opening && !isIn) return signIn(opening);
  await signIn();
  if (opening && running) askBefore(opening);
};

begin();
