// Small charts over time: gaps are gaps, thresholds are drawn, and what is drawn is told in words as well. Charts that lie
// in one element share a cursor: pointing at a moment in one of them, or going there with the arrow keys, tells the values
// of all of them. Where the library that draws is missing, the numbers are shown instead.

import { h, put } from "./dom.mjs";
import { tableOf } from "./parts.mjs";
import { draw, library } from "./plot.mjs";

const GAP_STEPS = 3; // Two reports may be lost before a line is cut.
const NUMBERS_SHOWN = 60; // Of the newest, where a table takes the chart's place.
const STROKES = 4; // As many kinds of line as `plot.mjs` draws.

/**
 * @typedef {{at: number, value: number}} Point
 * @typedef {{name: string, points: Point[]}} Series
 * @typedef {{stepMs: number, most?: number, threshold?: number, from?: number, to?: number}} How `most`: the top of the scale
 * @typedef {(number | null | undefined)[]} Column values by moment: null is a gap, undefined nothing of this series
 */

/**
 * Moments of all series, and the values of each at them; a null lies in every gap.
 * @param {Series[]} series
 * @param {number} stepMs
 * @returns {[number[], ...Column[]]}
 */
export const alignedOf = (series, stepMs) => {
  /** @type {Set<number>} */
  const moments = new Set();
  const columns = series.map(({ points }) => {
    /** @type {Map<number, number | null>} */
    const values = new Map();
    points.forEach(({ at, value }, place) => {
      const before = place ? points[place - 1].at : at;
      if (at - before > GAP_STEPS * stepMs) values.set((before + at) / 2, null);
      values.set(at, value);
    });
    for (const at of values.keys()) moments.add(at);
    return values;
  });
  const sorted = [...moments].sort((one, other) => one - other);
  return [sorted, ...columns.map((values) => sorted.map((at) => values.get(at)))];
};

/**
 * What a series says at a moment: its nearest point, if there is one within a step.
 * @param {Point[]} points
 * @param {number} at
 * @param {number} stepMs
 * @returns {number | null}
 */
export const valueAt = (points, at, stepMs) => {
  /** @type {Point | null} */
  let best = null;
  for (const one of points) if (!best || Math.abs(one.at - at) < Math.abs(best.at - at)) best = one;
  return best && Math.abs(best.at - at) <= stepMs ? best.value : null;
};

/**
 * The lowest and the highest value that a chart has room for: every value, zero, and the threshold.
 * @param {number[]} values
 * @param {How} how
 * @returns {[number, number]}
 */
export const scaleOf = (values, { most, threshold }) => {
  const high = values.reduce((one, other) => Math.max(one, other), Math.max(most ?? 0, threshold ?? 0));
  return [values.reduce((one, other) => Math.min(one, other), 0), high || 1];
};

/**
 * @param {string} title
 * @param {string} unit
 * @param {Point[]} points in order of time
 * @param {How} how
 */
export const chart = (title, unit, points, how) => chartOf(title, unit, [{ name: "", points }], how);

/**
 * A chart of one or more series.
 * @param {string} title
 * @param {string} unit
 * @param {Series[]} given
 * @param {How} how
 */
