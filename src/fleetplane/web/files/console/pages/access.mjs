// Access: people, what they hold and why; tokens; sessions; the provider that vouches for people; what lets machines in; and giving and taking of roles.

import { address, answer, get, send } from "../api.mjs";
import { h, put } from "../dom.mjs";
import { itemsOf, quoted, since } from "../model.mjs";
import { button, choice, closeDialog, curl, field, getCommand, openDialog, propose, tableOf, words } from "../parts.mjs";

/**
 * @typedef {import("../main.mjs").App} App
 * @typedef {import("../main.mjs").Page} Page
 */

const TENANTS = 20; // Whose tokens of daemons are shown: each is a question of its own.
const ROLES = ["viewer", "operator", "admin", "owner"];

/**
 * @param {App} app
 * @returns {Page}
 */
export const accessPage = (app) => {
  const say = h("p", { class: "sentence" }, "Loading.");
  const own = h("ul");
  const people = tableOf("People", (/** @type {any} */ one) => `${one.subject} ${one.active}`, [
    { title: "Person", text: (one) => one.name },
    { title: "Of", text: (one) => one.directory },
    { title: "State", text: (one) => (one.active ? "active" : "disabled"), tone: (one) => (one.active ? "" : "waiting") },
    { title: "Roles", text: (one) => one.roles.map((/** @type {any} */ role) => `${role.role} at ${role.scope}`).join(", ") || "none bound" },
    { title: "Vouched for by", text: (one) => one.vouchedBy ?? "" },
    { title: "Also a user of", text: (one) => Object.keys(one.users ?? {}).join(", ") },
    { title: "", node: (one) => h("span", { class: "tools" }, button("Give a role", () => give(one.subject), { "aria-label": `Give ${one.name} a role` }),
      one.directory === "people" ? [button(one.active ? "Disable" : "Enable", () => setActive(one.name), { class: "set-active", "aria-label": `${one.active ? "Disable" : "Enable"} ${one.name}` }),
        button("Delete", () => removeAccount(one.name), { "aria-label": `Delete ${one.name}` })] : null) },
  ], () => curl("GET", address("/people/accounts")));
  const bindings = tableOf("Roles", (/** @type {any} */ one) => one.id, [
    { title: "Who", text: (one) => one.subject },
    { title: "Role", text: (one) => one.role },
    { title: "Where", text: (one) => one.scope },
    { title: "Given by", text: (one) => `${one.createdBy}, ${since(one.createdAt, Date.now())} ago` },
    { title: "", node: (one) => button("Take away", () => takeAway(one), { "aria-label": `Take ${one.role} at ${one.scope} from ${one.subject}` }) },
  ], () => curl("GET", address("/people/bindings")));
  const tokens = tableOf("Tokens", (/** @type {any} */ one) => one.name, [
    { title: "Token", text: (one) => one.name },
    { title: "Roles", text: (one) => one.roles.join(", ") },
    { title: "Where", text: (one) => one.scope },
    { title: "Ends", text: (one) => (one.expiresAt ? since(one.expiresAt, Date.now()) : "when revoked") },
    { title: "", node: (one) => button("Revoke", () => revoke(one.name), { "aria-label": `Revoke ${one.name}` }) },
  ], () => getCommand("tokens"));
  const sessions = tableOf("Sessions", (/** @type {any} */ one) => one.id, [
    { title: "Whose", text: (one) => one.name },
    { title: "Of", text: (one) => one.directory },
    { title: "Ends", text: (one) => since(one.expiresAt, Date.now()) },
    { title: "", node: (one) => button("End", () => end(one), { "aria-label": `End the session of ${one.name}` }) },
  ], () => curl("GET", address("/people/sessions")));
  const managed = h("div", null, h("h2", null, "People"), people.node, h("p", { class: "tools" }, button("New account", () => newAccount(), { class: "new-account" })),
    h("h2", null, "Roles"), bindings.node, h("p", { class: "tools" }, button("Give a role", () => give(""), { class: "give" })),
    h("h2", null, "Tokens"), tokens.node, h("p", { class: "tools" }, button("New token", () => newToken(), { class: "new-token" })));
  const provider = h("p", { class: "provider-words" });
  const enrolment = enrolmentPart(app);
  const node = h("section", null, h("h1", null, "Access"), say, own, managed, h("h2", null, "Sessions"), sessions.node,
    h("h2", null, "OpenID provider"), provider, h("h2", null, "Enrolment tokens"), enrolment.node);
  /** @type {Map<string, any>} */
  let known = new Map();

  const load = async () => {
    try {
      const who = await get("/people/whoami");
      own.replaceChildren(...who.roles.map((/** @type {any} */ one) => h("li", null, `${one.role} at ${one.scope}, from ${one.origin}`)));
      sessions.show((await get("/people/sessions")).items);
      const openid = await get("/people/oidc");
      put(provider, openid.enabled ? `People sign in with ${openid.name}, too: /ui/ offers it, and fleetplane login uses it. What its groups may do is set by oidc.roles of the server.` : "There is none: people have passwords of this installation. The server's settings oidc.issuer and oidc.client_id name one.");
      enrolment.load();
      try {
        const [accounts, given, programs] = await Promise.all([get("/people/accounts"), get("/people/bindings"), get("/people/tokens")]);
        known = new Map(accounts.items.map((/** @type {any} */ one) => [one.name, one]));
        people.show(accounts.items);
        bindings.show(given.items);
        tokens.show(programs.items);
        put(say, `You are ${who.name}. ${accounts.items.length} ${accounts.items.length === 1 ? "person" : "people"}, ${programs.items.length} ${programs.items.length === 1 ? "token" : "tokens"}, ${given.items.length} roles given.`);
      } catch (error) {
        if (app.isRefused(error)) return;
        managed.hidden = true;
        put(say, `You are ${who.name}. Who else is let in is not shown: ${words(error)}`);
      }
    } catch (error) {
      if (!app.isRefused(error)) put(say, words(error));
    }
  };

  /**
   * @param {string} path
   * @param {string} method
   * @param {any} [body]
   */
  const change = async (path, method, body) => {
    const told = await send(address(`/people${path}`), method, body);
    await load();
    return told;
  };

  /** @param {string} subject */
  const give = (subject) => {
    const who = field("Who, such as account/grace", "subject", { required: true, value: subject });
    const role = choice("Role", "role", ROLES.map((one) => [one, one]), "viewer");
    const scope = field("Where", "scope", { required: true, value: "/" });
    let given = "";
    propose(app, {
      title: "Give a role", says: ["It holds at this place of the tree of scopes and everywhere below."], fields: [who.node, role.node, scope.node], label: "Give",
      command: () => curl("POST", address("/people/bindings"), { subject: who.input.value.trim(), role: role.input.value, scope: scope.input.value.trim() }),
      run: async () => {
        given = (await change("/bindings", "POST", { subject: who.input.value.trim(), role: role.input.value, scope: scope.input.value.trim() })).id;
        return `Done: ${who.input.value} is ${role.input.value} at ${scope.input.value}.`;
      },
      undo: async () => { await change(`/bindings/${given}`, "DELETE"); return "Undone."; },
    });
  };

  /** @param {any} one */
  const takeAway = (one) => propose(app, {
    title: "Take a role away", says: [`${one.subject} is ${one.role} at ${one.scope} no longer. Streams that it let in end.`], label: "Take away", command: curl("DELETE", address(`/people/bindings/${one.id}`)),
    run: async () => { await change(`/bindings/${one.id}`, "DELETE"); return "Done."; },
    undo: async () => { await change("/bindings", "POST", { subject: one.subject, role: one.role, scope: one.scope }); return "Undone."; },
  });

  /** @param {string} name */
  const revoke = (name) => propose(app, {
    title: `Revoke ${name}`, says: ["Whoever uses this token is refused at once, and its sessions end. This cannot be undone."], label: "Revoke", name, command: `fleetplane tokens revoke ${quoted(name)} --server ${location.origin}`,
    run: async () => { await change(`/tokens/${encodeURIComponent(name)}`, "DELETE"); return "Done."; },
  });

  /** @param {any} one */
  const end = (one) => propose(app, {
    title: "End a session", says: [`${one.name} has to sign in again. This cannot be undone.`], label: "End", command: curl("DELETE", address(`/people/sessions/${one.id}`)),
    run: async () => { await change(`/sessions/${one.id}`, "DELETE"); return "Done."; },
  });

  /** @param {string} name */
  const setActive = (name) => {
    const isActive = known.get(name)?.active;
    const set = async (/** @type {boolean} */ disabled) => { await change(`/accounts/${encodeURIComponent(name)}`, "PATCH", { disabled }); return disabled ? "Done: its sessions ended." : "Done."; };
    propose(app, {
      title: `${isActive ? "Disable" : "Enable"} ${name}`, says: [isActive ? "It cannot sign in any more, and its sessions end. Its roles stay." : "It can sign in again."], label: isActive ? "Disable" : "Enable",
      command: curl("PATCH", address(`/people/accounts/${encodeURIComponent(name)}`), { disabled: isActive }),
      run: () => set(isActive), undo: () => set(!isActive),
    });
  };

  /** @param {string} name */
  const removeAccount = (name) => propose(app, {
    title: `Delete ${name}`, says: ["Its sessions and roles go with it. This cannot be undone."], label: "Delete", name, command: curl("DELETE", address(`/people/accounts/${encodeURIComponent(name)}`)),
    run: async () => { await change(`/accounts/${encodeURIComponent(name)}`, "DELETE"); return "Done."; },
  });

  const newAccount = () => {
    const name = field("Name", "account", { required: true });
    const password = field("Password", "new-password", { type: "password", required: true, autocomplete: "new-password" });
    propose(app, {
      title: "New account", says: ["It holds no role until it is given one."], fields: [name.node, password.node], label: "Make",
      command: () => curl("POST", address("/people/accounts"), { name: name.input.value.trim(), password: "PASSWORD" }),
      run: async () => {
        await change("/accounts", "POST", { name: name.input.value.trim(), password: password.input.value });
        return `Done: ${name.input.value} can sign in.`;
      },
    });
  };

  const newToken = () => {
    const name = field("Name", "token-name", { required: true });
    const role = choice("Role", "role", ROLES.map((one) => [one, one]), "viewer");
    const scope = field("Where", "scope", { required: true, value: "/" });
    const days = field("Days", "days", { type: "number", min: "1", max: "3650", required: true, value: 30 });
    propose(app, {
      title: "New token", says: ["It is shown once."], fields: [name.node, role.node, scope.node, days.node], label: "Make",
      command: () => `fleetplane tokens create ${quoted(name.input.value.trim() || "NAME")} --role ${role.input.value} --server ${location.origin}`,
      run: async () => {
        const made = await change("/tokens", "POST", { name: name.input.value.trim(), roles: [role.input.value], scope: scope.input.value.trim(), expiresInSeconds: Number(days.input.value) * 86_400 });
        openDialog(h("h2", { id: "dialog-title" }, `Token ${made.name}`), h("p", null, "This is the only time that it is shown:"), h("pre", { tabindex: "0", "aria-label": "Token" }, made.token), button("Close", closeDialog));
        return "Done.";
      },
    });
  };

  let seen = "";
  const update = () => {
    const mark = JSON.stringify(["accounts", "tokens"].map((plural) => [...itemsOf(app.world, plural).values()].map((one) => [one.uid, one.value?.metadata.revision, one.cells])));
    if (mark === seen || !app.world.synced) return;
    seen = mark;
    load();
  };
  return { node, title: "Access", update, close: () => {}, key: () => false };
};

