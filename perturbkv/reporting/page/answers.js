// What the model answered from each cache, and how good that is.

import { colours } from "./colours.js";
import { fill, lacking, make, table, widthOf } from "./dom.js";
import { estimate, number } from "./format.js";

/** @typedef {import("./seen.js").Seen} Seen */
/** @typedef {import("./told.js").Answers} Answers */

export const answers = {
  id: "answers",
  needs: ["baseline", "treatment", "budget", "sample"],
  /**
   * @param {HTMLElement} pane
   * @param {Seen} seen
   */
  draw(pane, seen) {
    const held = seen.told.answers;
    if (!held) return fill(pane, lacking(seen.told.lacks.answers || "This trace holds no answers."));
    const lines = held.full.texts ? texts(seen, held) : [lacking(seen.told.lacks.answers_text || "")];
    fill(pane, scores(pane, seen, held), make("div", { class: "scrolls" }, ...lines));
  },
};

/**
 * @param {HTMLElement} pane
 * @param {Seen} seen
 * @param {Answers} held
 */
function scores(pane, seen, held) {
  const rows = seen.told.configs.map((config, place) => {
    const [value, low, high, kind] = held.configs[place].mean || [null, null, null, "none"];
    const side = seen.told.sides[config.side];
    const role = side === seen.choice.treatment ? "treatment" : side === seen.choice.baseline ? "baseline" : "other";
    return { name: config.label, side, budget: seen.told.budgets[config.budget], value, low, high, role, kind };
  }).filter((row) => row.value !== null);
  if (!rows.length) return make("p", { class: "lacks" }, "No metric grades these answers.");
  const { baseline, treatment, grey } = colours();
  const width = Math.min(widthOf(pane), 820);
  const full = held.full_mean ? held.full_mean[0] : null;
  const names = rows.map((row) => `${row.side} · ${row.budget}`);
  const figure = /** @type {Node} */ (Plot.plot({
    width, height: 18 * rows.length + 54, marginLeft: Math.min(230, width * 0.45), marginBottom: 36,
    style: { background: "none", fontSize: "11px" }, ariaLabel: `${held.unit} of every configuration`,
    x: { label: held.unit, domain: [0, 1], grid: true, ticks: 5, labelAnchor: "center", labelArrow: "none" },
    y: { domain: names, label: null },
    color: { domain: ["other", "baseline", "treatment"], range: [grey, baseline, treatment] },
    marks: [
      ...(full === null ? [] : [Plot.ruleX([full], { stroke: "currentColor", strokeDasharray: "3,3" })]),
      Plot.ruleY(rows.filter((row) => row.low !== null), { x1: "low", x2: "high", y: (row) => `${row.side} · ${row.budget}`, stroke: "role", strokeWidth: 1.6 }),
      Plot.dot(rows, { x: "value", y: (row) => `${row.side} · ${row.budget}`, fill: "role", r: 4,
        title: (row) => `${row.name}\n${ofMean([row.value, row.low, row.high, row.kind])}` }),
    ],
  }));
  const told = held.full_mean ? `; dashed: full cache, ${ofMean(held.full_mean)}` : "";
  return make("div", null, make("p", { class: "caption" }, `${held.unit}, mean over all samples${told}`), figure);
}

/** @param {import("./told.js").Mean} mean */
function ofMean([value, low, high, kind]) {
  return estimate([value, low, high], number, kind);
}

/**
 * @param {Seen} seen
 * @param {Answers} held
 */
function texts(seen, held) {
  const sides = [...new Set([seen.baseline, seen.treatment])].filter((place) => place >= 0);
  const heading = (/** @type {number} */ place) => seen.told.sides[seen.told.configs[place].side];
  const shown = seen.told.samples.map((sample, place) => ({ sample, place }))
    .filter(({ place }) => seen.sample < 0 || place === seen.sample);
  const expected = held.expected;
  const rows = shown.map(({ sample, place }) => [
    sample.id,
    ...(expected ? [expected[place].join(" | ") || "–"] : []),
    said(held.full.texts, held.full.scores, place),
    ...sides.map((config) => said(held.configs[config].texts, held.configs[config].scores, place)),
  ]);
  return [table(`answers at budget ${seen.choice.budget}`,
    ["sample", ...(expected ? ["expected"] : []), "full cache", ...sides.map(heading)], rows)];
}

/**
 * @param {string[] | null} told
 * @param {(number | null)[] | null} graded
 * @param {number} place
 */
function said(told, graded, place) {
  const score = graded ? graded[place] : null;
  return make("span", { class: "answer", dir: "auto" }, make("span", null, told ? told[place] || "(nothing)" : "–"),
    score !== null && make("small", null, ` ${number(score)}`));
}
