// Objects as YAML, for reading and copying. Pure.

const PLAIN = /^[A-Za-z_/][\w ./@%+-]*$/;
const WORDS = new Set(["true", "false", "null", "yes", "no", "on", "off", "y", "n", "~"]);

/**
 * @param {any} value
 * @returns {string}
 */
const scalar = (value) => {
  if (typeof value !== "string") return JSON.stringify(value ?? null);
  return PLAIN.test(value) && !value.endsWith(" ") && !WORDS.has(value.toLowerCase()) ? value : JSON.stringify(value);
};

/**
 * @param {any} value
 * @param {string} [indent]
 * @returns {string}
 */
export const yaml = (value, indent = "") => {
  if (Array.isArray(value))
    return value.map((one) => `${indent}-${nested(one, `${indent}  `).replace(/^\n\s*/, " ")}`).join("");
  return Object.entries(value).map(([key, inner]) => `${indent}${scalar(key)}:${nested(inner, `${indent}  `)}`).join("");
};

/**
 * @param {any} value
 * @param {string} indent
 */
const nested = (value, indent) => {
  if (value === null || typeof value !== "object") return ` ${scalar(value)}\n`;
  if (!Object.keys(value).length) return Array.isArray(value) ? " []\n" : " {}\n";
  return `\n${yaml(value, indent)}`;
};
