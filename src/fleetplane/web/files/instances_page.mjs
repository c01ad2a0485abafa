// Shows a tenant's groups and instances, and keeps them up to date. What the server says becomes text and
// nothing else: no markup is ever made from it.

import {
  EventReader, age, apply, credentialsIn, frozenWords, groupsShown, instancesShown, nothing, retryMs, whyLines,
} from "./model.mjs";

const API = "/v1/instances";
const STALLED_MS = 40_000; // The server says something at least every 15 s.
const SHOW_MS = 60; // Changes gather for as long before they are shown.
const REFUSED = new Set([401, 403, 422]); // Trying again would not help.

const by = (id) => document.getElementById(id);
const session = { token: "", tenant: "", known: nothing(), stop: null };

// Who looks. The token stays in this tab and ends with it.

const remember = ({ token, tenant }) => {
  sessionStorage.setItem("token", token);
  sessionStorage.setItem("tenant", tenant);
};

const takeFromAddress = () => {
  const given = credentialsIn(location.hash);
  if (!given) return false;
  history.replaceState(null, "", location.pathname);
  remember(given);
  return true;
};

const headers = () => ({
  Authorization: `Bearer ${session.token}`,
  ...(session.tenant ? { "X-Tenant-Id": session.tenant } : {}),
});

const signOut = (why) => {
  if (session.stop) session.stop.abort();
  sessionStorage.clear();
  Object.assign(session, { token: "", tenant: "", known: nothing(), stop: null });
  by("view").hidden = true;
  by("sign-out").hidden = true;
  by("sign-in").hidden = false;
  by("refusal").textContent = why;
  tell("", "signed out");
  if (by("why").open) by("why").close();
  by("token").focus();
};

const signIn = () => {
  if (session.stop) session.stop.abort();
  const token = sessionStorage.getItem("token") || "";
  if (!token) return signOut("");
  const stop = new AbortController();
  Object.assign(session, { token, tenant: sessionStorage.getItem("tenant") || "", known: nothing(), stop });
  by("sign-in").hidden = true;
  by("view").hidden = false;
  by("sign-out").hidden = false;
  by("refusal").textContent = "";
  follow(stop.signal);
};

// Following.

const tell = (state, words) => {
  const status = by("status");
  status.dataset.state = state;
  if (status.textContent !== words) status.textContent = words;
};

const pause = (ms, signal) =>
  new Promise((done) => {
    const timer = setTimeout(done, ms);
    signal.addEventListener("abort", () => { clearTimeout(timer); done(); }, { once: true });
  });

const problemOf = async (answer) => {
  try {
    const { error } = await answer.json();
    return [error.message, ...(error.details || []).map((one) => `${one.field}: ${one.message}`)].join("; ");
  } catch {
    return `the server answered ${answer.status}`;
  }
};

// One connection, from its first byte to its end; how many events came.
const followOnce = async (signal) => {
  const stalled = new AbortController();
  const given = { ...headers(), Accept: "text/event-stream" };
  if (session.known.mark) given["Last-Event-ID"] = session.known.mark;
  const either = AbortSignal.any([signal, stalled.signal]);
  let timer = setTimeout(() => stalled.abort(), STALLED_MS);
  try {
    const answer = await fetch(`${API}/events`, { headers: given, cache: "no-store", signal: either });
    if (REFUSED.has(answer.status)) return signOut(await problemOf(answer));
    if (!answer.ok) throw new Error(await problemOf(answer));
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    const events = new EventReader();
    for (;;) {
      const { value, done } = await reader.read();
      if (done || signal.aborted) return;
      clearTimeout(timer);
      timer = setTimeout(() => stalled.abort(), STALLED_MS);
      for (const event of events.take(value)) apply(session.known, event, Date.now());
      if (session.known.synced) tell("live", "live");
      later();
    }
  } finally {
    clearTimeout(timer);
  }
};

const follow = async (signal) => {
  for (let attempt = 0; !signal.aborted; ) {
    tell("waiting", session.known.mark ? "reconnecting" : "connecting");
    const before = session.known.mark;
    let why = "the server ended the connection";
    try {
      await followOnce(signal);
    } catch (error) {
      why = error.message;
    }
    if (signal.aborted) return;
    attempt = session.known.mark === before ? attempt + 1 : 0;
    const ms = retryMs(attempt, Math.random());
    tell("lost", `not connected (${why}); trying again in ${Math.ceil(ms / 1000)} s`);
    await pause(ms, signal);
  }
};

// Showing.

let shown = null;

const later = () => {
  if (shown === null) shown = setTimeout(() => { shown = null; show(); }, SHOW_MS);
};

const put = (node, text, word) => {
  if (node.textContent !== text) node.textContent = text;
  if (word !== undefined && node.dataset.word !== word) node.dataset.word = word;
};

const makeRow = (key, columns) => {
  const row = document.createElement("tr");
  row.dataset.key = key;
  for (let column = 0; column < columns; column += 1) {
    const cell = document.createElement(column ? "td" : "th");
    if (!column) cell.scope = "row";
    row.append(cell);
  }
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "why?";
  button.setAttribute("aria-label", `why is ${key} as it is?`);
  button.addEventListener("click", () => why(key));
  row.lastElementChild.append(button);
  return row;
};

