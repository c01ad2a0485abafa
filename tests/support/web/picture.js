// The page as it is drawn, as SVG: boxes with a background or a border, charts, and every line of text where it stands.
(() => {
  const escaped = (text) => text.replace(/[&<>"]/g, (one) => `&#${one.charCodeAt(0)};`);
  const number = (value) => String(Math.round(value * 10) / 10);
  const parts = [];
  const shows = (box) => box.width > 0 && box.height > 0 && box.bottom > 0 && box.top < innerHeight && box.right > 0 && box.left < innerWidth;
  const seen = (node) => node.checkVisibility({ visibilityProperty: true, opacityProperty: true });
  const clips = (node) => {
    let box = { left: 0, top: 0, right: innerWidth, bottom: innerHeight };
    for (let one = node; one; one = one.parentElement) {
      if (one !== node && getComputedStyle(one).overflowX === "visible" && getComputedStyle(one).overflowY === "visible") continue;
      const own = one.getBoundingClientRect();
      if (one === node) continue;
      box = { left: Math.max(box.left, own.left), top: Math.max(box.top, own.top), right: Math.min(box.right, own.right), bottom: Math.min(box.bottom, own.bottom) };
    }
    return box;
  };
  for (const node of document.querySelectorAll("body, body *")) {
    if (!seen(node)) continue;
    const style = getComputedStyle(node);
    const box = node.getBoundingClientRect();
    if (!shows(box)) continue;
    const clip = clips(node);
    const [left, top, right, bottom] = [Math.max(box.left, clip.left), Math.max(box.top, clip.top), Math.min(box.right, clip.right), Math.min(box.bottom, clip.bottom)];
    if (right <= left || bottom <= top) continue;
    const bordered = parseFloat(style.borderTopWidth) > 0 && parseFloat(style.borderLeftWidth) > 0;
    const filled = style.backgroundColor !== "rgba(0, 0, 0, 0)";
    if (filled || bordered)
      parts.push(`<rect x="${number(left)}" y="${number(top)}" width="${number(right - left)}" height="${number(bottom - top)}" rx="${number(parseFloat(style.borderTopLeftRadius) || 0)}" fill="${filled ? style.backgroundColor : "none"}"${bordered ? ` stroke="${style.borderTopColor}"` : ""}/>`);
    else if (parseFloat(style.borderBottomWidth) > 0)
      parts.push(`<line x1="${number(left)}" x2="${number(right)}" y1="${number(bottom)}" y2="${number(bottom)}" stroke="${style.borderBottomColor}"/>`);
    if (node instanceof HTMLCanvasElement)
      parts.push(`<image x="${number(box.left)}" y="${number(box.top)}" width="${number(box.width)}" height="${number(box.height)}" href="${node.toDataURL()}"/>`);
    const texts = [...node.childNodes].filter((one) => one.nodeType === Node.TEXT_NODE && one.data.trim());
    const lines = [];
    for (const text of texts)
      for (const word of text.data.matchAll(/\S+/g)) {
        const range = document.createRange();
        range.setStart(text, word.index);
        range.setEnd(text, word.index + word[0].length);
        const where = range.getBoundingClientRect();
        const last = lines[lines.length - 1];
        if (last && Math.abs(last.top - where.top) < 2) Object.assign(last, { words: `${last.words} ${word[0]}`, right: where.right });
        else lines.push({ words: word[0], left: where.left, right: where.right, top: where.top, bottom: where.bottom });
      }
    if (node instanceof HTMLInputElement && (node.value || node.placeholder) && node.type !== "checkbox")
      lines.push({ words: node.value || node.placeholder, left: box.left + 8, right: 0, top: box.top + 4, bottom: box.bottom - 4 });
    if (node instanceof HTMLSelectElement) lines.push({ words: node.selectedOptions[0]?.text ?? "", left: box.left + 8, right: 0, top: box.top + 4, bottom: box.bottom - 4 });
    for (const line of lines) {
      if (line.top >= clip.bottom || line.bottom <= clip.top || line.left >= clip.right) continue;
      const size = parseFloat(style.fontSize);
      const width = Math.min(line.right, clip.right) - line.left;
      const cut = line.right > clip.right + 1 ? line.words.slice(0, Math.max(1, Math.floor((line.words.length * width) / (line.right - line.left)) - 1)) + "…" : line.words;
      const fit = width > 0 ? ` textLength="${number(width)}" lengthAdjust="spacingAndGlyphs"` : "";
      parts.push(`<text x="${number(line.left)}" y="${number((line.top + line.bottom) / 2 + size * 0.36)}" font-size="${number(size)}" font-weight="${style.fontWeight}" fill="${style.color}"${style.fontFamily.includes("mono") ? ' font-family="monospace"' : ""}${fit}>${escaped(cut)}</text>`);
    }
  }
  return `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${innerWidth} ${innerHeight}" font-family="system-ui, sans-serif">\n${parts.join("\n")}\n</svg>\n`;
})()
