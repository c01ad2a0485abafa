// Small charts over time, drawn as SVG: gaps are gaps, and what is drawn is told in words as well. Charts that lie in one
// element share a cursor: pointing at a moment in one of them tells the values of all of them.

const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 320;
const HEIGHT = 72;
const STROKES = 4; // As many kinds of line as the style sheet has, by colour and by dashes.

/**
 * @typedef {{at: number, value: number}} Point
 * @typedef {{name: string, points: Point[]}} Series
 * @typedef {{stepMs: number, from: number, span: number, series: Series[], unit: string, cursor: SVGElement, told: HTMLElement}} Drawn
 * @typedef {{stepMs: number, most?: number, threshold?: number, from?: number, to?: number}} How `most`: the top of the scale
 */

/** @type {WeakMap<Element, Drawn>} */
const drawn = new WeakMap();

/**
 * @param {string} tag
 * @param {Record<string, string>} props
 * @param {...(Node | string)} children
 */
const s = (tag, props, ...children) => {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(props)) node.setAttribute(name, value);
  node.append(...children);
  return node;
};

/**
 * The runs of points without a gap: one is longer than three steps.
 * @param {Point[]} points
 * @param {number} stepMs
 * @returns {Point[][]}
 */
export const runsOf = (points, stepMs) => {
  /** @type {Point[][]} */
  const runs = [];
  points.forEach((point, place) => {
    if (!place || point.at - points[place - 1].at > 3 * stepMs) runs.push([]);
    runs[runs.length - 1].push(point);
  });
  return runs;
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
 * @param {Series[]} series
 * @param {How} how
 */
export const chartOf = (title, unit, series, { stepMs, most, threshold, from, to }) => {
  const figure = document.createElement("figure");
  const caption = document.createElement("figcaption");
  const values = series.flatMap((one) => one.points.map((point) => point.value));
  const told = values.length ? series.map((one) => sentence(one, unit)).join("; ") : "nothing measured yet";
  caption.textContent = `${title}: ${told}`;
  figure.append(caption);
  if (!values.length) return figure;
  const high = values.reduce((one, other) => Math.max(one, other), 0);
  const top = most ?? (high || 1);
  const moments = series.flatMap((one) => one.points.map((point) => point.at));
  const begins = from ?? moments.reduce((one, other) => Math.min(one, other));
  const span = Math.max(1, (to ?? moments.reduce((one, other) => Math.max(one, other))) - begins);
  const x = (/** @type {number} */ at) => ((at - begins) / span) * WIDTH;
  const y = (/** @type {number} */ value) => HEIGHT - 2 - (Math.min(value, top) / top) * (HEIGHT - 4);
  const lines = series.flatMap((one, number) => runsOf(one.points, stepMs).map((run) =>
    run.length === 1
      ? s("circle", { cx: x(run[0].at).toFixed(1), cy: y(run[0].value).toFixed(1), r: "2", class: `dot stroke-${number % STROKES}` })
      : s("polyline", { points: run.map((point) => `${x(point.at).toFixed(1)},${y(point.value).toFixed(1)}`).join(" "), class: `line stroke-${number % STROKES}` })));
  const cursor = s("line", { x1: "0", x2: "0", y1: "0", y2: String(HEIGHT), class: "cursor", visibility: "hidden" });
  figure.append(s("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title}, ${told}`, preserveAspectRatio: "none" },
    s("line", { x1: "0", x2: String(WIDTH), y1: String(HEIGHT - 2), y2: String(HEIGHT - 2), class: "axis" }),
    ...(threshold === undefined ? [] : [s("line", { x1: "0", x2: String(WIDTH), y1: y(threshold).toFixed(1), y2: y(threshold).toFixed(1), class: "threshold" })]),
    ...lines, cursor));
  const at = document.createElement("p");
  at.className = "at";
  figure.append(at);
  drawn.set(figure, { stepMs, from: begins, span, series, unit, cursor, told: at });
  return figure;
};

/**
 * Let the charts of an element share a cursor.
 * @param {HTMLElement} node
 */
export const shareCursor = (node) => {
  node.addEventListener("pointermove", (event) => {
    const svg = /** @type {Element} */ (event.target).closest("svg");
    const figure = svg?.closest("figure");
    const one = figure && drawn.get(figure);
    if (!svg || !one) return hideCursor(node);
    const box = svg.getBoundingClientRect();
    showCursor(node, one.from + ((event.clientX - box.left) / Math.max(1, box.width)) * one.span);
  });
  node.addEventListener("pointerleave", () => hideCursor(node));
  return node;
};

/**
 * @param {Element} node
 * @param {number} at
 */
const showCursor = (node, at) => {
  for (const figure of node.querySelectorAll("figure")) {
    const one = drawn.get(figure);
    if (!one) continue;
    const place = (((at - one.from) / one.span) * WIDTH).toFixed(1);
    for (const name of ["x1", "x2"]) one.cursor.setAttribute(name, place);
    one.cursor.setAttribute("visibility", "visible");
    const said = one.series.map(({ name, points }) => {
      const value = valueAt(points, at, one.stepMs);
      return `${name ? `${name} ` : ""}${value === null ? "nothing" : shown(value) + one.unit}`;
    });
    one.told.textContent = `${new Date(at).toLocaleTimeString()}: ${said.join(", ")}`;
  }
};

/** @param {Element} node */
const hideCursor = (node) => {
  for (const figure of node.querySelectorAll("figure")) {
    const one = drawn.get(figure);
    one?.cursor.setAttribute("visibility", "hidden");
    if (one) one.told.textContent = "";
  }
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
