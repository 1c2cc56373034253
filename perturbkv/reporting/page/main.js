// Opens the page: reads its traces, and draws what the address chooses.

import { ablation } from "./ablation.js";
import { answers } from "./answers.js";
import { assumption } from "./assumption.js";
import { budgets } from "./budgets.js";
import { Chosen } from "./choice.js";
import { choosing } from "./choosing.js";
import { whenPaperChanges } from "./colours.js";
import { lacking, make } from "./dom.js";
import { Drawing } from "./drawing.js";
import { head } from "./head.js";
import { layers } from "./layers.js";
import { map } from "./map.js";
import { prompt } from "./prompt.js";
import { scatter } from "./scatter.js";
import { page } from "./told.js";
import { place } from "./tooltip.js";
import { Trace } from "./trace.js";
import { verdict } from "./verdict.js";

const PARTS = [verdict, map, scatter, head, prompt, layers, assumption, budgets, ablation, answers];

async function open() {
  place();
  document.body.append(make("div", { id: "live", class: "unseen", role: "status", "aria-live": "polite" }));
  const traces = page().traces.map((told) => new Trace(told));
  document.body.dataset.traces = String(traces.length);
  await Promise.all(traces.map((trace) => trace.open()));
  const chosen = new Chosen(traces);
  const room = /** @type {HTMLElement} */ (document.querySelector("#choose .panes"));
  document.getElementById("choose")?.addEventListener("submit", (event) => event.preventDefault());
  choosing(room, chosen);
  document.querySelector(".skip")?.addEventListener("click", (event) => {
    event.preventDefault(); // the address is the choice's
    document.getElementById("main")?.focus();
  });
  const drawing = new Drawing(PARTS, chosen);
  drawing.visible();
  performance.mark("ready");
  whenPaperChanges(() => drawing.all());
  await Promise.all(traces.map((trace) => trace.rest()));
  drawing.again();
  document.body.dataset.ready = "all";
}

open().catch((error) => {
  document.getElementById("main")?.prepend(lacking(`This page cannot be shown here: ${error.message}. It needs a browser of 2023 or later.`));
  throw error;
});
