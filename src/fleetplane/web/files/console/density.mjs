// How close rows stand: roomy, or dense for who looks at many. Kept in this browser.

const KEY = "console-density";
const DENSE = "dense";

export const isDense = () => document.documentElement.dataset.density === DENSE;

/** @param {boolean} dense */
const show = (dense) => {
  if (dense) document.documentElement.dataset.density = DENSE;
  else delete document.documentElement.dataset.density;
};

/** As it was left. */
export const restoreDensity = () => show(localStorage.getItem(KEY) === DENSE);

export const toggleDensity = () => {
  const dense = !isDense();
  show(dense);
  if (dense) localStorage.setItem(KEY, DENSE);
  else localStorage.removeItem(KEY);
  dispatchEvent(new Event("resize")); // lists are as high as their rows
  return dense;
};
