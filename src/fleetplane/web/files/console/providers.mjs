// Signing in with an OpenID provider, where the server has one.

import { h } from "./dom.mjs";

/**
 * Offer the provider at an element that is hidden otherwise.
 * @param {HTMLElement} place
 * @param {() => string} next where in the console to go then
 */
export const offerProvider = async (place, next) => {
  try {
    const told = await (await fetch("/apis/v1/people/oidc", { cache: "no-store" })).json();
    if (!told.enabled) return;
    const link = h("a", { href: told.login, class: "provider" }, `Sign in with ${told.name}`);
    link.addEventListener("click", () => { link.setAttribute("href", `${told.login}?next=${encodeURIComponent(next())}`); });
    place.replaceChildren(link);
    place.hidden = false;
  } catch {
    place.hidden = true; // the other ways to sign in are there without it
  }
};
