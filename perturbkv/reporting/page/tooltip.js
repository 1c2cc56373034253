// One box beside the pointer.

import { fill, make } from "./dom.js";

const box = make("div", { id: "tooltip", "aria-hidden": "true", hidden: true });

/** Add the tooltip's box to the page. */
export function attachTooltip() {
  document.body.append(box);
}

/**
 * Show lines beside the pointer; the first is a heading.
 * @param {{clientX: number, clientY: number}} at
 * @param {string[]} lines
 */
export function show(at, lines) {
  fill(box, ...lines.map((line, number) => make(number ? "div" : "strong", null, line)));
  box.hidden = false;
  const { width, height } = box.getBoundingClientRect();
  const [right, bottom] = [document.documentElement.clientWidth, window.innerHeight];
  box.style.left = `${Math.max(4, Math.min(at.clientX + 14, right - width - 4))}px`;
  box.style.top = `${at.clientY + 18 + height > bottom ? Math.max(4, at.clientY - height - 10) : at.clientY + 18}px`;
}

/** Hide the tooltip. */
export function hide() {
  box.hidden = true;
}
