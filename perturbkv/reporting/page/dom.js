// Elements, made of text that is never markup.

const LEAST = 330;
const GAP = 24;

/** @typedef {Record<string, string | number | boolean | ((event: any) => void) | null | undefined>} Given */

/**
 * An element with attributes, listeners (`onclick: …`) and children; strings become text.
 * @template {keyof HTMLElementTagNameMap} Tag
 * @param {Tag} tag
 * @param {Given | null} [given]
 * @param {...(Node | string | null | false)} children
 * @returns {HTMLElementTagNameMap[Tag]}
 */
export function make(tag, given, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(given || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children.filter((one) => one !== null && one !== false));
  return made;
}

/**
 * A labelled select; `chosen` is told what is picked.
 * @param {string} label
 * @param {string} name
 * @param {{value: string, text: string, disabled?: boolean}[]} options
 * @param {string} value
 * @param {(value: string) => void} chosen
 * @returns {HTMLLabelElement}
 */
export function select(label, name, options, value, chosen) {
  const list = make("select", { name, onchange: (event) => chosen(event.target.value) });
  for (const one of options) list.append(make("option", { value: one.value, disabled: one.disabled }, one.text));
  list.value = value;
  return make("label", { class: "choice" }, make("span", null, label), list);
}

/**
 * A table of text; columns whose heading begins with '#' are set to the right.
 * @param {string} caption
 * @param {string[]} headings
 * @param {(string | Node)[][]} rows the first cell of each names it
 * @returns {HTMLTableElement}
 */
export function table(caption, headings, rows) {
  const side = headings.map((one) => (one.startsWith("#") ? "number" : null));
  const head = headings.map((one, index) => make("th", { scope: "col", class: side[index] }, one.replace(/^#/, "")));
  const body = rows.map((row) =>
    make("tr", null, ...row.map((cell, index) =>
      index ? make("td", { class: side[index], "data-of": headings[index].replace(/^#/, "") }, cell) : make("th", { scope: "row" }, cell))));
  return make("table", null, make("caption", null, caption), make("thead", null, make("tr", null, ...head)),
    make("tbody", null, ...body));
}

/**
 * Put these children in place of what is there.
 * @param {Element} parent
 * @param {...(Node | string | null | false)} children
 */
export function fill(parent, ...children) {
  parent.replaceChildren(...children.filter((one) => one !== null && one !== false));
}

/**
 * What the page lacks, and how to record it.
 * @param {string} sentence
 */
export function lacking(sentence) {
  return make("p", { class: "lacks" }, sentence.charAt(0).toUpperCase() + sentence.slice(1));
}

/**
 * How wide a pane is, in whole pixels; of one that is not laid out a usual width.
 * @param {Element} pane
 */
export function widthOf(pane) {
  return Math.max(260, Math.floor(pane.getBoundingClientRect().width) || 640);
}

/**
 * Children side by side, as many as there is room for.
 * @param {Element} pane
 * @param {number} most
 * @param {(width: number) => (Node | null)[]} children made for this width each
 */
export function inColumns(pane, most, children) {
  const whole = widthOf(pane);
  const columns = Math.max(1, Math.min(most, Math.floor(whole / LEAST)));
  const width = Math.floor((whole - (columns - 1) * GAP) / columns);
  return make("div", { class: "beside", "data-columns": columns }, ...children(width));
}

/**
 * Say something to whoever listens to the page.
 * @param {string} text
 */
export function announce(text) {
  const live = document.getElementById("live");
  if (live && live.textContent !== text) live.textContent = text;
}
