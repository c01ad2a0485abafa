// Approving the login of a program, such as `fleetplane login URL --oidc`, by whoever is signed in here.

import { Problem, answer, send, session } from "./api.mjs";
import { by, h, put } from "./dom.mjs";
import { offerProvider } from "./providers.mjs";

const DEVICE = "/apis/v1/people/device";
const given = () => new URLSearchParams(location.search).get("code") ?? "";

/** @param {unknown} error */
const said = (error) => (error instanceof Problem ? error.line : "the server cannot be reached");

/** @param {string} id */
const only = (id) => {
  for (const one of ["sign-in", "ask", "request", "done"]) by(one).hidden = one !== id;
};

/** @param {string} code */
const url = (code) => `${DEVICE}/${encodeURIComponent(code.trim())}`;

/** @param {string} code */
const look = async (code) => {
  put(by("refusal"), "");
  if (!code.trim()) return only("ask");
  try {
    const told = await (await answer(url(code))).json();
    by("facts").replaceChildren(
      h("dt", null, "Code"), h("dd", { id: "shown-code" }, told.userCode),
      h("dt", null, "Program"), h("dd", null, told.client || "does not say"),
      h("dt", null, "Asks from"), h("dd", null, told.address),
      h("dt", null, "Since"), h("dd", null, told.askedAt));
    only("request");
    by("approve").focus();
  } catch (error) {
    put(by("refusal"), said(error));
    only("ask");
  }
};

/** @param {boolean} approve */
const decide = async (approve) => {
  try {
    await send(url(by("shown-code").textContent), "POST", { approve });
    put(by("done"), approve ? "Approved. The program is logged in as you; you can close this page." : "Refused. Nobody was logged in.");
    only("done");
  } catch (error) {
    put(by("refusal"), said(error));
    only("ask");
  }
};

/** @param {() => Promise<void>} opening */
const signIn = async (opening) => {
  put(by("refusal"), "");
  try {
    await opening();
    const who = await (await answer("/apis/v1/people/whoami")).json();
    put(by("caller"), who.name);
    await look(given());
  } catch (error) {
    const isNew = opening === session.resume && error instanceof Problem && error.status === 401;
    put(by("refusal"), isNew ? "" : said(error));
    only("sign-in");
    by("name").focus();
  }
};

by("by-password").addEventListener("submit", (/** @type {Event} */ event) => {
  event.preventDefault();
  const [name, password] = [by("name").value.trim(), by("password").value];
  by("password").value = "";
  signIn(() => session.byPassword(name, password));
});
by("ask").addEventListener("submit", (/** @type {Event} */ event) => {
  event.preventDefault();
  look(by("code").value);
});
by("approve").addEventListener("click", () => decide(true));
by("refuse").addEventListener("click", () => decide(false));
offerProvider(by("providers"), () => `/ui/device${given() ? `?code=${encodeURIComponent(given())}` : ""}`);
signIn(session.resume);
