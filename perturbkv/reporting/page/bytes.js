// Blocks of the page: base64 of deflated bytes, decoded when somebody asks for them.

/** @type {Map<string, Uint8Array>} */
const decoded = new Map();
/** @type {Map<string, Promise<Uint8Array>>} */
const inflating = new Map();

/**
 * The stored bytes of a block.
 * @param {string} id
 * @returns {Uint8Array}
 */
export function stored(id) {
  const known = decoded.get(id);
  if (known) return known;
  const held = document.getElementById(id);
  if (!held) throw new Error(`the page has no block ${id}`);
  const bytes = fromBase64((held.textContent || "").trim());
  held.remove();
  decoded.set(id, bytes);
  return bytes;
}

/**
 * A block's bytes, inflated once.
 * @param {string} id
 * @returns {Promise<Uint8Array>}
 */
export function block(id) {
  let found = inflating.get(id);
  if (!found) {
    found = inflated(stored(id));
    inflating.set(id, found);
  }
  return found;
}

/**
 * What a raw deflate holds.
 * @param {Uint8Array} bytes
 * @returns {Promise<Uint8Array>}
 */
export async function inflated(bytes) {
  const part = /** @type {Uint8Array<ArrayBuffer>} */ (bytes);
  const stream = new Blob([part]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/**
 * Bytes whose planes lie one behind the other, put together again.
 * @param {Uint8Array} bytes
 * @param {number} width bytes of a value
 * @returns {Uint8Array}
 */
export function unshuffled(bytes, width) {
  const count = bytes.length / width;
  const whole = new Uint8Array(bytes.length);
  for (let plane = 0; plane < width; plane++) {
    const start = plane * count;
    for (let place = 0; place < count; place++) whole[place * width + plane] = bytes[start + place];
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
  for (let place = 0; place < raw.length; place++) bytes[place] = raw.charCodeAt(place);
  return bytes;
}
