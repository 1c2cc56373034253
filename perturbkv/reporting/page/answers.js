// What the model answered from each cache, and how good that is.

import { colours } from "./colours.js";
import { fill, lacking, make, table, widthOf } from "./dom.js";
import { estimate, number } from "./format.js";

/** @typedef {import("./view.js").View} View */
/** @typedef {import("./page_data.js").Answers} Answers */

export const answers = {
  id: "answers",
  needs: ["baseline", "treatment", "budget", "sample"],
  /**
   * @param {HTMLElement} pane
   * @param {View} view
   */
  draw(pane, view) {
    const answered = view.data.answers;
    if (!answered) return fill(pane, lacking(view.data.lacks.answers || "This trace holds no answers."));
    const lines = answered.full.texts ? texts(view, answered) : [lacking(view.data.lacks.answers_text || "")];
    fill(pane, scores(pane, view, answered), make("div", { class: "scrolls" }, ...lines));
  },
};

/**
 * @param {HTMLElement} pane
 * @param {View} view
 * @param {Answers} answered
 */
function scores(pane, view, answered) {
  const rows = view.data.configs.map((config, index) => {
    const [value, low, high, kind] = answered.configs[index].mean || [null, null, null, "none"];
    const side = view.data.sides[config.side];
    const role = side === view.choice.treatment ? "treatment" : side === view.choice.baseline ? "baseline" : "other";
    return { name: config.label, side, budget: view.data.budgets[config.budget], value, low, high, role, kind };
  }).filter((row) => row.value !== null);
  if (!rows.length) return make("p", { class: "lacks" }, "No metric grades these answers.");
  const { baseline, treatment, grey } = colours();
  const width = Math.min(widthOf(pane), 820);
  const full = answered.full_mean ? answered.full_mean[0] : null;
  const names = rows.map((row) => `${row.side} · ${row.budget}`);
  const figure = /** @type {Node} */ (Plot.plot({
    width, height: 18 * rows.length + 54, marginLeft: Math.min(230, width * 0.45), marginBottom: 36,
    style: { background: "none", fontSize: "11px" }, ariaLabel: `${answered.unit} of every configuration`,
    x: { label: answered.unit, domain: [0, 1], grid: true, ticks: 5, labelAnchor: "center", labelArrow: "none" },
    y: { domain: names, label: null },
    color: { domain: ["other", "baseline", "treatment"], range: [grey, baseline, treatment] },
    marks: [
      ...(full === null ? [] : [Plot.ruleX([full], { stroke: "currentColor", strokeDasharray: "3,3" })]),
      Plot.ruleY(rows.filter((row) => row.low !== null), { x1: "low", x2: "high", y: (row) => `${row.side} · ${row.budget}`, stroke: "role", strokeWidth: 1.6 }),
      Plot.dot(rows, { x: "value", y: (row) => `${row.side} · ${row.budget}`, fill: "role", r: 4,
        title: (row) => `${row.name}\n${meanText([row.value, row.low, row.high, row.kind])}` }),
    ],
  }));
  const fullText = answered.full_mean ? `; dashed: full cache, ${meanText(answered.full_mean)}` : "";
  return make("div", null, make("p", { class: "caption" }, `${answered.unit}, mean over all samples${fullText}`), figure);
}

/** @param {import("./page_data.js").Mean} mean */
function meanText([value, low, high, kind]) {
  return estimate([value, low, high], number, kind);
}

/**
 * @param {View} view
 * @param {Answers} answered
 */
function texts(view, answered) {
  const sides = [...new Set([view.baseline, view.treatment])].filter((index) => index >= 0);
  const heading = (/** @type {number} */ index) => view.data.sides[view.data.configs[index].side];
  const shown = view.data.samples.map((sample, index) => ({ sample, index }))
    .filter(({ index }) => view.sample < 0 || index === view.sample);
  const expected = answered.expected;
  const rows = shown.map(({ sample, index }) => [
    sample.id,
    ...(expected ? [expected[index].join(" | ") || "–"] : []),
    answerText(answered.full.texts, answered.full.scores, index),
    ...sides.map((config) => answerText(answered.configs[config].texts, answered.configs[config].scores, index)),
  ]);
  return [table(`answers at budget ${view.choice.budget}`,
    ["sample", ...(expected ? ["expected"] : []), "full cache", ...sides.map(heading)], rows)];
}

/**
 * An answer's text with its score.
 * @param {string[] | null} texts by sample
 * @param {(number | null)[] | null} scores by sample
 * @param {number} index of the sample
 */
function answerText(texts, scores, index) {
  const score = scores ? scores[index] : null;
  return make("span", { class: "answer", dir: "auto" }, make("span", null, texts ? texts[index] || "(nothing)" : "–"),
    score !== null && make("small", null, ` ${number(score)}`));
}
