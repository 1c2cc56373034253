// Perplexity of the text under every cache (METHOD, log p and perplexity).

import { fill, lacking, make, table } from "./dom.js";
import { estimate, number } from "./format.js";

/** @typedef {import("./view.js").View} View */
/** @typedef {import("./page_data.js").Mean} Mean */

export const perplexity = {
  id: "perplexity",
  needs: [],
  /**
   * @param {HTMLElement} pane
   * @param {View} view
   */
  draw(pane, view) {
    const found = view.data.perplexity;
    if (!found) return fill(pane, lacking("This trace holds no log p that a cache changes: a text needs two tokens or more."));
    const { configs, sides, budgets } = view.data;
    const rows = found.configs.map((row, index) => {
      const { side, budget, held } = configs[index];
      return [`${sides[side]} · ${budgets[budget]}`, number(held), ...[row.perplexity, row.ratio, row.over_baseline].map(shown)];
    });
    fill(pane, make("p", { class: "said" }, found.conclusion),
      make("div", { class: "scrolls" }, table(found.title, ["", "#cache share", "#perplexity", "#over full cache’s", "#over first method’s"],
        [["full cache", "", shown(found.full), "", ""], ...rows])),
      ...found.notes.map((note) => make("p", { class: "legend" }, note)));
  },
};

/** @param {Mean | null} mean */
function shown(mean) {
  return mean ? estimate([mean[0], mean[1], mean[2]], number, mean[3]) : "";
}
