/** @returns {any} what the page holds, as docs of `perturbkv.report` describe it */
export function pageDocument() {
  const held = document.getElementById("page");
  if (held === null || held.textContent === null) throw new Error("the page holds no document");
  return JSON.parse(held.textContent);
}

/**
 * @param {string} id of a block
 * @returns {Promise<ArrayBuffer>} its bytes, inflated
 */
export async function inflated(id) {
  const held = document.getElementById(id);
  if (held === null || held.textContent === null) throw new Error(`the page holds no block ${id}`);
  const bytes = Uint8Array.from(atob(held.textContent), (sign) => sign.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Response(stream).arrayBuffer();
}
