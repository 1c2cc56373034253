// The pair that is chosen, by kind of the decoded token (METHOD, kinds of tokens).

import { fill, lacking, make, table } from "./dom.js";
import { estimate, ratio } from "./format.js";

/** @typedef {import("./view.js").View} View */
/** @typedef {import("./page_data.js").Mean} Mean */

export const kinds = {
  id: "kinds",
  needs: ["baseline", "treatment", "budget"],
  /**
   * @param {HTMLElement} pane
   * @param {View} view
   */
  draw(pane, view) {
    if (!view.data.kinds) return fill(pane, lacking("This trace does not hold several kinds of tokens."));
    const found = view.data.kinds[`${view.baseline}-${view.treatment}`];
    const first = view.data.sides[view.data.start.baseline];
    if (!found) return fill(pane, lacking(`Kinds of tokens are compared with ${first} as the baseline; choose it and another treatment.`));
    const rows = found.rows.map((row) => [row.kind, String(row.samples), String(row.steps), ...[row.isolated, row.propagated, row.rest].map(shown)]);
    fill(pane, found.note && make("p", { class: "said" }, found.note),
      make("div", { class: "scrolls" }, table("by kind of decoded token: sum over heads and samples, over the baseline’s (L1)",
        ["", "#samples", "#steps", "#isolated", "#propagated", "#propagated without it"], rows)));
  },
};

/** @param {Mean} mean */
function shown([value, low, high, kind]) {
  return estimate([value, low, high], ratio, kind);
}
