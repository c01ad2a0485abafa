// A form for anything that has a schema: a control for each field, as the schema of discovery says. Each control is called by the path that the
// server calls its field by, so that what it refuses is told there.

import { h } from "./dom.mjs";
import { button } from "./parts.mjs";

/**
 * @typedef {{node: HTMLElement, read: () => any}} Control `read`: undefined for what is not given
 * @typedef {{help?: Record<string, string>, follow?: (path: string, input: HTMLInputElement) => void}} More
 *   `help`: by path without numbers; `follow`: is told of each line of text, to complete it
 * @typedef {{type: "text" | "integer" | "number" | "boolean" | "choice" | "lines" | "pairs" | "list" | "object" | "json", nullable: boolean,
 *   options: string[], part: any, items: any}} Shape
 */

/**
 * What kind of control a part of a schema needs.
 * @param {any} root
 * @param {any} given
 * @returns {Shape}
 */
export const shapeOf = (root, given) => {
  const whole = (/** @type {any} */ part) => (part?.$ref ? root.$defs[part.$ref.split("/").at(-1)] : (part ?? {}));
  const all = (given?.anyOf ?? [given]).map(whole);
  const kinds = all.filter((/** @type {any} */ one) => one.type !== "null");
  const nullable = kinds.length < all.length;
  const part = kinds.length === 1 ? kinds[0] : {};
  const shape = (/** @type {Shape["type"]} */ type, more = {}) => ({ type, nullable, options: [], part, items: null, ...more });
  if (part.enum?.every((/** @type {any} */ one) => typeof one === "string")) return shape("choice", { options: part.enum });
  if (part.type === "string") return shape("text");
  if (part.type === "integer" || part.type === "number" || part.type === "boolean") return shape(part.type);
  if (part.type === "array") {
    const items = whole(part.items);
    if (items.type === "string" && !items.enum) return shape("lines");
    return items.type === "object" && items.properties ? shape("list", { items }) : shape("json");
  }
  if (part.type === "object" && part.properties && !part.additionalProperties) return shape("object");
  if (part.type === "object" && whole(part.additionalProperties).type === "string") return shape("pairs");
  return shape("json");
};

/**
 * `KEY=VALUE` lines as an object; raises for a line that is none.
 * @param {string} text
 * @returns {Record<string, string>}
 */
export const pairsOf = (text) => Object.fromEntries(linesOf(text).map((line) => {
  const place = line.indexOf("=");
  if (place < 1) throw new Error(`“${line}” is no KEY=VALUE`);
  return [line.slice(0, place).trim(), line.slice(place + 1)];
}));

/** @param {string} text */
export const linesOf = (text) => text.split("\n").filter((line) => line.trim() !== "");

/**
 * `workingDir` as people write it.
 * @param {string} name
 */
export const spelled = (name) => {
  const words = name.replace(/([a-z0-9])([A-Z])/g, "$1 $2").toLowerCase();
  return words[0].toUpperCase() + words.slice(1);
};

/**
 * The control of one field.
 * @param {any} root the schema that has the definitions
 * @param {any} given the part of it
 * @param {string} path
 * @param {any} value undefined for its default
 * @param {boolean} required
 * @param {More} more
 * @returns {Control}
 */
