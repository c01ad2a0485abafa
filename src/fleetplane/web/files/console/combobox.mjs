// A field that offers what may come next: with the arrow keys and Enter or Tab, or with the mouse; Escape closes the list.

import { h, mark } from "./dom.mjs";

let made = 0;

/**
 * @param {HTMLInputElement} input in a label, which is given a list
 * @param {(text: string) => import("./completion.mjs").Suggestion[]} offer
 */
export const completing = (input, offer) => {
  const list = h("ul", { role: "listbox", class: "offers", id: `offers-${(made += 1)}`, hidden: true, "aria-label": "What may come next" });
  for (const [name, value] of [["role", "combobox"], ["aria-autocomplete", "list"], ["aria-controls", list.id], ["aria-expanded", "false"]]) mark(input, name, value);
  /** @type {import("./completion.mjs").Suggestion[]} */
  let found = [];
  let chosen = -1;

  const choose = (/** @type {number} */ place) => {
    chosen = place;
    [...list.children].forEach((one, at) => mark(one, "aria-selected", String(at === place)));
    mark(input, "aria-activedescendant", place < 0 ? null : `${list.id}-${place}`);
  };
  const show = () => {
    found = document.activeElement === input ? offer(input.value.slice(0, input.selectionStart ?? undefined)) : [];
    list.replaceChildren(...found.map((one, place) => h("li", { role: "option", id: `${list.id}-${place}`, "aria-selected": "false",
      onmousedown: (/** @type {Event} */ event) => { event.preventDefault(); take(place); } }, one.text)));
    list.hidden = !found.length;
    mark(input, "aria-expanded", String(found.length > 0));
    choose(-1);
  };
  const hide = () => { found = []; list.hidden = true; mark(input, "aria-expanded", "false"); choose(-1); };
  const take = (/** @type {number} */ place) => {
    const rest = input.value.slice(input.selectionStart ?? input.value.length);
    const { insert } = found[place];
    input.value = insert + rest;
    input.setSelectionRange(insert.length, insert.length);
    input.dispatchEvent(new Event("input", { bubbles: true }));
    show();
  };

  input.addEventListener("input", show);
  input.addEventListener("focus", show);
  input.addEventListener("blur", hide);
  input.addEventListener("keydown", (event) => {
    if (!found.length) return;
    if (event.key === "ArrowDown" || event.key === "ArrowUp") choose((chosen + (event.key === "ArrowDown" ? 1 : -1) + found.length + (chosen < 0 && event.key === "ArrowUp" ? 1 : 0)) % found.length);
    else if ((event.key === "Enter" || event.key === "Tab") && chosen >= 0) take(chosen);
    else if (event.key === "Escape") hide();
    else return;
    event.preventDefault();
  });
  input.parentElement?.append(list);
  input.parentElement?.classList.add("completing");
};
