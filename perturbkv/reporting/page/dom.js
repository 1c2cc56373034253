// Elements, made of text that is never markup.

const LEAST = 330;
const GAP = 24;

/** @typedef {Record<string, string | number | boolean | ((event: any) => void) | null | undefined>} Given */

/**
 * Return an element with attributes, listeners (`onclick: …`) and children; strings become text.
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
 * Return a labelled select; `chosen` is called with the value that is picked.
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
 * Return a table of text; columns whose heading begins with '#' are right-aligned.
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
 * Replace an element's children.
 * @param {Element} parent
 * @param {...(Node | string | null | false)} children
 */
export function fill(parent, ...children) {
  parent.replaceChildren(...children.filter((one) => one !== null && one !== false));
}

/**
 * Return a paragraph that says what is missing and how to record it.
 * @param {string} sentence
 */
export function lacking(sentence) {
  return make("p", { class: "lacks" }, sentence.charAt(0).toUpperCase() + sentence.slice(1));
}

/**
 * Return a pane's width in whole pixels; a usual width before it is laid out.
 * @param {Element} pane
 */
export function widthOf(pane) {
  return Math.max(260, Math.floor(pane.getBoundingClientRect().width) || 640);
}

/**
 * Return children side by side in columns, as many as fit.
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
 * Announce a text to screen readers.
 * @param {string} text
 */
export function announce(text) {
  const live = document.getElementById("live");
  if (live && live.textContent !== text) live.textContent = text;
}
