// The page's JSON document: its types, and reading it.

/** @typedef {import("./numbers.js").Stored} Stored */
/** @typedef {[number | null, number | null, number | null]} Estimate */
/** @typedef {[number | null, number | null, number | null, "interval" | "range" | "none"]} Mean with what its ends are */
/** @typedef {{label: string, side: number, budget: number, held: number | null, bytes: number | null}} Config */
/**
 * @typedef {{key: string, name: string, unit: string, kind: string, distance: string, less: boolean, ties: number | null,
 *   compare: "ratio" | "difference", about: string}} Measure
 */
/** @typedef {{name: string, isolated: Estimate, propagated: Estimate}} Row */
/** @typedef {{budget: number | null, title: string, rows: Row[], brings: Row[]}} Setting */
/** @typedef {{share: number | null, verdict: string, on_line: boolean}} Standing */
/** @typedef {{name: string, policy: string, kind: string, loss: Mean, packed: Standing, resident: Standing}} CachePoint */
/** @typedef {{title: string, conclusion: string, notes: string[], points: CachePoint[]}} EqualBytes */
/** @typedef {{texts: string[] | null, scores: (number | null)[] | null, mean?: Mean | null}} Answered */
/**
 * @typedef {{unit: string, metric: string, expected: string[][] | null, full: Answered, configs: Answered[],
 *   full_mean: Mean | null}} Answers
 */
/** @typedef {{kind: string, samples: number, steps: number, isolated: Mean, propagated: Mean, rest: Mean}} KindRow */
/** @typedef {{perplexity: Mean, ratio: Mean, over_baseline: Mean | null}} PerplexityRow */
/** @typedef {{title: string, conclusion: string, notes: string[], full: Mean, configs: PerplexityRow[]}} Perplexity */
/**
 * @typedef {{text: string | null, share: string | null, attention: string | null, heads: string | null, held: number[],
 *   ends: number[]}} PromptBlocks
 */
/**
 * @typedef {{name: string, title: string, model: string, dataset: string, warnings: string[],
 *   samples: {id: string, tokens: number, steps: number}[], failed: {id: string, reason: string}[],
 *   interval: "interval" | "range" | "none", steps: number, layers: number[], decoder_layers: number, heads: number, sides: string[],
 *   budgets: string[], configs: Config[],
 *   start: {baseline: number, treatment: number, budget: number, head: [number, number]}, measures: Measure[],
 *   pairs: [number, number][], pairs_left_out: number, conclusions: Record<string, string>, lacks: Record<string, string>,
 *   arrays: Record<string, Stored>, prompts: Record<string, PromptBlocks>, losses: number, distances: string[], stepped: string[], ablation: Setting[] | null,
 *   answers: Answers | null, step_samples: number[], kl_floor: number | null,
 *   held_heads: {of: number, held: number, why: string}, kinds?: Record<string, {rows: KindRow[], note: string}>,
 *   perplexity?: Perplexity, missed?: {places: string[], blocks: (string | null)[]}, equal_bytes?: EqualBytes}} TraceData
 */
/** @typedef {{format: number, made_with: string, traces: TraceData[]}} Page */

/**
 * Return the page's JSON document.
 * @returns {Page}
 */
export function page() {
  const element = document.getElementById("page");
  if (!element) throw new Error("the page has no document");
  return JSON.parse(element.textContent || "");
}
