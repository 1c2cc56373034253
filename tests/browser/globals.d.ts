// What the vendored builds put into the page's global scope.
import type * as d3Types from "d3";
import type * as PlotTypes from "@observablehq/plot";

declare global {
  const d3: typeof d3Types;
  const Plot: typeof PlotTypes;
}
