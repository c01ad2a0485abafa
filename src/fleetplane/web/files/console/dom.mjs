// Elements of the page. What the server says becomes text and nothing else: no markup is ever made from it.

const TURNING = /[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;

/**
 * A text as it is shown: characters that turn the direction of what follows them are spelled, so that no name turns the words around it.
 * @param {string} text
 */
export const plain = (text) => text.replace(TURNING, (one) => `⟨U+${one.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);

/** @typedef {Node | string | number | null | undefined | false} Child */

/**
 * One element. Keys of `props` that begin with `on` are listeners, the others attributes; what is null,
 * undefined or false is left out.
 * @param {string} tag
 * @param {Record<string, any> | null} [props]
 * @param {...(Child | Child[])} children
 * @returns {HTMLElement}
 */
export const h = (tag, props = null, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props ?? {})) {
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false)
      node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...nodes(children));
  return node;
};

/**
 * @param {(Child | Child[])[]} children
 * @returns {(Node | string)[]}
 */
const nodes = (children) =>
  children
    .flat()
    .filter((one) => one !== null && one !== undefined && one !== false)
    .map((one) => (one instanceof Node ? one : plain(String(one))));

/**
 * Set a text only where it differs, so that selections and readers of screens are left alone.
 * @param {Element} node
 * @param {string} text
 */
export const put = (node, text) => {
  const shown = plain(text);
  if (node.textContent !== shown) node.textContent = shown;
};

/**
 * Set an attribute only where it differs; null takes it away.
 * @param {Element} node
 * @param {string} name
 * @param {string | null} value
 */
export const mark = (node, name, value) => {
  if (value === null) node.removeAttribute(name);
  else if (node.getAttribute(name) !== value) node.setAttribute(name, value);
};

/**
 * The element of an id that the page always has.
 * @param {string} id
 * @returns {any}
 */
export const by = (id) => document.getElementById(id);

/**
 * A moment as its age, which `refreshAges` keeps up to date; the moment itself on hover.
 * @param {string | null | undefined} at
 * @param {string} [after] such as ` ago`
 */
export const ago = (at, after = "") => h("time", { datetime: at || null, title: at || null, "data-after": after });

/**
 * @param {ParentNode} root
 * @param {(at: string) => string} text
 */
export const refreshAges = (root, text) => {
  for (const one of /** @type {NodeListOf<HTMLTimeElement>} */ (root.querySelectorAll("time[data-after]")))
    put(one, one.dateTime ? `${text(one.dateTime)}${one.dataset.after}` : "");
};

/**
 * A button that copies a text, and tells that it did.
 * @param {string} label
 * @param {() => string} text
 * @returns {HTMLElement}
 */
export const copyButton = (label, text) => {
  const button = h("button", { type: "button", class: "copy" }, label);
  button.addEventListener("click", async () => {
    const copied = text();
    button.title = copied;
    try {
      await navigator.clipboard.writeText(copied);
      button.textContent = "Copied";
    } catch {
      button.textContent = copied; // where the browser keeps the clipboard to itself, to be marked by hand
      return;
    }
    setTimeout(() => { button.textContent = label; }, 1500);
  });
  return button;
};
