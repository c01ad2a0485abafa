// What every live page needs: server-sent events out of text, ages, and when to try again. Pure.

const RETRY_FIRST_MS = 500;
const RETRY_LIMIT_MS = 30_000;

// Server-sent events out of pieces of text, wherever they were cut.
export class EventReader {
  #rest = "";
  #kind = "";
  /** @type {string[]} */
  #data = [];
  #mark = "";

  /** @param {string} text */
  take(text) {
    const lines = (this.#rest + text).split("\n");
    this.#rest = lines.pop() ?? "";
    return lines.map((line) => this.#line(line.replace(/\r$/, ""))).filter((event) => event !== null);
  }

  /** @param {string} line */
  #line(line) {
    if (line === "") return this.#finish();
    const colon = line.indexOf(":");
    if (colon === 0) return null; // only there to show that somebody is
    const name = colon < 0 ? line : line.slice(0, colon);
    const value = colon < 0 ? "" : line.slice(colon + 1).replace(/^ /, "");
    if (name === "event") this.#kind = value;
    else if (name === "data") this.#data.push(value);
    else if (name === "id") this.#mark = value;
    return null;
  }

  #finish() {
    const event = this.#data.length
      ? { kind: this.#kind, data: JSON.parse(this.#data.join("\n")), mark: this.#mark }
      : null;
    [this.#kind, this.#data, this.#mark] = ["", [], ""];
    return event;
  }
}

/**
 * How long ago, in the two largest units.
 * @param {string} since
 * @param {number} nowMs
 */
export const age = (since, nowMs) => {
  const seconds = Math.max(0, Math.floor((nowMs - Date.parse(since)) / 1000));
  if (!Number.isFinite(seconds)) return "";
  /** @type {[string, number][]} */
  const units = [["d", 86_400], ["h", 3600], ["m", 60], ["s", 1]];
  const first = units.findIndex(([, size]) => seconds >= size);
  if (first < 0) return "0s";
  const [name, size] = units[first];
  const [nextName, nextSize] = units[first + 1] || ["", 0];
  const rest = nextSize ? Math.floor((seconds % size) / nextSize) : 0;
  return `${Math.floor(seconds / size)}${name}${rest ? ` ${rest}${nextName}` : ""}`;
};

/**
 * How long to wait before the next attempt: longer each time, and not all pages at once.
 * @param {number} attempt
 * @param {number} random
 */
export const retryMs = (attempt, random) =>
  Math.min(RETRY_LIMIT_MS, RETRY_FIRST_MS * 2 ** Math.min(attempt, 16)) * (0.5 + random / 2);
