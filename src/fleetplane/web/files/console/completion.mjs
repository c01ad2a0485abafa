// What may come next in a selector, from what there is: keys, what may stand between, values. Pure.

/** @typedef {{text: string, insert: string}} Suggestion `insert`: what the whole field holds then */

const MOST = 12;

/**
 * Labels by their values.
 * @param {Iterable<Record<string, string | string[]>>} all
 * @returns {Map<string, Set<string>>}
 */
export const factsOf = (all) => {
  /** @type {Map<string, Set<string>>} */
  const found = new Map();
  for (const labels of all)
    for (const [key, value] of Object.entries(labels)) {
      if (!found.has(key)) found.set(key, new Set());
      for (const one of [value].flat()) if (one) found.get(key)?.add(one);
    }
  return found;
};

/**
 * What the requirement that is being written may become; nothing where it is whole.
 * @param {string} text up to where somebody writes
 * @param {Map<string, Set<string>>} facts
 * @param {string[]} [words] that stand for themselves, alone
 * @param {string} [between] characters that stand between requirements
 * @returns {Suggestion[]}
 */
export const suggestions = (text, facts, words = [], between = ",") => {
  let [start, depth] = [0, 0];
  [...text].forEach((letter, place) => {
    depth += letter === "(" ? 1 : letter === ")" ? -1 : 0;
    if (!depth && between.includes(letter)) start = place + 1;
  });
  const [before, part] = [text.slice(0, start), text.slice(start)];
  const space = /^\s*/.exec(part)?.[0] ?? "";
  const own = part.slice(space.length);
  const of = (/** @type {string[]} */ found) => found.slice(0, MOST).map((one) => ({ text: one, insert: before + space + one }));
  const set = /^(\S+\s+(?:in|notin)\s*\((?:[^(),]*,)*\s*)([^(),]*)$/.exec(own);
  const compared = /^([^=!\s]+\s*(?:==|!=|=)\s*)(\S*)$/.exec(own);
  const [head, last] = set?.slice(1) ?? compared?.slice(1) ?? ["", own];
  if (set || compared) {
    const key = /^[^=!\s]+/.exec(head)?.[0] ?? "";
    const fits = [...(facts.get(key) ?? [])].filter((one) => one.startsWith(last) && one !== last).sort();
    return of(fits.map((one) => head + one));
  }
  const negated = last.startsWith("!") ? "!" : "";
  const name = last.slice(negated.length);
  const keys = [...facts.keys()].sort();
  if (keys.includes(name) && !negated) return of([`${name}=`, `${name}!=`, `${name} in (`, `${name} notin (`]);
  const alone = start ? [] : words.filter((one) => one.startsWith(own) && one !== own);
  return of([...alone, ...keys.filter((key) => key.startsWith(name) && (key !== name)).map((key) => negated + key)]);
};
