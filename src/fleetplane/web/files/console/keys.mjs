// Keys of pages that have no keys of their own: through the rows of their tables and grids, to their first field, and back.

const ROWS = "tbody tr, .grid > li, .pins > li, .counts > li, .attention > li, article.group";

/**
 * @param {HTMLElement} root
 * @param {string} key
 * @param {() => void} back
 * @returns {boolean} whether it was one of them
 */
export const pageKey = (root, key, back) => {
  if (key === "/") {
    const field = /** @type {HTMLElement | null} */ (root.querySelector(".filters input:not([type=checkbox]), .filters select"));
    field?.focus();
    return field !== null;
  }
  if (key === "Escape") {
    back();
    return true;
  }
  if (key !== "j" && key !== "k") return false;
  const rows = /** @type {HTMLElement[]} */ ([...root.querySelectorAll(ROWS)]).filter((one) => one.offsetParent !== null);
  if (!rows.length) return false;
  const at = rows.findIndex((one) => one.contains(document.activeElement));
  const row = rows[at < 0 ? 0 : Math.max(0, Math.min(rows.length - 1, at + (key === "j" ? 1 : -1)))];
  const target = /** @type {HTMLElement} */ (row.querySelector("a[href], button:not([disabled])") ?? row);
  if (target === row) row.tabIndex = -1;
  target.focus();
  row.scrollIntoView({ block: "nearest" });
  return true;
};
