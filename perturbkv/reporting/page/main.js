// Opens the page: reads its traces, and draws what the address chooses.

import { ablation } from "./ablation.js";
import { answers } from "./answers.js";
import { assumption } from "./assumption.js";
import { budgets } from "./budgets.js";
import { Chosen } from "./choice.js";
import { drawChoices } from "./choosing.js";
import { onPaperChange } from "./colours.js";
import { lacking, make } from "./dom.js";
import { Drawing } from "./drawing.js";
import { equalBytes } from "./equal_bytes.js";
import { head } from "./head.js";
import { kinds } from "./kinds.js";
import { layers } from "./layers.js";
import { map } from "./map.js";
import { missed } from "./missed.js";
import { perplexity } from "./perplexity.js";
import { prompt } from "./prompt.js";
import { scatter } from "./scatter.js";
import { page } from "./page_data.js";
import { attachTooltip } from "./tooltip.js";
import { Trace } from "./trace.js";
import { verdict } from "./verdict.js";

const PARTS = [verdict, map, scatter, head, prompt, missed, kinds, layers, assumption, budgets, equalBytes, ablation, perplexity, answers];
/** A page has no section of what none of its traces holds, such as the assumption of no two-stage selection. */
const shownParts = () => PARTS.filter((part) => document.getElementById(part.id));

async function open() {
  attachTooltip();
  document.body.append(make("div", { id: "live", class: "unseen", role: "status", "aria-live": "polite" }));
  const traces = page().traces.map((data) => new Trace(data));
  document.body.dataset.traces = String(traces.length);
  await Promise.all(traces.map((trace) => trace.loadFirst()));
  const chosen = new Chosen(traces);
  const room = /** @type {HTMLElement} */ (document.querySelector("#choose .panes"));
  document.getElementById("choose")?.addEventListener("submit", (event) => event.preventDefault());
  drawChoices(room, chosen);
  document.querySelector(".skip")?.addEventListener("click", (event) => {
    event.preventDefault(); // the address is the choice's
    document.getElementById("main")?.focus();
  });
  const drawing = new Drawing(shownParts(), chosen);
  drawing.drawVisible();
  performance.mark("ready");
  onPaperChange(() => drawing.drawAll());
  await Promise.all(traces.map((trace) => trace.loadRest()));
  drawing.redraw();
  document.body.dataset.ready = "all";
}

open().catch((error) => {
  document.getElementById("main")?.prepend(lacking(`This page cannot be shown here: ${error.message}. It needs a browser of 2023 or later.`));
  throw error;
});
