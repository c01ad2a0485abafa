// JSON with the line of every value, so that what a server refuses can be shown where it was written. Pure.

/** A text that is no JSON, with the line that says so. */
export class LineError extends Error {
  /**
   * @param {number} line
   * @param {string} message
   */
  constructor(line, message) {
    super(message);
    this.line = line;
  }
}

const STRING = /"(?:[^"\\\u0000-\u001f]|\\.)*"/y;
const NUMBER = /-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?/y;
const WORD = /true|false|null/y;
const SPACE = /[ \t\r\n]*/y;
const DEPTH = 100;

/**
 * The value of a text, and the line of each part by its path, such as `locations.0.path`; raises `LineError`.
 * @param {string} text
 * @returns {{value: any, lines: Map<string, number>}}
 */
export const parseLines = (text) => {
  let at = 0;
  /** @type {Map<string, number>} */
  const lines = new Map();
  const line = () => text.slice(0, at).split("\n").length;
  /** @param {RegExp} pattern */
  const take = (pattern) => {
    pattern.lastIndex = at;
    const found = pattern.exec(text);
    if (!found) return null;
    at = pattern.lastIndex;
    return found[0];
  };
  /** @param {string} wanted */
  const expect = (wanted) => {
    take(SPACE);
    if (text[at] !== wanted) throw new LineError(line(), `expected ${wanted}, not ${at < text.length ? text[at] : "the end"}`);
    at += 1;
  };
  const next = () => { take(SPACE); return text[at]; };
  const string = () => {
    const found = take(STRING);
    if (found === null) throw new LineError(line(), "expected a text in double quotes");
    try {
      return JSON.parse(found);
    } catch {
      throw new LineError(line(), `${found} has an escape that JSON does not know`);
    }
  };

  /**
   * @param {string} path
   * @param {number} depth
   * @returns {any}
   */
  const value = (path, depth) => {
    const first = next();
    if (!lines.has(path)) lines.set(path, line());
    if (depth > DEPTH) throw new LineError(line(), "is nested too deeply");
    if (first === "{") return object(path, depth);
    if (first === "[") return list(path, depth);
    if (first === '"') return string();
    const plain = take(NUMBER) ?? take(WORD);
    if (plain === null) throw new LineError(line(), first === undefined ? "the text ends too early" : `did not expect ${first}`);
    return JSON.parse(plain);
  };

  /**
   * @param {string} path
   * @param {number} depth
   */
  const object = (path, depth) => {
    /** @type {[string, any][]} */
    const found = [];
    expect("{");
    if (next() === "}") { at += 1; return {}; }
    for (;;) {
      next();
      const where = line();
      const key = string();
      const below = path ? `${path}.${key}` : key;
      if (lines.has(below)) throw new LineError(where, `${key} is there twice`);
      lines.set(below, where);
      expect(":");
      found.push([key, value(below, depth + 1)]);
      if (next() === "}") { at += 1; return Object.fromEntries(found); }
      expect(",");
    }
  };

  /**
   * @param {string} path
   * @param {number} depth
   */
  const list = (path, depth) => {
    /** @type {any[]} */
    const found = [];
    expect("[");
    if (next() === "]") { at += 1; return found; }
    for (;;) {
      found.push(value(`${path ? `${path}.` : ""}${found.length}`, depth + 1));
      if (next() === "]") { at += 1; return found; }
      expect(",");
    }
  };

  const found = value("", 0);
  if (next() !== undefined) throw new LineError(line(), `did not expect ${text[at]} after the end`);
  return { value: found, lines };
};

/**
 * The line of a field as a server names it, such as `objects[0].spec.locations[1].path`; of what is around it where it is not there.
 * @param {Map<string, number>} lines of a specification
 * @param {string} field
 */
export const lineOfField = (lines, field) => {
  const parts = field.replace(/\[(\d+)\]/g, ".$1").replace(/^objects\.\d+\./, "").replace(/^spec\.?/, "").split(".").filter(Boolean);
  for (let count = parts.length; count >= 0; count -= 1) {
    const found = lines.get(parts.slice(0, count).join("."));
    if (found) return found;
  }
  return 1;
};
