// Blocks of the page: base64 of deflated bytes, decoded when somebody asks for them.

/** @type {Map<string, Uint8Array>} */
const decoded = new Map();
/** @type {Map<string, Promise<Uint8Array>>} */
const inflating = new Map();

/**
 * Return the stored bytes of a block, read from the page once.
 * @param {string} id
 * @returns {Uint8Array}
 */
export function blockBytes(id) {
  const known = decoded.get(id);
  if (known) return known;
  const element = document.getElementById(id);
  if (!element) throw new Error(`the page has no block ${id}`);
  const bytes = fromBase64((element.textContent || "").trim());
  element.remove();
  decoded.set(id, bytes);
  return bytes;
}

/**
 * Return a block's bytes, inflated once.
 * @param {string} id
 * @returns {Promise<Uint8Array>}
 */
export function inflatedBlock(id) {
  let found = inflating.get(id);
  if (!found) {
    found = inflate(blockBytes(id));
    inflating.set(id, found);
  }
  return found;
}

/**
 * Return the JSON value of a block that holds one as text.
 * @param {string} id
 * @returns {Promise<any>}
 */
export async function jsonBlock(id) {
  return JSON.parse(new TextDecoder().decode(await inflatedBlock(id)));
}

/**
 * Return the bytes that were compressed as raw deflate.
 * @param {Uint8Array} bytes
 * @returns {Promise<Uint8Array>}
 */
export async function inflate(bytes) {
  const part = /** @type {Uint8Array<ArrayBuffer>} */ (bytes);
  const stream = new Blob([part]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/**
 * Return the values' bytes from byte planes: first bytes of all values, then second bytes, and so on.
 * @param {Uint8Array} bytes
 * @param {number} width bytes of a value
 * @returns {Uint8Array}
 */
export function joinPlanes(bytes, width) {
  const count = bytes.length / width;
  const whole = new Uint8Array(bytes.length);
  for (let plane = 0; plane < width; plane++) {
    const start = plane * count;
    for (let index = 0; index < count; index++) whole[index * width + plane] = bytes[start + index];
  }
  return whole;
}

/**
 * @param {string} text
 * @returns {Uint8Array}
 */
function fromBase64(text) {
  const made = /** @type {{fromBase64?: (text: string) => Uint8Array}} */ (/** @type {unknown} */ (Uint8Array));
  if (made.fromBase64) return made.fromBase64(text);
  const raw = atob(text);
  const bytes = new Uint8Array(raw.length);
  for (let index = 0; index < raw.length; index++) bytes[index] = raw.charCodeAt(index);
  return bytes;
}
