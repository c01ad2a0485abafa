// How a chart gets onto its canvas: uPlot, loaded when the first chart is shown, with the colours of the style sheet. A plot
// is made when its element has a width, follows it, and is gone when the element is.

/**
 * @typedef {import("../libraries/uPlot.esm.js")} Plot
 * @typedef {typeof import("../libraries/uPlot.esm.js")} Library
 * @typedef {{data: [number[], ...import("./chart.mjs").Column[]], from: number, to: number, scale: [number, number], threshold?: number, unit: string, shown: (value: number) => string, tell: (at: number | null) => void}} Drawing
 */

const HEIGHT = 120;
const FONT = "11px system-ui, sans-serif";
const DAY_MS = 86_400_000;
/** Colour, dashes and width of each kind of line: whoever sees no colours tells them apart as well. */
const LINES = [
  { token: "--accent", dash: [], width: 1.5 },
  { token: "--bad", dash: [6, 3], width: 1.5 },
  { token: "--wait", dash: [2, 3], width: 1.5 },
  { token: "--good", dash: [], width: 3 },
];
const AWAY_PX = -10; // Where uPlot shows no cursor.

/** @type {Promise<Library> | null} */
let loading = null;

/** The library, or the reason why there is none; who asks later tries again. */
export const library = () =>
  (loading ??= load().catch((error) => {
    loading = null;
    throw error;
  }));

const load = async () => {
  try {
    const [found] = await Promise.all([import("../libraries/uPlot.esm.js"), styled()]);
    return found.default;
  } catch {
    throw new Error(await reason());
  }
};

/** @param {string} name */
const place = (name) => new URL(`../libraries/${name}`, import.meta.url).href;

/** @type {HTMLLinkElement | null} */
let style = null;

/** @returns {Promise<void>} */
const styled = () =>
  new Promise((done, failed) => {
    if (style) return done();
    const link = document.createElement("link");
    link.rel = "stylesheet";
    link.href = place("uPlot.min.css");
    link.addEventListener("load", () => { style = link; done(); });
    link.addEventListener("error", () => { link.remove(); failed(new Error()); });
    document.head.prepend(link); // the console's own rules come after it
  });

const reason = async () => {
  const answer = await fetch(place("uPlot.esm.js"), { method: "HEAD" }).catch(() => null);
  return answer?.status === 404
    ? "This server was built without the library that draws charts; on a checkout, tools/setup.sh console gets it."
    : "The library that draws charts could not be loaded.";
};

/** @param {string} name */
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** @type {Map<Element, Plot>} */
const drawn = new Map();
/** @type {WeakMap<Element, (width: number) => Plot>} */
const makers = new WeakMap();
/** @type {ResizeObserver | null} */
let sizes = null;

const observer = () => {
  if (sizes) return sizes;
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { for (const one of drawn.values()) one.redraw(); });
  sizes = new ResizeObserver((entries) => { for (const one of entries) fit(one.target, Math.floor(one.contentRect.width)); });
  return sizes;
};

/**
 * @param {Element} node
 * @param {number} width
 */
const fit = (node, width) => {
  const known = drawn.get(node);
  if (node.isConnected && width) {
    if (!known) drawn.set(node, /** @type {(width: number) => Plot} */ (makers.get(node))(width));
    else if (known.width !== width) known.setSize({ width, height: HEIGHT });
    return;
  }
  known?.destroy();
  drawn.delete(node);
  if (!node.isConnected) sizes?.unobserve(node);
};

/**
 * Draw into an element, now and whenever its size or the colours change.
 * @param {Library} uPlot
 * @param {HTMLElement} node
 * @param {Drawing} drawing
 */
export const draw = (uPlot, node, drawing) => {
  makers.set(node, (width) => new uPlot(optionsOf(node, width, drawing), /** @type {any} */ (drawing.data), node));
  node.addEventListener("keydown", (event) => {
    const plot = drawn.get(node);
    const at = plot ? momentFor(plot, event.key) : null;
    if (at === null) return;
    event.preventDefault();
    pointed(uPlot, node, at);
  });
  node.addEventListener("blur", () => pointed(uPlot, node, null));
  observer().observe(node);
};

/** @param {Element} node */
const cursorOf = (node) => /** @type {HTMLElement | null} */ (node.closest("[data-cursor]"))?.dataset.cursor;

/**
 * Put the cursor of a chart, and of those that share it, at a moment; null takes it away.
 * @param {Library} uPlot
 * @param {Element} node
 * @param {number | null} at
 */