const control = (root, given, path, value, required, more) => {
  const shape = shapeOf(root, given);
  const start = value === undefined ? given.default : value;
  const name = path.split(".").at(-1)?.replace(/\[\d+\]$/, "") ?? path;
  const help = more.help?.[path.replace(/\[\d+\]/g, "")] ?? given.description ?? "";
  const label = `${spelled(name)}${required || shape.type === "boolean" || shape.type === "choice" ? "" : " (optional)"}`;
  const props = { name, "data-field": path, autocomplete: "off", spellcheck: "false" };
  const none = () => (shape.nullable ? null : undefined);
  const labelled = (/** @type {HTMLElement} */ input, text = label) => h("label", null, text, input, help ? h("small", null, help) : null);
  if (shape.type === "boolean" && shape.nullable) { // Not set is another thing than no: the server has a default.
    const options = [["", "not set"], ["true", "yes"], ["false", "no"]];
    const input = /** @type {HTMLSelectElement} */ (h("select", props, options.map(([one, text]) => h("option", { value: one }, text))));
    input.value = String(start ?? "");
    return { node: labelled(input), read: () => (input.value === "" ? null : input.value === "true") };
  }
  if (shape.type === "boolean") {
    const input = /** @type {HTMLInputElement} */ (h("input", { ...props, type: "checkbox", checked: start === true }));
    return { node: h("label", { class: "check" }, input, spelled(name), help ? h("small", null, help) : null), read: () => input.checked };
  }
  if (shape.type === "choice") {
    const options = shape.nullable || !required ? ["", ...shape.options] : shape.options;
    const input = /** @type {HTMLSelectElement} */ (h("select", props, options.map((one) => h("option", { value: one }, one || "not set"))));
    input.value = start ?? "";
    return { node: labelled(input), read: () => input.value || none() };
  }
  if (shape.type === "object") return group(root, shape.part, path, start, more, spelled(name));
  if (shape.type === "list") return list(root, shape.items, path, start ?? [], more, spelled(name));
  if (shape.type === "text" || shape.type === "integer" || shape.type === "number") {
    const isText = shape.type === "text";
    const input = /** @type {HTMLInputElement} */ (h("input", { ...props, required, type: isText ? "text" : "number", step: isText ? null : shape.type === "integer" ? "1" : "any" }));
    input.value = start ?? "";
    if (isText) more.follow?.(path, input);
    return { node: labelled(input), read: () => (input.value === "" ? (isText && !shape.nullable ? "" : none()) : isText ? input.value : Number(input.value)) };
  }
  const written = start === undefined || start === null ? "" : shape.type === "lines" ? start.join("\n")
    : shape.type === "pairs" ? Object.entries(start).map(([key, one]) => `${key}=${one}`).join("\n") : JSON.stringify(start, null, 2);
  const input = /** @type {HTMLTextAreaElement} */ (h("textarea", { ...props, rows: "3", required }));
  input.value = written;
  const how = { lines: "one each line", pairs: "KEY=VALUE each line", json: "JSON" }[/** @type {"lines" | "pairs" | "json"} */ (shape.type)];
  const read = () => {
    const text = input.value;
    if (!text.trim()) return shape.type === "lines" ? (shape.nullable ? null : []) : shape.type === "pairs" ? (shape.nullable ? null : {}) : none();
    if (shape.type === "lines") return linesOf(text);
    try {
      return shape.type === "pairs" ? pairsOf(text) : JSON.parse(text);
    } catch (error) {
      throw Object.assign(new Error(error instanceof Error ? error.message : String(error)), { field: input.dataset.field }); // which may have been counted anew
    }
  };
  return { node: labelled(input, `${label.replace(" (optional)", "")}, ${how}`), read };
};

/**
 * The fields of an object, in a frame of their own if it has a title.
 * @param {any} root
 * @param {any} part
 * @param {string} path
 * @param {any} value
 * @param {More} more
 * @param {string} [title]
 * @returns {Control}
 */
export const group = (root, part, path, value, more, title = "") => {
  const required = new Set(part.required ?? []);
  const controls = Object.entries(part.properties ?? {}).map(([name, one]) =>
    /** @type {[string, Control]} */ ([name, control(root, one, path ? `${path}.${name}` : name, value?.[name], required.has(name), more)]));
  const inside = controls.map(([, one]) => one.node);
  const node = title ? h("fieldset", { class: "location" }, h("legend", null, title), inside) : h("div", { class: "act" }, inside);
  const read = () => Object.fromEntries(controls.flatMap(([name, one]) => {
    const found = one.read();
    return found === undefined ? [] : [[name, found]];
  }));
  return { node, read };
};

/**
 * Objects that can be added and removed. Their paths are counted anew with each, as the server counts them.
 * @param {any} root
 * @param {any} part
 * @param {string} path
 * @param {any[]} values
 * @param {More} more
 * @param {string} title
 * @returns {Control}
 */
const list = (root, part, path, values, more, title) => {
  /** @type {Control[]} */
  let parts = [];
  const place = h("div", { class: "locations" });
  const count = () => parts.forEach(({ node }, number) => {
    for (const one of /** @type {NodeListOf<HTMLElement>} */ (node.querySelectorAll("[data-field]")))
      one.dataset.field = `${path}[${number}]${one.dataset.field?.slice(one.dataset.field.indexOf("]", path.length) + 1)}`;
    const remove = node.querySelector(":scope > .remove");
    remove?.setAttribute("aria-label", `Remove ${number + 1} of ${title.toLowerCase()}`);
  });
  /** @param {any} value */
  const add = (value) => {
    const made = group(root, part, `${path}[${parts.length}]`, value, more, title);
    made.node.append(button("Remove", () => {
      parts = parts.filter((one) => one !== made);
      made.node.remove();
      count();
    }, { class: "remove" }));
    parts.push(made);
    place.append(made.node);
    count();
    return made;
  };
  values.forEach(add);
  const more_ = button(`Add to ${title.toLowerCase()}`, () => add(undefined).node.querySelector("input")?.focus(), { class: "add", "data-list": path });
  return { node: h("div", { class: "parts" }, h("h3", null, title), place, more_), read: () => parts.map((one) => one.read()) };
};