// Rows that stay are not touched, so that whoever is on one with the keyboard stays there.
const fill = (body, rows, keyOf, columns, write) => {
  const before = new Map([...body.rows].map((row) => [row.dataset.key, row]));
  const keys = new Set(rows.map(keyOf));
  for (const [key, row] of before) if (!keys.has(key)) row.remove();
  rows.forEach((one, place) => {
    const row = before.get(keyOf(one)) || makeRow(keyOf(one), columns);
    write(one, row.cells);
    if (body.rows[place] !== row) body.insertBefore(row, body.rows[place] || null);
  });
};

const writeGroup = (group, cells) => {
  put(cells[0], group.name);
  put(cells[1], group.asleep ? `0 of ${group.size} (asleep)` : String(group.wanted));
  put(cells[2], String(group.ready), group.ready >= group.wanted ? "good" : "short");
  put(cells[3], String(group.pending));
  put(cells[4], String(group.draining + group.deleting));
  put(cells[5], String(group.unhealthy), group.unhealthy ? "unhealthy" : "");
  put(cells[6], String(group.on_demand));
  put(cells[7], frozenWords(group.frozen), group.frozen ? "frozen" : "");
};

const writeInstance = (instance, cells, nowMs) => {
  put(cells[0], instance.id);
  put(cells[1], instance.group);
  put(cells[2], instance.reason ? `${instance.state} (${instance.reason})` : instance.state, instance.state);
  put(cells[3], instance.health, instance.health);
  put(cells[4], age(instance.created_at, nowMs));
  put(cells[5], instance.last_error, instance.last_error ? "error" : "");
};

const writeError = (error, cells, nowMs) => {
  put(cells[0], `${age(error.at, nowMs)} ago`);
  put(cells[1], error.instance || error.group || "everything");
  put(cells[2], error.error, "error");
};

const offer = (select, names) => {
  const wanted = ["", ...names];
  if ([...select.options].map((one) => one.value).join("\n") === wanted.join("\n")) return;
  const chosen = select.value;
  select.replaceChildren(select.options[0], ...names.map((name) => new Option(name, name)));
  select.value = names.includes(chosen) ? chosen : "";
};

const show = () => {
  const { known } = session;
  const nowMs = Date.now() + known.skewMs;
  const groups = groupsShown(known);
  offer(by("group"), groups.map((group) => group.name));
  const filters = {
    group: by("group").value, state: by("state").value, text: by("find").value, gone: by("gone").checked,
  };
  const { rows, total } = instancesShown(known, filters);
  fill(by("groups").tBodies[0], groups, (group) => group.name, 9, writeGroup);
  fill(by("instances").tBodies[0], rows, (one) => one.id, 7, (one, cells) => writeInstance(one, cells, nowMs));
  put(by("count"), total > rows.length ? `the first ${rows.length} of ${total}` : `${total}`);
  const body = by("errors").tBodies[0];
  while (body.rows.length > known.errors.length) body.deleteRow(-1);
  known.errors.forEach((error, place) => {
    const row = body.rows[place] || body.insertRow();
    while (row.cells.length < 3) row.insertCell();
    writeError(error, row.cells, nowMs);
  });
  by("no-errors").hidden = known.errors.length > 0;
};

// Why.

const ask = async (path) => {
  const answer = await fetch(API + path, { headers: headers(), cache: "no-store" });
  if (answer.status === 401) signOut(await problemOf(answer));
  if (!answer.ok) throw new Error(await problemOf(answer));
  return answer.json();
};

const why = async (about) => {
  const dialog = by("why");
  const list = by("reasons");
  by("about").textContent = about;
  list.replaceChildren(line("asking the server"));
  if (!dialog.open) dialog.showModal();
  try {
    const name = encodeURIComponent(about);
    const [explained, instance] = await Promise.all([
      ask(`/explain?about=${name}`),
      session.known.instances.has(about) ? ask(`/instances/${name}`) : null,
    ]);
    if (by("about").textContent === about) list.replaceChildren(...whyLines(explained, instance).map(line));
  } catch (error) {
    list.replaceChildren(line(error.message));
  }
};

const line = (text) => {
  const node = document.createElement("li");
  node.textContent = text;
  return node;
};

by("sign-in").addEventListener("submit", (event) => {
  event.preventDefault();
  const token = by("token").value.trim();
  const tenant = by("tenant").value.trim();
  by("token").value = "";
  if (!token) return;
  remember({ token, tenant });
  signIn();
});
by("sign-out").addEventListener("click", () => signOut(""));
by("close").addEventListener("click", () => by("why").close());
for (const id of ["group", "state", "find", "gone"]) by(id).addEventListener("input", show);
addEventListener("hashchange", () => { if (takeFromAddress()) signIn(); });
setInterval(() => { if (session.token) show(); }, 1000); // ages grow

takeFromAddress();
signIn();
