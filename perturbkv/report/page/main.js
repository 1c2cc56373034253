import { pageDocument } from "./data.js";

const shown = pageDocument();
const said = document.createElement("p");
said.textContent = `${shown.traces.length} traces`;
document.querySelector("#verdict .panes")?.append(said);
performance.mark("ready");
