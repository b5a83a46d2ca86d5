/**
 * understudy for browsers and Node: record what players do, and play with the bots that learned it.
 *
 *     import { connect } from "./understudy.js";
 *     const game = await connect("my-game", { url, key, obs: 6, actions: ["up", "stay", "down"], consent: "granted" });
 *     const ep = game.episode();
 *     ep.acted(obs, "up");            // what the player saw, and what they did
 *     const action = ep.act(obs);     // or: what the bot does
 *     ep.reward(1);                   // any time; belongs to the last decision
 *     ep.end(lastObs, { result: "win" });
 *     await game.close();
 *
 * One file, no build, no dependency; Node 20 or newer, and browsers of 2023 or newer. Recording works on any page; a bot
 * plays where its signature can be checked, which needs WebCrypto's Ed25519: Chrome and Edge 137, Firefox 129, Safari
 * 17, and a page served over https or from 127.0.0.1. The calls of an episode are synchronous and never wait for the
 * network; sending runs in the background. The byte formats are in docs/protocol.md and docs/formats.md. Sections:
 *
 *     text and bytes · specs · tensors, chunks, frames, frame batches · rows of an episode · policies · signed
 *     documents · the link · the sender · bots · sessions and episodes · connect
 */

export const VERSION = "0.1.0";

// --- Text and bytes --------------------------------------------------------------------------------------------------

/** Input or data that was rejected: a stable `code`, and a `detail` for people. */
export class Refused extends Error {
  /** @param {string} code @param {string} detail */
  constructor(code, detail) {
    super(`${code}: ${detail}`);
    this.name = "Refused";
    this.code = code;
    this.detail = detail;
  }
}

const utf8 = new TextEncoder();

/** @typedef {Uint8Array<ArrayBuffer>} Bytes */

/** @param {string} text @returns {Bytes} */
const bytesOf = (text) => /** @type {Bytes} */ (utf8.encode(text));

/** @param {readonly Uint8Array[]} parts @returns {Bytes} */
function concatBytes(parts) {
  const whole = new Uint8Array(parts.reduce((size, part) => size + part.length, 0));
  let at = 0;
  for (const part of parts) {
    whole.set(part, at);
    at += part.length;
  }
  return whole;
}

/** @param {Uint8Array} bytes */
const hexOf = (bytes) => Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");

/** @param {string} text @returns {Bytes} */
const fromHex = (text) => Uint8Array.from(text.match(/../g) ?? [], (pair) => parseInt(pair, 16));

/** @param {Uint8Array} bytes */
function toBase64(bytes) {
  let text = "";
  for (let at = 0; at < bytes.length; at += 0x8000) text += String.fromCharCode(...bytes.subarray(at, at + 0x8000));
  return btoa(text);
}

/** @param {string} text @returns {Bytes} */
const fromBase64 = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));

const CRC_TABLE = Uint32Array.from({ length: 256 }, (_, byte) => {
  for (let bit = 0; bit < 8; bit++) byte = byte & 1 ? (byte >>> 1) ^ 0xedb88320 : byte >>> 1;
  return byte;
});

/**
 * The CRC-32 of zlib, as an unsigned integer.
 * @param {Uint8Array} bytes
 */
export function crc32(bytes) {
  let crc = 0xffffffff;
  for (const byte of bytes) crc = (crc >>> 8) ^ CRC_TABLE[(crc ^ byte) & 255];
  return (crc ^ 0xffffffff) >>> 0;
}

/**
 * The first 32 fractional bits of the square roots of the first 8 primes (the initial hash), and of the cube roots of
 * the first 64 primes (the round constants).
 */
const [SHA_BEGIN, SHA_MIX] = (() => {
  const primes = [2];
  for (let number = 3; primes.length < 64; number += 2)
    if (primes.every((prime) => number % prime)) primes.push(number);
  /** @param {number} power */
  const roots = (power) => Uint32Array.from(primes, (prime) => (prime ** power % 1) * 2 ** 32);
  return [roots(1 / 2).slice(0, 8), roots(1 / 3)];
})();

/**
 * SHA-256 in hex. Implemented here because WebCrypto exists on https pages only, and recording works on any page.
 * @internal
 * @param {Uint8Array} bytes
 */
