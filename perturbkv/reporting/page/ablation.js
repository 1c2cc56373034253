// Which ingredient brings what: each selection over attention's (METHOD, controls).

import { colours } from "./colours.js";
import { inColumns, fill, lacking, make } from "./dom.js";
import { estimate, ratio, ratioTicks, tick } from "./format.js";

/** @typedef {import("./view.js").View} View */
/** @typedef {import("./page_data.js").Row} Row */
/** @typedef {import("./page_data.js").Setting} Setting */
/** @typedef {{name: string, kind: string, value: number, low: number, high: number}} Mark */

const KINDS = /** @type {const} */ (["isolated", "propagated"]);

export const ablation = {
  id: "ablation",
  needs: ["budget"],
  /**
   * @param {HTMLElement} pane
   * @param {View} view
   */
  draw(pane, view) {
    const allSettings = view.data.ablation;
    if (!allSettings) return fill(pane, lacking(view.data.lacks.ablation || "This trace holds no chain of selections to tell apart."));
    const budget = view.data.budgets.indexOf(view.choice.budget);
    const settings = allSettings.filter((one) => one.budget === budget || one.budget === null);
    if (!settings.length) return fill(pane, lacking("This trace holds no chain of selections at this budget."));
    fill(pane, inColumns(pane, 2, (width) => settings.flatMap((one) => panels(view, one, width))), key());
  },
};

/**
 * @param {View} view
 * @param {Setting} setting
 * @param {number} width
 */
function panels(view, setting, width) {
  const of = `mean of ${view.data.samples.length} samples`;
  const rows = panel(view, `${setting.title}: each selection over attention’s, ${of}`, setting.rows, width, "Σ over attention’s");
  const brings = panel(view, `${setting.title}: what each ingredient brings, ${of}`, setting.brings, width, "Σ over that without it");
  return [rows, brings].filter((one) => one !== null);
}

/**
 * @param {View} view
 * @param {string} title
 * @param {Row[]} rows
 * @param {number} width
 * @param {string} label
 */
function panel(view, title, rows, width, label) {
  /** @type {Mark[]} */
  const marks = rows.flatMap((row) => KINDS.map((kind) => {
    const [value, low, high] = row[kind].map((end) => end ?? NaN);
    return { name: row.name, kind, value, low, high };
  })).filter((mark) => mark.value > 0);
  if (!marks.length) return null;
  const { baseline, treatment, grey } = colours();
  const ends = [1, ...marks.flatMap((mark) => [mark.value, mark.low, mark.high].filter((end) => end > 0))];
  const markText = (/** @type {Mark} */ mark) => estimate([mark.value, mark.low, mark.high], ratio, view.data.interval);
  const figure = /** @type {Node} */ (Plot.plot({
    width, height: 46 * rows.length + 40, marginLeft: Math.min(190, width * 0.42), marginRight: 16, marginBottom: 36,
    style: { background: "none", fontSize: "11px" }, ariaLabel: title,
    x: { type: "log", grid: true, ticks: ratioTicks(ends), tickFormat: tick, label, labelAnchor: "center", labelArrow: "none" },
    y: { axis: null, domain: KINDS },
    fy: { domain: [...new Set(rows.map((row) => row.name))], label: null, axis: "left" },
    color: { domain: KINDS, range: [grey, treatment] },
    symbol: { domain: KINDS, range: ["circle", "square"] },
    marks: [
      Plot.ruleX([1], { stroke: baseline, strokeDasharray: "3,3" }),
      Plot.ruleY(marks.filter((mark) => mark.low > 0), { fy: "name", y: "kind", x1: "low", x2: "high", stroke: "kind", strokeWidth: 1.6 }),
      Plot.dot(marks, { fy: "name", y: "kind", x: "value", fill: "kind", symbol: "kind", r: 4, title: (mark) => `${mark.name}, ${mark.kind}: × ${markText(mark)}` }),
    ],
  }));
  return make("div", null, make("p", { class: "caption" }, title), figure);
}

function key() {
  return make("p", { class: "legend" },
    make("span", { class: "key other" }, make("b", { "aria-hidden": "true" }, "●"), " isolated"),
    make("span", { class: "key treatment" }, make("b", { "aria-hidden": "true" }, "■"), " propagated"), " left of 1: less perturbation");
}