const pointed = (uPlot, node, at) => {
  const key = cursorOf(node);
  const own = drawn.get(node);
  for (const plot of key ? uPlot.sync(key).plots : own ? [own] : [])
    plot.setCursor({ left: at === null ? AWAY_PX : plot.valToPos(at, "x"), top: at === null ? AWAY_PX : 0 }, true);
};

/**
 * Where a key leads from where the cursor is: to a moment at which something was measured.
 * @param {Plot} plot
 * @param {string} key
 * @returns {number | null}
 */
const momentFor = (plot, key) => {
  const [all, ...columns] = plot.data;
  const moments = [...all].filter((_, number) => columns.some((one) => typeof one[number] === "number"));
  const left = plot.cursor.left ?? -1;
  const at = left < 0 ? Infinity : plot.posToVal(left, "x");
  const near = at === Infinity ? moments.length : nearest(moments, at);
  const wanted = { ArrowLeft: near - 1, ArrowRight: near + 1, Home: 0, End: moments.length - 1 }[key];
  return wanted === undefined ? null : moments[Math.min(Math.max(wanted, 0), moments.length - 1)];
};

/**
 * @param {number[]} moments
 * @param {number} at
 */
const nearest = (moments, at) => moments.reduce((best, one, number) => (Math.abs(one - at) < Math.abs(moments[best] - at) ? number : best), 0);

/**
 * Points with a gap on both sides, of which no line is made.
 * @param {ArrayLike<number | null | undefined>} column
 * @returns {number[]}
 */
export const aloneOf = (column) => {
  const known = Array.from(column, (value, number) => ({ value, number })).filter((one) => one.value !== undefined);
  return known.filter((one, place) => one.value !== null && (known[place - 1]?.value ?? null) === null && (known[place + 1]?.value ?? null) === null).map((one) => one.number);
};

/**
 * @param {HTMLElement} node
 * @param {number} width
 * @param {Drawing} drawing
 * @returns {import("../libraries/uPlot.esm.js").Options}
 */
const optionsOf = (node, width, { data, from, to, scale, threshold, shown, tell }) => {
  const key = cursorOf(node);
  const { at } = node.dataset; // where the cursor of a chart was that this one takes the place of
  const quiet = () => colour("--quiet");
  const faint = () => colour("--line");
  /** @type {Intl.DateTimeFormatOptions} */
  const words = to - from > 2 * DAY_MS ? { month: "short", day: "numeric" } : { hour: "2-digit", minute: "2-digit", hourCycle: "h23" };
  return {
    width, height: HEIGHT, ms: 1, padding: [8, 16, 0, 0], legend: { show: false },
    cursor: { y: false, drag: { x: false, y: false, setScale: false }, points: { size: 7 }, ...(key ? { sync: { key, scales: ["x", null] } } : {}) },
    scales: { x: { range: [from, to] }, y: { range: scale } },
    axes: [
      { stroke: quiet, font: FONT, size: 22, gap: 4, space: 64, grid: { show: false }, ticks: { stroke: faint, size: 4, width: 1 }, values: (_, splits) => splits.map((one) => new Date(one).toLocaleString([], words)) },
      { stroke: quiet, font: FONT, size: 48, gap: 4, space: 28, grid: { stroke: faint, width: 1 }, ticks: { show: false }, values: (_, splits) => splits.map(splits.every(Number.isInteger) ? String : shown) },
    ],
    series: [{}, ...data.slice(1).map((column, number) => {
      const { token, dash, width } = LINES[number % LINES.length];
      const stroke = () => colour(token);
      return { stroke, dash, width, points: { show: false, size: 4, stroke, fill: stroke, filter: () => aloneOf(/** @type {any} */ (column)) } };
    })],
    hooks: {
      ready: [(plot) => { if (at) plot.setCursor({ left: plot.valToPos(Number(at), "x"), top: 0 }, true); }],
      draw: [(plot) => { if (threshold !== undefined) ruled(plot, threshold); }],
      setCursor: [(plot) => { const left = plot.cursor.left ?? -1; tell(left < 0 ? null : plot.posToVal(left, "x")); }],
    },
  };
};

/**
 * @param {Plot} plot
 * @param {number} threshold
 */
const ruled = ({ ctx, bbox, valToPos }, threshold) => {
  const y = Math.round(valToPos(threshold, "y", true)) + 0.5;
  ctx.save();
  ctx.strokeStyle = colour("--bad");
  ctx.lineWidth = devicePixelRatio;
  ctx.setLineDash([4 * devicePixelRatio, 4 * devicePixelRatio]);
  ctx.beginPath();
  ctx.moveTo(bbox.left, y);
  ctx.lineTo(bbox.left + bbox.width, y);
  ctx.stroke();
  ctx.restore();
};