export function sha256(bytes) {
  const padded = new Uint8Array(((bytes.length + 72) >> 6) << 6);
  padded.set(bytes);
  padded[bytes.length] = 0x80;
  const view = new DataView(padded.buffer);
  view.setBigUint64(padded.length - 8, BigInt(bytes.length) * 8n);
  const sum = SHA_BEGIN.slice();
  const words = new Uint32Array(64);
  /** @param {number} word @param {number} by */
  const rotated = (word, by) => (word >>> by) | (word << (32 - by));
  for (let block = 0; block < padded.length; block += 64) {
    for (let at = 0; at < 64; at++) {
      if (at < 16) words[at] = view.getUint32(block + 4 * at);
      else {
        const near = words[at - 2];
        const far = words[at - 15];
        const mixed = (rotated(near, 17) ^ rotated(near, 19) ^ (near >>> 10)) + words[at - 7] + words[at - 16];
        words[at] = mixed + (rotated(far, 7) ^ rotated(far, 18) ^ (far >>> 3));
      }
    }
    let [a, b, c, d, e, f, g, h] = sum;
    for (let at = 0; at < 64; at++) {
      const low = h + (rotated(e, 6) ^ rotated(e, 11) ^ rotated(e, 25)) + ((e & f) ^ (~e & g)) + SHA_MIX[at] + words[at];
      const high = (rotated(a, 2) ^ rotated(a, 13) ^ rotated(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
      h = g;
      g = f;
      f = e;
      e = (d + low) | 0;
      d = c;
      c = b;
      b = a;
      a = (low + high) | 0;
    }
    [a, b, c, d, e, f, g, h].forEach((word, at) => (sum[at] += word));
  }
  return Array.from(sum, (word) => word.toString(16).padStart(8, "0")).join("");
}

/** A number that JSON gets with a decimal point, as Python writes floats; JavaScript has only one number type. */
class Float {
  /** @param {number} value */
  constructor(value) {
    this.value = value;
  }
}

/** @param {number} value */
function floatText(value) {
  const [digits, power] = value.toExponential().split("e");
  if (value === 0 || (Number(power) >= -4 && Number(power) < 16)) {
    return Number.isInteger(value) ? `${Object.is(value, -0) ? "-0" : value}.0` : String(value);
  }
  return `${digits}e${power[0]}${power.slice(1).padStart(2, "0")}`;
}

/** @param {string} left @param {string} right */
function byCodePoint(left, right) {
  const a = Array.from(left, (letter) => letter.codePointAt(0) ?? 0);
  const b = Array.from(right, (letter) => letter.codePointAt(0) ?? 0);
  for (let at = 0; at < Math.min(a.length, b.length); at++) if (a[at] !== b[at]) return a[at] - b[at];
  return a.length - b.length;
}

/**
 * Compact JSON with sorted keys, byte for byte what Python's `canonical_json` writes; rejects non-finite numbers.
 * @param {unknown} value
 * @returns {string}
 */
export function canonicalJson(value) {
  if (value === null || typeof value === "boolean" || typeof value === "string") return JSON.stringify(value);
  if (typeof value === "bigint") return value.toString();
  if (value instanceof Float) return floatText(value.value);
  if (typeof value === "number") {
    if (!Number.isFinite(value))
      throw new Refused("not_finite", `${value} cannot be written as JSON; pass a finite number`);
    return Number.isSafeInteger(value) ? String(value + 0) : floatText(value);
  }
  if (Array.isArray(value)) return `[${value.map(canonicalJson).join(",")}]`;
  if (typeof value !== "object") throw new Refused("bad_json", `a ${typeof value} cannot be written as JSON`);
  const fields = Object.entries(value).filter(([, field]) => field !== undefined);
  fields.sort(([left], [right]) => byCodePoint(left, right));
  return `{${fields.map(([name, field]) => `${JSON.stringify(name)}:${canonicalJson(field)}`).join(",")}}`;
}

// --- Specs -----------------------------------------------------------------------------------------------------------

/**
 * One part of an observation or action, as a spec describes it.
 * @typedef {{space: "box", dtype: string, shape: number[], low: number | number[] | null, high: number | number[] |
 *   null}} Box
 * @typedef {{space: "discrete", dtype: string, n: number, start: number}} Discrete
 * @typedef {{space: "multi_discrete", dtype: string, shape: number[], counts: number[]}} MultiDiscrete
 * @typedef {{space: "multi_binary", dtype: string, shape: number[]}} MultiBinary
 * @typedef {Box | Discrete | MultiDiscrete | MultiBinary} Space
 */
/**
 * A game's spec, as the platform stores it; `obs` and `action` have a space by path, which is "" for a single part.
 * @typedef {object} Spec
 * @property {number} format
 * @property {string} game
 * @property {Record<string, Space>} obs
 * @property {Record<string, Space>} action
 * @property {readonly string[]} obs_names
 * @property {readonly string[]} action_names
 * @property {boolean} has_action_mask
 * @property {number | null} max_episode_steps
 */
/**
 * @typedef {number | readonly number[] | readonly string[] | Space | Record<string, Space>} Shape a length, a shape,
 *   names or spaces
 */

/**
 * @typedef {Uint8Array | Int8Array | Uint16Array | Int16Array | Uint32Array | Int32Array | Float32Array | Float64Array
 *   | BigUint64Array | BigInt64Array} TypedArray
 */

/** @type {Record<string, {make: (size: number) => TypedArray, bytes: number, ends: [number, number] | null}>} */
const DTYPES = {
  BOOL: { make: (size) => new Uint8Array(size), bytes: 1, ends: [0, 1] },
  U8: { make: (size) => new Uint8Array(size), bytes: 1, ends: [0, 255] },
  I8: { make: (size) => new Int8Array(size), bytes: 1, ends: [-128, 127] },
  U16: { make: (size) => new Uint16Array(size), bytes: 2, ends: [0, 65535] },
  I16: { make: (size) => new Int16Array(size), bytes: 2, ends: [-32768, 32767] },
  U32: { make: (size) => new Uint32Array(size), bytes: 4, ends: [0, 2 ** 32 - 1] },
  I32: { make: (size) => new Int32Array(size), bytes: 4, ends: [-(2 ** 31), 2 ** 31 - 1] },
  U64: { make: (size) => new BigUint64Array(size), bytes: 8, ends: [0, 2 ** 64] },
  I64: { make: (size) => new BigInt64Array(size), bytes: 8, ends: [-(2 ** 63), 2 ** 63] },
  F32: { make: (size) => new Float32Array(size), bytes: 4, ends: null },
  F64: { make: (size) => new Float64Array(size), bytes: 8, ends: null },
};

/**
 * The largest float that is recorded, of either sign; the platform stores no larger ones. A bound of at least this size
 * counts as no bound.
 */
const MAX_NUMBER = 1e20;
/** The largest count of actions: a network has an output for each. */
const MAX_CHOICES = 65536;

/** @param {readonly number[]} shape */
const product = (shape) => shape.reduce((size, side) => size * side, 1);

/** @param {string} dtype */
const isFloat = (dtype) => dtype.startsWith("F");

/** @param {Space} space */
const shapeOf = (space) => (space.space === "discrete" ? [] : space.shape);

/**
 * Builds a game's spec: `obs` is a length, a shape, names or spaces; `actions` is a count, names or spaces.
 * @param {string} game
 * @param {{obs: Shape, actions: Shape, hasActionMask?: boolean, maxEpisodeSteps?: number | null}} shape
 * @returns {Spec}
 */
export function specOf(game, { obs, actions, hasActionMask = false, maxEpisodeSteps = null }) {
  const [obsSpaces, obsNames] = spacesOf("obs", obs, (shape) => ({
    space: "box",
    dtype: "F32",
    shape,
    low: null,
    high: null,
  }));
  const [actionSpaces, actionNames] = spacesOf("actions", actions, ([n]) => ({
    space: "discrete",
    dtype: "I32",
    n,
    start: 0,
  }));
  return checkedSpec({
    format: 1,
    game,
    obs: obsSpaces,
    action: actionSpaces,
    obs_names: obsNames,
    action_names: actionNames,
    has_action_mask: hasActionMask,
    max_episode_steps: maxEpisodeSteps,
  });
}

/**
 * @param {"obs" | "actions"} what
 * @param {Shape} shape
 * @param {(shape: number[]) => Space} make
 * @returns {[Record<string, Space>, string[]]}
 */
function spacesOf(what, shape, make) {
  if (typeof shape === "number") shape = [shape];
  if (Array.isArray(shape)) {
    const isShape =
      shape.every((side) => Number.isInteger(side) && side > 0) &&
      (what === "obs" || (shape.length === 1 && Number(shape[0]) <= MAX_CHOICES));
    if (shape.length && shape.every((name) => typeof name === "string"))
      return [{ "": make([shape.length]) }, [...shape]];
    if (shape.length && isShape) return [{ "": make([...shape]) }, []];
  } else if (shape !== null && typeof shape === "object") {
    return "space" in shape && typeof shape.space === "string"
      ? [{ "": /** @type {Space} */ (shape) }, []]
      : [/** @type {Record<string, Space>} */ ({ ...shape }), []];
  }
  const expected =
    what === "obs"
      ? "a length (6), a shape ([84, 84]), names"
      : `a count (3) of at most ${MAX_CHOICES}, names (["up", "down"])`;
  throw new Refused("bad_spec", `${what} is ${JSON.stringify(shape)}; pass ${expected}, a space, or spaces by name`);
}

/**
 * The spec in canonical form, in which equal games have equal bytes; throws Refused when it is not valid.
 * @param {Spec} raw
 * @returns {Spec}
 */
function checkedSpec(raw) {
  if (!/^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$/.test(raw.game) || raw.game.endsWith(".")) {
    throw new Refused(
      "bad_name",
      `game ${JSON.stringify(raw.game)} is not a valid name; use 1 to 63 of A-Z a-z 0-9 . _ -, such as "my-game"`,
    );
  }
  const spec = {
    ...raw,
    obs: Object.fromEntries(Object.entries(raw.obs).map(([path, space]) => [path, checkedSpace(path, space)])),
    action: Object.fromEntries(Object.entries(raw.action).map(([path, space]) => [path, checkedSpace(path, space)])),
  };
  const discrete = spec.action[""]?.space === "discrete" ? spec.action[""] : null;
  const flat = spec.obs[""] ? product(shapeOf(spec.obs[""])) : -1;
  if (!Object.keys(spec.obs).length || !Object.keys(spec.action).length) {
    throw new Refused("bad_spec", `${spec.game} has no observation or no action; declare at least one of each`);
  }
  for (const [names, size] of /** @type {[readonly string[], number][]} */ ([
    [spec.action_names, discrete?.n ?? -1],
    [spec.obs_names, flat],
  ])) {
    if (names.length && (names.length !== size || new Set(names).size !== size)) {
      throw new Refused("bad_spec", `names ${names.slice(0, 8)} do not fit; name every element of a single part once`);
    }
    if (names.some((name) => !name.trim())) throw new Refused("bad_spec", "a name is empty; name each element");
    const odd = names.find((name) => /[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]/.test(name));
    if (odd !== undefined)
      throw new Refused("bad_spec", `name ${JSON.stringify(odd)} contains control characters; use printable text`);
  }
  if (typeof spec.has_action_mask !== "boolean")
    throw new Refused("bad_spec", `hasActionMask is ${String(spec.has_action_mask)}; pass true or false`);
  if (spec.has_action_mask && !discrete)
    throw new Refused("bad_spec", "action masks need a single discrete action; omit hasActionMask");
  return spec;
}

/** @param {string} path @param {Space} space @returns {Space} */
function checkedSpace(path, space) {
  const type = DTYPES[space.dtype];
  if (!type)
    throw new Refused("bad_spec", `${path || "a part"} has dtype ${space.dtype}; use one of ${Object.keys(DTYPES)}`);
  if (space.space !== "box") return space;
  /** @param {number | number[] | null} bound @param {number} end */
  const bound = (bound, end) => {
    if (bound === null) return null;
    const values = (Array.isArray(bound) ? bound : [bound]).map(
      (value) => (space.dtype === "F32" ? Math.fround(value) : value) + 0,
    );
    if (new Set(values).size > 1) return values;
    return type.ends && values[0] === type.ends[end] ? null : values[0];
  };
  return { ...space, low: bound(space.low, 0), high: bound(space.high, 1) };
}

/**
 * The spec as JSON, byte for byte as it is registered.
 * @internal
 * @param {Spec} spec
 */
export function specJson(spec) {
  /** @param {Record<string, Space>} spaces */
  const withFloatBounds = (spaces) =>
    Object.fromEntries(
      Object.entries(spaces).map(([path, space]) => {
        if (space.space !== "box" || !isFloat(space.dtype)) return [path, space];
        /** @param {number | number[] | null} bound */
        const bound = (bound) =>
          Array.isArray(bound) ? bound.map((value) => new Float(value)) : bound === null ? null : new Float(bound);
        return [path, { ...space, low: bound(space.low), high: bound(space.high) }];
      }),
    );
  return canonicalJson({ ...spec, obs: withFloatBounds(spec.obs), action: withFloatBounds(spec.action) });
}

/**
 * The SHA-256 of a spec, which chunks and bots refer to; a connected game has it as `game.schema`.
 * @internal
 * @param {Spec} spec
 */
export const schemaOf = (spec) => sha256(bytesOf(specJson(spec)));

/**
 * @typedef {{name: string, path: string, space: Space, dtype: string, shape: readonly number[], size: number}} Part a
 *   column of a spec
 */

/** @param {"obs" | "action" | "raw_action"} what @param {Record<string, Space>} spaces @returns {Part[]} */
function partsOf(what, spaces) {
  return Object.keys(spaces)
    .sort(byCodePoint)
    .map((path) => {
      const space = spaces[path];
      const name = path ? `${what}.${path}` : what;
      return { name, path, space, dtype: space.dtype, shape: shapeOf(space), size: product(shapeOf(space)) };
    });
}

// --- Tensors, chunks, frames, frame batches --------------------------------------------------------------------------

/**
 * @typedef {{dtype: string, shape: readonly number[], data: TypedArray, packed?: Bytes}} Column `packed`: the data
 *   compressed by zlib, which is sent instead
 */

/**
 * A safetensors file: columns and metadata sorted by name, the data aligned to 64 bytes.
 * @internal
 * @param {Record<string, Column>} columns
 * @param {Record<string, string>} metadata
 */
export function encodeTensors(columns, metadata) {
  const names = Object.keys(columns).sort(byCodePoint);
  /** @type {Record<string, unknown>} */
  const header = { __metadata__: metadata };
  let at = 0;
  for (const name of names) {
    const { dtype, shape, data } = columns[name];
    header[name] = { data_offsets: [at, at + data.byteLength], dtype, shape: [...shape] };
    at += data.byteLength;
  }
  const text = bytesOf(canonicalJson(header));
  const padded = new Uint8Array(Math.ceil((8 + text.length) / 64) * 64).fill(32);
  padded.set(text, 8);
  new DataView(padded.buffer).setBigUint64(0, BigInt(padded.length - 8), true);
  const raw = names
    .map((name) => columns[name].data)
    .map((data) => new Uint8Array(data.buffer, data.byteOffset, data.byteLength));
  return concatBytes([padded, ...raw]);
}

/**
 * The columns and metadata of a safetensors file; throws Refused unless the bytes are exactly one such file.
 * @internal
 * @param {Uint8Array} raw
 * @returns {{columns: Record<string, Column>, metadata: Record<string, string>}}
 */
export function decodeTensors(raw) {
  const bad = (/** @type {string} */ why) => new Refused("bad_tensors", why);
  const length = raw.length < 8 ? -1 : Number(new DataView(raw.buffer, raw.byteOffset).getBigUint64(0, true));
  if (length < 2 || length > 256 * 1024 || 8 + length > raw.length)
    throw bad(`a header of ${length} bytes in a file of ${raw.length}; expected 2 to 262144 that fit into the file`);
  let fields;
  try {
    fields = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(raw.subarray(8, 8 + length)));
  } catch (error) {
    throw bad(`the header is not JSON: ${error}`);
  }
  const { __metadata__: metadata = {}, ...entries } = fields;
  if (Object.values(metadata).some((text) => typeof text !== "string")) throw bad("__metadata__ must map text to text");
  /** @type {Record<string, Column>} */
  const columns = {};
  let at = 0;
  const inOrder = Object.keys(entries).sort(
    (left, right) => entries[left].data_offsets?.[0] - entries[right].data_offsets?.[0],
  );
  for (const name of inOrder) {
    const { dtype, shape, data_offsets: offsets } = entries[name];
    const type = Object.hasOwn(DTYPES, dtype) ? DTYPES[dtype] : undefined;
    if (!type || !Array.isArray(shape) || !shape.every((side) => Number.isSafeInteger(side) && side >= 0)) {
      throw bad(`${name} has dtype ${dtype} and shape ${shape}; expected a known dtype and a list of sizes`);
    }
    const size = product(shape);
    const end = at + size * type.bytes;
    if (!Array.isArray(offsets) || offsets[0] !== at || offsets[1] !== end || 8 + length + end > raw.length) {
      throw bad(`${name} is at offsets ${offsets}; expected ${[at, end]} within ${raw.length - 8 - length} bytes`);
    }
    const data = type.make(size);
    new Uint8Array(data.buffer).set(raw.subarray(8 + length + at, 8 + length + end));
    columns[name] = { dtype, shape, data };
    at = end;
  }
  if (8 + length + at !== raw.length) throw bad(`tensors end at byte ${at} of ${raw.length - 8 - length}`);
  return { columns, metadata };
}

/**
 * Metadata of one episode in a chunk, starting at row `row`.
 * @typedef {object} Note
 * @property {number} row
 * @property {number} seat
 * @property {string} [match]
 * @property {readonly string[]} [opponents] what the opponents were (`person`, `script`, a model's name), never
 *   players' names
 * @property {string | number} [result]
 * @property {number | bigint} [seed]
 * @property {string} [model]
 * @property {string} [ticket] the gateway's draw of `model`, if there were several
 * @property {string} [skill] the skill at which the bot plays, `easy` or `even`
 * @property {number} [noise] the noise of that skill, once a bot has decided
 * @property {number} [temperature]
 * @property {boolean} [cut]
 */
/**
 * A chunk's metadata.
 * @typedef {object} ChunkMeta
 * @property {string} game
 * @property {string} schema
 * @property {string} session
 * @property {number} chunkNo
 * @property {number} firstStep
 * @property {number} nSteps
 * @property {string} [kind]
 * @property {Consent} consent
 * @property {string} client
 * @property {readonly Note[]} episodes
 */
/** @typedef {"granted" | "denied" | "unknown"} Consent */

/**
 * A chunk as bytes: the body of a data frame.
 * @param {ChunkMeta} meta
 * @param {Record<string, Column>} columns
 */
export function encodeChunk(meta, columns) {
  /** @type {Record<string, Column>} */
  const sent = { ...columns };
  /** @type {Record<string, unknown>} */
  const codec = {};
  for (const [name, { dtype, shape, packed }] of Object.entries(columns)) {
    if (!packed) continue;
    codec[name] = ["zlib", dtype, [...shape]];
    sent[name] = { dtype: "U8", shape: [packed.length], data: packed };
  }
  return encodeTensors(sent, {
    ...(Object.keys(codec).length ? { codec: canonicalJson(codec) } : {}),
    format: "understudy-chunk/1",
    game: meta.game,
    schema: meta.schema,
    session: meta.session,
    chunk_no: String(meta.chunkNo),
    first_step: String(meta.firstStep),
    n_steps: String(meta.nSteps),
    kind: meta.kind ?? "player",
    consent: meta.consent,
    client: meta.client,
    episodes: canonicalJson(meta.episodes.map(noteFields)),
  });
}

/** Whether a column holds images, which are compressed as in the Python client. @param {Column} column */
const isImage = ({ dtype, shape }) => (dtype === "U8" || dtype === "I8") && product(shape.slice(1)) >= PACKED_FROM_BYTES;

/** Compresses the images of a block, off the game's thread. @param {Block} block */
async function pack(block) {
  for (const column of Object.values(block.columns).filter(isImage)) {
    const { buffer, byteOffset, byteLength } = column.data;
    const raw = new Uint8Array(/** @type {ArrayBuffer} */ (buffer), byteOffset, byteLength);
    const stream = new Blob([raw]).stream().pipeThrough(new CompressionStream("deflate"));
    const packed = new Uint8Array(await new Response(stream).arrayBuffer());
    if (packed.length < raw.length) column.packed = packed;
  }
}

/** @param {Note} note */
function noteFields(note) {
  const { opponents, cut, ...plain } = note;
  return { ...plain, ...(opponents?.length ? { opponents } : {}), ...(cut ? { cut } : {}) };
}

const KINDS = { data: 0, drop: 1, close: 2 };
/** @typedef {keyof typeof KINDS} FrameKind */
const MAX_BODY_BYTES = 512 * 1024 - 64;

/**
 * A frame: 64 bytes of header, and the body.
 * @param {FrameKind} kind
 * @param {string} session
 * @param {number} chunkNo
 * @param {Uint8Array} body
 */
export function encodeFrame(kind, session, chunkNo, body) {
  if (body.length > MAX_BODY_BYTES)
    throw new Refused("too_large", `a frame body has ${body.length} bytes; the limit is ${MAX_BODY_BYTES}`);
  const header = new Uint8Array(64);
  const view = new DataView(header.buffer);
  header.set(bytesOf("UNDY"));
  header.set([1, KINDS[kind]], 4);
  view.setUint32(8, body.length, true);
  view.setUint32(12, crc32(body), true);
  header.set(fromHex(session.replaceAll("-", "")), 16);
  view.setBigUint64(32, BigInt(chunkNo), true);
  view.setUint32(60, crc32(header.subarray(0, 60)), true);
  return concatBytes([header, body]);
}

/** @param {Uint8Array} frame */
const sessionOf = (frame) => dashed(hexOf(frame.subarray(16, 32)));

/** @param {string} hex */
const dashed = (hex) => hex.replace(/^(.{8})(.{4})(.{4})(.{4})/, "$1-$2-$3-$4-");

/**
 * The body of one request: the names of its players, and up to 64 frames.
 * @param {readonly Uint8Array[]} frames
 * @param {Record<string, string>} players name by session
 * @param {number} [skippedSteps]
 */
export function encodeFrameBatch(frames, players, skippedSteps = 0) {
  const sessions = new Set(frames.map(sessionOf));
  const named = Object.fromEntries(Object.entries(players).filter(([session]) => sessions.has(session)));
  const preamble = bytesOf(canonicalJson({ players: named, skipped_steps: skippedSteps }));
  const head = new Uint8Array(8);
  head.set(bytesOf("UNPA"));
  new DataView(head.buffer).setUint32(4, preamble.length, true);
  return concatBytes([head, preamble, ...frames]);
}

/**
 * A fresh UUIDv7: its first 48 bits are the time in milliseconds.
 * @param {number} [nowMs]
 * @param {Uint8Array} [random] 10 bytes
 */
export function newSession(nowMs = Date.now(), random = crypto.getRandomValues(new Uint8Array(10))) {
  const tail = Uint8Array.from(random);
  tail[0] = 0x70 | (tail[0] & 0x0f);
  tail[2] = 0x80 | (tail[2] & 0x3f);
  return dashed(Math.round(nowMs).toString(16).padStart(12, "0") + hexOf(tail.subarray(0, 10)));
}

/** @param {string} session */
const sessionStartMs = (session) => parseInt(session.replace("-", "").slice(0, 12), 16);

// --- Rows of an episode ----------------------------------------------------------------------------------------------

const MAX_STEPS = 512;
const PACKED_FROM_BYTES = 512;
/** How many full blocks may wait for compression; beyond that they are sent uncompressed. */
const MAX_PACKING = 8;
const CUT_BYTES = 440 * 1024;
const MAX_NOTE_BYTES = 32 * 1024;
const FINAL = 1;
const BOOTSTRAP = 2;
const EMPTY = 0;
const STAGED = 1;
const OPEN = 2;
/** @type {Readonly<Record<string, number>>} */
const BY = Object.freeze({ unknown: 0, person: 1, bot: 2, script: 3 });
/** @typedef {"unknown" | "person" | "bot" | "script"} Decider */

/**
 * @typedef {{logp: number | null, version: number, rawAction: ArrayLike<number> | null}} Extras what a policy records about
 *   its choice
 */
/**
 * @typedef {{columns: Record<string, Column>, nSteps: number, consent: Consent, episodes: Note[],
 *   packing?: Promise<void> | null}} Block closed rows, ready to be encoded as a chunk; `packing` is pending while its
 *   images are compressed
 */

/**
 * Writes the value of a part as flat numbers; throws Refused when it does not match the space.
 * @param {Part} part
 * @param {any} value a number, an array, a typed array, or nested arrays
 * @param {{bounds: boolean, as?: TypedArray, at?: number}} options `bounds`: also check the bounds of floats
 */
function writeValue(part, value, { bounds, as = DTYPES[part.dtype].make(part.size), at = 0 }) {
  const flat = ArrayBuffer.isView(value)
    ? /** @type {any} */ (value)
    : Array.isArray(value)
      ? value.flat(Infinity)
      : [value];
  if (flat.length !== part.size) {
    throw new Refused(
      "bad_shape",
      `${part.name} has ${flat.length} numbers; this game was connected with shape [${part.shape}]`,
    );
  }
  const isReal = isFloat(part.dtype);
  const largest = part.dtype === "F32" ? Math.fround(MAX_NUMBER) : MAX_NUMBER;
  const isBig = as instanceof BigInt64Array || as instanceof BigUint64Array;
  for (let index = 0; index < part.size; index++) {
    const element = flat[index];
    const number = typeof element === "boolean" || typeof element === "bigint" ? Number(element) : element;
    if (typeof number !== "number")
      throw new Refused("bad_dtype", `${part.name} contains ${String(element).slice(0, 40)}; pass numbers`);
    const size = Math.abs(part.dtype === "F32" ? Math.fround(number) : number);
    if (isReal ? !(size <= largest) : Number.isNaN(number)) {
      throw new Refused("not_finite", `${part.name} contains ${number}; pass finite numbers up to ${MAX_NUMBER}`);
    }
    if (!isReal && !Number.isInteger(number))
      throw new Refused("bad_dtype", `${part.name} contains ${number}; pass integers`);
    const exact = isBig ? BigInt(element) : number; // not every 64-bit integer is a JavaScript number
    if ((bounds || !isReal) && !isInSpace(part, index, exact)) {
      throw new Refused(
        "not_in_space",
        `${part.name} contains ${element}, which is outside ${JSON.stringify(part.space)}`,
      );
    }
    as[at * part.size + index] = /** @type {never} */ (exact);
  }
  return as;
}

/** @param {Part} part @param {number} index @param {number | bigint} number */
function isInSpace(part, index, number) {
  const { space } = part;
  if (typeof number === "bigint" && number !== (part.dtype === "U64" ? BigInt.asUintN : BigInt.asIntN)(64, number))
    return false;
  if (space.space === "discrete") return number >= space.start && number < space.start + space.n;
  if (space.space === "multi_discrete") return number >= 0 && number < space.counts[index];
  if (space.space === "multi_binary") return Number(number) === 0 || Number(number) === 1;
  const [low, high] = [space.low, space.high].map((bound) => (Array.isArray(bound) ? bound[index] : bound));
  const ends = DTYPES[part.dtype].ends ?? [-Infinity, Infinity];
  const rounded = part.dtype === "F32" ? Math.fround(Number(number)) : number;
  return rounded >= (low ?? ends[0]) && rounded <= (high ?? ends[1]);
}

/** @param {Part} part @param {any} value @returns {any} the value at a part's path, flat or nested */
function partOf(part, value) {
  if (!part.path || value?.[part.path] !== undefined) return part.path ? value[part.path] : value;
  const nested = part.path.split(".").reduce((inner, key) => inner?.[key], value);
  if (nested === undefined)
    throw new Refused("bad_shape", `${part.name} is missing; pass every part that the game was connected with`);
  return nested;
}

/** The column layout of a game's rows, and the checks of actions and masks. */
class Columns {
  /** @param {Spec} spec */
  constructor(spec) {
    this.spec = spec;
    this.obs = partsOf("obs", spec.obs);
    this.action = partsOf("action", spec.action);
    this.raw = partsOf("raw_action", spec.action).map((part) => {
      const dtype = isFloat(part.dtype) ? part.dtype : "F32";
      return {
        ...part,
        dtype,
        space: /** @type {Space} */ ({ space: "box", dtype, shape: part.shape, low: null, high: null }),
      };
    });
    const only = spec.action[""];
    /** The action space if it is a single discrete one, otherwise null. */
    this.discrete = only?.space === "discrete" ? only : null;
    /** @type {[string, string, readonly number[]][]} name, dtype and shape of every column */
    this.layout = [...this.obs, ...this.action, ...this.raw].map((part) => [part.name, part.dtype, part.shape]);
    this.layout.push(
      ["reward", "F32", []],
      ["terminated", "BOOL", []],
      ["truncated", "BOOL", []],
      ["is_first", "BOOL", []],
      ["row", "U8", []],
      ["by", "U8", []],
      ["frames", "U16", []],
      ["t_ms", "U32", []],
      ["logp", "F32", []],
      ["version", "U32", []],
    );
    if (spec.has_action_mask && this.discrete) this.layout.push(["action_mask", "BOOL", [this.discrete.n]]);
    const rowBytes = this.layout.reduce((size, [, dtype, shape]) => size + DTYPES[dtype].bytes * product(shape), 0);
    this.nRows = Math.max(2, Math.min(Math.floor(CUT_BYTES / rowBytes), MAX_STEPS + MAX_STEPS / 8 + 2));
  }

  /**
   * The number of a discrete action that is passed by name or by number.
   * @param {any} action
   */
  numbered(action) {
    if (typeof action !== "string" || !this.discrete) return action;
    const at = this.spec.action_names.indexOf(action);
    const known = this.spec.action_names.length
      ? `one of ${this.spec.action_names.slice(0, 12)}`
      : "a number: this game has no action names";
    if (at < 0) throw new Refused("not_in_space", `action ${action.slice(0, 40)} is unknown; pass ${known}`);
    return this.discrete.start + at;
  }

  /**
   * An action mask as bytes; null when none was passed.
   * @param {any} actionMask
   */
  mask(actionMask) {
    if (actionMask === undefined || actionMask === null) return null;
    const n = this.discrete?.n;
    if (n === undefined)
      throw new Refused("bad_columns", `${this.spec.game} has no discrete actions; omit actionMask`);
    const flags = Array.from(actionMask);
    const odd = flags.find((flag) => typeof flag !== "boolean" && flag !== 0 && flag !== 1);
    if (flags.length !== n)
      throw new Refused("bad_shape", `actionMask has ${flags.length} flags; pass one for each of the ${n} actions`);
    if (odd !== undefined || flags.includes(undefined))
      throw new Refused("bad_dtype", `actionMask contains ${String(odd).slice(0, 40)}; pass true or false, or 1 or 0`);
    return Uint8Array.from(flags, Number);
  }
}

/**
 * Rows of one session. The current row is empty, staged (an observation without a decision) or open (a decision without
 * its outcome); all earlier rows are closed. `take` returns the closed rows as a block, which becomes one chunk.
 */
class Rows {
  /** @param {Columns} columns */
  constructor(columns) {
    this._columns = columns;
    /** @type {Record<string, Column>} */
    this._data = Object.fromEntries(
      columns.layout.map(([name, dtype, shape]) => [
        name,
        { dtype, shape, data: DTYPES[dtype].make(columns.nRows * product(shape)) },
      ]),
    );
    /** @type {Consent} */
    this._consent = "unknown";
    /** Closed steps that `take` has not returned yet, and when the oldest of them was closed. */
    this.closedSteps = 0;
    this.oldestMs = 0;
    this._state = EMPTY;
    this._at = this._episodeRow = this._noteBytes = this._reward = 0;
    this._isFirst = false;
    /** @type {Note | null} */
    this._note = null;
    /** @type {Note[]} */
    this._notes = [];
    /** @type {Set<string>} */
    this._used = new Set();
    /** @type {string[]} */
    this._openUsed = [];
  }

  get hasDecision() {
    return this._state === OPEN;
  }

  get inEpisode() {
    return this._note !== null;
  }

  /**
   * @param {Note} note
   * @param {Consent} consent
   * @returns {Block | null} the rows recorded so far, if their consent differs
   */
  begin(note, consent) {
    checkNote(note);
    const block = consent === this._consent ? null : this.take();
    this._consent = consent;
    this._note = { ...note, row: 0 };
    this._isFirst = true;
    this._episodeRow = this._at;
    return block;
  }

  /**
   * Names the model that decides from now on, for the episode's note.
   * @param {string} model
   * @param {string} [ticket] the gateway's draw of it, if there were several
   * @param {number} [noise] the noise with which it plays
   * @param {number} [temperature] the temperature at which it plays
   */
  nameModel(model, ticket, noise, temperature) {
    if (!this._note || (this._note.model === model && this._note.noise === noise)) return;
    const named = { model, ticket, noise, temperature };
    this._note = { ...this._note, ...named };
    if (this._state === OPEN || !this._isFirst) Object.assign(this._notes[this._notes.length - 1], named);
  }

  /**
   * Closes the open step and opens the next one.
   * @param {any} obs
   * @param {any} action
   * @param {{actionMask: any, by: number, frames: number, tMs: number, extras: Extras | null}} options
   */
  decide(obs, action, { actionMask, by, frames, tMs, extras }) {
    const at = this._at + (this._state === OPEN ? 1 : 0);
    this._writeObs(at, obs, actionMask);
    if (this._state === OPEN) this._close(tMs);
    this._at = at;
    this._state = STAGED;
    const { action: parts, raw, discrete } = this._columns;
    const numbered = this._columns.numbered(action);
    for (const part of parts)
      writeValue(part, partOf(part, numbered), { bounds: true, as: this._data[part.name].data, at });
    const mask = this._data.action_mask;
    if (discrete && mask && !mask.data[at * discrete.n + numbered - discrete.start]) {
      throw new Refused("invalid_action", `action ${action} is not valid: the actionMask passed with it excludes it`);
    }
    if (!Number.isInteger(frames) || frames < 0)
      throw new Refused("bad_frames", `frames is ${frames}; pass how many frames the decision lasts, 0 or more`);
    this._put(at, { by, frames: Math.min(frames, 65535), t_ms: Math.min(tMs, 2 ** 32 - 1) });
    this._openUsed = [];
    if (extras) {
      this._put(at, { version: extras.version });
      this._openUsed.push("version");
      if (extras.logp !== null) {
        this._put(at, { logp: extras.logp });
        this._openUsed.push("logp");
      }
      for (const part of extras.rawAction ? raw : []) {
        writeValue(part, extras.rawAction, { bounds: false, as: this._data[part.name].data, at });
        this._openUsed.push(part.name);
      }
    }
    if (this._isFirst && this._note) {
      this._put(at, { is_first: 1 });
      this._notes.push({ ...this._note, row: at });
    }
    this._reward = 0;
    this._state = OPEN;
  }

  /** @param {number} reward */
  addReward(reward) {
    if (this._state !== OPEN)
      throw new Refused("early_reward", "a reward needs a decision before it; call act or acted first");
    if (!["number", "boolean", "bigint"].includes(typeof reward))
      throw new Refused("bad_dtype", `reward ${String(reward).slice(0, 40)} is not a number; pass a finite number`);
    const sum = this._reward + Number(reward);
    if (!(Math.abs(sum) <= Math.fround(MAX_NUMBER))) {
      throw new Refused(
        "not_finite",
        `reward ${reward} makes the step's reward NaN, or larger than ${MAX_NUMBER}; pass a finite, smaller number`,
      );
    }
    this._reward = sum;
  }

  /** Throws Refused when an episode cannot have this result. @param {string | number | undefined} result */
  checkResult(result) {
    checkNote({ row: 0, seat: 0, result });
  }

  /**
   * Ends the episode after its open step; a truncated episode needs its last observation.
   * @param {any} obs
   * @param {{truncated: boolean, actionMask: any, result: string | number | undefined, tMs: number}} options
   */
  finish(obs, { truncated, actionMask, result, tMs }) {
    if (!this._note) throw new Refused("bad_order", "no episode is running; start one with game.episode");
    const hasObs = obs !== undefined && obs !== null;
    if (this._state !== OPEN) return this.cut(result);
    if (truncated && !hasObs) {
      throw new Refused(
        "no_last_obs",
        "a truncated episode ends without its last observation, so the outcome of its last decision is unknown; pass " +
          "that observation, as in end(obs, { truncated: true })",
      );
    }
    const at = this._at + 1;
    if (hasObs) this._writeObs(at, obs, actionMask);
    else {
      // No return is bootstrapped from this row; the last observation is repeated, since it is in the space.
      for (const { name, size } of this._columns.obs)
        this._data[name].data.copyWithin(at * size, (at - 1) * size, at * size);
      this._writeMask(at, actionMask);
    }
    this._put(this._at, truncated ? { truncated: 1 } : { terminated: 1 });
    this._close(tMs);
    this._put(at, { row: FINAL });
    this._leave(at + 1, { ...this._note, result });
  }

  /**
   * Stops the episode at its last complete step: an open step is dropped, its observation kept.
   * @param {string | number} [result]
   */
  cut(result) {
    if (this._state !== EMPTY) this._pad(this._at);
    if (!this._note || this._state === EMPTY || this._at === this._episodeRow) {
      if (this._state !== EMPTY && this._notes.at(-1)?.row === this._at) this._notes.pop();
      this._state = EMPTY;
      this._note = null;
      return;
    }
    this._put(this._at, { row: BOOTSTRAP });
    this._leave(this._at + 1, { ...this._note, cut: true, result });
  }

  get isFull() {
    // There must stay room for one row after the current one.
    return this._at >= this._columns.nRows - 1 || this.closedSteps >= MAX_STEPS || this._noteBytes > MAX_NOTE_BYTES;
  }

  /** Returns the closed rows; the current row becomes the first of the next block. @returns {Block | null} */
  take() {
    if (!this.closedSteps) return null;
    const at = this._at;
    let nRows = at;
    let notes = this._notes;
    let carried = /** @type {Note[]} */ ([]);
    const current = this._state === EMPTY ? null : this._copied(at, at + 1);
    if (current && this._note) {
      if (at === this._episodeRow) {
        // No step of this episode is closed yet: all of it belongs to the next block.
        if (this._state === OPEN) {
          carried = [{ ...notes[notes.length - 1], row: 0 }];
          notes = notes.slice(0, -1);
        }
      } else {
        this._pad(at);
        this._put(at, { row: BOOTSTRAP });
        nRows = at + 1;
        carried = [{ ...this._note, row: 0 }];
      }
    }
    /** @type {Block} */
    const block = {
      columns: this._copied(0, nRows),
      nSteps: this.closedSteps,
      consent: this._consent,
      episodes: notes,
    };
    for (const name of ["logp", "version", ...this._columns.raw.map((part) => part.name)]) {
      if (!this._used.has(name)) delete block.columns[name];
    }
    for (const { data } of Object.values(this._data))
      data.fill(/** @type {never} */ (data instanceof BigInt64Array || data instanceof BigUint64Array ? 0n : 0));
    for (const [name, column] of Object.entries(current ?? {}))
      this._data[name].data.set(/** @type {any} */ (column.data));
    this._notes = carried;
    this._used = new Set();
    this._noteBytes = this._at = this._episodeRow = this.closedSteps = 0;
    return block;
  }

  /** @param {number} from @param {number} to */
  _copied(from, to) {
    return Object.fromEntries(
      Object.entries(this._data).map(([name, { dtype, shape, data }]) => {
        const size = product(shape);
        return [name, { dtype, shape: [to - from, ...shape], data: data.slice(from * size, to * size) }];
      }),
    );
  }

  /** @param {number} at @param {any} obs @param {any} actionMask */
  _writeObs(at, obs, actionMask) {
    if (!this._note) throw new Refused("bad_order", "no episode is running; start one with game.episode");
    for (const part of this._columns.obs)
      writeValue(part, partOf(part, obs), { bounds: false, as: this._data[part.name].data, at });
    this._writeMask(at, actionMask);
  }

  /** @param {number} at @param {any} actionMask */
  _writeMask(at, actionMask) {
    const column = this._data.action_mask;
    const mask = this._columns.mask(actionMask);
    if (mask && !column)
      throw new Refused("bad_columns", "an action mask was passed; connect with hasActionMask: true to record it");
    const n = this._columns.discrete?.n ?? 0;
    if (column) /** @type {Uint8Array} */ (column.data).set(mask ?? new Uint8Array(n).fill(1), at * n);
  }

  /** @param {number} at @param {Record<string, number>} values */
  _put(at, values) {
    for (const [name, value] of Object.entries(values)) this._data[name].data[at] = /** @type {never} */ (value);
  }

  /** Clears a row's decision; its observation and mask stay. @param {number} at */
  _pad(at) {
    for (const [name, { shape, data }] of Object.entries(this._data)) {
      if (name === "action_mask" || name === "obs" || name.startsWith("obs.")) continue;
      const size = product(shape);
      const isBig = data instanceof BigInt64Array || data instanceof BigUint64Array;
      data.fill(/** @type {never} */ (isBig ? 0n : 0), at * size, (at + 1) * size);
    }
  }

  /** @param {number} tMs */
  _close(tMs) {
    this._put(this._at, { reward: this._reward });
    if (!this.closedSteps) this.oldestMs = tMs;
    this.closedSteps += 1;
    this._isFirst = false;
    for (const name of this._openUsed) this._used.add(name);
  }

  /** @param {number} at @param {Note} note */
  _leave(at, note) {
    this._notes.push({ ...note, row: /** @type {Note} */ (this._notes.pop()).row });
    this._noteBytes += 2 * canonicalJson(noteFields(note)).length;
    this._state = EMPTY;
    this._at = at;
    this._note = null;
  }
}

const MAX_TICKET_CHARS = 128;

/** Throws Refused for a note that the platform would reject. @param {Note} note */
function checkNote(note) {
  const { seat, match = "", model = "", opponents = [], result = "", seed = 0, ticket = "" } = note;
  const { skill = "even", noise = 0, temperature = 1 } = note;
  const isCount = (/** @type {unknown} */ value, /** @type {number} */ below) =>
    typeof value === "bigint"
      ? value >= 0n && value < 2n ** 64n
      : Number.isSafeInteger(value) && Number(value) >= 0 && Number(value) < below;
  const isText = (/** @type {unknown} */ value, /** @type {number} */ maxLength) =>
    typeof value === "string" && value.length <= maxLength;
  const isValid =
    isCount(seat, 2 ** 32) &&
    isCount(seed, 2 ** 64) &&
    isText(match, 128) &&
    isText(model, 128) &&
    isText(ticket, MAX_TICKET_CHARS) &&
    Object.hasOwn(DEFAULT_NOISE, skill) &&
    isNoise(noise) &&
    temperature > 0 &&
    temperature <= MAX_TEMPERATURE &&
    Array.isArray(opponents) &&
    opponents.length <= 64 &&
    opponents.every((opponent) => isText(opponent, 128)) &&
    (isText(result, 64) || (typeof result === "number" && Math.abs(result) < 1e300));
  if (!isValid)
    throw new Refused(
      "bad_metadata",
      `a field of the episode has the wrong type or is too large: ${canonicalJson(noteFields(note)).slice(0, 120)}`,
    );
}

// --- Skills ---------------------------------------------------------------------------------------------------------

/** @typedef {"easy" | "even" | "hard"} SkillName */
/** @typedef {{easy: number, even: number}} SkillNoise the noise of each skill below `hard` */
/** @typedef {{skill?: SkillName, noise?: number, temperature?: number}} BotSkill how a bot plays; empty: as released */

/** How well a bot may play: `hard` is as released. */
const SKILLS = ["easy", "even", "hard"];
/** @type {SkillNoise} until the platform has calibrated them */
const DEFAULT_NOISE = { easy: 0.5, even: 0.25 };
const MIN_TEMPERATURE = 0.01;
const MAX_TEMPERATURE = 100;
const MAX_EXPLORE_SHARE = 0.5;

/** @param {unknown} value */
const isNoise = (value) => typeof value === "number" && value >= 0 && value <= 1;

/**
 * The skill that a game asks for; throws Refused when it is not valid.
 * @param {SkillName | null} [skill]
 * @param {number | null} [temperature]
 * @returns {BotSkill}
 */
function botSkill(skill, temperature) {
  skill ??= undefined;
  temperature ??= undefined;
  if (temperature !== undefined && skill !== undefined)
    throw new Refused(
      "bad_skill",
      `skill is ${String(skill).slice(0, 40)} and temperature is ${String(temperature).slice(0, 40)}; pass one of the two`,
    );
  if (temperature !== undefined) {
    const isValid =
      typeof temperature === "number" && temperature >= MIN_TEMPERATURE && temperature <= MAX_TEMPERATURE;
    if (!isValid)
      throw new Refused(
        "bad_temperature",
        `temperature is ${String(temperature).slice(0, 40)}; pass a number from ${MIN_TEMPERATURE} to ${MAX_TEMPERATURE}, ` +
          "where 1 is as released and more is more random",
      );
    return { temperature };
  }
  if (skill !== undefined && !SKILLS.includes(skill))
    throw new Refused("bad_skill", `skill is ${String(skill).slice(0, 40)}; pass one of ${SKILLS.join(", ")}`);
  return skill === undefined || skill === "hard" ? {} : { skill };
}

/**
 * How a bot explores: as at a temperature of 1, if it was released at a lower one, else with a little noise.
 * @param {unknown} releasedTemperature
 * @returns {BotSkill & {deterministic?: boolean}}
 */
function exploringSkill(releasedTemperature) {
  const temperature = 1 / Number(releasedTemperature ?? 1);
  return temperature > 1 && temperature <= MAX_TEMPERATURE ? { temperature, deterministic: false } : { noise: 0.1 };
}

/** Whether the bot plays as released. @param {BotSkill} skill */
const isReleased = ({ skill, temperature }) => skill === undefined && temperature === undefined;

// --- Policies --------------------------------------------------------------------------------------------------------

/** @typedef {{layer: string, [field: string]: any}} Layer */
/** @typedef {Float32Array | Float64Array} Numbers */
/** @typedef {(x: Numbers) => Numbers} Run a layer's computation; it may overwrite the array it returned before */
/**
 * @typedef {{widths: Record<string, number>, columns: Record<string, Numbers>, rows: Record<string, ArrayLike<number>>}}
 *   OtherInputs what a `centre` layer needs of other inputs: the widths of their rows, their columns and their rows
 */
/** @typedef {Record<string, Column>} Weights */

const fround = Math.fround;
const MASKED = -1e30;
const LOWEST = -1e20;
const LOG_STD = [-20, 4];

/** @type {Record<string, (x: number) => number>} */
const ACTIVATIONS = {
  relu: (x) => Math.max(x, 0),
  tanh: Math.tanh,
  sigmoid: (x) => (Math.tanh(x / 2) + 1) / 2,
  silu: (x) => (x * (Math.tanh(x / 2) + 1)) / 2,
  gelu: (x) => (x * (1 + Math.tanh(0.7978845608028654 * (x + 0.044715 * x * x * x)))) / 2,
  elu: (x) => (x > 0 ? x : Math.expm1(x)),
};

/**
 * For each kind of layer, a function that returns its computation for an input of this shape, and the output's shape.
 * Sums are accumulated in float64 and rounded once, so they differ from NumPy's no more than two machines differ.
 * @type {Record<string, (layer: Layer, shape: readonly number[], weight: (name: string, shape: number[]) =>
 *   Float32Array, inputs: OtherInputs) => [Run, number[]]>}
 */
const LAYERS = {
  dense: ({ width }, [size], weight) => [linear(weight("kernel", [size, width]), weight("bias", [width])), [width]],
  conv: convolution,
  layer_norm(_, shape, weight) {
    const width = shape[shape.length - 1];
    const scale = weight("scale", [width]);
    const bias = weight("bias", [width]);
    const out = new Float32Array(product(shape));
    /** @type {Run} */
    const run = (x) => {
      for (let from = 0; from < out.length; from += width) {
        let mean = 0;
        let spread = 0;
        for (let at = 0; at < width; at++) mean += x[from + at] / width;
        for (let at = 0; at < width; at++) spread += (x[from + at] - mean) ** 2 / width;
        const by = 1 / Math.sqrt(spread + 1e-6);
        for (let at = 0; at < width; at++) out[from + at] = (x[from + at] - mean) * by * scale[at] + bias[at];
      }
      return out;
    };
    return [run, [...shape]];
  },
  observation_norm(_, shape, weight) {
    const mean = weight("mean", [...shape]);
    const by = weight("var", [...shape]).map((variance) => 1 / Math.sqrt(fround(variance + 1e-8)));
    weight("count", []);
    return [each(product(shape), (x, at) => Math.max(-10, Math.min(10, fround(x - mean[at]) * by[at]))), [...shape]];
  },
  flatten: (_, shape) => [(x) => x, [product(shape)]],
  activation: ({ name }, shape) => [each(product(shape), ACTIVATIONS[name]), [...shape]],
  dueling({ width, hidden }, [size], weight) {
    const inner = hidden || size;
    /** @param {string} name @param {number} wide @returns {Run} */
    const branch = (name, wide) => {
      const last = linear(weight(`${name}.kernel`, [inner, wide]), weight(`${name}.bias`, [wide]));
      if (!hidden) return last;
      const first = linear(weight(`${name}_hidden.kernel`, [size, hidden]), weight(`${name}_hidden.bias`, [hidden]));
      const relu = each(hidden, ACTIVATIONS.relu);
      return (x) => last(relu(first(x)));
    };
    const value = branch("value", 1);
    const advantage = branch("advantage", width);
    const out = new Float32Array(width);
    /** @type {Run} */
    const run = (x) => {
      const base = value(x)[0];
      const better = advantage(x);
      let mean = 0;
      for (let at = 0; at < width; at++) mean += better[at] / width;
      for (let at = 0; at < width; at++) out[at] = base + better[at] - mean;
      return out;
    };
    return [run, [width]];
  },
  scale_image: (_, shape) => [each(product(shape), (x) => x * fround(1 / 255)), [...shape]],
  channels({ axes }, shape) {
    const kept = shape.map((_, axis) => axis).filter((axis) => !axes.includes(axis));
    const order = [...kept, ...axes];
    const out = new Float32Array(product(shape));
    const strides = shape.map((_, axis) => product(shape.slice(axis + 1)));
    const from = new Uint32Array(out.length);
    for (let at = 0; at < out.length; at++) {
      let rest = at;
      for (let axis = order.length - 1; axis >= 0; axis--) {
        from[at] += (rest % shape[order[axis]]) * strides[order[axis]];
        rest = Math.floor(rest / shape[order[axis]]);
      }
    }
    /** @type {Run} */
    const run = (x) => {
      for (let at = 0; at < out.length; at++) out[at] = x[from[at]];
      return out;
    };
    return [run, [...kept.map((axis) => shape[axis]), product(axes.map((/** @type {number} */ axis) => shape[axis]))]];
  },
  one_hot({ n, start }, shape) {
    const out = new Float32Array(product(shape) * n);
    /** @type {Run} */
    const run = (x) => {
      out.fill(0);
      x.forEach(
        (value, at) => Number.isInteger(value) && value >= start && value < start + n && (out[at * n + value - start] = 1),
      );
      return out;
    };
    return [run, [...shape, n]];
  },
  constant({ width }, _, weight) {
    const value = weight("constant", [width]);
    return [() => value, [width]];
  },
  centre,
};

/**
 * A grid shown from one cell: the highest one of a channel, or the one whose row and column other inputs hold.
 * @param {Layer} layer @param {readonly number[]} shape @param {unknown} _ @param {OtherInputs} inputs
 * @returns {[Run, number[]]}
 */
function centre({ channel, row: ofRow, column: ofColumn, radius, others }, [high, wide, channels], _, inputs) {
  const isPlaced = ofRow.length === 2 && ofColumn.length === 2;
  const needed = [...(isPlaced ? [ofRow[0], ofColumn[0]] : []), ...others];
  const missing = needed.filter((name) => !(name in inputs.widths));
  if (missing.length || !(channels > channel))
    throw new Refused("bad_policy", `a centre layer needs inputs [${missing}], or has no channel ${channel}`);
  const [tall, broad] = [high, wide].map((side) => Math.min(2 * side, 2 * radius + 2) - 1);
  let depth = channels + 1;
  for (const name of others) depth += inputs.widths[name];
  const out = new Float32Array(tall * broad * depth);
  /** The cell's place in one direction: a number of another input, counted from its end. */
  const placed = (/** @type {[string, number]} */ [name, at], /** @type {number} */ side) =>
    Math.trunc(Math.max(0, Math.min(side - 1, Number(inputs.columns[name].at(at)))));
  /** @type {Run} */
  const run = (x) => {
    let at = 0;
    if (isPlaced) at = placed(ofRow, high) * wide + placed(ofColumn, wide);
    else for (let cell = 1; cell < high * wide; cell++) if (x[cell * channels + channel] > x[at * channels + channel]) at = cell;
    const top = Math.floor(at / wide) - (tall >> 1);
    const left = (at % wide) - (broad >> 1);
    out.fill(0);
    for (let row = 0, to = 0; row < tall; row++)
      for (let beside = 0; beside < broad; beside++, to += depth) {
        const [from, over] = [top + row, left + beside];
        if (from >= 0 && from < high && over >= 0 && over < wide) {
          const cell = (from * wide + over) * channels;
          for (let each = 0; each < channels; each++) out[to + each] = x[cell + each];
          out[to + channels] = 1;
        }
        let next = to + channels + 1;
        for (const name of others) {
          out.set(inputs.rows[name], next);
          next += inputs.widths[name];
        }
      }
    return out;
  };
  return [run, [tall, broad, depth]];
}

/** @param {number} size @param {(x: number, at: number) => number} compute @returns {Run} */
function each(size, compute) {
  const out = new Float32Array(size);
  return (x) => {
    for (let at = 0; at < size; at++) out[at] = compute(x[at], at);
    return out;
  };
}

/** @param {Float32Array} kernel @param {Float32Array} bias @returns {Run} */
function linear(kernel, bias) {
  const width = bias.length;
  const out = new Float32Array(bias.length);
  const sums = new Float64Array(width);
  return (x) => {
    sums.fill(0);
    for (let row = 0, at = 0; row < x.length; row++, at += width) {
      const by = x[row];
      if (by === 0) continue;
      for (let column = 0; column < width; column++) sums[column] += by * kernel[at + column];
    }
    for (let column = 0; column < width; column++) out[column] = sums[column] + bias[column];
    return out;
  };
}

/**
 * A square convolution without padding over [height, width, channels].
 * @type {typeof LAYERS[string]}
 */
function convolution({ channels, kernel: side, stride }, shape, weight) {
  const [, wide, deep] = shape;
  const [high, across] = shape.slice(0, 2).map((size) => Math.floor((size - side) / stride) + 1);
  const kernel = weight("kernel", [side, side, deep, channels]);
  const bias = weight("bias", [channels]);
  const out = new Float32Array(high * across * channels);
  const sums = new Float64Array(channels);
  const line = side * deep;
  /** @type {Run} */
  const run = (x) => {
    for (let y = 0, to = 0; y < high; y++) {
      for (let column = 0; column < across; column++, to += channels) {
        sums.set(bias);
        for (let down = 0; down < side; down++) {
          const from = ((y * stride + down) * wide + column * stride) * deep;
          for (let at = 0, tap = down * line * channels; at < line; at++, tap += channels) {
            const by = x[from + at];
            if (by !== 0)
              for (let channel = 0; channel < channels; channel++) sums[channel] += by * kernel[tap + channel];
          }
        }
        out.set(sums, to);
      }
    }
    return out;
  };
  return [run, [high, across, channels]];
}

/** @typedef {{kind: string, size: number, low: (number | null)[], high: (number | null)[]}} Head */
/**
 * @typedef {{action: any, logp: number | null, raw: Float32Array | null}} Choice an action in the game's form, and what
 *   the policy records about it
 */
/** @typedef {{action: number, name: string, value: number | null, probability: number | null}} Advice */
/** @typedef {ArrayLike<boolean | number> | null} ActionMask one flag per action: whether it is valid */
/**
 * @typedef {{actionMask?: ActionMask, deterministic?: boolean, random?: () => number, noise?: number, temperature?:
 *   number}} Choosing `noise` from 0 to 1, as a skill has it; `temperature` 1 is as released
 */

/** Maps observations to actions: a game, a network, its weights and a head. Created by `openPolicy`; immutable. */
export class Policy {
  /** @param {Record<string, string>} facts @param {Weights} weights */
  constructor(facts, weights) {
    /** @type {Spec} */
    this.game = JSON.parse(facts.game);
    /**
     * @type {{inputs: Record<string, {shape: number[], dtype: string, layers: Layer[]}>, trunk: Layer[], heads:
     *   Record<string, Layer[]>}}
     */
    const network = JSON.parse(facts.network);
    /** @type {Head} */
    this.head = JSON.parse(facts.head);
    this.stack = Number(facts.stack);
    this.version = Number(facts.version);
    this.schema = sha256(bytesOf(facts.game));
    this._columns = new Columns(this.game);
    this._outputs = OUTPUTS[this.head.kind];
    if (!this._outputs)
      throw new Refused("bad_policy", `head ${this.head.kind} is unknown; known heads are ${Object.keys(OUTPUTS)}`);
    const unused = new Set(Object.keys(weights));
    /** @type {OtherInputs} */
    this._others = { widths: {}, columns: {}, rows: {} };
    /**
     * @param {string} place
     * @param {Layer[]} layers
     * @param {readonly number[]} shape
     * @returns {[Run[], readonly number[]]}
     */
    const compiled = (place, layers, shape) => {
      const steps = layers.map((layer, index) => {
        const make = Object.hasOwn(LAYERS, layer.layer) ? LAYERS[layer.layer] : undefined;
        if (!make)
          throw new Refused("bad_policy", `${place} has unknown layer ${layer.layer}; known: ${Object.keys(LAYERS)}`);
        const [run, after] = make(layer, shape, (name, expected) => {
          const column = weights[`${place}.${index}.${name}`];
          if (
            !column ||
            column.dtype !== "F32" ||
            column.shape.join() !== expected.join() ||
            !(/** @type {Float32Array} */ (column.data).every(Number.isFinite))
          ) {
            throw new Refused("bad_policy", `${place}.${index}.${name} is missing, not finite, or not F32[${expected}]`);
          }
          unused.delete(`${place}.${index}.${name}`);
          return /** @type {Float32Array} */ (column.data);
        }, this._others);
        shape = after;
        return run;
      });
      return [steps, shape];
    };
    const before = this.stack > 1 ? [this.stack] : [];
    const names = Object.keys(network.inputs).sort(byCodePoint);
    const isCentred = (/** @type {string} */ name) => network.inputs[name].layers.some(({ layer }) => layer === "centre");
    /** The network's inputs in the order they are computed: a `centre` layer needs the others' rows. */
    this._inOrder = [...names.filter((name) => !isCentred(name)), ...names.filter(isCentred)]
      .map((name) => {
        const { shape, dtype, layers } = network.inputs[name];
        const part = this._columns.obs.find((candidate) => candidate.name === name);
        if (!part || part.dtype !== dtype || [...before, ...part.shape].join() !== shape.join()) {
          throw new Refused("bad_policy", `input ${name} is ${dtype}[${shape}], which the game does not have`);
        }
        const [steps, after] = compiled(`inputs.${name}`, layers, shape);
        this._others.widths[name] = product(after);
        return { name, dtype, size: product(shape), isExact: layers[0]?.layer === "one_hot", steps };
      });
    /** The network's inputs, in its order. */
    this.inputs = names.map((name) => /** @type {any} */ (this._inOrder.find((input) => input.name === name)));
    let features = 0;
    /** Where the row of each input begins among the trunk's numbers. @type {Record<string, number>} */
    this._starts = {};
    for (const name of names) {
      this._starts[name] = features;
      features += this._others.widths[name];
    }
    const [trunk, width] = compiled("trunk", network.trunk, [features]);
    this._trunk = trunk;
    /** @type {Record<string, Run[]>} */
    this._heads = {};
    for (const name of Object.keys(network.heads).sort(byCodePoint)) {
      const [steps, after] = compiled(`heads.${name}`, network.heads[name], width);
      if (this._outputs.includes(name) && after.join() !== String(this.head.size)) {
        throw new Refused("bad_policy", `head ${name} outputs [${after}]; ${this.head.kind} needs ${this.head.size}`);
      }
      this._heads[name] = steps;
    }
    const missing = this._outputs.filter((name) => !this._heads[name]);
    if (missing.length || unused.size)
      throw new Refused("bad_policy", `missing outputs: [${missing}]; weights that no layer uses: [${[...unused]}]`);
    this._features = new Float32Array(features);
    /** The names of the network's outputs. */
    this.headNames = Object.keys(this._heads);
  }

  /**
   * The output of every head for an observation; if `stack` is above 1, for a list of the last `stack` observations.
   * @param {any} obs
   * @returns {Record<string, Float32Array>}
   */
  heads(obs) {
    return this.forward(this.read(this.stack > 1 ? obs : [obs]), this.headNames);
  }

  /**
   * The chosen action: a number, or the numbers of a box.
   * @param {any} obs
   * @param {Choosing} [options]
   */
  act(obs, options = {}) {
    return this.choose(this.read(this.stack > 1 ? obs : [obs]), options).action;
  }

  /**
   * The valid actions of a discrete game, best first, each with its value or its probability, whichever the policy has.
   * @param {any} obs
   * @param {{actionMask?: ActionMask}} [options]
   * @returns {Advice[]}
   */
  rank(obs, { actionMask = null } = {}) {
    const { discrete } = this._columns;
    if (!discrete)
      throw new Refused("not_discrete", `${this.game.game} has no discrete actions to rank; use act instead`);
    const mask = this._mask(actionMask);
    const columns = this.read(this.stack > 1 ? obs : [obs]);
    const scores = maskScores(this.forward(columns, this._outputs)[this._outputs[0]], mask);
    const most = Math.max(...scores);
    const total = scores.reduce((sum, score) => sum + Math.exp(score - most), 0);
    const isValue = this._outputs[0] === "q";
    const ranked = Array.from(scores.keys())
      .filter((at) => !mask || mask[at])
      .sort((left, right) => scores[right] - scores[left] || left - right);
    return ranked.map((at) => ({
      action: at + discrete.start,
      name: this.game.action_names[at] ?? String(at + discrete.start),
      value: isValue ? scores[at] : null,
      probability: isValue ? null : Math.exp(scores[at] - most) / total,
    }));
  }

  /**
   * Checks `stack` observations, the oldest first, and converts them to the network's inputs.
   * @param {readonly any[]} rows
   * @returns {Record<string, Numbers>}
   */
  read(rows) {
    if (rows.length !== this.stack)
      throw new Refused("bad_shape", `${rows.length} observations were passed; this policy needs ${this.stack}`);
    return Object.fromEntries(
      this.inputs.map(({ name, size, isExact }) => {
        const part = /** @type {Part} */ (this._columns.obs.find((candidate) => candidate.name === name));
        const numbers = isExact ? new Float64Array(size) : new Float32Array(size);
        rows.forEach((row, at) => {
          const values = writeValue(part, partOf(part, row), { bounds: false });
          for (let index = 0; index < part.size; index++) numbers[at * part.size + index] = Number(values[index]);
        });
        return [name, numbers];
      }),
    );
  }

  /**
   * The outputs of these heads, as copies.
   * @param {Record<string, Numbers>} columns
   * @param {readonly string[]} heads
   * @returns {Record<string, Float32Array>}
   */
  forward(columns, heads) {
    const through = (/** @type {Run[]} */ steps, /** @type {Numbers} */ x) => steps.reduce((now, step) => step(now), x);
    this._others.columns = columns;
    for (const { name, steps } of this._inOrder) {
      const row = through(steps, columns[name]);
      this._features.set(row, this._starts[name]);
      this._others.rows[name] = row;
    }
    const features = Float32Array.from(through(this._trunk, this._features));
    return Object.fromEntries(heads.map((name) => [name, Float32Array.from(through(this._heads[name], features))]));
  }

  /**
   * The decision for inputs that `read` returned.
   * @param {Record<string, Numbers>} columns
   * @param {Choosing} options
   * @returns {Choice}
   */
  choose(columns, { actionMask = null, deterministic = true, random = Math.random, noise = 0, temperature = 1 }) {
    const mask = this._mask(actionMask);
    const outputs = this.forward(columns, this._outputs);
    const { discrete } = this._columns;
    if (!discrete) {
      const logStd = outputs.log_std.map((wide) => wide + Math.log(temperature));
      const choice = this._gaussian(outputs.mean, logStd, deterministic ? null : random);
      return noise ? { action: this._towardsRandom(choice.action, noise, random), logp: null, raw: null } : choice;
    }
    const scores = maskScores(outputs[this._outputs[0]], mask);
    if (noise || temperature !== 1) {
      const isSampled = !deterministic && this.head.kind === "categorical";
      const chances = this._chances(scores, mask, { isSampled, noise, temperature });
      const at = drawn(chances, random());
      return { action: discrete.start + at, logp: Math.log(chances[at]), raw: null };
    }
    if (deterministic || this.head.kind !== "categorical")
      return { action: discrete.start + argmax(scores), logp: 0, raw: null };
    // The argmax of logits plus Gumbel noise is a sample from their distribution.
    const action = argmax(scores.map((score) => score - Math.log(Math.max(-Math.log(1 - random()), 1e-30))));
    const most = Math.max(...scores);
    const logp = scores[action] - most - Math.log(scores.reduce((sum, score) => sum + Math.exp(score - most), 0));
    return { action: discrete.start + action, logp, raw: null };
  }

  /**
   * The probability of each action, of which `noise` is divided among the valid ones.
   * @param {Float32Array} scores
   * @param {Uint8Array | null} mask
   * @param {{isSampled: boolean, noise: number, temperature: number}} how
   */
  _chances(scores, mask, { isSampled, noise, temperature }) {
    const best = argmax(scores);
    const weights = Array.from(scores, (score, at) =>
      isSampled ? Math.exp((score - scores[best]) / temperature) : Number(at === best),
    );
    const total = weights.reduce((sum, weight) => sum + weight, 0);
    const nValid = mask ? mask.filter(Boolean).length : scores.length;
    return weights.map((weight, at) => ((1 - noise) * weight) / total + (!mask || mask[at] ? noise / nValid : 0));
  }

  /**
   * A box action moved towards a random one by this share, so that it stays in the box.
   * @param {any} action
   * @param {number} noise
   * @param {() => number} random
   */
  _towardsRandom(action, noise, random) {
    const other = randomAction(this._columns, random, null);
    const mixed = (/** @type {number} */ from, /** @type {number} */ to) =>
      Math.min(Math.max((1 - noise) * from + noise * to, Math.min(from, to)), Math.max(from, to));
    return typeof action === "number"
      ? mixed(action, other)
      : action.map((/** @type {number} */ number, /** @type {number} */ at) => mixed(number, other[at]));
  }

  /** @param {Float32Array} mean @param {Float32Array} logStd @param {(() => number) | null} random @returns {Choice} */
  _gaussian(mean, logStd, random) {
    const raw = Float32Array.from(mean);
    let logp = 0;
    for (let at = 0; random && at < raw.length; at++) {
      const noise = Math.sqrt(-2 * Math.log(1 - random())) * Math.cos(2 * Math.PI * random());
      const wide = Math.max(LOG_STD[0], Math.min(LOG_STD[1], logStd[at]));
      raw[at] = mean[at] + Math.exp(wide) * noise;
      logp -= (noise * noise) / 2 + wide + Math.log(2 * Math.PI) / 2;
    }
    const space = /** @type {Box} */ (this.game.action[""]);
    const numbers = space.dtype === "F64" ? new Float64Array(raw.length) : new Float32Array(raw.length);
    raw.forEach((value, at) => {
      const low = this.head.low[at] ?? -Infinity;
      const high = this.head.high[at] ?? Infinity;
      const isClosed = Math.abs(low) < MAX_NUMBER && Math.abs(high) < MAX_NUMBER;
      const [by, middle] = isClosed ? [fround((high - low) / 2), fround((high + low) / 2)] : [1, 0];
      const scaled = (this.head.kind === "gaussian_tanh" ? Math.tanh(value) : value) * by + middle;
      numbers[at] = Math.min(Math.max(scaled, low), high);
    });
    return { action: space.shape.length ? numbers : numbers[0], logp, raw };
  }

  /** @param {ActionMask} actionMask */
  _mask(actionMask) {
    const mask = this._columns.mask(actionMask);
    if (mask && !mask.includes(1))
      throw new Refused("invalid_action", "actionMask allows no action; allow at least one, or end the episode");
    return mask;
  }
}

/** @type {Record<string, string[]>} the outputs that each kind of head reads */
const OUTPUTS = {
  argmax: ["q"],
  epsilon_greedy: ["q"],
  categorical: ["logits"],
  gaussian_clipped: ["mean", "log_std"],
  gaussian_tanh: ["mean", "log_std"],
};

/**
 * The scores with every masked action below every valid one.
 * @param {Float32Array} scores
 * @param {Uint8Array | null} mask
 */
const maskScores = (scores, mask) =>
  mask ? scores.map((score, at) => (mask[at] ? Math.max(score, LOWEST) : MASKED)) : scores;

/** @param {Float32Array} scores */
const argmax = (scores) => scores.reduce((best, score, at) => (score > scores[best] ? at : best), 0);

/** The index at which the sum of the chances passes `lot`, from 0 to 1. @param {number[]} chances @param {number} lot */
function drawn(chances, lot) {
  let sum = 0;
  let last = 0;
  for (let at = 0; at < chances.length; at++) {
    if (chances[at] > 0) last = at; // rounding may leave the sum of all below the lot
    sum += chances[at];
    if (lot < sum) return at;
  }
  return last;
}

/**
 * Reads a policy file; throws Refused unless the bytes are exactly one such file. Does not check a signature.
 * @param {Uint8Array} raw
 */
export function openPolicy(raw) {
  const { columns, metadata } = decodeTensors(raw);
  if (metadata.format !== "understudy-policy/1")
    throw new Refused("bad_version", `the policy has format ${metadata.format}; expected understudy-policy/1`);
  try {
    return new Policy(metadata, columns);
  } catch (error) {
    throw error instanceof Refused ? error : new Refused("bad_policy", `the policy cannot be read: ${error}`);
  }
}

// --- Signed documents ------------------------------------------------------------------------------------------------

const MAX_SIGNED = 256 * 1024;

/**
 * The entry of a signed document; throws Refused unless a trusted key signed it.
 *
 * The signature covers the entry's exact text, so it does not have to be re-encoded as Python writes it.
 * @param {string} text
 * @param {readonly string[]} trust public keys as `ed25519:BASE64`
 * @returns {Promise<any>}
 */
export async function checkSigned(text, trust) {
  if (text.length > MAX_SIGNED)
    throw new Refused("too_large", `a signed document has ${text.length} characters; the limit is ${MAX_SIGNED}`);
  const match = /^\{"entry":(\{.*\}),"key_id":"([0-9a-f]{16})","signature":"([A-Za-z0-9+/]{86}==)"\}$/s.exec(text);
  if (!match)
    throw new Refused("bad_entry", "a signed document must have exactly entry, key_id and signature, in this order");
  const [, entry, keyId, signature] = match;
  const keys = trust.map(publicKey);
  const key = keys.find((candidate) => sha256(candidate).slice(0, 16) === keyId);
  if (!key)
    throw new Refused("unknown_key", `signed by key ${keyId}, which is not among the ${keys.length} trusted keys`);
  const subtle = globalThis.crypto?.subtle;
  if (!subtle)
    throw new Refused("no_crypto", "this page cannot verify signatures; serve it over https, or from 127.0.0.1");
  const raw = fromBase64(signature);
  const verifier = await subtle.importKey("raw", key, { name: "Ed25519" }, false, ["verify"]).catch((error) => {
    throw new Refused("no_crypto", `this browser cannot verify Ed25519 signatures (${error}); use a newer one`);
  });
  // Several base64 texts decode to the same bytes; only the canonical one is accepted.
  const isValid =
    toBase64(raw) === signature &&
    (await subtle.verify("Ed25519", verifier, raw, bytesOf(`understudy-entry/1\0${entry}`)));
  if (!isValid) throw new Refused("bad_signature", `the signature of key ${keyId} does not match the document`);
  return JSON.parse(entry);
}

/** @param {string} text @returns {Bytes} */
function publicKey(text) {
  const match = /^ed25519:([A-Za-z0-9+/]{43}=)$/.exec(text);
  if (!match)
    throw new Refused(
      "bad_key",
      `${String(text).slice(0, 60)} is not a public key; pass ed25519:BASE64, as \`understudy up\` prints it`,
    );
  return fromBase64(match[1]);
}

/**
 * @typedef {{name: string, policy: Policy, manifest: any, ticket?: string, deterministic?: boolean} & BotSkill} Bot a
 *   model that passed every check, the gateway's draw of it for an episode, if there were several, and options of
 *   `policy.act`
 */

/**
 * Opens a model; throws Refused unless its bytes match the manifest and reproduce its golden outputs.
 * @param {any} manifest
 * @param {Uint8Array} raw
 * @returns {Bot}
 */
function openBot(manifest, raw) {
  const name = `${manifest.game}/${manifest.model_no}`;
  if (raw.length !== manifest.policy_bytes || sha256(raw) !== manifest.policy_sha256) {
    throw new Refused("bad_hash", `the ${raw.length} bytes of ${name} do not match the signed hash`);
  }
  const policy = openPolicy(raw);
  if (policy.game.game !== manifest.game || policy.schema !== manifest.schema)
    throw new Refused("bad_policy", `${name} contains a policy of another game or schema`);
  checkGolden(policy, manifest.golden);
  return { name, policy, manifest };
}

/** @param {Policy} policy @param {any} outputs each head's outputs for two observations, from the signed manifest */
function checkGolden(policy, outputs) {
  const rows = 2;
  let drawn = 0;
  /** @type {Record<string, Numbers>[]} */
  const inputs = Array.from({ length: rows }, () => ({}));
  for (const { name, dtype, size, isExact } of policy.inputs) {
    for (const row of inputs) {
      const numbers = Array.from({ length: size }, () => {
        const hash = Math.imul(++drawn, 2654435761) >>> 0;
        return isFloat(dtype) ? hash / 2 ** 31 - 1 : hash >>> 31;
      });
      row[name] = isExact ? Float64Array.from(numbers) : Float32Array.from(numbers);
    }
  }
  inputs.forEach((columns, row) => {
    for (const [head, numbers] of Object.entries(policy.forward(columns, policy.headNames))) {
      const expected = outputs?.[head];
      const isClose =
        Array.isArray(expected) &&
        expected.length === rows &&
        expected[row].length === numbers.length &&
        numbers.every((value, at) => Math.abs(value - expected[row][at]) <= 1e-4 + 1e-4 * Math.abs(expected[row][at]));
      if (!isClose)
        throw new Refused("bad_golden", `output ${head} differs from the golden outputs in the signed manifest`);
    }
  });
}

// --- The link --------------------------------------------------------------------------------------------------------

/** A request that failed as a whole; `status` is 0 when there was no response. */
export class LinkFailed extends Error {
  /**
   * @param {string} code
   * @param {string} detail
   * @param {{status?: number, retryAfterS?: number, isFromGateway?: boolean}} [more]
   */
  constructor(code, detail, { status = 0, retryAfterS = 0, isFromGateway = false } = {}) {
    super(`${code}: ${detail}`);
    this.name = "LinkFailed";
    this.code = code;
    this.detail = detail;
    this.status = status;
    this.retryAfterS = retryAfterS;
    /** Whether a gateway sent this error. Errors from proxies and captive portals are never treated as final. */
    this.isFromGateway = isFromGateway;
  }

  /** Whether retrying needs another key. */
  get needsKey() {
    return this.isFromGateway && (this.status === 401 || this.status === 403);
  }

  /** Whether the same request may succeed later. */
  get isRetryable() {
    return this.status === 0 || this.status === 408 || this.status === 429 || this.status >= 500;
  }
}

const TIMEOUT_S = 10;

/** The connection to a platform's gateway. */
class Link {
  /** @param {{url: string, key: string, game: string, fetch: typeof globalThis.fetch}} place */
  constructor({ url, key, game, fetch }) {
    this.address = url.replace(/\/+$/, "");
    this.key = key;
    this._path = `${this.address}/v1/games/${game}`;
    this._fetch = fetch;
    /** @type {Set<AbortController>} */
    this._open = new Set();
    this._isClosed = false;
  }

  /**
   * The status and body of a successful response; throws LinkFailed with the gateway's error otherwise.
   * @param {string} method
   * @param {string} path
   * @param {{body?: Bytes | string, kind?: string, waitS?: number}} [more]
   */
  async ask(method, path, { body, kind, waitS = 0 } = {}) {
    if (this._isClosed) throw new LinkFailed("closed", "the link was closed");
    const stop = new AbortController();
    const timer = setTimeout(() => stop.abort(), (TIMEOUT_S + waitS) * 1000);
    this._open.add(stop);
    const { key } = this;
    /** @type {Record<string, string>} */
    const headers = { Authorization: `Bearer ${key}`, ...(kind ? { "Content-Type": kind } : {}) };
    let answer, raw;
    try {
      answer = await this._fetch(this._path + path, {
        method,
        headers,
        body,
        signal: stop.signal,
        cache: "no-store",
        redirect: "error", // a gateway never redirects, and steps must not be sent to another server
      });
      raw = new Uint8Array(await answer.arrayBuffer());
    } catch (error) {
      throw new LinkFailed("unreachable", `${this.address} did not respond (${error}); is the gateway running there?`);
    } finally {
      clearTimeout(timer);
      this._open.delete(stop);
    }
    if (answer.status === 200 || answer.status === 204) return { status: answer.status, raw };
    if (key !== this.key) throw new LinkFailed("old_key", "the key was replaced while this request was in flight");
    const failure = /** @type {any} */ (jsonOf(raw))?.error;
    const isFromGateway = typeof failure?.code === "string";
    const [code, detail] = isFromGateway
      ? [failure.code, failure.detail]
      : [`status_${answer.status}`, "the response is not from a gateway; is the address right?"];
    const ownDelayS = isFromGateway ? failure.retry_after_s : null;
    const retryAfterS = Number(ownDelayS ?? answer.headers.get("retry-after") ?? 0) || 0;
    throw new LinkFailed(
      code.slice(0, 40),
      `${String(detail).slice(0, 300)} (${this.address} answered ${answer.status})`,
      { status: answer.status, retryAfterS, isFromGateway },
    );
  }

  /** Closes the link; pending requests are aborted. */
  close() {
    this._isClosed = true;
    for (const stop of this._open) stop.abort();
  }
}

/** @param {Uint8Array} raw @returns {unknown} the parsed JSON, or null when it is not JSON */
function jsonOf(raw) {
  try {
    return JSON.parse(new TextDecoder().decode(raw));
  } catch {
    return null;
  }
}

/** Exponential backoff with jitter: waits are random between 0 and a bound that doubles with each failure. */
class Backoff {
  /** @param {Clock} clock @param {() => number} random */
  constructor(clock, random) {
    this._clock = clock;
    this._random = random;
    this._failures = this._untilMs = 0;
  }

  get leftMs() {
    return this._untilMs - this._clock.monotonic();
  }

  succeeded() {
    this._failures = this._untilMs = 0;
  }

  /** @param {number} retryAfterS @param {boolean} [isWholeBatch] whether every frame of the batch must be resent */
  failed(retryAfterS, isWholeBatch = true) {
    this._failures = isWholeBatch ? this._failures + 1 : 1;
    const boundS = Math.min(30, 0.5 * 2 ** Math.min(this._failures - 1, 16));
    this._untilMs = this._clock.monotonic() + 1000 * Math.max(this._random() * boundS, Math.min(retryAfterS, 30));
  }
}

/**
 * @typedef {{now: () => number, monotonic: () => number}} Clock milliseconds since 1970, and of a monotonic clock
 */
/**
 * @typedef {{getItem: (key: string) => string | null, setItem: (key: string, value: string) => void, removeItem: (key:
 *   string) => void, length?: number, key?: (at: number) => string | null}} TextStorage such as localStorage
 */

/** JSON values in a storage, under one key prefix. Storage errors are ignored: only the stored values are lost. */
class ScopedStorage {
  /** @param {TextStorage} storage @param {string} prefix */
  constructor(storage, prefix) {
    this._storage = storage;
    this._prefix = prefix;
  }

  /** @param {string} name @returns {any} */
  read(name) {
    try {
      return JSON.parse(this._storage.getItem(this._prefix + name) ?? "null");
    } catch {
      return null;
    }
  }

  /** @param {string} name @param {unknown} value @returns {number} its size in characters; 0 when it was not stored */
  write(name, value) {
    try {
      const key = this._prefix + name;
      const text = JSON.stringify(value);
      this._storage.setItem(key, text);
      return key.length + text.length;
    } catch {
      return 0;
    }
  }

  /** @param {string} name */
  remove(name) {
    try {
      this._storage.removeItem(this._prefix + name);
    } catch {
      // The value is read again at the next start; a frame that is sent twice is stored once.
    }
  }

  /** @param {string} beginning @returns {string[]} */
  names(beginning) {
    try {
      const keys = Array.from({ length: this._storage.length ?? 0 }, (_, at) => this._storage.key?.(at) ?? "");
      return keys
        .filter((key) => key.startsWith(this._prefix + beginning))
        .map((key) => key.slice(this._prefix.length));
    } catch {
      return [];
    }
  }
}

/**
 * Removes values of all deployments that are older than MAX_AGE_MS and can be replaced: heartbeats, and policies of games
 * and schemas not played for that long. Pinned keys and the highest entry numbers stay. So do unsent frames: the clock of this
 * machine may be wrong, and the platform rejects frames that are too old.
 * @param {TextStorage} storage
 * @param {number} nowMs
 */
function removeExpired(storage, nowMs) {
  const all = new ScopedStorage(storage, "understudy/");
  for (const name of all.names("")) {
    const [place, kind, schema] = name.split("/");
    let lastMs = nowMs;
    if (kind === "held") lastMs = Number(all.read(name)) || 0;
    else if (kind === "policy") lastMs = Number(all.read(`${place}/used/${schema}`)) || 0;
    if (!(nowMs - lastMs <= MAX_AGE_MS)) all.remove(name);
  }
}

/** @typedef {{request: (name: string, how: {ifAvailable: true}, work: (lock: unknown) => unknown) => Promise<unknown>}} Locks */

/**
 * Tracks which pages still run, so that only one page sends the stored frames of each. A page owns its own name and the
 * names of the pages whose frames it adopted. Uses Web Locks where available, otherwise heartbeats in the storage, which
 * expire when a page is gone.
 */
class OwnerLocks {
  /** @param {{storage: ScopedStorage, clock: Clock, locks: Locks | null, place: string}} parts */
  constructor({ storage, clock, locks, place }) {
    this._storage = storage;
    this._clock = clock;
    this._locks = locks;
    this._place = place;
    /** @type {Map<string, () => void>} how each name is released */
    this._held = new Map();
    /** @type {Map<string, number>} the last heartbeat written for each name */
    this._heartbeats = new Map();
    this._isOver = false;
    /** @type {any} */
    this._timer = locks ? undefined : setInterval(() => this._heartbeat(), HEARTBEAT_MS);
    this._timer?.unref?.();
  }

  /** Takes ownership of a name; false when another page owns it. @param {string} name */
  async take(name) {
    if (this._isOver || this._held.has(name)) return false;
    if (!this._locks) {
      if (Math.abs(this._clock.now() - (Number(this._storage.read(`held/${name}`)) || 0)) < ALIVE_MS) return false;
      this._held.set(name, () => this._storage.remove(`held/${name}`));
      this._heartbeat();
      return true;
    }
    const { request } = this._locks;
    return new Promise((/** @type {(isTaken: boolean) => void} */ resolve) => {
      const work = (/** @type {unknown} */ lock) => {
        resolve(lock !== null && !this._isOver);
        const isOurs = lock !== null && !this._isOver;
        return isOurs ? new Promise((done) => this._held.set(name, () => done(null))) : null;
      };
      request.call(this._locks, `${this._place}${name}`, { ifAvailable: true }, work).catch(() => resolve(false));
    });
  }

  _heartbeat() {
    const nowMs = this._clock.now();
    for (const name of this._held.keys()) {
      if (!this._isLost(name) && this._storage.write(`held/${name}`, nowMs)) this._heartbeats.set(name, nowMs);
    }
  }

  /** Releases and returns the names that other pages took over because this page slept past its heartbeat. */
  lost() {
    const names = [...this._heartbeats.keys()].filter((name) => this._isLost(name));
    for (const name of names) {
      this._held.delete(name);
      this._heartbeats.delete(name);
    }
    return names;
  }

  /** @param {string} name */
  _isLost(name) {
    const atMs = this._heartbeats.get(name);
    if (atMs === undefined || Math.abs(this._clock.now() - atMs) < ALIVE_MS) return false;
    // If `used` is gone too, the storage was cleared; a page that takes over a name does not remove `used`.
    return this._storage.read(`held/${name}`) !== atMs && this._storage.read("used") !== null;
  }

  /** Releases all names. */
  end() {
    this._isOver = true;
    clearInterval(this._timer);
    for (const release of this._held.values()) release();
    this._held.clear();
    this._heartbeats.clear();
  }
}

/**
 * Lets one visible page of a browser at a time hold a long poll at the gateway. Over HTTP/1.1 a browser has six
 * connections per host, and long polls of many pages would leave none to send with.
 */
class PollLock {
  /** @param {{locks: Locks | null, name: string, isPage: boolean}} parts outside of pages long polls are unlimited */
  constructor({ locks, name, isPage }) {
    this._locks = locks;
    this._name = name;
    this._isPage = isPage;
    /** @type {(() => void) | null} */
    this._release = null;
  }

  /** Whether this page may hold the long poll now. */
  async take() {
    if (!this._isPage) return true;
    if (globalThis.document?.visibilityState === "hidden") this.end();
    else if (!this._release && this._locks) await this._request(this._locks);
    return this._release !== null;
  }

  /** @param {Locks} locks @returns {Promise<void>} */
  _request(locks) {
    return new Promise((resolve) => {
      const work = (/** @type {unknown} */ lock) => {
        const held = lock === null ? null : new Promise((done) => (this._release = () => done(null)));
        resolve();
        return held;
      };
      locks.request(this._name, { ifAvailable: true }, work).catch(() => resolve());
    });
  }

  end() {
    this._release?.();
    this._release = null;
  }
}

/** A storage in memory. @returns {TextStorage} */
function memoryStorage() {
  /** @type {Map<string, string>} */
  const items = new Map();
  return {
    getItem: (key) => items.get(key) ?? null,
    setItem: (key, value) => void items.set(key, value),
    removeItem: (key) => void items.delete(key),
  };
}

// --- The sender ------------------------------------------------------------------------------------------------------

const MAX_FRAMES = 64;
const MAX_BATCH_BYTES = 4 * 1024 * 1024;
const MAX_REPORTED = 1024;
const IDLE_MS = 60_000;
const REPORT_MS = 10_000;
const DAY_MS = 86_400_000;
/** How long heartbeats, and policies of games that are not played, are stored. */
const MAX_AGE_MS = 8 * DAY_MS;
/** How many characters of frames are stored. */
const MAX_STORED_CHARS = 2 * 1024 * 1024;
/** Browsers run background timers about once a minute; a page without a heartbeat for longer is gone. */
const HEARTBEAT_MS = 20_000;
const ALIVE_MS = 150_000;
const ADOPT_FIRST_MS = 1_000;
const ADOPT_CAP_MS = 60_000;
const FRAMES_TYPE = "application/vnd.understudy.frames";

/** Consecutive episodes of one player and seat: their rows, and the numbers of their frames. */
class Session {
  /**
   * @param {{id: string, player: string, seat?: number, isRecorded?: boolean, rows: Rows | null, startedMs: number}} facts
   *   without rows it is a session of an earlier page or program, whose frames are only sent
   */
  constructor({ id, player, seat = 0, isRecorded = true, rows, startedMs }) {
    this.id = id;
    this.player = player;
    this.seat = seat;
    /** Whether its episodes are recorded; otherwise their steps are counted only. */
    this.isRecorded = isRecorded;
    this.rows = rows;
    this._startedMs = startedMs;
    this.idleSinceMs = startedMs;
    /** @type {WeakRef<object> | null} the episode that records into it now */
    this.holder = null;
    /** @type {Block[]} full blocks that are not encoded yet */
    this.blocks = [];
    this.nextNo = this.nSteps = this.nWaiting = 0;
    /** @type {{numbers: number[], steps: number}} dropped chunk numbers that no drop report contains yet */
    this.lost = { numbers: [], steps: 0 };
    /** @type {Map<number, number>} steps by chunk number of the frames that are in memory only */
    this.unstored = new Map();
    /** Whether it has ended: no more calls are recorded. */
    this.hasEnded = false;
    this.isClosing = false;
    /** Whether the platform rejected a drop report or close of this session: no more are sent. */
    this.isReportRefused = false;
    /** Whether the storage has a record of the frames that are in memory only. */
    this.hasGapRecord = false;
  }

  /** @param {number} nowMs @returns {number} milliseconds since the session started */
  tMs(nowMs) {
    return Math.max(0, Math.floor(nowMs - this._startedMs));
  }

  /** Cuts the running episode and stops recording. */
  end() {
    if (this.rows?.inEpisode) this.rows.cut();
    this.hasEnded = true;
  }
}

/**
 * @typedef {{session: Session, chunkNo: number, kind: FrameKind, nSteps: number, frame: Bytes, isTried: boolean,
 *   isDone: boolean, name: string, chars: number}} Entry a frame until its ack; `chars` is its size in the
 *   storage
 */

/**
 * Encodes blocks as frames and sends them until each is acknowledged, in background rounds.
 */
class Sender {
  /**
   * @param {{link: Link, columns: Columns, client: string, clock: Clock, random: () => number, lingerMs: number,
   *   capBytes: number, storage: ScopedStorage | null, ownerLocks: OwnerLocks | null}} parts
   */
  constructor({ link, columns, client, clock, random, lingerMs, capBytes, storage, ownerLocks }) {
    this._link = link;
    this._columns = columns;
    this._client = client;
    this._clock = clock;
    this._random = random;
    this._lingerMs = lingerMs;
    this._capBytes = capBytes;
    this._storage = storage;
    this._ownerLocks = ownerLocks;
    /** The owner name of the frames stored by this page. */
    this._owner = freshOwner();
    this._adoptAtMs = 0;
    this._adoptMs = ADOPT_FIRST_MS;
    this._specJson = specJson(columns.spec);
    this._schema = schemaOf(columns.spec);
    this._backoff = new Backoff(clock, random);
    /** @type {Set<Session>} */
    this.sessions = new Set();
    /** @type {Entry[]} in the order in which they are sent */
    this._waiting = [];
    this._waitingBytes = this._storedChars = 0;
    this._batchFrames = MAX_FRAMES;
    this._isRegistered = false;
    this._isBusy = false;
    this._timerMs = Infinity;
    /** @type {any} */
    this._timer = undefined;
    this._reportAtMs = clock.monotonic() + REPORT_MS;
    this.recordingRate = 1;
    this.skippedSteps = this._reportedSkips = 0;
    this.counts = {
      recorded: 0,
      acked: 0,
      refused: 0,
      dropped: 0,
      adopted: 0,
      failedSends: 0,
    };
    /** Why sending stopped until another key is set; empty while it runs. */
    this.stopped = "";
    this.linkError = this.refusal = "";
    this.isClosed = false;
    /** Called when the platform acknowledged a batch. */
    this.onAnswer = () => {};
  }

  /** Whether unsent frames are stored, within the limit, for the next start. */
  get isStored() {
    return this._storage !== null;
  }

  /** Steps that are not acknowledged yet. */
  get waitingSteps() {
    const open = [...this.sessions].reduce((sum, session) => sum + (session.isRecorded ? stepsOf(session) : 0), 0);
    return (
      open + this._waiting.reduce((sum, entry) => sum + (entry.session.rows && !entry.isDone ? entry.nSteps : 0), 0)
    );
  }

  get recordedSteps() {
    const open = [...this.sessions].reduce((sum, session) => sum + (session.isRecorded ? stepsOf(session) : 0), 0);
    return this.counts.recorded + open;
  }

  get unreportedSkips() {
    const open = [...this.sessions].reduce((sum, session) => sum + (session.isRecorded ? 0 : stepsOf(session)), 0);
    return this.skippedSteps + open - this._reportedSkips;
  }

  /** Registers this game's spec at the gateway. */
  async register() {
    await this._link.ask("PUT", "", { body: this._specJson, kind: "application/json" });
    this._isRegistered = true;
  }

  /** Called when a step was closed: queues a full block, or schedules a round. @param {Session} session */
  onStepClosed(session) {
    if (session.rows?.isFull) {
      const block = session.rows.take();
      if (block) this.enqueue(session, block);
    } else this._schedule(this._clock.monotonic() + this._lingerOf(session));
  }

  /** @param {Session} session @param {Block} block */
  enqueue(session, block) {
    this._queue(session, block);
    // A game that never yields its thread must not fill the memory: its own call then encodes and enforces the cap.
    if (session.blocks.length > MAX_PACKING) this.collect();
    this._schedule(0);
  }

  /** @param {Session} session @param {Block} block */
  _queue(session, block) {
    session.blocks.push(block);
    if (!session.isRecorded || !globalThis.CompressionStream || !Object.values(block.columns).some(isImage)) return;
    block.packing = pack(block)
      .catch(() => {}) // then the images are sent uncompressed
      .then(() => {
        block.packing = null;
        this._schedule(0);
      });
  }

  /** @param {number} atMs */
  _schedule(atMs) {
    if (this.isClosed || atMs >= this._timerMs) return;
    clearTimeout(this._timer);
    this._timerMs = atMs;
    this._timer = setTimeout(() => this.wake(), Math.max(0, atMs - this._clock.monotonic()));
    this._timer?.unref?.(); // must not keep a Node program alive
  }

  /** Runs a round now; while one is in progress, only encodes frames. */
  wake() {
    clearTimeout(this._timer);
    this._timerMs = Infinity;
    if (this.isClosed) return;
    // Frames are encoded even while a request is in flight, so that they are stored for the next page.
    if (this._isBusy) {
      this.collect();
      this._schedule(this._cutMs());
      return;
    }
    this._isBusy = true;
    this._round().finally(() => {
      this._isBusy = false;
      this._schedule(this._dueMs());
    });
  }

  async _round() {
    if (this._clock.monotonic() >= this._adoptAtMs) await this.adopt();
    this.collect();
    for (;;) {
      const batch = this._batch();
      const mustReport = this.unreportedSkips > 0 && this._clock.monotonic() >= this._reportAtMs && this._canTry;
      if (this.isClosed || !(batch.length || mustReport)) return;
      await this._send(batch);
      this.collect();
    }
  }

  get _canTry() {
    return !this.stopped && this._backoff.leftMs <= 0;
  }

  /** @param {Session} session */
  _lingerOf(session) {
    return session.isRecorded ? this._lingerMs : Math.max(this._lingerMs, REPORT_MS); // skipped steps are not urgent
  }

  /** The time at which the next rows must be sent, or the next session becomes idle. */
  _cutMs() {
    const due = [Infinity];
    for (const session of this.sessions) {
      if (session.rows?.closedSteps) due.push(session._startedMs + session.rows.oldestMs + this._lingerOf(session));
      if (!session.holder && !session.hasEnded) due.push(session.idleSinceMs + IDLE_MS);
    }
    return Math.min(...due);
  }

  _dueMs() {
    const tryMs = this._clock.monotonic() + this._backoff.leftMs;
    const sendMs = this._waiting.length && !this.stopped ? tryMs : Infinity;
    const reportMs = this.unreportedSkips && !this.stopped ? Math.max(this._reportAtMs, tryMs) : Infinity;
    return Math.min(this._cutMs(), sendMs, reportMs, this._storage ? this._adoptAtMs : Infinity);
  }

  // From the game into frames.

  /**
   * Encodes the rows that are due as frames; `isAll`: all closed rows; `isUrgent`: without waiting for compression.
   * @param {{isAll?: boolean, isUrgent?: boolean}} [options]
   */
  collect({ isUrgent = false, isAll = isUrgent } = {}) {
    const nowMs = this._clock.monotonic();
    if (this._ownerLocks?.lost().includes(this._owner)) this._onOwnershipLost();
    for (const session of this.sessions) {
      const { rows } = session;
      if (rows && session.holder && session.holder.deref() === undefined) {
        // The game discarded its episode without ending it.
        rows.cut();
        this.release(session);
      }
      const isDue =
        rows && rows.closedSteps > 0 && nowMs - session._startedMs - rows.oldestMs >= this._lingerOf(session);
      const block = isAll || isDue || session.hasEnded ? rows?.take() : null;
      if (block) this._queue(session, block);
      const { blocks } = session; // encoded in order
      while (blocks.length && (isUrgent || !blocks[0].packing || blocks.length > MAX_PACKING)) {
        this._encode(session, /** @type {Block} */ (blocks.shift()));
      }
      if (!session.holder && nowMs - session.idleSinceMs >= IDLE_MS) session.end();
    }
    this._enforceCap();
    this._reportLost();
    this._closeFinished();
  }

  /** @param {Session} session */
  release(session) {
    session.holder = null;
    session.idleSinceMs = this._clock.monotonic();
  }

  /** @param {Session} session @param {Block} block */
  _encode(session, block) {
    if (!session.isRecorded) {
      this.skippedSteps += block.nSteps;
      return;
    }
    this.counts.recorded += block.nSteps;
    const { id, nextNo: chunkNo, nSteps: firstStep } = session;
    const { nSteps, consent, episodes, columns } = block;
    const meta = {
      game: this._columns.spec.game,
      schema: this._schema,
      session: id,
      chunkNo,
      firstStep,
      nSteps,
      consent,
      client: this._client,
      episodes,
    };
    session.nSteps += nSteps;
    try {
      this._add(session, "data", encodeChunk(meta, columns), nSteps);
    } catch (error) {
      session.nextNo = chunkNo + 1;
      this.refusal = String(error);
      this._drop(session, chunkNo, nSteps);
    }
  }

  /** @param {Session} session @param {FrameKind} kind @param {Uint8Array} body @param {number} nSteps */
  _add(session, kind, body, nSteps) {
    const chunkNo = session.nextNo;
    /** @type {Entry} */
    const entry = {
      session,
      chunkNo,
      kind,
      nSteps,
      frame: encodeFrame(kind, session.id, chunkNo, body),
      isTried: false,
      isDone: false,
      name: `frame/${this._owner}/${session.id}/${chunkNo}`,
      chars: 0,
    };
    session.nextNo += 1;
    this._store(entry);
    if (this._storage && !entry.chars) session.unstored.set(chunkNo, nSteps);
    this._recordUnstored(session);
    this._push(entry);
  }

  /** Stores a frame; false when the storage limit is reached. @param {Entry} entry */
  _store(entry) {
    if (!this._storage || entry.chars) return true;
    const { session, nSteps, kind } = entry;
    const text = toBase64(entry.frame);
    // Reports are small, and without them the platform could not explain the missing numbers.
    if (kind === "data" && this._storedChars + text.length > MAX_STORED_CHARS) return false;
    entry.chars = this._storage.write(entry.name, { player: session.player, nSteps, frame: text, kind });
    this._storedChars += entry.chars;
    return true;
  }

  /** Records which frames are in memory only, so that the next page can report them as lost. @param {Session} session */
  _recordUnstored(session) {
    const { id, player, unstored, nextNo } = session;
    if (!session.hasGapRecord && !unstored.size) return;
    session.hasGapRecord = unstored.size > 0;
    const steps = [...unstored.values()].reduce((sum, count) => sum + count, 0);
    const record = { player, ranges: rangesOf([...unstored.keys()]), steps, nextNo };
    if (session.hasGapRecord) this._storage?.write(`gap/${this._owner}/${id}`, record);
    else this._storage?.remove(`gap/${this._owner}/${id}`);
  }

  /**
   * Removes entries from the record of frames in memory only. Frames in flight stay in the record: if the page closes
   * now, they are not sent again. If they did arrive, the platform has them anyway, and the drop report then names too
   * many chunk numbers rather than too few.
   * @param {Iterable<Entry>} entries settled or stored entries, which are not lost
   */
  _clearUnstored(entries) {
    for (const { session, chunkNo } of entries) if (session.unstored.delete(chunkNo)) this._recordUnstored(session);
  }

  /** @param {Entry} entry */
  _push(entry) {
    entry.session.nWaiting += 1;
    this._waitingBytes += entry.frame.length;
    // A report precedes the data: without it the numbers after a long gap would be too far ahead to be accepted.
    if (entry.kind === "drop") this._waiting.unshift(entry);
    else this._waiting.push(entry);
  }

  /** Adopts the unsent frames of pages and programs that no longer run. */
  async adopt() {
    if (!this._storage || !this._ownerLocks || this.isClosed) return;
    // A page that is closing may own its frames a moment longer, so the first attempts follow quickly.
    this._adoptAtMs = this._clock.monotonic() + this._adoptMs;
    this._adoptMs = Math.min(2 * this._adoptMs, ADOPT_CAP_MS);
    await this._ownerLocks.take(this._owner);
    const storage = this._storage;
    const names = ["frame/", "gap/", "held/"].flatMap((kind) => storage.names(kind));
    for (const owner of new Set(names.map((name) => name.split("/")[1]))) {
      if (await this._ownerLocks.take(owner)) this._adoptFrom(storage, owner);
    }
    this._schedule(this._waiting.length ? 0 : this._adoptAtMs);
  }

  /** @param {ScopedStorage} storage @param {string} owner */
  _adoptFrom(storage, owner) {
    const startedMs = this._clock.monotonic();
    /** @type {Entry[]} */
    const entries = [];
    /** @type {Map<string, Session>} */
    const sessions = new Map();
    const sessionNamed = (/** @type {string} */ id, /** @type {string} */ player) => {
      const session = sessions.get(id) ?? new Session({ id, player, rows: null, startedMs });
      sessions.set(id, session);
      return session;
    };
    for (const name of storage.names(`frame/${owner}/`)) {
      const stored = storage.read(name);
      try {
        const frame = fromBase64(stored.frame);
        const session = sessionNamed(sessionOf(frame), stored.player);
        const { nSteps, kind } = stored;
        const chunkNo = Number(new DataView(frame.buffer).getBigUint64(32, true));
        const chars = name.length + stored.frame.length;
        entries.push({ session, chunkNo, kind, nSteps, frame, isTried: true, isDone: false, name, chars });
        this._storedChars += chars;
        this.counts.adopted += nSteps;
      } catch {
        warn("damaged", "stored frames of an earlier page were damaged, and are deleted");
        storage.remove(name);
      }
    }
    entries.sort((left, right) => byCodePoint(left.session.id, right.session.id) || left.chunkNo - right.chunkNo);
    for (const entry of entries) this._push(entry);
    for (const name of storage.names(`gap/${owner}/`)) {
      try {
        const { player, ranges, steps, nextNo } = storage.read(name);
        const session = sessionNamed(name.split("/")[2], player);
        session.nextNo = nextNo;
        this._report(session, ranges, steps);
        this.counts.dropped += steps;
        warn("dropped", "recorded steps had to be dropped; game.stats().dropped counts them");
      } catch {
        // The record is damaged; there is nothing to report.
      }
      storage.remove(name);
    }
  }

  /**
   * Called when another page took over this page's frames while it slept. The other page sends the stored frames, which
   * the platform deduplicates, and reports the others as dropped, in frames with the next chunk numbers of the session.
   * This page continues after those numbers.
   */
  _onOwnershipLost() {
    this._owner = freshOwner();
    void this._ownerLocks?.take(this._owner);
    for (const session of this.sessions) {
      if (!session.hasGapRecord) continue;
      const { unstored } = session;
      session.nextNo += Math.ceil(rangesOf([...unstored.keys()]).length / MAX_REPORTED);
      session.unstored = new Map();
      session.hasGapRecord = false;
      const abandoned = this._waiting.filter((entry) => entry.session === session && unstored.has(entry.chunkNo));
      for (const entry of abandoned) {
        if (entry.isDone) continue;
        this._finish(entry);
        this.counts.dropped += entry.nSteps;
        if (entry.kind === "drop") this._add(session, "drop", entry.frame.subarray(64), 0);
        if (entry.kind === "close") session.isClosing = false;
      }
      warn("dropped", "recorded steps had to be dropped; game.stats().dropped counts them");
    }
  }

  // Dropping and reporting.

  _enforceCap() {
    if (this._waitingBytes <= this._capBytes) return;
    for (const entry of this._waiting) {
      if (this._waitingBytes <= (this._capBytes * 7) / 8) break;
      // A frame that was sent may have arrived, so reporting it as dropped could be wrong.
      if (entry.isTried || entry.isDone || entry.kind !== "data") continue;
      this._finish(entry);
      this._drop(entry.session, entry.chunkNo, entry.nSteps);
    }
    this._waiting = this._waiting.filter((entry) => !entry.isDone);
  }

  /** @param {Session} session @param {number} chunkNo @param {number} nSteps */
  _drop(session, chunkNo, nSteps) {
    session.lost.numbers.push(chunkNo);
    session.lost.steps += nSteps;
    this.counts.dropped += nSteps;
    warn("dropped", "recorded steps had to be dropped; game.stats().dropped counts them");
  }

  _reportLost() {
    for (const session of this.sessions) {
      if (!session.lost.numbers.length || session.isReportRefused || session.isClosing) continue;
      const { numbers, steps } = session.lost;
      session.lost = { numbers: [], steps: 0 };
      this._report(session, rangesOf(numbers), steps);
    }
  }

  /** Reports dropped chunk numbers. @param {Session} session @param {[number, number][]} ranges @param {number} steps */
  _report(session, ranges, steps) {
    for (let at = 0; at < ranges.length; at += MAX_REPORTED) {
      const report = { n_steps: at ? 0 : steps, ranges: ranges.slice(at, at + MAX_REPORTED) };
      this._add(session, "drop", bytesOf(canonicalJson(report)), 0);
    }
  }

  _closeFinished() {
    for (const session of this.sessions) {
      if (!session.hasEnded || session.nWaiting || session.blocks.length || session.rows?.closedSteps) continue;
      if (session.nextNo && !session.isClosing && !session.isReportRefused) {
        session.isClosing = true;
        this._add(session, "close", bytesOf(canonicalJson({ n_chunks: session.nextNo, n_steps: session.nSteps })), 0);
      } else this.sessions.delete(session);
    }
  }

  // From frames through the link.

  _batch() {
    if (!this._canTry) return [];
    const waiting = this._waiting.filter((entry) => !entry.isDone);
    // Own frames first: the platform may put off those of an earlier page for long, such as for their age.
    this._waiting = [
      ...waiting.filter(({ session }) => session.rows),
      ...waiting.filter(({ session }) => !session.rows),
    ];
    let bytesLeft = MAX_BATCH_BYTES;
    const end = this._waiting.findIndex(
      (entry, at) => at === this._batchFrames || ((bytesLeft -= entry.frame.length) < 0 && at > 0),
    );
    const batch = this._waiting.slice(0, end < 0 ? this._waiting.length : end);
    // Store before sending: if the page closes during the request, the outcome would be unknown.
    const full = batch.findIndex((entry, at) => !this._store(entry) && at > 0);
    this._clearUnstored(batch.filter((entry) => entry.chars));
    return full < 0 ? batch : batch.slice(0, full);
  }

  /** @param {Entry[]} batch */
  async _send(batch) {
    const skipped = this.unreportedSkips;
    const players = Object.fromEntries(batch.map(({ session }) => [session.id, session.player]));
    for (const entry of batch) entry.isTried = true;
    /** @type {Entry[]} the entries that a failure concerns */
    let sent = [];
    try {
      if (!this._isRegistered) await this.register();
      sent = batch;
      const body = encodeFrameBatch(
        batch.map((entry) => entry.frame),
        players,
        skipped,
      );
      const { raw } = await this._link.ask("POST", "/frames", { body, kind: FRAMES_TYPE });
      const answer = /** @type {any} */ (jsonOf(raw));
      if (
        !Array.isArray(answer?.acks) ||
        answer.acks.length !== batch.length ||
        !(answer.recording_rate >= 0 && answer.recording_rate <= 1)
      ) {
        throw new LinkFailed("strange_answer", `${this._link.address} sent a response that this version cannot read`);
      }
      this._reportedSkips += skipped;
      this._reportAtMs = this._clock.monotonic() + REPORT_MS;
      this.recordingRate = answer.recording_rate;
      this._settle(batch, answer.acks);
      this.onAnswer();
    } catch (error) {
      this._onFailure(sent, error instanceof LinkFailed ? error : new LinkFailed("failed", String(error)));
    }
  }

  /**
   * @param {Entry[]} batch
   * @param {{accepted: boolean, refused: string | null, retry_after_s: number, error: string}[]} acks
   */
  _settle(batch, acks) {
    let again = 0;
    let retryAfterS = 0;
    let why = "";
    batch.forEach((entry, at) => {
      const ack = acks[at];
      if (entry.isDone) return; // dropped in the meantime
      if (ack.accepted) {
        this.counts.acked += entry.session.rows ? entry.nSteps : 0;
        this._finish(entry);
      } else if (ack.refused) this._refuse(entry, ack.refused);
      else {
        again += 1;
        retryAfterS = Math.max(retryAfterS, Number(ack.retry_after_s) || 0);
        why = ack.error;
      }
    });
    this.linkError = why;
    this._batchFrames = Math.max(this._batchFrames, Math.min(2 * batch.length, MAX_FRAMES));
    if (again) this._backoff.failed(retryAfterS, again === batch.length);
    else this._backoff.succeeded();
    this.counts.failedSends += again ? 1 : 0;
  }

  /** @param {Entry[]} batch @param {LinkFailed} failed */
  _onFailure(batch, failed) {
    this._isRegistered = false; // the next gateway may be another one that does not know this game
    this.linkError = failed.message;
    this.counts.failedSends += 1;
    if (failed.needsKey) {
      this.stopped = failed.message;
      warn("stopped", `sending stopped, recorded steps are kept: ${failed.message}`);
      return;
    }
    if ([0, 400, 408, 413].includes(failed.status) && failed.code !== "unknown_schema") {
      // The batch is too large for a proxy or for the connection, or one of its frames is invalid: bisect.
      if (batch.length > 1) this._batchFrames = batch.length >> 1;
      else if (batch.length && failed.isFromGateway && failed.status !== 408) this._refuse(batch[0], failed.message);
    }
    this._backoff.failed(failed.retryAfterS);
  }

  /** @param {Entry} entry @param {string} reason */
  _refuse(entry, reason) {
    if (entry.isDone) return;
    this.counts.refused += entry.session.rows ? entry.nSteps : 0;
    this.refusal = reason;
    warn("refused", `the platform permanently rejected recorded steps: ${reason}`);
    this._finish(entry);
    if (entry.kind !== "data") entry.session.isReportRefused = true;
    else if (entry.session.rows) {
      entry.session.lost.numbers.push(entry.chunkNo);
      entry.session.lost.steps += entry.nSteps;
    }
  }

  /** @param {Entry} entry */
  _finish(entry) {
    entry.isDone = true;
    entry.session.nWaiting -= 1;
    this._waitingBytes -= entry.frame.length;
    this._clearUnstored([entry]);
    if (entry.chars) this._storage?.remove(entry.name);
    this._storedChars -= entry.chars;
    entry.chars = 0;
  }

  // Flushing and closing.

  /** Sends everything recorded so far; false when some of it is not settled in time. @param {number} timeoutS */
  async flush(timeoutS) {
    this.collect({ isAll: true });
    await Promise.all([...this.sessions].flatMap((session) => session.blocks.map((block) => block.packing)));
    this.collect();
    const entries = [...this._waiting];
    return this._until(() => entries.every((entry) => entry.isDone), timeoutS);
  }

  /** Ends every session and sends the rest; false when some of it is not settled in time. @param {number} timeoutS */
  async finish(timeoutS) {
    for (const session of this.sessions) session.end();
    this.collect();
    const isAll = await this._until(
      () => this.sessions.size === 0 && this._waiting.every((entry) => entry.isDone),
      timeoutS,
    );
    this.end();
    return isAll;
  }

  /** Stops sending. */
  end() {
    this.isClosed = true;
    clearTimeout(this._timer);
    this.releaseStored();
  }

  /** Lets the next page adopt the stored frames. */
  releaseStored() {
    this._ownerLocks?.end();
  }

  /** @param {() => boolean} isDone @param {number} timeoutS */
  async _until(isDone, timeoutS) {
    const endMs = this._clock.monotonic() + 1000 * timeoutS;
    while (!isDone()) {
      if (this.stopped || this.isClosed || this._clock.monotonic() >= endMs) return false;
      this.wake();
      await new Promise((resolve) => setTimeout(resolve, 10));
    }
    return true;
  }

  /** Retries at once, after a new key or when the network is back. */
  retry() {
    this.stopped = this.linkError = "";
    this._backoff.succeeded();
    this.wake();
  }
}

const freshOwner = () => hexOf(crypto.getRandomValues(new Uint8Array(8)));

/** @param {number[]} numbers @returns {[number, number][]} first and last of each consecutive run */
function rangesOf(numbers) {
  /** @type {[number, number][]} */
  const ranges = [];
  for (const number of numbers.sort((left, right) => left - right)) {
    const last = ranges.at(-1);
    if (last && last[1] === number - 1) last[1] = number;
    else ranges.push([number, number]);
  }
  return ranges;
}

/** @param {Session} session */
const stepsOf = (session) =>
  (session.rows?.closedSteps ?? 0) + session.blocks.reduce((sum, block) => sum + block.nSteps, 0);

const warned = new Set();

/** Warns once per topic. @param {string} topic @param {string} text */
function warn(topic, text) {
  if (warned.has(topic)) return;
  warned.add(topic);
  console.warn(`understudy: ${text}`);
}

// --- Bots ------------------------------------------------------------------------------------------------------------

const POLL_S = 25;
/** Tickets that are fetched at once; more are fetched when half of them are used. */
const N_TICKETS = 64;
const MAX_STORED_POLICY_BYTES = 1024 * 1024;
/** The shortest time between two acks to the sender that end the backoff of polling. */
const NUDGE_MS = 5000;
/** How often a page polls while another page of the same browser holds the long poll. */
const SHORT_POLL_MS = 10_000;
const RECHECK_FIRST_MS = 15_000;
const RECHECK_CAP_MS = 600_000;
/** @typedef {"champion" | "canary"} Alias */
/**
 * @typedef {{number: number, champion: string | null, champion_release: string | null, canary: string | null,
 *   canary_release: string | null, canary_share: number, control_release: string | null, noise: string | null,
 *   trust: string[]}} LiveModels champion, canary, control and the noise of the skills, signed
 * @typedef {{champion: Bot | null, canary?: Bot | null, control?: Bot | null, entry?: number}} LivePolicies the bots that
 *   play new episodes, and the canary's entry in the journal
 * @typedef {{model_no: number, ticket: string}} DrawnTicket the model that plays one episode, sealed by the gateway
 */

/**
 * Follows the bots of a game: restores the last valid ones from the storage, then fetches newer ones; each is verified
 * before it plays.
 */
class Bots {
  /**
   * @param {{link: Link, spec: Spec, clock: Clock, random: () => number, storage: ScopedStorage,
   *   trust: readonly string[], pollLock: PollLock}} parts
   */
  constructor({ link, spec, clock, random, storage, trust, pollLock }) {
    this._link = link;
    this._pollLock = pollLock;
    this._spec = spec;
    this._schema = schemaOf(spec);
    this._clock = clock;
    this._random = random;
    this._storage = storage;
    // Each version of a game has its own bots; the trusted keys are those of the deployment.
    const version = this._schema.slice(0, 16);
    this._botName = `bot/${version}`;
    this._policyPlace = `policy/${version}/`;
    this._trust = trust;
    this._backoff = new Backoff(clock, random);
    /** @type {LivePolicies} */
    this._live = { champion: null };
    this._noise = DEFAULT_NOISE;
    /** The share of episodes in which the champion explores. */
    this._exploreShare = 0;
    /** @type {string | null} the signed entry that has it */
    this._signedNoise = null;
    /**
     * @type {Record<Alias, number>} the highest entry number of each alias with a valid signature; older entries are
     *   rejected
     */
    this._seen = { champion: 0, canary: 0 };
    /** @type {{trial: string, untilMs: number, left: DrawnTicket[]}} the draws of the next episodes */
    this._tickets = { trial: "", untilMs: 0, left: [] };
    this._ticketBackoff = new Backoff(clock, random);
    this._isFetchingTickets = false;
    this._after = this._goodNumber = 0;
    this._recheckAtMs = Infinity;
    this._recheckMs = RECHECK_FIRST_MS;
    this._isFollowing = false;
    /** Before this time, an ack to the sender does not trigger a poll. */
    this._nudgeAtMs = 0;
    /** Ends the pause between two polls. */
    this._wake = () => {};
    this.isClosed = false;
    this.refused = 0;
    this.refusal = this.linkError = "";
    /** @type {Set<(name: string) => void>} */
    this.listeners = new Set();
  }

  get name() {
    return this._live.champion?.name ?? "";
  }

  get champion() {
    return this._live.champion;
  }

  /**
   * The bot for an episode: while a canary is on trial as the gateway's next ticket says, without one the champion; null
   * while there is none. At a skill or temperature it is the champion, on whose play the noise was calibrated; and in a few
   * episodes it is the champion, which explores.
   * @param {BotSkill} skill
   * @returns {Bot | null}
   */
  pickBot(skill = {}) {
    const { champion, canary } = this._live;
    if (!isReleased(skill)) return champion && this.atSkill(champion, skill);
    if (champion && this._exploreShare && this._random() < this._exploreShare)
      return { ...champion, ...exploringSkill(champion.manifest.lineage?.config?.temperature) };
    if (!canary) return champion;
    const { trial, left, untilMs } = this._tickets;
    // Tickets of other models are not used: if only some of them were, the comparison would be biased.
    const areValid = trial === this._trial() && this._clock.monotonic() < untilMs;
    const drawn = areValid ? left.shift() : undefined;
    if (!drawn || 2 * left.length <= N_TICKETS) void this._fetchTickets();
    const bot = this._liveBots().find((live) => live.manifest.model_no === drawn?.model_no);
    return drawn && bot ? { ...bot, ticket: drawn.ticket } : champion;
  }

  /** The canary's entry and the live models, as they must be in the batch of a ticket; empty without a canary. */
  _trial() {
    const { canary, entry = 0 } = this._live;
    const models = this._liveBots().map((bot) => bot.manifest.model_no);
    return canary ? trialOf(entry, models) : "";
  }

  /** @returns {Bot[]} */
  _liveBots() {
    const { champion, canary, control } = this._live;
    return [champion, canary, control].flatMap((bot) => bot ?? []);
  }

  /**
   * Fetches the draws of the next episodes if a canary is on trial and they run low; those of an earlier entry, or of
   * other models, are dropped. Until they arrive, the champion plays.
   */
  async _fetchTickets() {
    const trial = this._trial();
    const nowMs = this._clock.monotonic();
    if (this._tickets.trial !== trial || nowMs >= this._tickets.untilMs) this._tickets = { trial, untilMs: 0, left: [] };
    const tickets = this._tickets;
    const isDue = trial && 2 * tickets.left.length <= N_TICKETS && this._ticketBackoff.leftMs <= 0;
    if (!isDue || this._isFetchingTickets || this.isClosed) return;
    this._isFetchingTickets = true;
    try {
      const body = canonicalJson({ schema: this._schema, n: N_TICKETS, control: Boolean(this._live.control) });
      const { raw } = await this._link.ask("POST", "/tickets", { body, kind: "application/json" });
      const batch = parseTickets(jsonOf(raw), N_TICKETS);
      if (trialOf(batch.entry, batch.models) !== trial)
        throw new LinkFailed("other_trial", "the gateway knows another trial; the next poll returns it");
      const untilMs = nowMs + 1000 * batch.valid_s;
      tickets.untilMs = tickets.left.length ? Math.min(tickets.untilMs, untilMs) : untilMs;
      tickets.left.push(...batch.tickets);
      this._ticketBackoff.succeeded();
    } catch (error) {
      // A gateway of an earlier version has no tickets.
      this._ticketBackoff.failed(error instanceof LinkFailed ? error.retryAfterS : 0);
    } finally {
      this._isFetchingTickets = false;
    }
  }

  /** The same bot at a skill, with its noise, or at a temperature. @param {Bot} bot @param {BotSkill} skill @returns {Bot} */
  atSkill({ name, policy, manifest }, { skill, temperature }) {
    const noise = skill && this._noise[/** @type {keyof SkillNoise} */ (skill)];
    // By default, `policy.act` chooses the best action, at any temperature.
    const sampled = temperature === undefined ? {} : { deterministic: false };
    return { name, policy, manifest, skill, noise, temperature, ...sampled };
  }

  /** Restores the last valid bots; one that fails a check is fetched again. */
  async load() {
    const stored = this._storage.read(this._botName);
    try {
      if (!stored) return;
      this._seen = { champion: Number(stored.seen?.champion) || 0, canary: Number(stored.seen?.canary) || 0 };
      if (!stored.live_models) return;
      const news = parseLiveModels(stored.live_models);
      const champion = await this._restore(news.champion_release);
      const canary = await this._restore(news.canary_release).catch(() => null);
      const control = await this._restore(news.control_release).catch(() => null);
      await this._useNoise(news.noise, this._trustedKeys([]));
      this._after = this._goodNumber = news.number;
      this._setLive({ champion, canary, control, entry: this._seen.canary });
    } catch (error) {
      this._refuse(error);
      this._after = this._goodNumber = 0;
    }
  }

  /**
   * A stored bot, whose pointer was verified when it was stored.
   * @param {string | null} release
   * @returns {Promise<Bot | null>}
   */
  async _restore(release) {
    if (release === null) return null;
    const manifest = await this.manifest(release, this._trustedKeys([]));
    const text = this._storage.read(this._policyPlace + manifest.policy_sha256);
    if (typeof text !== "string")
      throw new Refused("bad_hash", `the stored policy of model ${manifest.model_no} is missing; it is fetched again`);
    return openBot(manifest, fromBase64(text));
  }

  /** Polls for new bots until closed. */
  async follow() {
    if (this._isFollowing) return;
    this._isFollowing = true;
    while (!this.isClosed && this._isFollowing) {
      const pauseMs = await this.step();
      if (pauseMs > 0) {
        await new Promise((/** @type {(nothing?: unknown) => void} */ resolve) => {
          this._wake = resolve;
          /** @type {any} */ (setTimeout(resolve, pauseMs)).unref?.();
        });
      }
    }
    this._pollLock.end(); // another page may hold the long poll now
  }

  /** Polls at once, after a new key or when the network is back. */
  retry() {
    this._backoff.succeeded();
    this._wake();
  }

  /** Called when the sender got an ack, so the platform responds: ends the backoff after a failed poll. */
  nudge() {
    const nowMs = this._clock.monotonic();
    if (!this.linkError || nowMs < this._nudgeAtMs) return;
    this._nudgeAtMs = nowMs + NUDGE_MS; // the platform may accept steps and still fail here
    this.retry();
  }

  /** Polls now that the page is visible, unless in backoff. */
  pollNow() {
    if (this._backoff.leftMs <= 0) this._wake();
  }

  /** Stops polling. */
  end() {
    this.isClosed = true;
    this._pollLock.end();
    this._wake();
  }

  /** Polls once and adopts valid new bots; returns the milliseconds until the next poll. */
  async step() {
    const mayWait = await this._pollLock.take();
    const nowMs = this._clock.monotonic();
    // After a failure the first poll does not wait: it only has to show that the platform is back.
    let waitS = mayWait && !this.linkError ? POLL_S : 0;
    if (nowMs >= this._recheckAtMs) {
      this._after = this._goodNumber;
      this._recheckAtMs = Infinity;
    } else waitS = Math.min(waitS, Math.ceil((this._recheckAtMs - nowMs) / 1000));
    try {
      const query = `schema=${this._schema}&after=${this._after}&wait_s=${waitS}`;
      const { status, raw } = await this._link.ask("GET", `/bot?${query}`, { waitS });
      if (status !== 204) await this._take(parseLiveModels(jsonOf(raw)));
      await this._fetchTickets();
      this.linkError = "";
      this._backoff.succeeded();
      // Avoids a busy loop against a gateway that does not wait.
      const pauseMs = mayWait ? 1000 : SHORT_POLL_MS * (0.75 + this._random() / 2);
      return status === 204 ? Math.max(0, pauseMs - (this._clock.monotonic() - nowMs)) : 0;
    } catch (error) {
      if (this.isClosed) return 0;
      const failed = error instanceof LinkFailed ? error : new LinkFailed("failed", String(error));
      this.linkError = failed.message;
      if (failed.needsKey) {
        this._isFollowing = false; // until `useKey` restarts it
        return 0;
      }
      this._backoff.failed(failed.retryAfterS);
      this._nudgeAtMs = Math.max(this._nudgeAtMs, this._clock.monotonic() + 1000 * Math.min(failed.retryAfterS, 30));
      return Math.max(0, this._backoff.leftMs);
    }
  }

  /** @param {LiveModels} news */
  async _take(news) {
    const fetched = async (/** @type {any} */ manifest) =>
      (await this._link.ask("GET", `/models/${manifest.model_no}/policy`, { waitS: 50 })).raw;
    const { champion: lastChampion, canary: lastCanary = null, control: lastControl = null } = this._live;
    const known = [lastChampion, lastCanary, lastControl];
    let champion, trust;
    try {
      trust = this._trustedKeys(news.trust);
      champion = await this._openBot(news, "champion", { trust, fetched, known });
    } catch (error) {
      if (error instanceof LinkFailed) throw error;
      // The last valid bots stay; this entry is checked again later, unless a newer one arrives.
      this._refuse(error);
      this._after = news.number;
      this._recheckAtMs = this._clock.monotonic() + this._recheckMs;
      this._recheckMs = Math.min(2 * this._recheckMs, RECHECK_CAP_MS);
      this._storeSeen();
      return;
    }
    this.refusal = "";
    this._recheckAtMs = Infinity;
    this._recheckMs = RECHECK_FIRST_MS;
    await this._useNoise(news.noise, trust);
    news = { ...news, noise: this._signedNoise };
    // The champion does not wait for the canary's download. The stored entry has the previous number, so that a restart
    // from it polls for this one again.
    const plain = { ...news, canary: null, canary_release: null, control_release: null };
    this._setLive({ champion });
    this._storeLive({ ...plain, number: this._goodNumber });
    const how = { trust, fetched, known: [champion, ...known] };
    const canary = await this._openBot(news, "canary", how).catch((error) => {
      if (error instanceof LinkFailed) throw error;
      this._refuse(error); // the champion keeps playing; a canary that fails a check never plays
      return null;
    });
    // Nor does such a control; if it cannot be fetched, the others do not wait for it.
    const control = canary && (await this._openControl(news, how).catch((error) => void this._refuse(error)));
    this._after = this._goodNumber = news.number;
    this._setLive({ champion, canary, control: control ?? null, entry: this._seen.canary });
    this._storeLive(canary ? { ...news, control_release: control ? news.control_release : null } : plain);
    const live = this._liveBots().map((bot) => this._policyPlace + bot.manifest.policy_sha256);
    for (const name of this._storage.names(this._policyPlace)) if (!live.includes(name)) this._storage.remove(name);
  }

  /**
   * @param {LiveModels} news
   * @param {Alias} alias
   * @param {{trust: readonly string[], fetched: (manifest: any) => Promise<Uint8Array>, known: (Bot | null)[]}} how
   * @returns {Promise<Bot | null>}
   */
  async _openBot(news, alias, { trust, fetched, known }) {
    const signed = news[alias];
    if (signed === null) {
      if (alias === "champion" && this._seen.champion) {
        throw new Refused("old_bot", "the platform has no champion, but had one before; is it the same deployment?");
      }
      return null;
    }
    const point = await this._entry(signed, "point", trust);
    if (point.alias !== alias || !Number.isSafeInteger(point.number) || !Number.isSafeInteger(point.model_no)) {
      throw new Refused("bad_entry", `the pointer of ${alias} names alias ${String(point.alias).slice(0, 20)}`);
    }
    if (point.number < this._seen[alias]) {
      throw new Refused("old_bot", `entry ${point.number} is older than entry ${this._seen[alias]}, received before`);
    }
    this._seen[alias] = point.number;
    if (point.model_no === 0) return null;
    const release = news[`${alias}_release`];
    if (release === null) throw new Refused("bad_entry", `model ${point.model_no} has no release document`);
    return this._openModel(release, alias, point.model_no, { trust, fetched, known });
  }

  /**
   * The control that the canary's document names, if any.
   * @param {LiveModels} news
   * @param {{trust: readonly string[], fetched: (manifest: any) => Promise<Uint8Array>, known: (Bot | null)[]}} how
   */
  async _openControl({ canary, control_release: release }, how) {
    const named = canary && release && (await this._entry(canary, "point", how.trust)).control;
    return named && release ? this._openModel(release, "control", named.model_no, how) : null;
  }

  /**
   * The model of a signed release, which must have this number.
   * @param {string} release
   * @param {string} alias
   * @param {number} modelNo
   * @param {{trust: readonly string[], fetched: (manifest: any) => Promise<Uint8Array>, known: (Bot | null)[]}} how
   * @returns {Promise<Bot>}
   */
  async _openModel(release, alias, modelNo, { trust, fetched, known }) {
    const manifest = await this.manifest(release, trust);
    if (manifest.model_no !== modelNo) {
      throw new Refused("bad_entry", `${alias} is model ${modelNo}, but the release is of ${manifest.model_no}`);
    }
    const loaded = known.find((bot) => bot && canonicalJson(bot.manifest) === canonicalJson(manifest));
    if (loaded) return loaded;
    const raw = await fetched(manifest);
    const bot = openBot(manifest, raw);
    if (raw.length <= MAX_STORED_POLICY_BYTES) this._storage.write(this._policyPlace + manifest.policy_sha256, toBase64(raw));
    return bot;
  }

  /**
   * The manifest in a signed release; throws Refused when it is of another game or schema.
   * @param {string} release
   * @param {readonly string[]} trust
   */
  async manifest(release, trust) {
    const { manifest } = await this._entry(release, "release", trust);
    if (manifest?.game !== this._spec.game || manifest.schema !== this._schema) {
      throw new Refused(
        "wrong_schema",
        `the model of ${manifest?.game} was trained for another game or schema than this ${this._spec.game}`,
      );
    }
    return manifest;
  }

  /**
   * Uses the noise of each skill and the share of exploring episodes in a signed entry, or the defaults without one; if
   * it is invalid, the last ones stay.
   * @param {string | null} signed
   * @param {readonly string[]} trust
   */
  async _useNoise(signed, trust) {
    try {
      const { schema, noise, explore_share: share = 0 } = signed === null ? {} : await this._entry(signed, "noise", trust);
      if (signed !== null && !(schema === this._schema && isNoise(noise?.easy) && isNoise(noise?.even)))
        throw new Refused("bad_entry", "the noise of the skills is invalid, or that of another schema");
      this._noise = signed === null ? DEFAULT_NOISE : { easy: noise.easy, even: noise.even };
      this._exploreShare = share > 0 ? Math.min(share, MAX_EXPLORE_SHARE) : 0;
      this._signedNoise = signed;
    } catch (error) {
      this._refuse(error);
    }
  }

  /** @param {string} text @param {string} kind @param {readonly string[]} trust */
  async _entry(text, kind, trust) {
    const entry = await checkSigned(text, trust);
    if (entry.kind !== kind || entry.journal !== `registry/${this._spec.game}`) {
      throw new Refused(
        "bad_entry",
        `expected a ${kind} of ${this._spec.game}, got ${String(entry.kind).slice(0, 20)} of ` +
          `${String(entry.journal).slice(0, 80)}`,
      );
    }
    this._pin(trust);
    return entry;
  }

  /**
   * Fetches a model by its number and verifies it like every other.
   * @param {number} modelNo
   */
  async model(modelNo) {
    const { raw } = await this._link.ask("GET", `/models/${modelNo}`);
    let trust = this._trustedKeys([]);
    if (!trust.length) {
      const answer = await this._link.ask("GET", "/bot");
      trust = this._trustedKeys(parseLiveModels(jsonOf(answer.raw)).trust);
    }
    const manifest = await this.manifest(String(/** @type {any} */ (jsonOf(raw))?.signed), trust);
    if (manifest.model_no !== modelNo)
      throw new Refused("bad_entry", `requested model ${modelNo}, got ${manifest.model_no}`);
    return openBot(manifest, (await this._link.ask("GET", `/models/${modelNo}/policy`, { waitS: 50 })).raw);
  }

  /**
   * The trusted keys: those passed to `connect`, else those pinned when one of them first signed, else `offered`.
   * @param {string[]} offered
   */
  _trustedKeys(offered) {
    if (this._trust.length) return this._trust;
    const pinned = this._storage.read("trust");
    return Array.isArray(pinned) && pinned.length ? pinned : offered;
  }

  /** Pins these keys after one of them signed a valid entry. @param {readonly string[]} trust */
  _pin(trust) {
    if (this._trust.length) return;
    this._trust = trust;
    this._storage.write("trust", trust);
  }

  /** @param {LivePolicies} live */
  _setLive(live) {
    const before = this.name;
    this._live = live;
    if (this.name === before) return;
    for (const listener of this.listeners) {
      try {
        listener(this.name);
      } catch (error) {
        console.error(error); // an error in a listener must not stop the polling
      }
    }
  }

  /** @param {unknown} error */
  _refuse(error) {
    this.refused += 1;
    this.refusal = String(error instanceof Error ? error.message : error).slice(0, 300);
  }

  /** @param {LiveModels} liveModels */
  _storeLive(liveModels) {
    const stored = this._storage.read(this._botName);
    const isOlder = (stored?.live_models?.number ?? 0) > liveModels.number; // than what another page stored
    this._storage.write(this._botName, { live_models: isOlder ? stored.live_models : liveModels, seen: this._seenBy(stored) });
  }

  _storeSeen() {
    const stored = this._storage.read(this._botName);
    this._storage.write(this._botName, { live_models: stored?.live_models ?? null, seen: this._seenBy(stored) });
  }

  /** The highest entry numbers of this page and of the storage. @param {any} stored @returns {Record<Alias, number>} */
  _seenBy(stored) {
    const highest = (/** @type {Alias} */ alias) => Math.max(this._seen[alias], Number(stored?.seen?.[alias]) || 0);
    return { champion: highest("champion"), canary: highest("canary") };
  }
}

/** @param {any} fields @returns {LiveModels} */
function parseLiveModels(fields) {
  const texts = ["champion", "champion_release", "canary", "canary_release", "control_release", "noise"];
  const isValid =
    Number.isSafeInteger(fields?.number) &&
    fields.number >= 0 &&
    texts.every((name) => (fields[name] ?? null) === null || typeof fields[name] === "string") &&
    Array.isArray(fields.trust ?? []) &&
    (fields.trust ?? []).every((/** @type {unknown} */ key) => typeof key === "string");
  if (!isValid)
    throw new LinkFailed("strange_answer", "the platform sent live models that this version cannot read");
  const share = fields.canary_share >= 0 && fields.canary_share <= 1 ? fields.canary_share : 0;
  const named = Object.fromEntries(texts.map((name) => [name, fields[name] ?? null]));
  return /** @type {LiveModels} */ ({ number: fields.number, ...named, canary_share: share, trust: fields.trust ?? [] });
}

/**
 * A trial as text: the canary's entry, and the models between which bots are drawn.
 * @param {number} entry
 * @param {number[]} models
 */
const trialOf = (entry, models) => `${entry}: ${[...models].sort((a, b) => a - b)}`;

/**
 * @param {any} fields
 * @param {number} n
 * @returns {{entry: number, models: number[], valid_s: number, tickets: DrawnTicket[]}}
 */
function parseTickets(fields, n) {
  const isValid =
    Number.isSafeInteger(fields?.entry) &&
    Array.isArray(fields.models) &&
    fields.models.every(Number.isSafeInteger) &&
    fields.valid_s >= 0 &&
    Array.isArray(fields.tickets) &&
    fields.tickets.length <= n &&
    fields.tickets.every(
      (/** @type {any} */ drawn) =>
        fields.models.includes(drawn?.model_no) &&
        typeof drawn.ticket === "string" &&
        drawn.ticket.length <= MAX_TICKET_CHARS,
    );
  if (!isValid) throw new LinkFailed("strange_answer", "the platform sent tickets that this version cannot read");
  return fields;
}

// --- Sessions and episodes -------------------------------------------------------------------------------------------

/**
 * A random valid action.
 * @param {Columns} columns
 * @param {() => number} random
 * @param {Uint8Array | null} mask
 * @returns {any}
 */
function randomAction(columns, random, mask) {
  const below = (/** @type {number} */ n) => Math.min(n - 1, Math.floor(random() * n));
  if (columns.discrete && mask) {
    const valid = Array.from(mask.keys()).filter((at) => mask[at]);
    return columns.discrete.start + valid[below(valid.length)];
  }
  /** @param {Part} part */
  const drawn = ({ space, dtype, size }) => {
    if (space.space === "discrete") return space.start + below(space.n);
    if (space.space === "multi_discrete") return space.counts.map(below);
    if (space.space === "multi_binary") return Array.from({ length: size }, () => below(2));
    const numbers = Array.from({ length: size }, (_, at) => {
      const [low, high] = [space.low, space.high]
        .map((bound, end) => (Array.isArray(bound) ? bound[at] : bound) ?? DTYPES[dtype].ends?.[end] ?? null)
        .map((bound) => (bound !== null && isFloat(dtype) && Math.abs(bound) >= MAX_NUMBER ? null : bound));
      if (low !== null && high !== null)
        return isFloat(dtype) ? low + random() * (high - low) : low + below(high - low + 1);
      const normal = Math.sqrt(-2 * Math.log(1 - random())) * Math.cos(2 * Math.PI * random());
      return Math.min(high ?? Infinity, Math.max(low ?? -Infinity, normal));
    });
    return space.shape.length ? numbers : numbers[0];
  };
  if (columns.action.length === 1 && !columns.action[0].path) return drawn(columns.action[0]);
  /** @type {any} */
  const tree = {};
  for (const part of columns.action) {
    const keys = part.path.split(".");
    const last = /** @type {string} */ (keys.pop());
    keys.reduce((inner, key) => (inner[key] ??= {}), tree)[last] = drawn(part);
  }
  return tree;
}

/**
 * @typedef {{actionMask?: ActionMask, deterministic?: boolean, otherwise?: any}} Acting
 *   `otherwise`: an action, or a function of the observation, while there is no bot
 */

/** One episode of one player; each decision closes the previous transition. Created by `game.episode`. */
export class Episode {
  /**
   * @param {Game} game
   * @param {Session} session
   * @param {{note: Note, consent: Consent, by: Decider, bot: Bot | null, skill: BotSkill}} how
   */
  constructor(game, session, { note, consent, by, bot, skill }) {
    this._game = game;
    this._session = session;
    this._rows = /** @type {Rows} */ (session.rows);
    this._by = by;
    /** @type {Bot | null} */
    this._bot = bot;
    this._skill = skill;
    /** @type {Record<string, Numbers>[]} the last observations, for a bot that needs several */
    this._last = [];
    /** @type {string | null} */
    this._over = null;
    const block = this._rows.begin(note, consent);
    if (block) game._sender.enqueue(session, block);
  }

  /** Whether this episode is sent; if not, the recording rate left it out, and its steps are only counted. */
  get isRecorded() {
    return this._session.isRecorded;
  }

  /** The bot that decides in this episode, such as `rally/3`; empty while there is none. */
  get bot() {
    return this._bot?.name ?? "";
  }

  /**
   * The bot's action, recorded as its decision; never waits. A named action is returned as its number.
   *
   * While there is no bot: `otherwise`, else a random valid action.
   * @param {any} obs
   * @param {Acting} [options]
   * @returns {any}
   */
  act(obs, { actionMask = null, deterministic = false, otherwise } = {}) {
    this._bot ??= this._game.pickBot(this._skill);
    const own = this._bot ? undefined : typeof otherwise === "function" ? otherwise(obs) : otherwise;
    const { _columns: columns, _random: random } = this._game;
    try {
      const chosen = this._choose(obs, own, { actionMask, deterministic });
      if (this._isLate("act")) return chosen.action;
      if (this._bot) {
        const { name, ticket, noise, temperature } = this._bot;
        this._rows.nameModel(name, ticket, noise, temperature);
      }
      this._recordDecision(obs, chosen.action, { actionMask, by: chosen.by, frames: 1, extras: chosen.extras });
      return chosen.action;
    } catch (error) {
      if (!this._isLate("act")) this._spoil(error);
      try {
        return randomAction(columns, random, columns.mask(actionMask));
      } catch {
        return randomAction(columns, random, null);
      }
    }
  }

  /**
   * @param {any} obs
   * @param {any} own
   * @param {Acting} options
   * @returns {{action: any, by: number, extras: Extras | null}}
   */
  _choose(obs, own, { actionMask = null, deterministic = false }) {
    const { _columns: columns, _random: random } = this._game;
    if (this._bot) {
      const { policy, noise, temperature } = this._bot;
      const options = { actionMask, deterministic, random, noise, temperature };
      const { action, logp, raw } = policy.choose(this._inputs(policy, obs), options);
      return { action, by: BY.bot, extras: { logp, version: policy.version, rawAction: raw } };
    }
    const mask = columns.mask(actionMask);
    if (mask && !mask.includes(1))
      throw new Refused("invalid_action", "actionMask allows no action; allow at least one, or end the episode");
    const action = own === undefined || own === null ? randomAction(columns, random, mask) : columns.numbered(own);
    return { action, by: BY.script, extras: null };
  }

  /** @param {Policy} policy @param {any} obs */
  _inputs(policy, obs) {
    if (policy.stack === 1) return policy.read([obs]);
    this._last.push(structuredClone(obs)); // the game may reuse its array
    if (this._last.length > policy.stack) this._last.shift();
    return policy.read([...Array(policy.stack - this._last.length).fill(this._last[0]), ...this._last]);
  }

  /**
   * Records that a person (or `by`) saw `obs` and chose `action`, a number or a name; closes the previous transition.
   * @param {any} obs
   * @param {any} action
   * @param {{actionMask?: ActionMask, by?: Decider, frames?: number}} [options]
   */
  acted(obs, action, { actionMask = null, by = this._by, frames = 1 } = {}) {
    if (this._isLate("acted")) return;
    try {
      if (!Object.hasOwn(BY, by))
        throw new Refused("bad_by", `by is ${String(by).slice(0, 20)}; pass one of ${Object.keys(BY)}`);
      this._recordDecision(obs, action, { actionMask, by: BY[by], frames, extras: null });
    } catch (error) {
      this._spoil(error);
    }
  }

  /**
   * @param {any} obs
   * @param {any} action
   * @param {{actionMask: any, by: number, frames: number, extras: Extras | null}} options
   */
  _recordDecision(obs, action, options) {
    const { _sender: sender, _clock: clock, _tolerance: tolerance } = this._game;
    this._rows.decide(obs, action, { ...options, tMs: this._session.tMs(clock.monotonic()) });
    tolerance.hasDecided = true;
    if (this._rows.closedSteps) sender.onStepClosed(this._session);
  }

  /** Adds to the reward of the last decision. @param {number} x */
  reward(x) {
    if (this._isLate("reward")) return;
    try {
      this._rows.addReward(x);
    } catch (error) {
      if (this._rows.hasDecision) this._spoil(error);
      else {
        this._game._tolerance.judge(error);
        this._game._tolerance.warn(error, "a reward was ignored");
      }
    }
  }

  /**
   * Ends the episode: the game ended it or, with `truncated`, only the recording stops.
   * @param {any} [obs] the last observation; optional when the game ended the episode, otherwise the last decision is
   *   dropped without it
   * @param {{truncated?: boolean, result?: string | number, actionMask?: ActionMask}} [options]
   */
  end(obs, { truncated = false, result, actionMask = null } = {}) {
    if (this._isLate("end")) return;
    const { _tolerance: tolerance, _clock: clock } = this._game;
    const tMs = this._session.tMs(clock.monotonic());
    /** @type {[unknown, string][]} */
    const problems = [];
    try {
      this._rows.checkResult(result);
    } catch (error) {
      tolerance.judge(error);
      problems.push([error, "an episode's result was ignored"]);
      result = undefined;
    }
    let isTruncated = true;
    try {
      if (typeof truncated !== "boolean")
        throw new Refused("bad_dtype", `truncated is ${String(truncated).slice(0, 40)}; pass true or false`);
      isTruncated = truncated;
      this._rows.finish(obs, { truncated, result, actionMask, tMs });
    } catch (error) {
      tolerance.judge(error);
      if (isTruncated) {
        problems.push([error, "an episode's last decision was dropped"]);
        this._rows.cut(result);
      } else {
        // The observation after a terminated step is never used.
        problems.push([error, "an episode's last observation was ignored"]);
        this._rows.finish(undefined, { truncated: false, result, actionMask: null, tMs });
      }
    }
    this._leave("it has ended");
    for (const [error, cost] of problems) tolerance.warn(error, cost);
  }

  /** Stops recording without an end: the last decision is dropped. Does nothing after `end`. */
  cancel() {
    if (this._over !== null || this._session.hasEnded) return;
    this._rows.cut();
    this._leave("it was cancelled");
  }

  /** @param {string} why */
  _leave(why) {
    this._over = why;
    this._game._release(this._session);
  }

  /** @param {unknown} error */
  _spoil(error) {
    if (this._rows.inEpisode) this._rows.cut();
    this._leave("");
    this._game._tolerance.judge(error);
    this._game._tolerance.warn(error, "recording of this episode stopped");
  }

  /** @param {string} call */
  _isLate(call) {
    if (this._over === null && !this._session.hasEnded) return false;
    const { _tolerance: tolerance } = this._game;
    // An episode with bad input and a closed game ignore calls: the game continues, the recording does not.
    if (this._over && !this._session.hasEnded) {
      const late = new Refused("bad_order", `${call} was called on an episode, but ${this._over}; start a new one`);
      tolerance.judge(late);
      tolerance.warn(late, "a call was ignored");
    } else tolerance.ignoredCalls += 1;
    return true;
  }
}

/** Handles input that cannot be recorded: throws at the first decision, later counts it and warns once per kind. */
class Tolerance {
  /** @param {boolean} isStrict */
  constructor(isStrict) {
    this._isStrict = isStrict;
    this.hasDecided = false;
    this.badInputs = this.ignoredCalls = 0;
    /** The last invalid input, as `code: detail`. */
    this.lastBadInput = "";
    /** @type {Set<string>} the codes that were warned of */
    this._warned = new Set();
  }

  /** Counts an error; throws it at the first decision or if strict. @param {unknown} error */
  judge(error) {
    this.badInputs += 1;
    this.lastBadInput = error instanceof Refused ? error.message : `bad_input: ${error}`;
    const isTolerated = this.hasDecided && !this._isStrict;
    this.hasDecided = true;
    if (!isTolerated) throw error;
  }

  /**
   * Warns once for each code; called last, when the input's effect is complete.
   * @param {unknown} error
   * @param {string} cost
   */
  warn(error, cost) {
    const code = error instanceof Refused ? error.code : "bad_input";
    if (this._warned.has(code)) return;
    this._warned.add(code);
    console.warn(
      `understudy: ${cost} because of invalid input: ${error}. Further input of this kind is only counted, in ` +
        "game.stats().badInputs, and the last one is lastBadInput; connect with strict: true to throw every error",
    );
  }
}

// --- Connect ---------------------------------------------------------------------------------------------------------

/**
 * Counters of a game; the first seven count steps.
 * @typedef {object} Stats
 * @property {number} recorded
 * @property {number} acked durable on the platform
 * @property {number} waiting recorded, not acknowledged yet
 * @property {number} refused permanently rejected by the platform
 * @property {number} dropped discarded because too many were waiting, or because an earlier page could not store them
 * @property {number} skipped played but not recorded, because of the platform's recording rate
 * @property {number} adopted unsent steps of an earlier page or program, sent by this one
 * @property {number} recordingRate the probability that the next episode is recorded
 * @property {number} failedSends
 * @property {string} stopped why sending stopped until `useKey` is called; empty while it runs
 * @property {string} lastError why the last send failed or was rejected; empty after a success
 * @property {string} bot
 * @property {number} refusedBots
 * @property {string} lastBotError why the newest bot was rejected or could not be fetched; the last valid one stays
 * @property {string} lastFollowError why the last poll for new bots failed; empty while the platform responds, which a
 *   page that sends nothing can show as "connected"
 * @property {number} badInputs
 * @property {string} lastBadInput the last invalid input of the game, as `code: detail`; empty while there was none
 * @property {number} ignoredCalls
 * @property {number} openEpisodes
 */
/**
 * An episode's player and metadata.
 * @typedef {object} EpisodeFacts
 * @property {string} [player]
 * @property {number} [seat]
 * @property {string} [match]
 * @property {readonly string[]} [opponents] what the opponents are: `person`, `script`, or a model's name
 * @property {number | bigint} [seed]
 * @property {string} [model] the model that decides, for a bot that the game runs itself
 * @property {Decider} [by] whose decisions `acted` records; default `person`
 * @property {Consent} [consent]
 * @property {Bot | null} [bot] the bot for `act`, from `game.pickBot` or `game.model`; default: drawn by `pickBot`
 * @property {SkillName} [skill] how well the bot plays in `act`; default: `hard`, as released
 * @property {number} [temperature] how random its choices are: 1 is as released
 */

/** A connected game, shared by many episodes. Created by `connect`. */
export class Game {
  /**
   * @param {{link: Link, sender: Sender, bots: Bots, columns: Columns, clock: Clock, random: () => number, player:
   *   string, consent: Consent, strict: boolean}} parts
   */
  constructor({ link, sender, bots, columns, clock, random, player, consent, strict }) {
    this._link = link;
    this._sender = sender;
    this._bots = bots;
    this._columns = columns;
    this._clock = clock;
    this._random = random;
    this._tolerance = new Tolerance(strict);
    this.player = player;
    this.spec = columns.spec;
    this.schema = schemaOf(columns.spec);
    /** @type {Consent} */
    this.consent = consent;
    /** @type {Session[]} */
    this._free = [];
    /** @type {Promise<boolean> | null} */
    this._closing = null;
    this._onVisibility = () => {
      if (globalThis.document?.visibilityState === "hidden") this._saveNow();
      else this._bots.pollNow();
    };
    globalThis.document?.addEventListener?.("visibilitychange", this._onVisibility);
    this._onOnline = () => {
      if (!this._sender.stopped) this._sender.retry();
      this._bots.retry();
    };
    globalThis.window?.addEventListener?.("online", this._onOnline);
    // A page in the back/forward cache may resume; a page that is gone for good releases its frames to others.
    this._onPageHide = (/** @type {any} */ event) => void (event.persisted || this._leave());
    globalThis.window?.addEventListener?.("pagehide", this._onPageHide);
  }

  /** The champion that plays new episodes, such as `rally/3`; empty while there is none. */
  get bot() {
    return this._bots.name;
  }

  /**
   * Calls a function with the name of every new champion; returns a function that unsubscribes it.
   * @param {(name: string) => void} listener
   */
  onBot(listener) {
    this._bots.listeners.add(listener);
    return () => void this._bots.listeners.delete(listener);
  }

  /**
   * Waits for a bot; false when the time runs out. Optional: a bot plays as soon as it is available.
   * @param {number} [timeoutS]
   */
  async waitForBot(timeoutS = 5) {
    const endMs = this._clock.monotonic() + 1000 * timeoutS;
    while (!this.bot && !this._closing && this._clock.monotonic() < endMs)
      await new Promise((resolve) => setTimeout(resolve, 10));
    return this.bot !== "";
  }

  /**
   * The bot for a new episode: the champion, or what the gateway's next ticket says; null while there is none.
   *
   * An episode takes its own bot at its first `act`. Use this to know the bot in advance, or to play without recording:
   * `bot.name`, `bot.policy.act(obs, bot)`; pass it to `game.episode({ bot })` to play there. With a `skill` or a
   * `temperature`, it is the champion, which then plays at it.
   * @param {{skill?: SkillName, temperature?: number}} [how]
   * @returns {Bot | null}
   */
  pickBot({ skill, temperature } = {}) {
    return this._bots.pickBot(botSkill(skill, temperature));
  }

  /**
   * Fetches a model by its number, verified like the champion, for an episode's `bot`. Throws when it is not available.
   * @param {number} modelNo
   * @returns {Promise<Bot>}
   */
  model(modelNo) {
    return this._bots.model(modelNo);
  }

  /**
   * The valid actions as the champion ranks them, best first; empty while there is no champion.
   *
   * A champion that needs several observations uses this one for all of them, as at the start of an episode.
   * @param {any} obs
   * @param {{actionMask?: ActionMask}} [options]
   * @returns {Advice[]}
   */
  rank(obs, options = {}) {
    const policy = this._bots.champion?.policy;
    return policy?.rank(policy.stack > 1 ? Array(policy.stack).fill(obs) : obs, options) ?? [];
  }

  /**
   * Starts recording an episode.
   * @param {EpisodeFacts} [facts]
   */
  episode({
    player = this.player,
    seat = 0,
    match,
    opponents,
    seed,
    model,
    by = "person",
    consent = this.consent,
    bot = null,
    skill,
    temperature,
  } = {}) {
    if (this._closing) throw new Refused("closed", `the game ${this.spec.game} is closed; connect again to record`);
    checkConsent(consent);
    checkPlayer(player);
    /** @type {Note} */
    const note = { row: 0, seat, match, opponents, seed, model: model ?? bot?.name };
    const asked = botSkill(skill, temperature);
    if (bot && !isReleased(asked)) bot = this._bots.atSkill(bot, asked);
    const at = bot ?? asked;
    Object.assign(note, { skill: at.skill, noise: at.noise, temperature: at.temperature });
    if (bot && note.model === bot.name) note.ticket = bot.ticket;
    checkNote(note);
    const { recordingRate } = this._sender;
    const session = this._acquire(player, seat, recordingRate >= 1 || this._random() < recordingRate);
    const episode = new Episode(this, session, { note, consent, by, bot, skill: asked });
    session.holder = new WeakRef(episode);
    return episode;
  }

  /** @param {string} player @param {number} seat @param {boolean} isRecorded */
  _acquire(player, seat, isRecorded) {
    const isFresh = (/** @type {Session} */ session) =>
      !session.hasEnded && Math.abs(this._clock.now() - sessionStartMs(session.id)) < DAY_MS;
    this._free = this._free.filter((session) => this._sender.sessions.has(session) && isFresh(session));
    const at = this._free.findIndex(
      (session) => session.player === player && session.seat === seat && session.isRecorded === isRecorded,
    );
    if (at >= 0) return this._free.splice(at, 1)[0];
    const id = newSession(this._clock.now());
    const startedMs = this._clock.monotonic();
    const session = new Session({ id, player, seat, isRecorded, rows: new Rows(this._columns), startedMs });
    this._sender.sessions.add(session);
    return session;
  }

  /** @param {Session} session */
  _release(session) {
    this._sender.release(session);
    this._free.push(session);
    this._sender.onStepClosed(session);
  }

  /**
   * Sets the consent of the next episodes. An open episode keeps the consent it started with: `cancel()` it when consent
   * is withdrawn; the steps recorded so far were recorded with consent.
   * @param {Consent} consent
   */
  setConsent(consent) {
    checkConsent(consent);
    this.consent = consent;
  }

  /** Continues with another key after the old one was rejected. @param {string} key */
  useKey(key) {
    this._link.key = key;
    this._sender.retry();
    this._bots.retry();
    void this._bots.follow();
  }

  /** @returns {Stats} */
  stats() {
    const sender = this._sender;
    const bots = this._bots;
    const { acked, refused, dropped, adopted, failedSends } = sender.counts;
    return {
      recorded: sender.recordedSteps,
      acked,
      waiting: sender.waitingSteps,
      refused,
      dropped,
      adopted,
      failedSends,
      skipped: sender.unreportedSkips + sender._reportedSkips,
      recordingRate: sender.recordingRate,
      stopped: sender.stopped,
      lastError: sender.linkError || sender.refusal,
      bot: this.bot,
      refusedBots: bots.refused,
      lastBotError: bots.refusal || bots.linkError,
      lastFollowError: bots.linkError,
      badInputs: this._tolerance.badInputs,
      lastBadInput: this._tolerance.lastBadInput,
      ignoredCalls: this._tolerance.ignoredCalls,
      openEpisodes: [...sender.sessions].filter((session) => session.holder !== null).length,
    };
  }

  /**
   * Waits until everything recorded so far is acknowledged (or rejected or dropped); false when the time runs out.
   * @param {number} [timeoutS]
   * @returns {Promise<boolean>}
   */
  flush(timeoutS = 10) {
    return this._closing ?? this._sender.flush(timeoutS);
  }

  /**
   * Cuts open episodes, sends what it can within the timeout, and closes; true when nothing is left to send. Otherwise
   * warns; the next start sends the stored steps and reports the rest as dropped.
   * @param {number} [timeoutS]
   * @returns {Promise<boolean>}
   */
  close(timeoutS = 5) {
    this._closing ??= (async () => {
      this._bots.end();
      globalThis.document?.removeEventListener?.("visibilitychange", this._onVisibility);
      globalThis.window?.removeEventListener?.("online", this._onOnline);
      globalThis.window?.removeEventListener?.("pagehide", this._onPageHide);
      const isAll = await this._sender.finish(timeoutS);
      const { waitingSteps, isStored, linkError } = this._sender;
      if (!isAll && waitingSteps) {
        const fate = isStored ? "the next start sends the stored ones" : "without a storage they are lost";
        const why = linkError || `no response within ${timeoutS} s`;
        warn("closed", `${waitingSteps} steps were not acknowledged before close() timed out (${why}); ${fate}`);
      }
      this._link.close();
      return isAll;
    })();
    return this._closing;
  }

  /** Called when the page is gone for good: lets the next page adopt its stored frames. */
  _leave() {
    this._saveNow();
    this._sender.releaseStored();
  }

  /** Called when the page may close soon: stores all closed steps for the next page, and tries to send them. */
  _saveNow() {
    this._sender.collect({ isUrgent: true });
    this._sender.wake();
  }
}

/** @param {unknown} consent */
function checkConsent(consent) {
  if (!["granted", "denied", "unknown"].includes(String(consent))) {
    throw new Refused("bad_consent", `consent is ${consent}; pass granted, denied or unknown`);
  }
}

/** @param {string} player */
function checkPlayer(player) {
  if (typeof player !== "string" || !/^(?: |[^\p{C}\p{Z}])+$/u.test(player) || bytesOf(player).length > 256) {
    throw new Refused(
      "bad_player",
      `player ${String(player).slice(0, 40)} is not a valid name; pass 1 to 256 bytes of printable text`,
    );
  }
}

/** @param {string} url @param {boolean} isInsecure */
function checkAddress(url, isInsecure) {
  const parts = URL.canParse(url) ? new URL(url) : null;
  if (!parts || !["http:", "https:"].includes(parts.protocol) || parts.search || parts.hash || parts.username) {
    throw new Refused("bad_url", `url ${url} is not a gateway's address; pass https://HOST, or http://127.0.0.1:PORT`);
  }
  const isNear =
    /^(localhost|127(\.\d+){3}|\[::1\])$/.test(parts.hostname) || parts.origin === globalThis.location?.origin;
  if (parts.protocol === "http:" && !isNear && !isInsecure) {
    throw new Refused(
      "bad_url",
      `${url} would send your key unencrypted; use https://, or insecure: true on a network you trust`,
    );
  }
}

/** The browser's localStorage; null when there is none or the page may not use it. @returns {TextStorage | null} */
function ownStorage() {
  try {
    return globalThis.window?.localStorage ?? null;
  } catch {
    return null;
  }
}

/**
 * Options of `connect`; pass `spec`, or `obs` and `actions`.
 * @typedef {object} Connecting
 * @property {string} url the gateway's address
 * @property {string} key
 * @property {Spec} [spec] a complete spec, as the platform stores it
 * @property {Shape} [obs] a length, a shape, names or spaces
 * @property {Shape} [actions] a count, names or spaces
 * @property {boolean} [hasActionMask] whether every step records which actions are valid
 * @property {number | null} [maxEpisodeSteps]
 * @property {string} [player] the default player of episodes; by default a random id that is kept in the storage
 * @property {Consent} [consent] whether bots may learn from the steps; default `unknown`
 * @property {number} [lingerS] the longest time that a closed step waits to be sent with others
 * @property {readonly string[]} [trust] public keys that may sign bots; by default the deployment's, pinned at first use
 * @property {boolean} [strict] throw on every bad input, not only at the first decision
 * @property {boolean} [insecure] allow http:// to other machines, where the key can be read on the network
 * @property {number} [capBytes] how many bytes may wait unsent; beyond it the oldest frames are dropped and reported
 * @property {string} [client] name and version of the game, stored with its steps
 * @property {typeof globalThis.fetch} [fetch]
 * @property {TextStorage | null} [storage] where unsent frames and the last bot are stored; default: the browser's
 *   localStorage. In a storage without `length` and `key`, frames of an earlier program are not found
 * @property {() => number} [now] milliseconds since 1970
 * @property {() => number} [random] from 0 to 1
 */

/**
 * Connects a game to the platform at `url`: registers its spec, and follows its bot from then on.
 *
 * Throws when the platform rejects the game; when it is unreachable, the game plays and records anyway, and is registered
 * later.
 * @param {string} name
 * @param {Connecting} options
 */
export async function connect(name, options) {
  const {
    url,
    key,
    obs,
    actions,
    hasActionMask = false,
    maxEpisodeSteps = null,
    consent = "unknown",
    lingerS = 1,
    trust = [],
    strict = false,
    insecure = false,
    capBytes = 8 * 1024 * 1024,
    client = `understudy-js/${VERSION}`,
    random = Math.random,
    now,
    fetch = globalThis.fetch.bind(globalThis),
    storage = ownStorage(),
  } = options;
  checkAddress(url, insecure);
  checkConsent(consent);
  if (!/^[\x21-\x7e]+$/.test(key ?? ""))
    throw new Refused("no_key", "connect needs a key; copy the one that `understudy up` printed");
  trust.forEach(publicKey);
  const spec = options.spec
    ? checkedSpec(options.spec)
    : specOf(name, {
        obs: /** @type {Shape} */ (obs),
        actions: /** @type {Shape} */ (actions),
        hasActionMask,
        maxEpisodeSteps,
      });
  if (spec.game !== name)
    throw new Refused("bad_spec", `connect got the name ${name} and a spec of ${spec.game}; pass the same name`);
  const link = new Link({ url, key, game: spec.game, fetch });
  const columns = new Columns(spec);
  /** @type {Clock} */
  const clock = { now: now ?? Date.now, monotonic: now ?? (() => performance.now()) };
  const textStorage = storage ?? memoryStorage();
  const player = options.player ?? ownPlayer(new ScopedStorage(textStorage, "understudy/"));
  checkPlayer(player);
  /** @param {string[]} facts */
  const placeOf = (...facts) => `understudy/${sha256(bytesOf(facts.join("\0"))).slice(0, 16)}/`;
  // Independent of the key: unsent frames belong to the game's sessions, and another key may send them.
  const place = placeOf(link.address, spec.game);
  const gameStorage = new ScopedStorage(textStorage, place);
  // Per key: a new deployment at the same address has new keys, and its signing keys are pinned separately.
  const botStorage = new ScopedStorage(textStorage, placeOf(link.address, spec.game, key));
  gameStorage.write("used", clock.now());
  botStorage.write(`used/${schemaOf(spec).slice(0, 16)}`, clock.now());
  removeExpired(textStorage, clock.now());
  // Pages that share localStorage share its locks; for another storage this is not known.
  const pageLocks = globalThis.navigator?.locks ?? null;
  const locks = storage && storage === ownStorage() ? pageLocks : null;
  const isPage = "document" in globalThis || "WorkerGlobalScope" in globalThis;
  const pollLock = new PollLock({ locks: pageLocks, name: `understudy/watch/${link.address}`, isPage });
  const sender = new Sender({
    link,
    columns,
    client: client.slice(0, 128),
    clock,
    random,
    lingerMs: lingerS * 1000,
    capBytes,
    storage: storage && gameStorage,
    ownerLocks: storage && new OwnerLocks({ storage: gameStorage, clock, locks, place }),
  });
  const bots = new Bots({ link, spec, clock, random, storage: botStorage, trust, pollLock });
  sender.onAnswer = () => bots.nudge();
  try {
    await sender.register();
  } catch (error) {
    if (!(error instanceof LinkFailed) || !error.isRetryable) {
      sender.end();
      throw error;
    }
    sender.linkError = error.message;
  }
  await sender.adopt();
  await bots.load();
  void bots.follow();
  return new Game({ link, sender, bots, columns, clock, random, player, consent, strict });
}

/** @param {ScopedStorage} storage */
function ownPlayer(storage) {
  const known = storage.read("player");
  if (typeof known === "string" && known) return known;
  const fresh = `p-${hexOf(crypto.getRandomValues(new Uint8Array(8)))}`;
  storage.write("player", fresh);
  return fresh;
}