/**
 * What lets machines in once: tokens of daemons and of boards. They are read when the page is opened, and after a change of one.
 * @typedef {{fleet: string, id: string, tenant: string, whom: string, by: string, state: string, expires: string, open: boolean}} Enrolment
 * @param {App} app
 */
const enrolmentPart = (app) => {
  const refusals = h("ul", { class: "refusals" });
  const none = h("p", { class: "empty", hidden: true }, "There are none. “Enrol a daemon” on the page Edge makes one for a daemon, fleetplane boards join-token create one for a board.");
  const table = tableOf("Enrolment tokens", (/** @type {Enrolment} */ one) => `${one.fleet} ${one.id}`, [
    { title: "Fleet", text: (one) => one.fleet },
    { title: "Tenant", text: (one) => one.tenant },
    { title: "For", text: (one) => one.whom },
    { title: "State", text: (one) => one.state },
    { title: "By", text: (one) => one.by },
    { title: "Ends", text: (one) => since(one.expires, Date.now()) },
    { title: "", node: (one) => (one.open ? button("Revoke", () => revoke(one), { "aria-label": `Revoke the token of ${one.fleet} for ${one.whom}` }) : h("span")) },
  ], () => `fleetplane boards join-token list --server ${location.origin}; fleetplane edge tokens --server ${location.origin}`);

  const edge = async () => {
    const tenants = [...new Set([...itemsOf(app.world, "edge-nodes").values(), ...itemsOf(app.world, "edge-groups").values()].map((one) => one.scope.split("/")[2]))].sort().slice(0, TENANTS);
    const found = await Promise.all(tenants.map(async (tenant) => (await (await answer("/v1/edge/enrollment-tokens", { headers: { "X-Aegis-Tenant": tenant } })).json()).items));
    return found.flat().map((/** @type {any} */ one) => ({ fleet: "edge", id: one.token_id, tenant: one.tenant_id, whom: one.issued_to, by: one.issued_by, state: one.state, expires: one.expires_at, open: one.state === "open" }));
  };
  const boards = async () => (await (await answer("/api/v1/join-tokens")).json()).data.map((/** @type {any} */ one) =>
    ({ fleet: "boards", id: one.id, tenant: "", whom: one.name, by: one.created_by, state: one.state, expires: one.expires_at, open: one.state === "good" }));

  const load = async () => {
    const fleets = /** @type {[string, () => Promise<Enrolment[]>][]} */ ([["edge-nodes", edge], ["boards", boards]]).filter(([plural]) => app.kinds.some((kind) => kind.plural === plural));
    /** @type {Enrolment[]} */
    const found = [];
    /** @type {string[]} */
    const why = [];
    for (const [plural, read] of fleets)
      try {
        found.push(...await read());
      } catch (error) {
        if (app.isRefused(error)) return;
        why.push(`Those of ${plural.replace("-", " ")} are not shown: ${words(error)}`);
      }
    refusals.replaceChildren(...why.map((one) => h("li", null, one)));
    table.show(found.sort((one, other) => (one.expires < other.expires ? 1 : -1)).slice(0, 100));
    none.hidden = found.length > 0 || why.length > 0;
  };

  /** @param {Enrolment} one */
  const revoke = (one) => propose(app, {
    title: `Revoke the token for ${one.whom || one.id}`, says: ["Nobody can enrol with it any more. Machines that are in stay."], label: "Revoke",
    command: one.fleet === "edge" ? curl("DELETE", `/v1/edge/enrollment-tokens/${one.id}`, undefined, { "X-Aegis-Tenant": one.tenant }) : curl("DELETE", `/api/v1/join-tokens/${one.id}`),
    run: async () => {
      if (one.fleet === "edge") await send(`/v1/edge/enrollment-tokens/${one.id}`, "DELETE", undefined, { "X-Aegis-Tenant": one.tenant });
      else await send(`/api/v1/join-tokens/${one.id}`, "DELETE");
      await load();
      return "Done.";
    },
  });
  return { node: h("div", null, refusals, table.node, none), load };
};