export const chartOf = (title, unit, given, how) => {
  const series = given.map(({ name, points }) => ({ name, points: points.filter((one) => Number.isFinite(one.at) && Number.isFinite(one.value)) }));
  const values = series.flatMap((one) => one.points.map((point) => point.value));
  const caption = h("figcaption", null, `${title}: `);
  const figure = h("figure", null, caption);
  if (!values.length) {
    caption.append("nothing measured yet");
    return figure;
  }
  series.forEach((one, number) =>
    caption.append(number ? "; " : "", ...(series.length > 1 ? [h("span", { class: `key stroke-${number % STROKES}` })] : []), sentence(one, unit)));
  const moments = series.flatMap((one) => one.points.map((point) => point.at));
  const from = how.from ?? moments.reduce((one, other) => Math.min(one, other));
  const to = Math.max(from + 1, how.to ?? moments.reduce((one, other) => Math.max(one, other)));
  const told = h("p", { class: "at" });
  const plot = h("div", { class: "plot", role: "slider", tabindex: "0", "aria-label": caption.textContent, "aria-orientation": "horizontal", "aria-valuemin": from, "aria-valuemax": to, "aria-valuenow": to, "aria-valuetext": series.map((one) => sentence(one, unit)).join("; ") });
  figure.append(plot, told);
  /** @param {number | null} at */
  const tell = (at) => {
    put(told, at === null ? "" : `${new Date(at).toLocaleTimeString()}: ${series.map(({ name, points }) => {
      const value = valueAt(points, at, how.stepMs);
      return `${name ? `${name} ` : ""}${value === null ? "nothing" : shown(value) + unit}`;
    }).join(", ")}`);
    if (at === null) {
      delete plot.dataset.at;
      return;
    }
    plot.dataset.at = String(at);
    plot.setAttribute("aria-valuenow", String(Math.round(at)));
    plot.setAttribute("aria-valuetext", told.textContent ?? "");
  };
  library().then(
    (uPlot) => draw(uPlot, plot, { data: alignedOf(series, how.stepMs), from, to, scale: scaleOf(values, how), threshold: how.threshold, unit, shown, tell }),
    (error) => figure.replaceChildren(caption, ...numbersOf(title, unit, series, error)),
  );
  return figure;
};

/**
 * Put new charts in the place of those of before; focus and cursor stay where they are.
 * @param {HTMLElement} node
 * @param {Node[]} found
 */
export const renewCharts = (node, found) => {
  const plots = () => /** @type {NodeListOf<HTMLElement>} */ (node.querySelectorAll(".plot"));
  const before = [...plots()];
  const focused = before.findIndex((one) => one === document.activeElement);
  const at = before.find((one) => one.dataset.at)?.dataset.at;
  node.replaceChildren(...found);
  if (at) for (const one of plots()) one.dataset.at = at;
  if (focused >= 0) plots()[focused]?.focus({ preventScroll: true });
};

let groups = 0;

/**
 * Let the charts of an element share a cursor.
 * @param {HTMLElement} node
 */
export const shareCursor = (node) => {
  node.dataset.cursor = `cursor-${(groups += 1)}`;
  return node;
};

/**
 * The newest values as a table, in the place of a chart that cannot be drawn.
 * @param {string} title
 * @param {string} unit
 * @param {Series[]} series
 * @param {Error} error why it cannot
 */
const numbersOf = (title, unit, series, error) => {
  const [moments, ...columns] = alignedOf(series, Infinity);
  const table = tableOf(`${title}, as numbers`, (/** @type {number} */ place) => String(moments[place]), [
    { title: "Time", text: (place) => new Date(moments[place]).toLocaleTimeString() },
    ...series.map(({ name }, number) => ({ title: name || title, text: (/** @type {number} */ place) => {
      const value = columns[number][place];
      return value === null || value === undefined ? "" : shown(value) + unit;
    } })),
  ]);
  table.show(moments.map((_, place) => moments.length - 1 - place).slice(0, NUMBERS_SHOWN));
  table.node.classList.add("numbers-instead");
  return [h("p", { class: "empty" }, `${error.message} Here are the numbers:`), table.node];
};

/**
 * @param {Series} series
 * @param {string} unit
 */
const sentence = ({ name, points }, unit) => {
  const said = name ? `${name} ` : "";
  if (!points.length) return `${said}nothing`;
  const values = points.map((one) => one.value);
  const low = values.reduce((one, other) => Math.min(one, other));
  const high = values.reduce((one, other) => Math.max(one, other));
  return `${said}now ${shown(values[values.length - 1])}${unit}, ${shown(low)} to ${shown(high)}${unit}`;
};

/** @param {number} value */
const shown = (value) => (Math.abs(value) >= 100 ? value.toFixed(0) : value.toFixed(1));
