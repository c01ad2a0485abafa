// Calls of the server's APIs. Who looks is in a cookie that no script can read; what changes something shows the
// session's CSRF token as well, which is kept in this page's memory and nowhere else.

const API = "/apis/v1";
const CONSOLE = `${API}/people/console`;
let csrf = "";

/** What the server refused, as its problem details say it, or as the older APIs of the fleets do. */
export class Problem extends Error {
  /**
   * @param {number} status
   * @param {any} said
   */
  constructor(status, said) {
    const older = said.error ?? {};
    super(said.detail || older.message || said.message || said.title || `the server answered ${status}`);
    this.status = status;
    this.reason = said.reason ?? older.code ?? "";
    this.field = said.field ?? "";
    this.hint = said.hint ?? older.hint ?? "";
    this.requestId = said.requestId ?? older.request_id ?? "";
  }

  /** In one line, with the field and what to do. */
  get line() {
    return `${this.field ? `${this.field}: ` : ""}${this.message}${this.hint ? `; ${this.hint}` : ""}`;
  }
}

/**
 * The address of something of the API.
 * @param {string} path
 * @param {Record<string, string | undefined>} [query]
 */
export const address = (path, query = {}) => {
  const given = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) if (value) given.set(name, value);
  return `${API}${path}${given.size ? `?${given}` : ""}`;
};

/**
 * One answer of the server; raises `Problem` for what it refused.
 * @param {string} url
 * @param {RequestInit} [more]
 * @returns {Promise<Response>}
 */
export const answer = async (url, more = {}) => {
  /** @type {Record<string, string>} */
  const shown = csrf && more.method && more.method !== "GET" ? { "X-CSRF-Token": csrf } : {};
  const found = await fetch(url, { cache: "no-store", ...more, headers: { ...more.headers, ...shown } });
  if (!found.ok) throw new Problem(found.status, await found.json().catch(() => ({})));
  return found;
};

/**
 * @param {string} url
 * @param {string} method
 * @param {any} [body]
 * @param {Record<string, string>} [headers]
 * @returns {Promise<any>} what it answers, null if that is empty
 */
export const send = async (url, method, body, headers = {}) => {
  const sent = body === undefined ? {} : { body: JSON.stringify(body) };
  /** @type {Record<string, string>} */
  const type = body === undefined ? {} : { "Content-Type": "application/json" };
  const text = await (await answer(url, { method, ...sent, headers: { ...type, ...headers } })).text();
  return text ? JSON.parse(text) : null;
};

export const session = {
  /** The session that the cookie is of; raises `Problem` where there is none. */
  resume: async () => begun(await (await answer(CONSOLE)).json()),
  /**
   * @param {string} name
   * @param {string} password
   */
  byPassword: async (name, password) => begun(await send(CONSOLE, "POST", { name, password })),
  /** @param {string} token */
  byToken: async (token) => begun(await send(`${CONSOLE}/token`, "POST", undefined, { Authorization: `Bearer ${token}` })),
  /** @param {string} code of a link, which is good once */
  byLink: async (code) => begun(await send(`${CONSOLE}/link`, "POST", { code })),
  end: async () => {
    const had = csrf;
    csrf = "";
    if (had) await fetch(CONSOLE, { method: "DELETE", headers: { "X-CSRF-Token": had } });
  },
};

/** @param {{csrfToken: string}} told */
const begun = (told) => {
  csrf = told.csrfToken;
};

/**
 * @param {string} path
 * @param {Record<string, string | undefined>} [query]
 * @returns {Promise<any>}
 */
export const get = async (path, query = {}) => (await answer(address(path, query))).json();

const PAGE_ROWS = 100;
const MOST_PAGES = 20; // Of one list; who has more looks by name.

/**
 * All rows of a list of the API of proxies, page by page.
 * @param {string} path
 * @returns {Promise<any[]>}
 */
export const listed = async (path) => {
  const rows = [];
  for (let page = 1; page <= MOST_PAGES; page += 1) {
    const found = await (await answer(`${path}?per_page=${PAGE_ROWS}&page=${page}`)).json();
    rows.push(...found.data);
    if (found.data.length < PAGE_ROWS) break;
  }
  return rows;
};

/**
 * @param {string} plural
 * @param {string} name
 */
export const objectPath = (plural, name) => `/${plural}/${encodeURIComponent(name)}`;
