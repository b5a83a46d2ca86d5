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
 * 17, and a page that came over https or from 127.0.0.1. The calls of an episode are synchronous and wait for no
 * network; what it does is dealt with behind them. The bytes are those of docs/protocol.md and docs/formats.md.
 * Sections, each with one job:
 *
 *     text and bytes · specs · tensors, chunks, frames, parcels · rows of an episode · policies · signed documents ·
 *     the link · the sender · bots · sessions and episodes · connect
 */

export const VERSION = "0.1.0";

// --- Text and bytes --------------------------------------------------------------------------------------------------

/** Something that will not be taken, with a code that does not change and words for people. */
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
function joined(parts) {
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
 * The CRC-32 of zlib, as a whole number from 0.
 * @param {Uint8Array} bytes
 */
export function crc32(bytes) {
  let crc = 0xffffffff;
  for (const byte of bytes) crc = (crc >>> 8) ^ CRC_TABLE[(crc ^ byte) & 255];
  return (crc ^ 0xffffffff) >>> 0;
}

/**
 * The first 32 bits behind the point of the roots of the first 64 primes: square roots begin a SHA-256, cube roots mix
 * it.
 */
const [SHA_BEGIN, SHA_MIX] = (() => {
  const primes = [2];
  for (let one = 3; primes.length < 64; one += 2) if (primes.every((prime) => one % prime)) primes.push(one);
  /** @param {number} power */
  const roots = (power) => Uint32Array.from(primes, (prime) => (prime ** power % 1) * 2 ** 32);
  return [roots(1 / 2).slice(0, 8), roots(1 / 3)];
})();

/**
 * SHA-256 in hex. Our own, since WebCrypto's is there on https pages only, and recording must work on any.
 * @internal
 * @param {Uint8Array} bytes
 */
export function sha256(bytes) {
  const padded = new Uint8Array(((bytes.length + 72) >> 6) << 6);
  padded.set(bytes);
  padded[bytes.length] = 0x80;
  const view = new DataView(padded.buffer);
  view.setBigUint64(padded.length - 8, BigInt(bytes.length) * 8n);
  const [sum, words] = [SHA_BEGIN.slice(), new Uint32Array(64)];
  /** @param {number} word @param {number} by */
  const turned = (word, by) => (word >>> by) | (word << (32 - by));
  for (let block = 0; block < padded.length; block += 64) {
    for (let at = 0; at < 64; at++) {
      if (at < 16) words[at] = view.getUint32(block + 4 * at);
      else {
        const [near, far] = [words[at - 2], words[at - 15]];
        const mixed = (turned(near, 17) ^ turned(near, 19) ^ (near >>> 10)) + words[at - 7] + words[at - 16];
        words[at] = mixed + (turned(far, 7) ^ turned(far, 18) ^ (far >>> 3));
      }
    }
    let [a, b, c, d, e, f, g, h] = sum;
    for (let at = 0; at < 64; at++) {
      const low = h + (turned(e, 6) ^ turned(e, 11) ^ turned(e, 25)) + ((e & f) ^ (~e & g)) + SHA_MIX[at] + words[at];
      const high = (turned(a, 2) ^ turned(a, 13) ^ turned(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
      [h, g, f, e, d, c, b, a] = [g, f, e, (d + low) | 0, c, b, a, (low + high) | 0];
    }
    [a, b, c, d, e, f, g, h].forEach((word, at) => (sum[at] += word));
  }
  return Array.from(sum, (word) => word.toString(16).padStart(8, "0")).join("");
}

/** A number that is written with a point, as Python writes floats; JSON has no other way to say what it is. */
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

/** @param {string} one @param {string} other */
function byCodePoint(one, other) {
  const [a, b] = [
    Array.from(one, (letter) => letter.codePointAt(0) ?? 0),
    Array.from(other, (letter) => letter.codePointAt(0) ?? 0),
  ];
  for (let at = 0; at < Math.min(a.length, b.length); at++) if (a[at] !== b[at]) return a[at] - b[at];
  return a.length - b.length;
}

/**
 * Compact JSON with sorted keys, the bytes that Python's `canonical_json` gives; what is not finite is refused.
 * @param {unknown} value
 * @returns {string}
 */
export function canonicalJson(value) {
  if (value === null || typeof value === "boolean" || typeof value === "string") return JSON.stringify(value);
  if (typeof value === "bigint") return value.toString();
  if (value instanceof Float) return floatText(value.value);
  if (typeof value === "number") {
    if (!Number.isFinite(value))
      throw new Refused("not_finite", `${value} cannot be written as JSON; give a finite number`);
    return Number.isSafeInteger(value) ? String(value + 0) : floatText(value);
  }
  if (Array.isArray(value)) return `[${value.map(canonicalJson).join(",")}]`;
  if (typeof value !== "object") throw new Refused("bad_json", `a ${typeof value} cannot be written as JSON`);
  const fields = Object.entries(value).filter(([, field]) => field !== undefined);
  fields.sort(([one], [other]) => byCodePoint(one, other));
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
 * A game's spec, as the platform has it; a path is "" where there is one part only.
 * @typedef {object} Spec
 * @property {number} format
 * @property {string} game
 * @property {Record<string, Space>} obs
 * @property {Record<string, Space>} action
 * @property {readonly string[]} obs_names
 * @property {readonly string[]} action_names
 * @property {boolean} has_legal
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

/** @param {readonly number[]} shape */
const product = (shape) => shape.reduce((size, side) => size * side, 1);

/** @param {string} dtype */
const isFloat = (dtype) => dtype.startsWith("F");

/** @param {Space} space */
const shapeOf = (space) => (space.space === "discrete" ? [] : space.shape);

/**
 * A game's spec from plain words: `obs` is a length, a shape, names or spaces; `actions` a count, names or spaces.
 * @param {string} game
 * @param {{obs: Shape, actions: Shape, hasLegal?: boolean, maxEpisodeSteps?: number | null}} shape
 * @returns {Spec}
 */
export function specOf(game, { obs, actions, hasLegal = false, maxEpisodeSteps = null }) {
  const [seen, obsNames] = spacesOf("obs", obs, (shape) => ({
    space: "box",
    dtype: "F32",
    shape,
    low: null,
    high: null,
  }));
  const [done, actionNames] = spacesOf("actions", actions, ([n]) => ({ space: "discrete", dtype: "I32", n, start: 0 }));
  return checkedSpec({
    format: 1,
    game,
    obs: seen,
    action: done,
    obs_names: obsNames,
    action_names: actionNames,
    has_legal: hasLegal,
    max_episode_steps: maxEpisodeSteps,
  });
}

/**
 * @param {"obs" | "actions"} what
 * @param {Shape} given
 * @param {(shape: number[]) => Space} make
 * @returns {[Record<string, Space>, string[]]}
 */
function spacesOf(what, given, make) {
  if (typeof given === "number") given = [given];
  if (Array.isArray(given)) {
    const isShape = given.every((side) => Number.isInteger(side) && side > 0) && (what === "obs" || given.length === 1);
    if (given.length && given.every((name) => typeof name === "string"))
      return [{ "": make([given.length]) }, [...given]];
    if (given.length && isShape) return [{ "": make([...given]) }, []];
  } else if (given !== null && typeof given === "object") {
    return "space" in given && typeof given.space === "string"
      ? [{ "": /** @type {Space} */ (given) }, []]
      : [/** @type {Record<string, Space>} */ ({ ...given }), []];
  }
  const wanted = what === "obs" ? "a length (6), a shape ([84, 84]), names" : 'a count (3), names (["up", "down"])';
  throw new Refused("bad_spec", `${what} is ${JSON.stringify(given)}; give ${wanted}, a space, or spaces by name`);
}

/**
 * The spec in the form in which equal games have equal bytes; Refused when it is none.
 * @param {Spec} given
 * @returns {Spec}
 */
function checkedSpec(given) {
  if (!/^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$/.test(given.game) || given.game.endsWith(".")) {
    throw new Refused(
      "bad_name",
      `game ${JSON.stringify(given.game)}; give 1 to 63 of A-Z a-z 0-9 . _ -, such as "my-game"`,
    );
  }
  const spec = {
    ...given,
    obs: Object.fromEntries(Object.entries(given.obs).map(([path, space]) => [path, checkedSpace(path, space)])),
    action: Object.fromEntries(Object.entries(given.action).map(([path, space]) => [path, checkedSpace(path, space)])),
  };
  const discrete = spec.action[""]?.space === "discrete" ? spec.action[""] : null;
  const flat = spec.obs[""] ? product(shapeOf(spec.obs[""])) : -1;
  if (!Object.keys(spec.obs).length || !Object.keys(spec.action).length) {
    throw new Refused("bad_spec", `${spec.game} has no observation or no action; give at least one part of each`);
  }
  for (const [names, size] of /** @type {[readonly string[], number][]} */ ([
    [spec.action_names, discrete?.n ?? -1],
    [spec.obs_names, flat],
  ])) {
    if (names.length && (names.length !== size || new Set(names).size !== size)) {
      throw new Refused("bad_spec", `names ${names.slice(0, 8)} do not fit ${size} elements; give each its own name`);
    }
    const odd = names.find((name) => /[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]/.test(name));
    if (odd !== undefined)
      throw new Refused("bad_spec", `name ${JSON.stringify(odd)} has control characters in it; give printable text`);
  }
  if (spec.has_legal && !discrete) throw new Refused("bad_spec", "legal masks need a single discrete action");
  return spec;
}

/** @param {string} path @param {Space} given @returns {Space} */
function checkedSpace(path, given) {
  const type = DTYPES[given.dtype];
  if (!type)
    throw new Refused("bad_spec", `${path || "a part"} is of dtype ${given.dtype}; give one of ${Object.keys(DTYPES)}`);
  if (given.space !== "box") return given;
  /** @param {number | number[] | null} bound @param {number} end */
  const bound = (bound, end) => {
    if (bound === null) return null;
    const values = (Array.isArray(bound) ? bound : [bound]).map(
      (one) => (given.dtype === "F32" ? Math.fround(one) : one) + 0,
    );
    if (new Set(values).size > 1) return values;
    return type.ends && values[0] === type.ends[end] ? null : values[0];
  };
  return { ...given, low: bound(given.low, 0), high: bound(given.high, 1) };
}

/**
 * The spec exactly as it is registered.
 * @internal
 * @param {Spec} spec
 */
export function specJson(spec) {
  /** @param {Record<string, Space>} spaces */
  const written = (spaces) =>
    Object.fromEntries(
      Object.entries(spaces).map(([path, space]) => {
        if (space.space !== "box" || !isFloat(space.dtype)) return [path, space];
        /** @param {number | number[] | null} bound */
        const bound = (bound) =>
          Array.isArray(bound) ? bound.map((one) => new Float(one)) : bound === null ? null : new Float(bound);
        return [path, { ...space, low: bound(space.low), high: bound(space.high) }];
      }),
    );
  return canonicalJson({ ...spec, obs: written(spec.obs), action: written(spec.action) });
}

/**
 * The SHA-256 of a spec, by which its chunks and bots name it; a game has its own as `game.schema`.
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
      const [space, name] = [spaces[path], path ? `${what}.${path}` : what];
      return { name, path, space, dtype: space.dtype, shape: shapeOf(space), size: product(shapeOf(space)) };
    });
}

// --- Tensors, chunks, frames, parcels --------------------------------------------------------------------------------

/**
 * @typedef {{dtype: string, shape: readonly number[], data: TypedArray, packed?: Bytes}} Column `packed`: the same data by
 *   zlib, which is sent in its place
 */

/**
 * A safetensors file: columns and metadata sorted by name, the data aligned to 64.
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
  return joined([padded, ...raw]);
}

/**
 * The columns and metadata of a safetensors file; Refused unless the bytes are exactly one.
 * @internal
 * @param {Uint8Array} raw
 * @returns {{columns: Record<string, Column>, metadata: Record<string, string>}}
 */
export function decodeTensors(raw) {
  const bad = (/** @type {string} */ why) => new Refused("bad_tensors", why);
  const length = raw.length < 8 ? -1 : Number(new DataView(raw.buffer, raw.byteOffset).getBigUint64(0, true));
  if (length < 2 || length > 256 * 1024 || 8 + length > raw.length)
    throw bad(`${raw.length} bytes with a header of ${length}`);
  let fields;
  try {
    fields = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(raw.subarray(8, 8 + length)));
  } catch (error) {
    throw bad(`the header is no JSON: ${error}`);
  }
  const { __metadata__: metadata = {}, ...entries } = fields;
  if (Object.values(metadata).some((text) => typeof text !== "string")) throw bad("__metadata__ must map text to text");
  /** @type {Record<string, Column>} */
  const columns = {};
  let at = 0;
  const inOrder = Object.keys(entries).sort(
    (one, other) => entries[one].data_offsets?.[0] - entries[other].data_offsets?.[0],
  );
  for (const name of inOrder) {
    const { dtype, shape, data_offsets: offsets } = entries[name];
    const type = Object.hasOwn(DTYPES, dtype) ? DTYPES[dtype] : undefined;
    if (!type || !Array.isArray(shape) || !shape.every((side) => Number.isSafeInteger(side) && side >= 0)) {
      throw bad(`${name} has dtype ${dtype} and shape ${shape}`);
    }
    const size = product(shape);
    const end = at + size * type.bytes;
    if (!Array.isArray(offsets) || offsets[0] !== at || offsets[1] !== end || 8 + length + end > raw.length) {
      throw bad(`${name} stands at ${offsets}; wanted ${[at, end]} within ${raw.length - 8 - length} bytes`);
    }
    const data = type.make(size);
    new Uint8Array(data.buffer).set(raw.subarray(8 + length + at, 8 + length + end));
    columns[name] = { dtype, shape, data };
    at = end;
  }
  if (8 + length + at !== raw.length) throw bad(`tensors end at ${at} of ${raw.length - 8 - length} bytes`);
  return { columns, metadata };
}

/**
 * What is known about one episode that touches a chunk, from row `row` on.
 * @typedef {object} Note
 * @property {number} row
 * @property {number} seat
 * @property {string} [match]
 * @property {readonly string[]} [opponents] what the others were (`person`, `script`, a model's name), never a
 *   player's name
 * @property {string | number} [result]
 * @property {number | bigint} [seed]
 * @property {string} [model]
 * @property {boolean} [cut]
 */
/**
 * What a chunk says about itself.
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
    episodes: canonicalJson(meta.episodes.map(noteJson)),
  });
}

/** Whether a column holds images: what the platform's own chunks compress. @param {Column} column */
const isImage = ({ dtype, shape }) => (dtype === "U8" || dtype === "I8") && product(shape.slice(1)) >= PACKED_FROM_BYTES;

/** Compress the images of a block, away from the game's thread. @param {Block} block */
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
function noteJson(note) {
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
    throw new Refused("too_large", `a body of ${body.length} bytes; at most ${MAX_BODY_BYTES} fit`);
  const header = new Uint8Array(64);
  const view = new DataView(header.buffer);
  header.set(bytesOf("UNDY"));
  header.set([1, KINDS[kind]], 4);
  view.setUint32(8, body.length, true);
  view.setUint32(12, crc32(body), true);
  header.set(fromHex(session.replaceAll("-", "")), 16);
  view.setBigUint64(32, BigInt(chunkNo), true);
  view.setUint32(60, crc32(header.subarray(0, 60)), true);
  return joined([header, body]);
}

/** @param {Uint8Array} frame */
const sessionOf = (frame) => dashed(hexOf(frame.subarray(16, 32)));

/** @param {string} hex */
const dashed = (hex) => hex.replace(/^(.{8})(.{4})(.{4})(.{4})/, "$1-$2-$3-$4-");

/**
 * What one request carries: the names of its players, and up to 64 frames.
 * @param {readonly Uint8Array[]} frames
 * @param {Record<string, string>} players name by session
 * @param {number} [skippedSteps]
 */
export function encodeParcel(frames, players, skippedSteps = 0) {
  const wanted = new Set(frames.map(sessionOf));
  const named = Object.fromEntries(Object.entries(players).filter(([session]) => wanted.has(session)));
  const preamble = bytesOf(canonicalJson({ players: named, skipped_steps: skippedSteps }));
  const head = new Uint8Array(8);
  head.set(bytesOf("UNPA"));
  new DataView(head.buffer).setUint32(4, preamble.length, true);
  return joined([head, preamble, ...frames]);
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
const beganMs = (session) => parseInt(session.replace("-", "").slice(0, 12), 16);

// --- Rows of an episode ----------------------------------------------------------------------------------------------

const MAX_STEPS = 512;
const PACKED_FROM_BYTES = 512;
/** How many full blocks may wait until they are compressed; beyond that they go as they are. */
const MAX_PACKING = 8;
const CUT_BYTES = 440 * 1024;
const MAX_NOTE_BYTES = 32 * 1024;
const [FINAL, BOOTSTRAP] = [1, 2];
const [EMPTY, STAGED, OPEN] = [0, 1, 2];
/** @type {Readonly<Record<string, number>>} */
const BY = Object.freeze({ unknown: 0, person: 1, bot: 2, script: 3 });
/** @typedef {"unknown" | "person" | "bot" | "script"} Decider */

/**
 * @typedef {{logp: number, version: number, rawAction: ArrayLike<number> | null}} Extras what a policy knows about its
 *   choice
 */
/**
 * @typedef {{columns: Record<string, Column>, nSteps: number, consent: Consent, episodes: Note[],
 *   packing?: Promise<void> | null}} Block closed rows, ready to be a chunk; `packing`: until its images are compressed
 */

/**
 * What a value of a part looks like as flat numbers; Refused when it does not fit.
 * @param {Part} part
 * @param {any} value a number, an array, a typed array, or arrays of arrays
 * @param {{bounds: boolean, as?: TypedArray, at?: number}} how `bounds`: floats must lie in them as well
 */
function written(part, value, { bounds, as = DTYPES[part.dtype].make(part.size), at = 0 }) {
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
  const [isReal, isBig] = [isFloat(part.dtype), as instanceof BigInt64Array || as instanceof BigUint64Array];
  for (let index = 0; index < part.size; index++) {
    const given = flat[index];
    const number = typeof given === "boolean" || typeof given === "bigint" ? Number(given) : given;
    if (typeof number !== "number")
      throw new Refused("bad_dtype", `${part.name} holds ${String(given).slice(0, 40)}; give numbers`);
    if (isReal ? !Number.isFinite(part.dtype === "F32" ? Math.fround(number) : number) : Number.isNaN(number)) {
      throw new Refused("not_finite", `${part.name} holds ${number}; give finite numbers`);
    }
    if (!isReal && !Number.isInteger(number))
      throw new Refused("bad_dtype", `${part.name} holds ${number}; give whole numbers`);
    const exact = isBig ? BigInt(given) : number; // a number of 64 bits may be none of JavaScript's own
    if ((bounds || !isReal) && !holds(part, index, exact)) {
      throw new Refused(
        "not_in_space",
        `${part.name} holds ${given}, which lies outside ${JSON.stringify(part.space)}`,
      );
    }
    as[at * part.size + index] = /** @type {never} */ (exact);
  }
  return as;
}

/** @param {Part} part @param {number} index @param {number | bigint} number */
function holds(part, index, number) {
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

/** @param {Part} part @param {any} value @returns {any} what stands at a part's path, however it was nested */
function partOf(part, value) {
  if (!part.path || value?.[part.path] !== undefined) return part.path ? value[part.path] : value;
  const found = part.path.split(".").reduce((inner, key) => inner?.[key], value);
  if (found === undefined)
    throw new Refused("bad_shape", `${part.name} is missing; give all parts that the game was connected with`);
  return found;
}

/** Checks what a game hands over, and knows where it goes. */
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
    /** The action space when it is a single discrete one. */
    this.discrete = only?.space === "discrete" ? only : null;
    /** @type {[string, string, readonly number[]][]} name, dtype and shape of everything a row may hold */
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
    if (spec.has_legal && this.discrete) this.layout.push(["legal", "BOOL", [this.discrete.n]]);
    const rowBytes = this.layout.reduce((size, [, dtype, shape]) => size + DTYPES[dtype].bytes * product(shape), 0);
    this.nRows = Math.max(2, Math.min(Math.floor(CUT_BYTES / rowBytes), MAX_STEPS + MAX_STEPS / 8 + 2));
  }

  /**
   * A discrete action as its number, whether it was named or not.
   * @param {any} action
   */
  numbered(action) {
    if (typeof action !== "string" || !this.discrete) return action;
    const at = this.spec.action_names.indexOf(action);
    const known = this.spec.action_names.length
      ? `one of ${this.spec.action_names.slice(0, 12)}`
      : "a number: this game has no action names";
    if (at < 0) throw new Refused("not_in_space", `action ${action.slice(0, 40)}; give ${known}`);
    return this.discrete.start + at;
  }

  /**
   * A legal mask as bytes; null where none was given.
   * @param {any} legal
   */
  mask(legal) {
    if (legal === undefined || legal === null) return null;
    const n = this.discrete?.n;
    if (n === undefined) throw new Refused("bad_columns", `${this.spec.game} has no discrete actions; leave out legal`);
    const flags = Array.from(legal);
    const odd = flags.find((flag) => typeof flag !== "boolean" && flag !== 0 && flag !== 1);
    if (flags.length !== n)
      throw new Refused("bad_shape", `legal has ${flags.length} flags; give one for each of the ${n} actions`);
    if (odd !== undefined || flags.includes(undefined))
      throw new Refused("bad_dtype", `legal holds ${String(odd).slice(0, 40)}; give true or false, or 1 or 0`);
    return Uint8Array.from(flags, Number);
  }
}

/**
 * Rows of one session; the row in work is empty, staged (an observation waits for a decision) or open (a decision waits
 * for what follows), and all rows before it are closed. What `take` gives is a block that makes one chunk.
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
    /** Closed steps that were not taken yet, and when the oldest of them was closed. */
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
   * @returns {Block | null} the block before it, when that has another consent
   */
  begin(note, consent) {
    checkNote(note);
    const block = consent === this._consent ? null : this.take();
    [this._consent, this._note, this._isFirst, this._episodeRow] = [consent, { ...note, row: 0 }, true, this._at];
    return block;
  }

  /** @param {string} model who decides from now on, for the episode's note */
  nameModel(model) {
    if (!this._note || this._note.model === model) return;
    this._note = { ...this._note, model };
    if (this._state === OPEN || !this._isFirst) this._notes[this._notes.length - 1].model = model;
  }

  /**
   * Close the open step and open the next one.
   * @param {any} obs
   * @param {any} action
   * @param {{legal: any, by: number, frames: number, tMs: number, extras: Extras | null}} how
   */
  decide(obs, action, { legal, by, frames, tMs, extras }) {
    const at = this._at + (this._state === OPEN ? 1 : 0);
    this._look(at, obs, legal);
    if (this._state === OPEN) this._close(tMs);
    [this._at, this._state] = [at, STAGED];
    const { action: parts, raw, discrete } = this._columns;
    const numbered = this._columns.numbered(action);
    for (const part of parts)
      written(part, partOf(part, numbered), { bounds: true, as: this._data[part.name].data, at });
    if (discrete && this._data.legal && !this._data.legal.data[at * discrete.n + numbered - discrete.start]) {
      throw new Refused("illegal_action", `action ${action} is not legal in its own mask`);
    }
    if (!(frames >= 0))
      throw new Refused("bad_frames", `frames is ${frames}; give how many frames the decision lasts, from 0`);
    this._put(at, { by, frames: Math.min(frames, 65535), t_ms: Math.min(tMs, 2 ** 32 - 1) });
    this._openUsed = [];
    if (extras) {
      this._put(at, { logp: extras.logp, version: extras.version });
      this._openUsed.push("logp", "version");
      for (const part of extras.rawAction ? raw : []) {
        written(part, extras.rawAction, { bounds: false, as: this._data[part.name].data, at });
        this._openUsed.push(part.name);
      }
    }
    if (this._isFirst && this._note) {
      this._put(at, { is_first: 1 });
      this._notes.push({ ...this._note, row: at });
    }
    [this._reward, this._state] = [0, OPEN];
  }

  /** @param {number} reward */
  addReward(reward) {
    const total = this._reward + Number(reward);
    if (this._state !== OPEN) throw new Refused("bad_order", "a reward needs a decision before it");
    if (!Number.isFinite(Math.fround(total)))
      throw new Refused("not_finite", `reward ${reward} is no finite number in float32`);
    this._reward = total;
  }

  /**
   * End the episode after its open step; without a last observation a truncated one is cut.
   * @param {any} obs
   * @param {{truncated: boolean, legal: any, result: string | number | undefined, tMs: number}} how
   */
  finish(obs, { truncated, legal, result, tMs }) {
    if (!this._note) throw new Refused("bad_order", "no episode is running");
    checkNote({ ...this._note, result });
    const isSeen = obs !== undefined && obs !== null;
    if (this._state !== OPEN || (truncated && !isSeen)) return this.cut(result);
    const at = this._at + 1;
    if (isSeen) this._look(at, obs, legal);
    else {
      // Never bootstrapped from; the last one seen again is sure to lie in the space.
      for (const { name, size } of this._columns.obs)
        this._data[name].data.copyWithin(at * size, (at - 1) * size, at * size);
      this._mark(at, legal);
    }
    this._put(this._at, truncated ? { truncated: 1 } : { terminated: 1 });
    this._close(tMs);
    this._put(at, { row: FINAL });
    this._leave(at + 1, { ...this._note, result });
  }

  /**
   * Stop the episode where it is known: an open step is dropped, a staged observation kept.
   * @param {string | number} [result]
   */
  cut(result) {
    if (this._state !== EMPTY) this._pad(this._at);
    if (!this._note || this._state === EMPTY || this._at === this._episodeRow) {
      if (this._state !== EMPTY && this._notes.at(-1)?.row === this._at) this._notes.pop();
      [this._state, this._note] = [EMPTY, null];
      return;
    }
    this._put(this._at, { row: BOOTSTRAP });
    this._leave(this._at + 1, { ...this._note, cut: true, result });
  }

  get isFull() {
    // One row must be left for what comes behind the row in work.
    return this._at >= this._columns.nRows - 1 || this.closedSteps >= MAX_STEPS || this._noteBytes > MAX_NOTE_BYTES;
  }

  /** The closed rows; the row in work becomes the first of the next block. @returns {Block | null} */
  take() {
    if (!this.closedSteps) return null;
    const at = this._at;
    let [nRows, notes, carried] = [at, this._notes, /** @type {Note[]} */ ([])];
    const inWork = this._state === EMPTY ? null : this._copied(at, at + 1);
    if (inWork && this._note) {
      if (at === this._episodeRow) {
        // Nothing of this episode is closed yet: it belongs to the next block as a whole.
        if (this._state === OPEN) [notes, carried] = [notes.slice(0, -1), [{ ...notes[notes.length - 1], row: 0 }]];
      } else {
        this._pad(at);
        this._put(at, { row: BOOTSTRAP });
        [nRows, carried] = [at + 1, [{ ...this._note, row: 0 }]];
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
    for (const [name, column] of Object.entries(inWork ?? {}))
      this._data[name].data.set(/** @type {any} */ (column.data));
    [this._notes, this._used, this._noteBytes, this._at, this._episodeRow, this.closedSteps] = [
      carried,
      new Set(),
      0,
      0,
      0,
      0,
    ];
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

  /** @param {number} at @param {any} obs @param {any} legal */
  _look(at, obs, legal) {
    if (!this._note) throw new Refused("bad_order", "no episode is running");
    for (const part of this._columns.obs)
      written(part, partOf(part, obs), { bounds: false, as: this._data[part.name].data, at });
    this._mark(at, legal);
  }

  /** @param {number} at @param {any} legal */
  _mark(at, legal) {
    const [column, mask] = [this._data.legal, this._columns.mask(legal)];
    if (mask && !column)
      throw new Refused("bad_columns", "a legal mask was given; connect with hasLegal: true to record it");
    const n = this._columns.discrete?.n ?? 0;
    if (column) /** @type {Uint8Array} */ (column.data).set(mask ?? new Uint8Array(n).fill(1), at * n);
  }

  /** @param {number} at @param {Record<string, number>} values */
  _put(at, values) {
    for (const [name, value] of Object.entries(values)) this._data[name].data[at] = /** @type {never} */ (value);
  }

  /** Make a row carry no decision; its observation and mask stay. @param {number} at */
  _pad(at) {
    for (const [name, { shape, data }] of Object.entries(this._data)) {
      if (name === "legal" || name === "obs" || name.startsWith("obs.")) continue;
      const [size, isBig] = [product(shape), data instanceof BigInt64Array || data instanceof BigUint64Array];
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
    this._noteBytes += 2 * canonicalJson(noteJson(note)).length;
    [this._state, this._at, this._note] = [EMPTY, at, null];
  }
}

/** The reader's own rules, so that nothing is recorded that could not be read back. @param {Note} note */
function checkNote(note) {
  const { seat, match = "", model = "", opponents = [], result = "", seed = 0 } = note;
  const isCount = (/** @type {unknown} */ one, /** @type {number} */ below) =>
    typeof one === "bigint"
      ? one >= 0n && one < 2n ** 64n
      : Number.isSafeInteger(one) && Number(one) >= 0 && Number(one) < below;
  const isText = (/** @type {unknown} */ one, /** @type {number} */ most) =>
    typeof one === "string" && one.length <= most;
  const isFine =
    isCount(seat, 2 ** 32) &&
    isCount(seed, 2 ** 64) &&
    isText(match, 128) &&
    isText(model, 128) &&
    Array.isArray(opponents) &&
    opponents.length <= 64 &&
    opponents.every((one) => isText(one, 128)) &&
    (isText(result, 64) || (typeof result === "number" && Math.abs(result) < 1e300));
  if (!isFine)
    throw new Refused(
      "bad_metadata",
      `an episode has a field of the wrong type or size: ${canonicalJson(noteJson(note)).slice(0, 120)}`,
    );
}

// --- Policies --------------------------------------------------------------------------------------------------------

/** @typedef {{layer: string, [field: string]: any}} Layer */
/** @typedef {Float32Array | Float64Array} Numbers */
/** @typedef {(x: Numbers) => Numbers} Run what a layer computes; it may overwrite what it gave before */
/** @typedef {Record<string, Column>} Weights */

const fround = Math.fround;
const [ILLEGAL, LOWEST, OPEN_END] = [-1e30, -1e20, 1e30];
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
 * What a kind of layer makes of a row of this shape, and the shape of what it gives. Sums are taken in float64 and
 * rounded once, so they lie as near to NumPy's as those of another machine.
 * @type {Record<string, (layer: Layer, shape: readonly number[], weight: (name: string, shape: number[]) =>
 *   Float32Array) => [Run, number[]]>}
 */
const LAYERS = {
  dense: ({ width }, [size], weight) => [linear(weight("kernel", [size, width]), weight("bias", [width])), [width]],
  conv: convolution,
  layer_norm(_, shape, weight) {
    const width = shape[shape.length - 1];
    const [scale, bias, out] = [weight("scale", [width]), weight("bias", [width]), new Float32Array(product(shape))];
    /** @type {Run} */
    const run = (x) => {
      for (let from = 0; from < out.length; from += width) {
        let [mean, spread] = [0, 0];
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
    const [mean, by] = [
      weight("mean", [...shape]),
      weight("var", [...shape]).map((one) => 1 / Math.sqrt(fround(one + 1e-8))),
    ];
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
    const [value, advantage, out] = [branch("value", 1), branch("advantage", width), new Float32Array(width)];
    /** @type {Run} */
    const run = (x) => {
      const [base, better] = [value(x)[0], advantage(x)];
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
    const [order, out] = [[...kept, ...axes], new Float32Array(product(shape))];
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
        (one, at) => Number.isInteger(one) && one >= start && one < start + n && (out[at * n + one - start] = 1),
      );
      return out;
    };
    return [run, [...shape, n]];
  },
  constant({ width }, _, weight) {
    const value = weight("constant", [width]);
    return [() => value, [width]];
  },
};

/** @param {number} size @param {(x: number, at: number) => number} one @returns {Run} */
function each(size, one) {
  const out = new Float32Array(size);
  return (x) => {
    for (let at = 0; at < size; at++) out[at] = one(x[at], at);
    return out;
  };
}

/** @param {Float32Array} kernel @param {Float32Array} bias @returns {Run} */
function linear(kernel, bias) {
  const [width, out] = [bias.length, new Float32Array(bias.length)];
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
  const [kernel, bias] = [weight("kernel", [side, side, deep, channels]), weight("bias", [channels])];
  const [out, sums, line] = [new Float32Array(high * across * channels), new Float64Array(channels), side * deep];
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
 * @typedef {{action: any, logp: number, raw: Float32Array | null}} Choice an action as the game takes it, and what the
 *   policy knows of it
 */
/** @typedef {{action: number, name: string, value: number | null, probability: number | null}} Advice */
/** @typedef {{legal?: ArrayLike<boolean | number> | null, deterministic?: boolean, random?: () => number}} Choosing */

/** Observations to actions: a game, a network, its weights and a head. Made by `openPolicy`; it never changes. */
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
      throw new Refused("bad_policy", `head ${this.head.kind} is not known; known are ${Object.keys(OUTPUTS)}`);
    const unused = new Set(Object.keys(weights));
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
          throw new Refused("bad_policy", `${place} holds a layer ${layer.layer}; known are ${Object.keys(LAYERS)}`);
        const [run, after] = make(layer, shape, (name, wanted) => {
          const column = weights[`${place}.${index}.${name}`];
          if (
            !column ||
            column.dtype !== "F32" ||
            column.shape.join() !== wanted.join() ||
            !(/** @type {Float32Array} */ (column.data).every(Number.isFinite))
          ) {
            throw new Refused("bad_policy", `${place}.${index}.${name} is missing, not finite, or not F32[${wanted}]`);
          }
          unused.delete(`${place}.${index}.${name}`);
          return /** @type {Float32Array} */ (column.data);
        });
        shape = after;
        return run;
      });
      return [steps, shape];
    };
    const before = this.stack > 1 ? [this.stack] : [];
    let features = 0;
    /** What the network looks at, in its order. */
    this.inputs = Object.keys(network.inputs)
      .sort(byCodePoint)
      .map((name) => {
        const { shape, dtype, layers } = network.inputs[name];
        const part = this._columns.obs.find((one) => one.name === name);
        if (!part || part.dtype !== dtype || [...before, ...part.shape].join() !== shape.join()) {
          throw new Refused("bad_policy", `input ${name} is ${dtype}[${shape}], which the game does not have`);
        }
        const [steps, after] = compiled(`inputs.${name}`, layers, shape);
        features += product(after);
        return { name, dtype, size: product(shape), isExact: layers[0]?.layer === "one_hot", steps };
      });
    const [trunk, width] = compiled("trunk", network.trunk, [features]);
    this._trunk = trunk;
    /** @type {Record<string, Run[]>} */
    this._heads = {};
    for (const name of Object.keys(network.heads).sort(byCodePoint)) {
      const [steps, after] = compiled(`heads.${name}`, network.heads[name], width);
      if (this._outputs.includes(name) && after.join() !== String(this.head.size)) {
        throw new Refused("bad_policy", `head ${name} gives [${after}]; ${this.head.kind} wants ${this.head.size}`);
      }
      this._heads[name] = steps;
    }
    const missing = this._outputs.filter((name) => !this._heads[name]);
    if (missing.length || unused.size)
      throw new Refused("bad_policy", `outputs ${missing} are missing, weights ${[...unused]} unknown`);
    this._features = new Float32Array(features);
    /** What the network gives. */
    this.headNames = Object.keys(this._heads);
  }

  /**
   * What every head of the network gives for an observation; with a stack, for the list of the last ones.
   * @param {any} obs
   * @returns {Record<string, Float32Array>}
   */
  heads(obs) {
    return this.forward(this.read(this.stack > 1 ? obs : [obs]), this.headNames);
  }

  /**
   * An action as the game takes it: a number, or the numbers of a box.
   * @param {any} obs
   * @param {Choosing} [how]
   */
  act(obs, how = {}) {
    return this.choose(this.read(this.stack > 1 ? obs : [obs]), how).action;
  }

  /**
   * The legal actions of a discrete game, best first, each with its value or its probability, whichever the policy
   * knows.
   * @param {any} obs
   * @param {{legal?: ArrayLike<boolean | number> | null}} [how]
   * @returns {Advice[]}
   */
  rank(obs, { legal = null } = {}) {
    const { discrete } = this._columns;
    if (!discrete)
      throw new Refused("not_discrete", `${this.game.game} has no discrete actions to rank; use act instead`);
    const mask = this._mask(legal);
    const columns = this.read(this.stack > 1 ? obs : [obs]);
    const scores = masked(this.forward(columns, this._outputs)[this._outputs[0]], mask);
    const most = Math.max(...scores);
    const total = scores.reduce((sum, score) => sum + Math.exp(score - most), 0);
    const isValue = this._outputs[0] === "q";
    const ranked = Array.from(scores.keys())
      .filter((at) => !mask || mask[at])
      .sort((one, other) => scores[other] - scores[one] || one - other);
    return ranked.map((at) => ({
      action: at + discrete.start,
      name: this.game.action_names[at] ?? String(at + discrete.start),
      value: isValue ? scores[at] : null,
      probability: isValue ? null : Math.exp(scores[at] - most) / total,
    }));
  }

  /**
   * Checked observations as the network takes them, `stack` of them one behind the other.
   * @param {readonly any[]} rows
   * @returns {Record<string, Numbers>}
   */
  read(rows) {
    if (rows.length !== this.stack)
      throw new Refused("bad_shape", `${rows.length} observations were given; this policy looks at ${this.stack}`);
    return Object.fromEntries(
      this.inputs.map(({ name, size, isExact }) => {
        const part = /** @type {Part} */ (this._columns.obs.find((one) => one.name === name));
        const numbers = isExact ? new Float64Array(size) : new Float32Array(size);
        rows.forEach((row, at) => {
          const values = written(part, partOf(part, row), { bounds: false });
          for (let index = 0; index < part.size; index++) numbers[at * part.size + index] = Number(values[index]);
        });
        return [name, numbers];
      }),
    );
  }

  /**
   * What these heads give, as copies.
   * @param {Record<string, Numbers>} columns
   * @param {readonly string[]} heads
   * @returns {Record<string, Float32Array>}
   */
  forward(columns, heads) {
    const through = (/** @type {Run[]} */ steps, /** @type {Numbers} */ x) => steps.reduce((now, step) => step(now), x);
    let at = 0;
    for (const { name, steps } of this.inputs) {
      const part = through(steps, columns[name]);
      this._features.set(part, at);
      at += part.length;
    }
    const features = Float32Array.from(through(this._trunk, this._features));
    return Object.fromEntries(heads.map((name) => [name, Float32Array.from(through(this._heads[name], features))]));
  }

  /**
   * The decision for what `read` gave.
   * @param {Record<string, Numbers>} columns
   * @param {Choosing} how
   * @returns {Choice}
   */
  choose(columns, { legal = null, deterministic = true, random = Math.random }) {
    const [mask, outputs, { discrete }] = [this._mask(legal), this.forward(columns, this._outputs), this._columns];
    if (!discrete) return this._gaussian(outputs.mean, outputs.log_std, deterministic ? null : random);
    const scores = masked(outputs[this._outputs[0]], mask);
    if (deterministic || this.head.kind !== "categorical")
      return { action: discrete.start + largest(scores), logp: 0, raw: null };
    // The largest of logits with Gumbel noise is a draw by their probabilities.
    const action = largest(scores.map((score) => score - Math.log(Math.max(-Math.log(1 - random()), 1e-30))));
    const most = Math.max(...scores);
    const logp = scores[action] - most - Math.log(scores.reduce((sum, score) => sum + Math.exp(score - most), 0));
    return { action: discrete.start + action, logp, raw: null };
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
    raw.forEach((one, at) => {
      const [low, high] = [this.head.low[at] ?? -Infinity, this.head.high[at] ?? Infinity];
      const isClosed = Math.abs(low) < OPEN_END && Math.abs(high) < OPEN_END;
      const [by, middle] = isClosed ? [fround((high - low) / 2), fround((high + low) / 2)] : [1, 0];
      const scaled = (this.head.kind === "gaussian_tanh" ? Math.tanh(one) : one) * by + middle;
      numbers[at] = Math.min(Math.max(scaled, low), high);
    });
    return { action: space.shape.length ? numbers : numbers[0], logp, raw };
  }

  /** @param {ArrayLike<boolean | number> | null} legal */
  _mask(legal) {
    const mask = this._columns.mask(legal);
    if (mask && !mask.includes(1))
      throw new Refused("illegal_action", "legal allows no action; give a mask with one, or end the episode");
    return mask;
  }
}

/** @type {Record<string, string[]>} what each kind of head reads */
const OUTPUTS = {
  argmax: ["q"],
  epsilon_greedy: ["q"],
  categorical: ["logits"],
  gaussian_clipped: ["mean", "log_std"],
  gaussian_tanh: ["mean", "log_std"],
};

/**
 * Outputs in which illegal actions lie below every legal one.
 * @param {Float32Array} scores
 * @param {Uint8Array | null} mask
 */
const masked = (scores, mask) =>
  mask ? scores.map((score, at) => (mask[at] ? Math.max(score, LOWEST) : ILLEGAL)) : scores;

/** @param {Float32Array} scores */
const largest = (scores) => scores.reduce((best, score, at) => (score > scores[best] ? at : best), 0);

/**
 * The policy that these bytes are; Refused unless they are exactly one. Whoever wants to know whose it is checks that
 * first.
 * @param {Uint8Array} raw
 */
export function openPolicy(raw) {
  const { columns, metadata } = decodeTensors(raw);
  if (metadata.format !== "understudy-policy/1")
    throw new Refused("bad_version", `format ${metadata.format}; this build reads understudy-policy/1`);
  try {
    return new Policy(metadata, columns);
  } catch (error) {
    throw error instanceof Refused ? error : new Refused("bad_policy", `it cannot be read: ${error}`);
  }
}

// --- Signed documents ------------------------------------------------------------------------------------------------

const MAX_SIGNED = 256 * 1024;

/**
 * What a trusted key signed; Refused when anything about it is wrong.
 *
 * The signature is over the entry exactly as it stands in the text, so nothing has to be written as Python writes it.
 * @param {string} text
 * @param {readonly string[]} trust public keys as `ed25519:BASE64`
 * @returns {Promise<any>}
 */
export async function checkSigned(text, trust) {
  if (text.length > MAX_SIGNED)
    throw new Refused("too_large", `a signed document of ${text.length} letters; at most ${MAX_SIGNED} are read`);
  const found = /^\{"entry":(\{.*\}),"key_id":"([0-9a-f]{16})","signature":"([A-Za-z0-9+/]{86}==)"\}$/s.exec(text);
  if (!found)
    throw new Refused("bad_entry", "a signed document has entry, key_id and signature, in this order and nothing else");
  const [, entry, keyId, signature] = found;
  const keys = trust.map(publicKey);
  const key = keys.find((one) => sha256(one).slice(0, 16) === keyId);
  if (!key) throw new Refused("unknown_key", `signed by ${keyId}, who is not among the ${keys.length} trusted keys`);
  const subtle = globalThis.crypto?.subtle;
  if (!subtle)
    throw new Refused("no_crypto", "this page cannot check signatures; serve it over https, or from 127.0.0.1");
  const raw = fromBase64(signature);
  const verifier = await subtle.importKey("raw", key, { name: "Ed25519" }, false, ["verify"]).catch((error) => {
    throw new Refused("no_crypto", `this browser cannot check Ed25519 signatures (${error}); use a newer one`);
  });
  // base64 has several texts for the same bytes; only one is ours.
  const isFine =
    toBase64(raw) === signature &&
    (await subtle.verify("Ed25519", verifier, raw, bytesOf(`understudy-entry/1\0${entry}`)));
  if (!isFine) throw new Refused("bad_signature", `the signature of ${keyId} does not fit what was signed`);
  return JSON.parse(entry);
}

/** @param {string} text @returns {Bytes} */
function publicKey(text) {
  const found = /^ed25519:([A-Za-z0-9+/]{43}=)$/.exec(text);
  if (!found)
    throw new Refused(
      "bad_key",
      `${String(text).slice(0, 60)} is no public key; give ed25519:BASE64, as \`understudy up\` prints it`,
    );
  return fromBase64(found[1]);
}

/** @typedef {{name: string, policy: Policy, manifest: any}} Bot a model that passed every check */

/**
 * The bot of these facts and bytes; Refused unless they are what was signed and act as they did then.
 * @param {any} manifest
 * @param {Uint8Array} raw
 * @returns {Bot}
 */
function opened(manifest, raw) {
  const name = `${manifest.game}/${manifest.model_no}`;
  if (raw.length !== manifest.policy_bytes || sha256(raw) !== manifest.policy_sha256) {
    throw new Refused("bad_hash", `the ${raw.length} bytes of ${name} are not the ones that were signed`);
  }
  const policy = openPolicy(raw);
  if (policy.game.game !== manifest.game || policy.schema !== manifest.schema)
    throw new Refused("bad_policy", `${name} holds a policy of another game`);
  checkGolden(policy, manifest.golden);
  return { name, policy, manifest };
}

/**
 * The platform draws golden observations with NumPy's generator from a fixed seed; this is that generator, from there
 * on.
 */
class Golden {
  constructor() {
    this._state = 0xd419f767f579b2a66512b355dcc079c0n;
    /** @type {number | null} */
    this._half = null;
  }

  /** 64 fresh bits. */
  bits() {
    const all = (1n << 128n) - 1n;
    this._state = (this._state * 0x2360ed051fc65da44385df649fccf645n + 0x8aea2dee8ffd65a31d8755612f9dea65n) & all;
    const [folded, turn] = [(this._state >> 64n) ^ (this._state & (all >> 64n)), this._state >> 122n];
    return BigInt.asUintN(64, (folded >> turn) | (folded << (64n - turn)));
  }

  /** A number from 0 to 1. */
  uniform() {
    return Number(this.bits() >> 11n) / 2 ** 53;
  }

  /** 0 or 1. */
  bit() {
    if (this._half !== null) {
      const half = this._half;
      this._half = null;
      return half >>> 31;
    }
    const bits = this.bits();
    this._half = Number(bits >> 32n);
    return Number(bits & 0xffffffffn) >>> 31;
  }

  /** A number from the normal distribution, by a ziggurat of 256 layers. */
  normal() {
    for (;;) {
      const bits = this.bits();
      const [layer, whole] = [Number(bits & 255n), Number((bits >> 9n) & 0xfffffffffffffn)];
      const x = whole * ZIGGURAT.width[layer] * (bits & 256n ? -1 : 1);
      if (whole < ZIGGURAT.inside[layer]) return x;
      if (layer === 0) {
        for (;;) {
          const [far, high] = [-Math.log1p(-this.uniform()) / ZIGGURAT.end, -Math.log1p(-this.uniform())];
          if (2 * high > far * far) return (whole >>> 8) & 1 ? -(ZIGGURAT.end + far) : ZIGGURAT.end + far;
        }
      }
      const { height } = ZIGGURAT;
      if ((height[layer - 1] - height[layer]) * this.uniform() + height[layer] < Math.exp((-x * x) / 2)) return x;
    }
  }
}

const ZIGGURAT = (() => {
  const [end, area, layers] = [3.6541528853610088, 0.00492867323397465, 256];
  const [width, inside, height] = [new Float64Array(layers), new Float64Array(layers), new Float64Array(layers)];
  const density = (/** @type {number} */ x) => Math.exp((-x * x) / 2);
  let x = end;
  [width[0], inside[0], height[0]] = [area / density(end) / 2 ** 52, ((end * density(end)) / area) * 2 ** 52, 1];
  [width[layers - 1], height[layers - 1]] = [end / 2 ** 52, density(end)];
  for (let layer = layers - 2; layer > 0; layer--) {
    const next = Math.sqrt(-2 * Math.log(area / x + density(x)));
    inside[layer + 1] = (next / x) * 2 ** 52;
    [width[layer], height[layer], x] = [next / 2 ** 52, density(next), next];
  }
  return { end, width, inside, height };
})();

/** @param {Policy} policy @param {any} wanted what each head gave for two observations when the model was signed */
function checkGolden(policy, wanted) {
  const [golden, rows] = [new Golden(), 2];
  /** @type {Record<string, Numbers>[]} */
  const given = Array.from({ length: rows }, () => ({}));
  for (const { name, dtype, size, isExact } of policy.inputs) {
    for (const row of given) {
      const draw = () =>
        isFloat(dtype) ? golden.normal() : dtype === "BOOL" ? Number(golden.uniform() < 0.5) : golden.bit();
      const drawn = Array.from({ length: size }, draw);
      row[name] = isExact ? Float64Array.from(drawn) : Float32Array.from(drawn);
    }
  }
  given.forEach((columns, row) => {
    for (const [head, numbers] of Object.entries(policy.forward(columns, policy.headNames))) {
      const expected = wanted?.[head];
      const isClose =
        Array.isArray(expected) &&
        expected.length === rows &&
        expected[row].length === numbers.length &&
        numbers.every((one, at) => Math.abs(one - expected[row][at]) <= 1e-4 + 1e-4 * Math.abs(expected[row][at]));
      if (!isClose) throw new Refused("bad_golden", `output ${head} differs from what was signed with the model`);
    }
  });
}

// --- The link --------------------------------------------------------------------------------------------------------

/** A request that failed as a whole; `status` is 0 where no answer came. */
export class LinkFailed extends Error {
  /**
   * @param {string} code
   * @param {string} detail
   * @param {{status?: number, retryAfterS?: number, isOwn?: boolean}} [more]
   */
  constructor(code, detail, { status = 0, retryAfterS = 0, isOwn = false } = {}) {
    super(`${code}: ${detail}`);
    this.name = "LinkFailed";
    this.code = code;
    this.detail = detail;
    this.status = status;
    this.retryAfterS = retryAfterS;
    /** Whether a gateway said so, in its own words; a proxy or a hotel's network says nothing that is for good. */
    this.isOwn = isOwn;
  }

  /** Whether another key is needed before anything may be tried again. */
  get needsKey() {
    return this.isOwn && (this.status === 401 || this.status === 403);
  }

  /** Whether the same request may succeed later. */
  get mayPass() {
    return this.status === 0 || this.status === 408 || this.status === 429 || this.status >= 500;
  }
}

const TIMEOUT_S = 10;

/** The way to a platform's gateway. */
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
   * The status and body of a success; LinkFailed with the gateway's own words otherwise.
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
        redirect: "error", // a gateway never sends its clients elsewhere, and steps are for nobody else
      });
      raw = new Uint8Array(await answer.arrayBuffer());
    } catch (error) {
      throw new LinkFailed("unreachable", `${this.address} gave no answer (${error}); does it run there?`);
    } finally {
      clearTimeout(timer);
      this._open.delete(stop);
    }
    if (answer.status === 200 || answer.status === 204) return { status: answer.status, raw };
    if (key !== this.key) throw new LinkFailed("old_key", "another key was given while this request was under way");
    const said = /** @type {any} */ (jsonOf(raw))?.error;
    const isOwn = typeof said?.code === "string";
    const [code, detail] = isOwn
      ? [said.code, said.detail]
      : [`status_${answer.status}`, "that is no answer of a gateway; is the address right?"];
    const retryAfterS = Number((isOwn ? said.retry_after_s : null) ?? answer.headers.get("retry-after") ?? 0) || 0;
    throw new LinkFailed(
      code.slice(0, 40),
      `${String(detail).slice(0, 300)} (${this.address} answered ${answer.status})`,
      { status: answer.status, retryAfterS, isOwn },
    );
  }

  /** Let go; whoever waits for an answer gets none. */
  close() {
    this._isClosed = true;
    for (const stop of this._open) stop.abort();
  }
}

/** @param {Uint8Array} raw @returns {unknown} what the bytes say, or null */
function jsonOf(raw) {
  try {
    return JSON.parse(new TextDecoder().decode(raw));
  } catch {
    return null;
  }
}

/** Waits are random between 0 and a bound that doubles with each failure. */
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

  /** @param {number} retryAfterS @param {boolean} [wholly] whether all of what was sent must go again */
  failed(retryAfterS, wholly = true) {
    this._failures = wholly ? this._failures + 1 : 1;
    const boundS = Math.min(30, 0.5 * 2 ** Math.min(this._failures - 1, 16));
    this._untilMs = this._clock.monotonic() + 1000 * Math.max(this._random() * boundS, Math.min(retryAfterS, 30));
  }
}

/**
 * @typedef {{now: () => number, monotonic: () => number}} Clock milliseconds: since 1970, and of a clock that nobody
 *   sets
 */
/**
 * @typedef {{getItem: (key: string) => string | null, setItem: (key: string, value: string) => void, removeItem: (key:
 *   string) => void, length?: number, key?: (at: number) => string | null}} TextStorage such as localStorage
 */

/** What is kept for the next start, under one place; a storage that fails loses only that. */
class Shelf {
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

  /** @param {string} name @param {unknown} value @returns {number} how many letters it takes; 0 when it is not kept */
  write(name, value) {
    try {
      const [key, text] = [this._prefix + name, JSON.stringify(value)];
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
      // It is read again at the next start, and sending it again changes nothing.
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
 * Remove what nobody comes back for, of whatever deployment: frames that are too old to be taken, signs of life, and
 * the policies of a game that was not played since; whom it trusts, and the numbers it has seen, stay.
 * @param {TextStorage} storage
 * @param {number} nowMs
 */
function sweep(storage, nowMs) {
  const all = new Shelf(storage, "understudy/");
  for (const name of all.names("")) {
    const [place, kind, owner, session] = name.split("/");
    let lastMs = nowMs;
    if (kind === "frame" || kind === "gap") lastMs = beganMs(session ?? owner);
    else if (kind === "held") lastMs = Number(all.read(name)) || 0;
    else if (kind === "policy") lastMs = Number(all.read(`${place}/used`)) || 0;
    if (!(nowMs - lastMs <= KEPT_MS)) all.remove(name);
  }
}

/** @typedef {{request: (name: string, how: {ifAvailable: true}, work: (lock: unknown) => unknown) => Promise<unknown>}} Locks */

/**
 * Which pages still run, so that what one of them keeps is sent by nobody else: each holds its own name, and the names
 * of those whose frames it took up. By locks where pages have them; elsewhere by a sign of life in the storage, which
 * is old once the page is gone.
 */
class Holds {
  /** @param {{shelf: Shelf, clock: Clock, locks: Locks | null, place: string}} parts */
  constructor({ shelf, clock, locks, place }) {
    this._shelf = shelf;
    this._clock = clock;
    this._locks = locks;
    this._place = place;
    /** @type {Map<string, () => void>} how each name is let go */
    this._mine = new Map();
    /** @type {Map<string, number>} the last sign of life of each name, as it was written */
    this._signs = new Map();
    this._isOver = false;
    /** @type {any} */
    this._timer = locks ? undefined : setInterval(() => this._beat(), BEAT_MS);
    this._timer?.unref?.();
  }

  /** Whether this name is held here from now on, and nobody held it before. @param {string} name */
  async take(name) {
    if (this._isOver || this._mine.has(name)) return false;
    if (!this._locks) {
      if (Math.abs(this._clock.now() - (Number(this._shelf.read(`held/${name}`)) || 0)) < ALIVE_MS) return false;
      this._mine.set(name, () => this._shelf.remove(`held/${name}`));
      this._beat();
      return true;
    }
    const { request } = this._locks;
    return new Promise((/** @type {(isTaken: boolean) => void} */ resolve) => {
      const work = (/** @type {unknown} */ lock) => {
        resolve(lock !== null && !this._isOver);
        const isOurs = lock !== null && !this._isOver;
        return isOurs ? new Promise((done) => this._mine.set(name, () => done(null))) : null;
      };
      request.call(this._locks, `${this._place}${name}`, { ifAvailable: true }, work).catch(() => resolve(false));
    });
  }

  _beat() {
    const nowMs = this._clock.now();
    for (const name of this._mine.keys()) {
      if (!this._isMissed(name) && this._shelf.write(`held/${name}`, nowMs)) this._signs.set(name, nowMs);
    }
  }

  /** Names that others took while this page slept for so long that they thought it gone; it holds them no more. */
  missed() {
    const names = [...this._signs.keys()].filter((name) => this._isMissed(name));
    for (const name of names) {
      this._mine.delete(name);
      this._signs.delete(name);
    }
    return names;
  }

  /** @param {string} name */
  _isMissed(name) {
    const atMs = this._signs.get(name);
    if (atMs === undefined || Math.abs(this._clock.now() - atMs) < ALIVE_MS) return false;
    // Where all is gone somebody emptied the storage; whoever takes a name leaves the rest.
    return this._shelf.read(`held/${name}`) !== atMs && this._shelf.read("used") !== null;
  }

  /** Let others have all of it. */
  end() {
    this._isOver = true;
    clearInterval(this._timer);
    for (const letGo of this._mine.values()) letGo();
    this._mine.clear();
    this._signs.clear();
  }
}

/**
 * Which page of a browser keeps a question waiting at the gateway: one, and one that is looked at. Over HTTP/1.1 a browser
 * has six connections for a host, and questions that wait in many pages would leave none to send with.
 */
class Watch {
  /** @param {{locks: Locks | null, name: string, isPage: boolean}} parts elsewhere than in a page anybody may wait */
  constructor({ locks, name, isPage }) {
    this._locks = locks;
    this._name = name;
    this._isPage = isPage;
    /** @type {(() => void) | null} */
    this._letGo = null;
  }

  /** Whether it is this page from now on. */
  async take() {
    if (!this._isPage) return true;
    if (globalThis.document?.visibilityState === "hidden") this.end();
    else if (!this._letGo && this._locks) await this._request(this._locks);
    return this._letGo !== null;
  }

  /** @param {Locks} locks @returns {Promise<void>} */
  _request(locks) {
    return new Promise((resolve) => {
      const work = (/** @type {unknown} */ lock) => {
        const held = lock === null ? null : new Promise((done) => (this._letGo = () => done(null)));
        resolve();
        return held;
      };
      locks.request(this._name, { ifAvailable: true }, work).catch(() => resolve());
    });
  }

  end() {
    this._letGo?.();
    this._letGo = null;
  }
}

/** A storage that lasts as long as the program. @returns {TextStorage} */
function memoryStorage() {
  /** @type {Map<string, string>} */
  const kept = new Map();
  return {
    getItem: (key) => kept.get(key) ?? null,
    setItem: (key, value) => void kept.set(key, value),
    removeItem: (key) => void kept.delete(key),
  };
}

// --- The sender ------------------------------------------------------------------------------------------------------

const [MAX_FRAMES, MAX_BATCH_BYTES, MAX_REPORTED] = [64, 4 * 1024 * 1024, 1024];
const [IDLE_MS, TELL_MS, DAY_MS] = [60_000, 10_000, 86_400_000];
/** How long what is left may lie, as the platform takes no older session; and how much, in letters as storages count. */
const [KEPT_MS, SHELF_LETTERS] = [8 * DAY_MS, 2 * 1024 * 1024];
/** Browsers let a page in the background do something once a minute; one that was silent for longer is gone. */
const [BEAT_MS, ALIVE_MS] = [20_000, 150_000];
const [ADOPT_FIRST_MS, ADOPT_CAP_MS] = [1_000, 60_000];
const PARCEL = "application/vnd.understudy.parcel";

/** The episodes that follow one another for one player and seat: their rows, and the numbers of their frames. */
class Session {
  /**
   * @param {{id: string, player: string, seat?: number, isKept?: boolean, rows: Rows | null, startedMs: number}} facts
   *   without rows: another program's, whose frames are only sent
   */
  constructor({ id, player, seat = 0, isKept = true, rows, startedMs }) {
    this.id = id;
    this.player = player;
    this.seat = seat;
    /** Whether its episodes are recorded; otherwise their steps are only counted. */
    this.isKept = isKept;
    this.rows = rows;
    this._startedMs = startedMs;
    this.idleSinceMs = startedMs;
    /** @type {WeakRef<object> | null} whoever records into it now */
    this.holder = null;
    /** @type {Block[]} full ones that are no frames yet */
    this.blocks = [];
    this.nextNo = this.nSteps = this.nWaiting = 0;
    /** @type {{numbers: number[], steps: number}} numbers that will never be sent, until a report says so */
    this.lost = { numbers: [], steps: 0 };
    /** @type {Map<number, number>} steps by number of the frames that are in memory only */
    this.unkept = new Map();
    /** No call is recorded any more. */
    this.hasEnded = false;
    this.isClosing = false;
    /** A report of it was refused: no more are made. */
    this.isMuted = false;
    /** The shelf says what is in memory only. */
    this.isNoted = false;
  }

  /** @param {number} nowMs milliseconds since it began */
  tMs(nowMs) {
    return Math.max(0, Math.floor(nowMs - this._startedMs));
  }

  /** Cut the running episode, and let nothing more be recorded. */
  end() {
    if (this.rows?.inEpisode) this.rows.cut();
    this.hasEnded = true;
  }
}

/**
 * @typedef {{session: Session, chunkNo: number, kind: FrameKind, nSteps: number, frame: Bytes, isTried: boolean,
 *   isDone: boolean, name: string, letters: number}} Entry a frame until its ack; `letters` is what it takes on the
 *   shelf
 */

/**
 * Makes blocks into frames and sends them until each is acknowledged; one round after another, behind the game's back.
 */
class Sender {
  /**
   * @param {{link: Link, columns: Columns, client: string, clock: Clock, random: () => number, lingerMs: number,
   *   capBytes: number, shelf: Shelf | null, holds: Holds | null}} parts
   */
  constructor({ link, columns, client, clock, random, lingerMs, capBytes, shelf, holds }) {
    this._link = link;
    this._columns = columns;
    this._client = client;
    this._clock = clock;
    this._random = random;
    this._lingerMs = lingerMs;
    this._capBytes = capBytes;
    this._shelf = shelf;
    this._holds = holds;
    /** Under which name what is kept here is held. */
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
    this._waitingBytes = this._shelvedLetters = 0;
    this._batchFrames = MAX_FRAMES;
    this._isRegistered = false;
    this._isBusy = false;
    this._timerMs = Infinity;
    /** @type {any} */
    this._timer = undefined;
    this._tellAtMs = clock.monotonic() + TELL_MS;
    this.keepShare = 1;
    this.skippedSteps = this._toldSteps = 0;
    this.counts = {
      recorded: 0,
      acked: 0,
      refused: 0,
      dropped: 0,
      adopted: 0,
      failedSends: 0,
    };
    /** Why nothing is sent until another key is given. */
    this.stopped = "";
    this.linkError = this.refusal = "";
    this.isClosed = false;
    /** Is called when the platform answered what was sent. */
    this.onAnswer = () => {};
  }

  /** Whether what waits outlives this program, as far as there is room for it. */
  get isStored() {
    return this._shelf !== null;
  }

  /** Steps that wait for their ack. */
  get waitingSteps() {
    const open = [...this.sessions].reduce((sum, one) => sum + (one.isKept ? stepsOf(one) : 0), 0);
    return (
      open + this._waiting.reduce((sum, entry) => sum + (entry.session.rows && !entry.isDone ? entry.nSteps : 0), 0)
    );
  }

  get recordedSteps() {
    return this.counts.recorded + [...this.sessions].reduce((sum, one) => sum + (one.isKept ? stepsOf(one) : 0), 0);
  }

  get untoldSteps() {
    const open = [...this.sessions].reduce((sum, one) => sum + (one.isKept ? 0 : stepsOf(one)), 0);
    return this.skippedSteps + open - this._toldSteps;
  }

  /** Tell the gateway what this game's rows look like. */
  async register() {
    await this._link.ask("PUT", "", { body: this._specJson, kind: "application/json" });
    this._isRegistered = true;
  }

  /** A step of this session was closed. @param {Session} session */
  notice(session) {
    if (session.rows?.isFull) {
      const block = session.rows.take();
      if (block) this.hand(session, block);
    } else this._schedule(this._clock.monotonic() + this._lingerOf(session));
  }

  /** @param {Session} session @param {Block} block */
  hand(session, block) {
    this._queue(session, block);
    // A game that never lets go of the thread must not fill the memory: then it makes the frames, and the cap is kept.
    if (session.blocks.length > MAX_PACKING) this.collect();
    this._schedule(0);
  }

  /** @param {Session} session @param {Block} block */
  _queue(session, block) {
    session.blocks.push(block);
    if (!session.isKept || !globalThis.CompressionStream || !Object.values(block.columns).some(isImage)) return;
    block.packing = pack(block)
      .catch(() => {}) // then they are sent as they are
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
    this._timer?.unref?.(); // a program in Node ends when it is done; it closes its games before
  }

  /** Do a round now; while one is under way, only make frames. */
  wake() {
    clearTimeout(this._timer);
    this._timerMs = Infinity;
    if (this.isClosed) return;
    // While an answer is waited for, frames are made all the same: they are kept where the next page finds them.
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
      const mustTell = this.untoldSteps > 0 && this._clock.monotonic() >= this._tellAtMs && this._mayTry;
      if (this.isClosed || !(batch.length || mustTell)) return;
      await this._send(batch);
      this.collect();
    }
  }

  get _mayTry() {
    return !this.stopped && this._backoff.leftMs <= 0;
  }

  /** @param {Session} session */
  _lingerOf(session) {
    return session.isKept ? this._lingerMs : Math.max(this._lingerMs, TELL_MS); // steps that are only counted may lie
  }

  /** When the next rows are to be cut, or a session has been idle for long. */
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
    const tellMs = this.untoldSteps && !this.stopped ? Math.max(this._tellAtMs, tryMs) : Infinity;
    return Math.min(this._cutMs(), sendMs, tellMs, this._shelf ? this._adoptAtMs : Infinity);
  }

  // From the game into frames.

  /**
   * Make frames of what is due; of all that is closed where `isAll`; in a hurry without waiting until images are small.
   * @param {{isAll?: boolean, inHurry?: boolean}} [how]
   */
  collect({ inHurry = false, isAll = inHurry } = {}) {
    const nowMs = this._clock.monotonic();
    if (this._holds?.missed().includes(this._owner)) this._giveWay();
    for (const session of this.sessions) {
      const { rows } = session;
      if (rows && session.holder && session.holder.deref() === undefined) {
        // The game forgot its episode without an end.
        rows.cut();
        this.release(session);
      }
      const isDue =
        rows && rows.closedSteps > 0 && nowMs - session._startedMs - rows.oldestMs >= this._lingerOf(session);
      const block = isAll || isDue || session.hasEnded ? rows?.take() : null;
      if (block) this._queue(session, block);
      const { blocks } = session; // in their order
      while (blocks.length && (inHurry || !blocks[0].packing || blocks.length > MAX_PACKING)) {
        this._encode(session, /** @type {Block} */ (blocks.shift()));
      }
      if (!session.holder && nowMs - session.idleSinceMs >= IDLE_MS) session.end();
    }
    this._keepCap();
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
    if (!session.isKept) {
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
      this._lose(session, chunkNo, nSteps);
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
      letters: 0,
    };
    session.nextNo += 1;
    this._shelve(entry);
    if (this._shelf && !entry.letters) session.unkept.set(chunkNo, nSteps);
    this._noteUnkept(session);
    this._push(entry);
  }

  /** Put a frame on the shelf, unless it is full; whether it is not. @param {Entry} entry */
  _shelve(entry) {
    if (!this._shelf || entry.letters) return true;
    const { session, nSteps, kind } = entry;
    const text = toBase64(entry.frame);
    // A report is small, and without it nobody would know what became of the numbers in it.
    if (kind === "data" && this._shelvedLetters + text.length > SHELF_LETTERS) return false;
    entry.letters = this._shelf.write(entry.name, { player: session.player, nSteps, frame: text, kind });
    this._shelvedLetters += entry.letters;
    return true;
  }

  /** Keep a record of what is in memory only, so that the next page can say what was lost. @param {Session} session */
  _noteUnkept(session) {
    const { id, player, unkept, nextNo } = session;
    if (!session.isNoted && !unkept.size) return;
    session.isNoted = unkept.size > 0;
    const steps = [...unkept.values()].reduce((sum, one) => sum + one, 0);
    const record = { player, ranges: rangesOf([...unkept.keys()]), steps, nextNo };
    if (session.isNoted) this._shelf?.write(`gap/${this._owner}/${id}`, record);
    else this._shelf?.remove(`gap/${this._owner}/${id}`);
  }

  /**
   * What is under way stays: were the page closed now, nobody would send it again. Should it have arrived, it is stored
   * all the same, and the report says too much rather than nothing.
   * @param {Iterable<Entry>} entries that are settled, or on the shelf: they will not be called lost
   */
  _forgetUnkept(entries) {
    for (const { session, chunkNo } of entries) if (session.unkept.delete(chunkNo)) this._noteUnkept(session);
  }

  /** @param {Entry} entry */
  _push(entry) {
    entry.session.nWaiting += 1;
    this._waitingBytes += entry.frame.length;
    // A report goes ahead of the data: without it the numbers behind a long gap would be too far ahead to be taken.
    if (entry.kind === "drop") this._waiting.unshift(entry);
    else this._waiting.push(entry);
  }

  /** Take up what pages and programs could not send that are gone by now. */
  async adopt() {
    if (!this._shelf || !this._holds || this.isClosed) return;
    // A page that is just being left may hold its frames a moment longer, so the first looks follow soon.
    this._adoptAtMs = this._clock.monotonic() + this._adoptMs;
    this._adoptMs = Math.min(2 * this._adoptMs, ADOPT_CAP_MS);
    await this._holds.take(this._owner);
    const names = ["frame/", "gap/", "held/"].flatMap((kind) => /** @type {Shelf} */ (this._shelf).names(kind));
    for (const owner of new Set(names.map((name) => name.split("/")[1]))) {
      if (await this._holds.take(owner)) this._takeUp(this._shelf, owner);
    }
    this._schedule(this._waiting.length ? 0 : this._adoptAtMs);
  }

  /** @param {Shelf} shelf @param {string} owner */
  _takeUp(shelf, owner) {
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
    for (const name of shelf.names(`frame/${owner}/`)) {
      const kept = shelf.read(name);
      try {
        const frame = fromBase64(kept.frame);
        const [session, { nSteps, kind }] = [sessionNamed(sessionOf(frame), kept.player), kept];
        const chunkNo = Number(new DataView(frame.buffer).getBigUint64(32, true));
        const letters = name.length + kept.frame.length;
        entries.push({ session, chunkNo, kind, nSteps, frame, isTried: true, isDone: false, name, letters });
        this._shelvedLetters += letters;
        this.counts.adopted += nSteps;
      } catch {
        shelf.remove(name);
      }
    }
    entries.sort((one, other) => byCodePoint(one.session.id, other.session.id) || one.chunkNo - other.chunkNo);
    for (const entry of entries) this._push(entry);
    for (const name of shelf.names(`gap/${owner}/`)) {
      try {
        const { player, ranges, steps, nextNo } = shelf.read(name);
        const session = sessionNamed(name.split("/")[2], player);
        session.nextNo = nextNo;
        this._report(session, ranges, steps);
        this.counts.dropped += steps;
        warn("dropped", "recorded steps had to be dropped; game.stats().dropped counts them");
      } catch {
        // It says nothing that could be told.
      }
      shelf.remove(name);
    }
  }

  /**
   * This page slept, and another one took it for gone: that one sends what was on the shelf, which changes nothing
   * when it comes twice, and has reported the rest as dropped, under the next numbers. Go on behind those.
   */
  _giveWay() {
    this._owner = freshOwner();
    void this._holds?.take(this._owner);
    for (const session of this.sessions) {
      if (!session.isNoted) continue;
      const { unkept } = session;
      session.nextNo += Math.ceil(rangesOf([...unkept.keys()]).length / MAX_REPORTED);
      session.unkept = new Map();
      session.isNoted = false;
      for (const entry of this._waiting.filter((one) => one.session === session && unkept.has(one.chunkNo))) {
        if (entry.isDone) continue;
        this._finish(entry);
        this.counts.dropped += entry.nSteps;
        if (entry.kind === "drop") this._add(session, "drop", entry.frame.subarray(64), 0);
        if (entry.kind === "close") session.isClosing = false;
      }
      warn("dropped", "recorded steps had to be dropped; game.stats().dropped counts them");
    }
  }

  // Dropping, and saying so.

  _keepCap() {
    if (this._waitingBytes <= this._capBytes) return;
    for (const entry of this._waiting) {
      if (this._waitingBytes <= (this._capBytes * 7) / 8) break;
      // What was handed to the link may have arrived, so calling it dropped could be wrong.
      if (entry.isTried || entry.isDone || entry.kind !== "data") continue;
      this._finish(entry);
      this._lose(entry.session, entry.chunkNo, entry.nSteps);
    }
    this._waiting = this._waiting.filter((entry) => !entry.isDone);
  }

  /** @param {Session} session @param {number} chunkNo @param {number} nSteps */
  _lose(session, chunkNo, nSteps) {
    session.lost.numbers.push(chunkNo);
    session.lost.steps += nSteps;
    this.counts.dropped += nSteps;
    warn("dropped", "recorded steps had to be dropped; game.stats().dropped counts them");
  }

  _reportLost() {
    for (const session of this.sessions) {
      if (!session.lost.numbers.length || session.isMuted || session.isClosing) continue;
      const { numbers, steps } = session.lost;
      session.lost = { numbers: [], steps: 0 };
      this._report(session, rangesOf(numbers), steps);
    }
  }

  /** Tell that these numbers never come. @param {Session} session @param {[number, number][]} ranges @param {number} steps */
  _report(session, ranges, steps) {
    for (let at = 0; at < ranges.length; at += MAX_REPORTED) {
      const report = { n_steps: at ? 0 : steps, ranges: ranges.slice(at, at + MAX_REPORTED) };
      this._add(session, "drop", bytesOf(canonicalJson(report)), 0);
    }
  }

  _closeFinished() {
    for (const session of this.sessions) {
      if (!session.hasEnded || session.nWaiting || session.blocks.length || session.rows?.closedSteps) continue;
      if (session.nextNo && !session.isClosing && !session.isMuted) {
        session.isClosing = true;
        this._add(session, "close", bytesOf(canonicalJson({ n_chunks: session.nextNo, n_steps: session.nSteps })), 0);
      } else this.sessions.delete(session);
    }
  }

  // From frames through the link.

  _batch() {
    if (!this._mayTry) return [];
    this._waiting = this._waiting.filter((entry) => !entry.isDone);
    let room = MAX_BATCH_BYTES;
    const end = this._waiting.findIndex(
      (entry, at) => at === this._batchFrames || ((room -= entry.frame.length) < 0 && at > 0),
    );
    const batch = this._waiting.slice(0, end < 0 ? this._waiting.length : end);
    // On the shelf first: were the page closed while it is under way, nobody would know whether it arrived.
    const full = batch.findIndex((entry, at) => !this._shelve(entry) && at > 0);
    this._forgetUnkept(batch.filter((entry) => entry.letters));
    return full < 0 ? batch : batch.slice(0, full);
  }

  /** @param {Entry[]} batch */
  async _send(batch) {
    const [skipped, players] = [
      this.untoldSteps,
      Object.fromEntries(batch.map(({ session }) => [session.id, session.player])),
    ];
    for (const entry of batch) entry.isTried = true;
    /** @type {Entry[]} what a failure is about */
    let sent = [];
    try {
      if (!this._isRegistered) await this.register();
      sent = batch;
      const parcel = encodeParcel(
        batch.map((entry) => entry.frame),
        players,
        skipped,
      );
      const { raw } = await this._link.ask("POST", "/frames", { body: parcel, kind: PARCEL });
      const answer = /** @type {any} */ (jsonOf(raw));
      if (
        !Array.isArray(answer?.acks) ||
        answer.acks.length !== batch.length ||
        !(answer.keep_share >= 0 && answer.keep_share <= 1)
      ) {
        throw new LinkFailed("strange_answer", `${this._link.address} answered what this build does not read`);
      }
      this._toldSteps += skipped;
      this._tellAtMs = this._clock.monotonic() + TELL_MS;
      this.keepShare = answer.keep_share;
      this._settle(batch, answer.acks);
      this.onAnswer();
    } catch (error) {
      this._failed(sent, error instanceof LinkFailed ? error : new LinkFailed("failed", String(error)));
    }
  }

  /**
   * @param {Entry[]} batch
   * @param {{accepted: boolean, refused: string | null, retry_after_s: number, error: string}[]} acks
   */
  _settle(batch, acks) {
    let [again, retryAfterS, why] = [0, 0, ""];
    batch.forEach((entry, at) => {
      const ack = acks[at];
      if (entry.isDone) return; // it was given up meanwhile
      if (ack.accepted) {
        this.counts.acked += entry.session.rows ? entry.nSteps : 0;
        this._finish(entry);
      } else if (ack.refused) this._refuse(entry, ack.refused);
      else [again, retryAfterS, why] = [again + 1, Math.max(retryAfterS, Number(ack.retry_after_s) || 0), ack.error];
    });
    this.linkError = why;
    this._batchFrames = Math.max(this._batchFrames, Math.min(2 * batch.length, MAX_FRAMES));
    if (again) this._backoff.failed(retryAfterS, again === batch.length);
    else this._backoff.succeeded();
    this.counts.failedSends += again ? 1 : 0;
  }

  /** @param {Entry[]} batch @param {LinkFailed} failed */
  _failed(batch, failed) {
    this._isRegistered = false; // whoever answers next may know nothing of us: another gateway, or a new one
    this.linkError = failed.message;
    this.counts.failedSends += 1;
    if (failed.needsKey) {
      this.stopped = failed.message;
      warn("stopped", `recorded steps wait here and are not sent: ${failed.message}`);
      return;
    }
    if ([0, 400, 408, 413].includes(failed.status) && failed.code !== "unknown_schema") {
      // It is too much for somebody on the way, or for the way itself; or something in it will never be taken.
      if (batch.length > 1) this._batchFrames = batch.length >> 1;
      else if (batch.length && failed.isOwn && failed.status !== 408) this._refuse(batch[0], failed.message);
    }
    this._backoff.failed(failed.retryAfterS);
  }

  /** @param {Entry} entry @param {string} reason */
  _refuse(entry, reason) {
    if (entry.isDone) return;
    this.counts.refused += entry.session.rows ? entry.nSteps : 0;
    this.refusal = reason;
    warn("refused", `the platform refused recorded steps for good: ${reason}`);
    this._finish(entry);
    if (entry.kind !== "data") entry.session.isMuted = true;
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
    this._forgetUnkept([entry]);
    if (entry.letters) this._shelf?.remove(entry.name);
    this._shelvedLetters -= entry.letters;
    entry.letters = 0;
  }

  // Ends.

  /** Whether all that is recorded by now was acknowledged, refused or dropped in time. @param {number} timeoutS */
  async flush(timeoutS) {
    this.collect({ isAll: true });
    await Promise.all([...this.sessions].flatMap((session) => session.blocks.map((block) => block.packing)));
    this.collect();
    const wanted = [...this._waiting];
    return this._until(() => wanted.every((entry) => entry.isDone), timeoutS);
  }

  /** End every session and send the rest; whether all of it was acknowledged in time. @param {number} timeoutS */
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

  /** Send nothing more. */
  end() {
    this.isClosed = true;
    clearTimeout(this._timer);
    this.letGo();
  }

  /** Whoever comes next may take up what is kept. */
  letGo() {
    this._holds?.end();
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

  /** Try again at once: there is a new key, or the network is back. */
  retry() {
    this.stopped = this.linkError = "";
    this._backoff.succeeded();
    this.wake();
  }
}

const freshOwner = () => hexOf(crypto.getRandomValues(new Uint8Array(8)));

/** @param {number[]} numbers @returns {[number, number][]} first and last of those that follow one another */
function rangesOf(numbers) {
  /** @type {[number, number][]} */
  const ranges = [];
  for (const number of numbers.sort((one, other) => one - other)) {
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

/** Say it once. @param {string} topic @param {string} text */
function warn(topic, text) {
  if (warned.has(topic)) return;
  warned.add(topic);
  console.warn(`understudy: ${text}`);
}

// --- Bots ------------------------------------------------------------------------------------------------------------

const [POLL_S, MAX_CANARY, MAX_SHELVED_POLICY] = [25, 0.5, 1024 * 1024];
/** How often an answer to the sender ends what the follower waits out. */
const NUDGE_MS = 5000;
/** How often a page asks while another one of the same browser waits for news. */
const GLANCE_MS = 10_000;
const [AGAIN_FIRST_MS, AGAIN_CAP_MS] = [15_000, 600_000];
/** @typedef {"champion" | "canary"} Alias */
/**
 * @typedef {{number: number, champion: string | null, champion_release: string | null, canary: string | null,
 *   canary_release: string | null, canary_share: number, trust: string[]}} Casting who plays, as signed documents
 */

/**
 * The bots of a game: the last good ones from the shelf at once, newer ones as they come, each checked before it
 * plays.
 */
class Bots {
  /**
   * @param {{link: Link, spec: Spec, clock: Clock, random: () => number, shelf: Shelf, trust: readonly string[], watch:
   *   Watch}} parts
   */
  constructor({ link, spec, clock, random, shelf, trust, watch }) {
    this._link = link;
    this._watch = watch;
    this._spec = spec;
    this._schema = schemaOf(spec);
    this._clock = clock;
    this._random = random;
    this._shelf = shelf;
    this._trust = trust;
    this._backoff = new Backoff(clock, random);
    /** @type {{champion: Bot | null, canary: Bot | null, share: number}} */
    this._stage = { champion: null, canary: null, share: 0 };
    /**
     * @type {Record<Alias, number>} the highest entry of each alias whose signature was right; older ones are never
     *   obeyed
     */
    this._seen = { champion: 0, canary: 0 };
    this._after = this._goodNumber = 0;
    this._againAtMs = Infinity;
    this._againMs = AGAIN_FIRST_MS;
    this._isFollowing = false;
    /** Before then an answer that somebody else got is no reason to ask. */
    this._nudgeAtMs = 0;
    /** Ends the pause between two questions. */
    this._wake = () => {};
    this.isClosed = false;
    this.refused = 0;
    this.refusal = this.linkError = "";
    /** @type {Set<(name: string) => void>} */
    this.listeners = new Set();
  }

  get name() {
    return this._stage.champion?.name ?? "";
  }

  get champion() {
    return this._stage.champion;
  }

  /** Who plays the episode that asks: the canary with its share, else the champion; null while there is none. */
  cast() {
    const { champion, canary, share } = this._stage;
    return canary && this._random() < share ? canary : champion;
  }

  /** Bring back the last good bots; what does not pass every check again is fetched anew. */
  async load() {
    const kept = this._shelf.read("bot");
    try {
      if (!kept) return;
      this._seen = { champion: Number(kept.seen?.champion) || 0, canary: Number(kept.seen?.canary) || 0 };
      if (!kept.casting) return;
      const news = castingOf(kept.casting);
      const champion = await this._restored(news.champion_release);
      const canary = await this._restored(news.canary_release).catch(() => null);
      this._after = this._goodNumber = news.number;
      this._show({ champion, canary, share: Math.min(news.canary_share, MAX_CANARY) });
    } catch (error) {
      this._refuse(error);
      this._after = this._goodNumber = 0;
    }
  }

  /**
   * A kept bot, whose pointer was obeyed when it was kept.
   * @param {string | null} release
   * @returns {Promise<Bot | null>}
   */
  async _restored(release) {
    if (release === null) return null;
    const manifest = await this.manifest(release, this._trusted([]));
    const text = this._shelf.read(`policy/${manifest.policy_sha256}`);
    if (typeof text !== "string")
      throw new Refused("bad_hash", `the policy of model ${manifest.model_no} is gone; it is fetched again`);
    return opened(manifest, fromBase64(text));
  }

  /** Ask for news for ever. */
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
    this._watch.end(); // another page may wait in its place
  }

  /** Ask again at once: there is a new key, or the network is back. */
  retry() {
    this._backoff.succeeded();
    this._wake();
  }

  /** Somebody got an answer from the platform: a failure need not be waited out. */
  nudge() {
    const nowMs = this._clock.monotonic();
    if (!this.linkError || nowMs < this._nudgeAtMs) return;
    this._nudgeAtMs = nowMs + NUDGE_MS; // the platform may have an answer for steps and none for this
    this.retry();
  }

  /** Ask again, unless a failure is waited out: somebody looks at the page. */
  look() {
    if (this._backoff.leftMs <= 0) this._wake();
  }

  /** Ask no more. */
  end() {
    this.isClosed = true;
    this._watch.end();
    this._wake();
  }

  /** Ask once, and take the news when they are good; how many milliseconds may pass before the next question. */
  async step() {
    const mayWait = await this._watch.take();
    const nowMs = this._clock.monotonic();
    // After a failure one question that is answered at once: that the platform is back is news enough.
    let waitS = mayWait && !this.linkError ? POLL_S : 0;
    if (nowMs >= this._againAtMs) [this._after, this._againAtMs] = [this._goodNumber, Infinity];
    else waitS = Math.min(waitS, Math.ceil((this._againAtMs - nowMs) / 1000));
    try {
      const { status, raw } = await this._link.ask("GET", `/bot?after=${this._after}&wait_s=${waitS}`, { waitS });
      if (status !== 204) await this._take(castingOf(jsonOf(raw)));
      this.linkError = "";
      this._backoff.succeeded();
      // A gateway that does not wait is not asked without end.
      const pauseMs = mayWait ? 1000 : GLANCE_MS * (0.75 + this._random() / 2);
      return status === 204 ? Math.max(0, pauseMs - (this._clock.monotonic() - nowMs)) : 0;
    } catch (error) {
      if (this.isClosed) return 0;
      const failed = error instanceof LinkFailed ? error : new LinkFailed("failed", String(error));
      this.linkError = failed.message;
      if (failed.needsKey) {
        this._isFollowing = false; // until `useKey` begins it again
        return 0;
      }
      this._backoff.failed(failed.retryAfterS);
      this._nudgeAtMs = Math.max(this._nudgeAtMs, this._clock.monotonic() + 1000 * Math.min(failed.retryAfterS, 30));
      return Math.max(0, this._backoff.leftMs);
    }
  }

  /** @param {Casting} news */
  async _take(news) {
    const fetched = async (/** @type {any} */ manifest) =>
      (await this._link.ask("GET", `/models/${manifest.model_no}/policy`, { waitS: 50 })).raw;
    const known = [this._stage.champion, this._stage.canary];
    let champion, trust;
    try {
      trust = this._trusted(news.trust);
      champion = await this._opened(news, "champion", { trust, fetched, known });
    } catch (error) {
      if (error instanceof LinkFailed) throw error;
      // The last good ones stay; a newer entry is waited for, and this one looked at again later.
      this._refuse(error);
      [this._after, this._againAtMs] = [news.number, this._clock.monotonic() + this._againMs];
      this._againMs = Math.min(2 * this._againMs, AGAIN_CAP_MS);
      this._keepSeen();
      return;
    }
    [this.refusal, this._againAtMs, this._againMs] = ["", Infinity, AGAIN_FIRST_MS];
    // A canary may be long on its way, and the champion does not wait for it. What is kept has the number of before,
    // so that whoever starts from it asks for these news again.
    const plain = { ...news, canary: null, canary_release: null };
    this._show({ champion, canary: null, share: 0 });
    this._keep({ ...plain, number: this._goodNumber });
    const canary = await this._opened(news, "canary", { trust, fetched, known: [champion, ...known] }).catch((error) => {
      if (error instanceof LinkFailed) throw error;
      this._refuse(error); // the champion plays on; a canary that cannot be checked plays nowhere
      return null;
    });
    this._after = this._goodNumber = news.number;
    this._show({ champion, canary, share: Math.min(news.canary_share, MAX_CANARY) });
    this._keep(canary ? news : plain);
    const wanted = [champion, canary].map((bot) => `policy/${bot?.manifest.policy_sha256}`);
    for (const name of this._shelf.names("policy/")) if (!wanted.includes(name)) this._shelf.remove(name);
  }

  /**
   * @param {Casting} news
   * @param {Alias} alias
   * @param {{trust: readonly string[], fetched: (manifest: any) => Promise<Uint8Array>, known: (Bot | null)[]}} how
   * @returns {Promise<Bot | null>}
   */
  async _opened(news, alias, { trust, fetched, known }) {
    const signed = news[alias];
    if (signed === null) {
      if (alias === "champion" && this._seen.champion) {
        throw new Refused("old_bot", "the platform knows of no champion, yet there was one; is it the same one?");
      }
      return null;
    }
    const point = await this._entry(signed, "point", trust);
    if (point.alias !== alias || !Number.isSafeInteger(point.number) || !Number.isSafeInteger(point.model_no)) {
      throw new Refused("bad_entry", `the pointer of ${alias} is one of ${String(point.alias).slice(0, 20)}`);
    }
    if (point.number < this._seen[alias]) {
      throw new Refused("old_bot", `entry ${point.number} is older than ${this._seen[alias]}, which was seen before`);
    }
    this._seen[alias] = point.number;
    if (point.model_no === 0) return null;
    const release = news[`${alias}_release`];
    if (release === null) throw new Refused("bad_entry", `model ${point.model_no} came without its release`);
    const manifest = await this.manifest(release, trust);
    if (manifest.model_no !== point.model_no) {
      throw new Refused("bad_entry", `${alias} means model ${point.model_no}, the release is of ${manifest.model_no}`);
    }
    const here = known.find((bot) => bot && canonicalJson(bot.manifest) === canonicalJson(manifest));
    if (here) return here;
    const raw = await fetched(manifest);
    const bot = opened(manifest, raw);
    if (raw.length <= MAX_SHELVED_POLICY) this._shelf.write(`policy/${manifest.policy_sha256}`, toBase64(raw));
    return bot;
  }

  /**
   * The facts in a signed release, if they are of this game.
   * @param {string} release
   * @param {readonly string[]} trust
   */
  async manifest(release, trust) {
    const { manifest } = await this._entry(release, "release", trust);
    if (manifest?.game !== this._spec.game || manifest.schema !== this._schema) {
      throw new Refused(
        "wrong_schema",
        `a model of ${manifest?.game} learned another version of ${this._spec.game} than this one`,
      );
    }
    return manifest;
  }

  /** @param {string} text @param {string} kind @param {readonly string[]} trust */
  async _entry(text, kind, trust) {
    const entry = await checkSigned(text, trust);
    if (entry.kind !== kind || entry.journal !== `registry/${this._spec.game}`) {
      throw new Refused(
        "bad_entry",
        `a ${String(entry.kind).slice(0, 20)} of ${String(entry.journal).slice(0, 80)} came instead`,
      );
    }
    this._pin(trust);
    return entry;
  }

  /**
   * A model by its number, checked like every other, for whoever wants to play against an older one.
   * @param {number} modelNo
   */
  async model(modelNo) {
    const { raw } = await this._link.ask("GET", `/models/${modelNo}`);
    let trust = this._trusted([]);
    if (!trust.length) trust = this._trusted(castingOf(jsonOf((await this._link.ask("GET", "/bot")).raw)).trust);
    const manifest = await this.manifest(String(/** @type {any} */ (jsonOf(raw))?.signed), trust);
    if (manifest.model_no !== modelNo)
      throw new Refused("bad_entry", `model ${modelNo} was asked for, ${manifest.model_no} came`);
    return opened(manifest, (await this._link.ask("GET", `/models/${modelNo}/policy`, { waitS: 50 })).raw);
  }

  /**
   * The keys to believe: those that were given, else the deployment's own as they were when one of them first signed.
   * @param {string[]} met
   */
  _trusted(met) {
    if (this._trust.length) return this._trust;
    const pinned = this._shelf.read("trust");
    return Array.isArray(pinned) && pinned.length ? pinned : met;
  }

  /** Believe these keys from now on: one of them signed what it should have. @param {readonly string[]} trust */
  _pin(trust) {
    if (this._trust.length) return;
    this._trust = trust;
    this._shelf.write("trust", trust);
  }

  /** @param {{champion: Bot | null, canary: Bot | null, share: number}} stage */
  _show(stage) {
    const before = this.name;
    this._stage = stage;
    if (this.name === before) return;
    for (const listener of this.listeners) {
      try {
        listener(this.name);
      } catch (error) {
        console.error(error); // a page's own mistake must not end the following
      }
    }
  }

  /** @param {unknown} error */
  _refuse(error) {
    this.refused += 1;
    this.refusal = String(error instanceof Error ? error.message : error).slice(0, 300);
  }

  /** @param {Casting} casting */
  _keep(casting) {
    const kept = this._shelf.read("bot");
    const isOlder = (kept?.casting?.number ?? 0) > casting.number; // than what another page has put there
    this._shelf.write("bot", { casting: isOlder ? kept.casting : casting, seen: this._seenBy(kept) });
  }

  _keepSeen() {
    const kept = this._shelf.read("bot");
    this._shelf.write("bot", { casting: kept?.casting ?? null, seen: this._seenBy(kept) });
  }

  /** The highest numbers seen, here or by whoever wrote what is kept. @param {any} kept @returns {Record<Alias, number>} */
  _seenBy(kept) {
    const most = (/** @type {Alias} */ alias) => Math.max(this._seen[alias], Number(kept?.seen?.[alias]) || 0);
    return { champion: most("champion"), canary: most("canary") };
  }
}

/** @param {any} found @returns {Casting} */
function castingOf(found) {
  const texts = ["champion", "champion_release", "canary", "canary_release"];
  const isFine =
    Number.isSafeInteger(found?.number) &&
    found.number >= 0 &&
    texts.every((name) => (found[name] ?? null) === null || typeof found[name] === "string") &&
    Array.isArray(found.trust ?? []) &&
    (found.trust ?? []).every((/** @type {unknown} */ one) => typeof one === "string");
  if (!isFine)
    throw new LinkFailed("strange_answer", "the platform said who plays in words that this build does not read");
  const share = found.canary_share >= 0 && found.canary_share <= 1 ? found.canary_share : 0;
  const named = Object.fromEntries(texts.map((name) => [name, found[name] ?? null]));
  return /** @type {Casting} */ ({ number: found.number, ...named, canary_share: share, trust: found.trust ?? [] });
}

// --- Sessions and episodes -------------------------------------------------------------------------------------------

/**
 * An action that a game allows, by chance.
 * @param {Columns} columns
 * @param {() => number} random
 * @param {Uint8Array | null} mask
 * @returns {any}
 */
function randomAction(columns, random, mask) {
  const below = (/** @type {number} */ n) => Math.min(n - 1, Math.floor(random() * n));
  if (columns.discrete && mask) {
    const legal = Array.from(mask.keys()).filter((at) => mask[at]);
    return columns.discrete.start + legal[below(legal.length)];
  }
  /** @param {Part} part */
  const drawn = ({ space, dtype, size }) => {
    if (space.space === "discrete") return space.start + below(space.n);
    if (space.space === "multi_discrete") return space.counts.map(below);
    if (space.space === "multi_binary") return Array.from({ length: size }, () => below(2));
    const numbers = Array.from({ length: size }, (_, at) => {
      const [low, high] = [space.low, space.high].map(
        (bound, end) => (Array.isArray(bound) ? bound[at] : bound) ?? DTYPES[dtype].ends?.[end] ?? null,
      );
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
 * @typedef {{legal?: ArrayLike<boolean | number> | null, deterministic?: boolean, otherwise?: any}} Acting
 *   `otherwise`: an action, or a function of the observation, while there is no bot
 */

/** One episode of one player; a decision closes the transition before it. Made by `game.episode`. */
export class Episode {
  /**
   * @param {Game} game
   * @param {Session} session
   * @param {{note: Note, consent: Consent, by: Decider, bot: Bot | null}} how
   */
  constructor(game, session, { note, consent, by, bot }) {
    this._game = game;
    this._session = session;
    this._rows = /** @type {Rows} */ (session.rows);
    this._by = by;
    /** @type {Bot | null} */
    this._bot = bot;
    /** @type {Record<string, Numbers>[]} the last observations, where the bot looks at several */
    this._last = [];
    /** @type {string | null} */
    this._over = null;
    const block = this._rows.begin(note, consent);
    if (block) game._sender.hand(session, block);
  }

  /** Whether this episode is sent; otherwise its steps are only counted, because the platform asked for a share. */
  get isKept() {
    return this._session.isKept;
  }

  /** The bot that decides here, such as `rally/3`; empty while none does. */
  get bot() {
    return this._bot?.name ?? "";
  }

  /**
   * What the bot does, recorded as its decision; never waits. Where actions have names, it is the number.
   *
   * While there is no bot: `otherwise`, else any legal action.
   * @param {any} obs
   * @param {Acting} [how]
   * @returns {any}
   */
  act(obs, { legal = null, deterministic = false, otherwise } = {}) {
    this._bot ??= this._game.cast();
    const own = this._bot ? undefined : typeof otherwise === "function" ? otherwise(obs) : otherwise;
    const { _columns: columns, _random: random } = this._game;
    try {
      const chosen = this._chosen(obs, own, { legal, deterministic });
      if (this._isLate("act")) return chosen.action;
      if (this._bot) this._rows.nameModel(this._bot.name);
      this._decided(obs, chosen.action, { legal, by: chosen.by, frames: 1, extras: chosen.extras });
      return chosen.action;
    } catch (error) {
      if (!this._isLate("act")) this._spoil(error);
      try {
        return randomAction(columns, random, columns.mask(legal));
      } catch {
        return randomAction(columns, random, null);
      }
    }
  }

  /**
   * @param {any} obs
   * @param {any} own
   * @param {Acting} how
   * @returns {{action: any, by: number, extras: Extras | null}}
   */
  _chosen(obs, own, { legal = null, deterministic = false }) {
    const { _columns: columns, _random: random } = this._game;
    if (this._bot) {
      const { policy } = this._bot;
      const { action, logp, raw } = policy.choose(this._seen(policy, obs), { legal, deterministic, random });
      return { action, by: BY.bot, extras: { logp, version: policy.version, rawAction: raw } };
    }
    const mask = columns.mask(legal);
    if (mask && !mask.includes(1))
      throw new Refused("illegal_action", "legal allows no action; give a mask with one, or end the episode");
    const action = own === undefined || own === null ? randomAction(columns, random, mask) : columns.numbered(own);
    return { action, by: BY.script, extras: null };
  }

  /** @param {Policy} policy @param {any} obs */
  _seen(policy, obs) {
    if (policy.stack === 1) return policy.read([obs]);
    this._last.push(structuredClone(obs)); // the game may use its array again
    if (this._last.length > policy.stack) this._last.shift();
    return policy.read([...Array(policy.stack - this._last.length).fill(this._last[0]), ...this._last]);
  }

  /**
   * A person (or `by`) saw `obs` and chose `action`, a number or a name; ends the transition of the decision before.
   * @param {any} obs
   * @param {any} action
   * @param {{legal?: ArrayLike<boolean | number> | null, by?: Decider, frames?: number}} [how]
   */
  acted(obs, action, { legal = null, by = this._by, frames = 1 } = {}) {
    if (this._isLate("acted")) return;
    try {
      if (!Object.hasOwn(BY, by))
        throw new Refused("bad_by", `by is ${String(by).slice(0, 20)}; give one of ${Object.keys(BY)}`);
      this._decided(obs, action, { legal, by: BY[by], frames, extras: null });
    } catch (error) {
      this._spoil(error);
    }
  }

  /**
   * @param {any} obs
   * @param {any} action
   * @param {{legal: any, by: number, frames: number, extras: Extras | null}} how
   */
  _decided(obs, action, how) {
    const { _sender: sender, _clock: clock, _tolerance: tolerance } = this._game;
    this._rows.decide(obs, action, { ...how, tMs: this._session.tMs(clock.monotonic()) });
    tolerance.hasDecided = true;
    if (this._rows.closedSteps) sender.notice(this._session);
  }

  /** Add to the reward of the last decision. @param {number} x */
  reward(x) {
    if (this._isLate("reward")) return;
    try {
      this._rows.addReward(x);
    } catch (error) {
      this._spoil(error);
    }
  }

  /**
   * The episode is over: the game ended it, or (`truncated`) only the watching stopped.
   * @param {any} [obs] what was seen last; where the game ended it may be left out
   * @param {{truncated?: boolean, result?: string | number, legal?: ArrayLike<boolean | number> | null}} [how]
   */
  end(obs, { truncated = false, result, legal = null } = {}) {
    if (this._isLate("end")) return;
    try {
      this._rows.finish(obs, { truncated, result, legal, tMs: this._session.tMs(this._game._clock.monotonic()) });
      this._leave("it has ended");
    } catch (error) {
      this._spoil(error);
    }
  }

  /** Stop recording here, without an end: the last decision is dropped. Does nothing after `end`. */
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
  }

  /** @param {string} call */
  _isLate(call) {
    if (this._over === null && !this._session.hasEnded) return false;
    const { _tolerance: tolerance } = this._game;
    // A spoiled episode and a closed game stay quiet: the game goes on, only the recording does not.
    if (this._over && !this._session.hasEnded) {
      tolerance.judge(new Refused("bad_order", `${call} was called on an episode, but ${this._over}; start a new one`));
    } else tolerance.ignoredCalls += 1;
    return true;
  }
}

/** What happens to input that cannot be recorded: thrown on the first decision, later counted and warned of once. */
class Tolerance {
  /** @param {boolean} isStrict */
  constructor(isStrict) {
    this._isStrict = isStrict;
    this.hasDecided = false;
    this.badInputs = this.ignoredCalls = 0;
  }

  /** @param {unknown} error */
  judge(error) {
    this.badInputs += 1;
    const mayGoOn = this.hasDecided && !this._isStrict;
    this.hasDecided = true;
    if (!mayGoOn) throw error;
    warn(
      "bad_input",
      `an episode is no longer recorded: ${error}. Later ones are counted in game.stats().badInputs only; ` +
        "connect with strict: true to throw each",
    );
  }
}

// --- Connect ---------------------------------------------------------------------------------------------------------

/**
 * What a game did so far; numbers are steps.
 * @typedef {object} Stats
 * @property {number} recorded
 * @property {number} acked durable on the platform
 * @property {number} waiting recorded, and not answered yet
 * @property {number} refused never taken by the platform
 * @property {number} dropped given up because too many waited, here, or where an earlier page could not keep them
 * @property {number} skipped played and not recorded, because the platform asked for a share of episodes only
 * @property {number} adopted left by an earlier page or program, and sent by this one
 * @property {number} keepShare the probability with which the next episode is recorded
 * @property {number} failedSends
 * @property {string} stopped why nothing is sent until `useKey` is called; empty while it is
 * @property {string} lastError why the last send failed or was refused; empty while all is well
 * @property {string} bot
 * @property {number} refusedBots
 * @property {string} lastBotError why the newest bot is not played, or could not be fetched; the last good one stays
 * @property {string} lastFollowError why the last question for news of bots got no answer; empty while the platform
 *   answers, which a page that sends nothing can take for "connected"
 * @property {number} badInputs
 * @property {number} ignoredCalls
 * @property {number} openEpisodes
 */
/**
 * Whose episode it is, and what is known about it.
 * @typedef {object} EpisodeFacts
 * @property {string} [player]
 * @property {number} [seat]
 * @property {string} [match]
 * @property {readonly string[]} [opponents] what the others are: `person`, `script`, or a model's name
 * @property {number | bigint} [seed]
 * @property {string} [model] who decides, where that is a bot that the game runs itself
 * @property {Decider} [by] whose decisions `acted` records; `person` unless said
 * @property {Consent} [consent]
 * @property {Bot | null} [bot] who plays in `act`, as `game.cast` or `game.model` gives it; drawn by `cast` unless said
 */

/** A connected game; many episodes share it. Made by `connect`. */
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
    this._onHide = () => (globalThis.document?.visibilityState === "hidden" ? this._hurry() : this._bots.look());
    globalThis.document?.addEventListener?.("visibilitychange", this._onHide);
    this._onOnline = () => {
      if (!this._sender.stopped) this._sender.retry();
      this._bots.retry();
    };
    globalThis.window?.addEventListener?.("online", this._onOnline);
    // A page that may come back from a browser's cache goes on then; one that is gone for good lets others send.
    this._onGone = (/** @type {any} */ event) => void (event.persisted || this._leave());
    globalThis.window?.addEventListener?.("pagehide", this._onGone);
  }

  /** Who plays new episodes, such as `rally/3`; empty while there is no bot. */
  get bot() {
    return this._bots.name;
  }

  /**
   * Call a function with the name of every new champion; what is returned ends that.
   * @param {(name: string) => void} listener
   */
  onBot(listener) {
    this._bots.listeners.add(listener);
    return () => void this._bots.listeners.delete(listener);
  }

  /**
   * Whether there is a bot by then. Nothing needs this: without it, a bot plays as soon as it is there.
   * @param {number} [timeoutS]
   */
  async waitForBot(timeoutS = 5) {
    const endMs = this._clock.monotonic() + 1000 * timeoutS;
    while (!this.bot && !this._closing && this._clock.monotonic() < endMs)
      await new Promise((resolve) => setTimeout(resolve, 10));
    return this.bot !== "";
  }

  /**
   * Who plays an episode that begins now: the canary with its share, else the champion; null while there is none.
   *
   * An episode draws for itself at its first `act`. This is for a game that wants to know before, or that plays without
   * recording: `bot.name`, `bot.policy.act(obs)`; given to `game.episode({ bot })` it plays there.
   * @returns {Bot | null}
   */
  cast() {
    return this._bots.cast();
  }

  /**
   * A model by its number, checked like the champion; for an episode's `bot`. Throws when it cannot be had.
   * @param {number} modelNo
   * @returns {Promise<Bot>}
   */
  model(modelNo) {
    return this._bots.model(modelNo);
  }

  /**
   * What the champion thinks of the legal actions, best first; nothing while there is none.
   *
   * A champion that looks at several observations takes this one for all of them, as at the beginning of an episode.
   * @param {any} obs
   * @param {{legal?: ArrayLike<boolean | number> | null}} [how]
   * @returns {Advice[]}
   */
  rank(obs, how = {}) {
    const policy = this._bots.champion?.policy;
    return policy?.rank(policy.stack > 1 ? Array(policy.stack).fill(obs) : obs, how) ?? [];
  }

  /**
   * Start recording an episode.
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
  } = {}) {
    if (this._closing) throw new Refused("closed", `the game ${this.spec.game} was closed; connect again to record`);
    checkConsent(consent);
    checkPlayer(player);
    /** @type {Note} */
    const note = { row: 0, seat, match, opponents, seed, model: model ?? bot?.name };
    checkNote(note);
    const session = this._acquire(player, seat, this._sender.keepShare >= 1 || this._random() < this._sender.keepShare);
    const episode = new Episode(this, session, { note, consent, by, bot });
    session.holder = new WeakRef(episode);
    return episode;
  }

  /** @param {string} player @param {number} seat @param {boolean} isKept */
  _acquire(player, seat, isKept) {
    const isFresh = (/** @type {Session} */ one) =>
      !one.hasEnded && Math.abs(this._clock.now() - beganMs(one.id)) < DAY_MS;
    this._free = this._free.filter((one) => this._sender.sessions.has(one) && isFresh(one));
    const at = this._free.findIndex((one) => one.player === player && one.seat === seat && one.isKept === isKept);
    if (at >= 0) return this._free.splice(at, 1)[0];
    const [id, startedMs] = [newSession(this._clock.now()), this._clock.monotonic()];
    const session = new Session({ id, player, seat, isKept, rows: new Rows(this._columns), startedMs });
    this._sender.sessions.add(session);
    return session;
  }

  /** @param {Session} session */
  _release(session) {
    this._sender.release(session);
    this._free.push(session);
    this._sender.notice(session);
  }

  /**
   * What the next episodes may be used for. One that is open keeps the consent it began with: `cancel()` it where the
   * answer is no, and what it recorded so far was still given before.
   * @param {Consent} consent
   */
  setConsent(consent) {
    checkConsent(consent);
    this.consent = consent;
  }

  /** Go on with another key, after the old one was refused. @param {string} key */
  useKey(key) {
    this._link.key = key;
    this._sender.retry();
    this._bots.retry();
    void this._bots.follow();
  }

  /** @returns {Stats} */
  stats() {
    const [sender, bots] = [this._sender, this._bots];
    const { acked, refused, dropped, adopted, failedSends } = sender.counts;
    return {
      recorded: sender.recordedSteps,
      acked,
      waiting: sender.waitingSteps,
      refused,
      dropped,
      adopted,
      failedSends,
      skipped: sender.untoldSteps + sender._toldSteps,
      keepShare: sender.keepShare,
      stopped: sender.stopped,
      lastError: sender.linkError || sender.refusal,
      bot: this.bot,
      refusedBots: bots.refused,
      lastBotError: bots.refusal || bots.linkError,
      lastFollowError: bots.linkError,
      badInputs: this._tolerance.badInputs,
      ignoredCalls: this._tolerance.ignoredCalls,
      openEpisodes: [...sender.sessions].filter((session) => session.holder !== null).length,
    };
  }

  /**
   * Wait until everything recorded so far is acknowledged (or refused or dropped); false when time ran out.
   * @param {number} [timeoutS]
   * @returns {Promise<boolean>}
   */
  flush(timeoutS = 10) {
    return this._closing ?? this._sender.flush(timeoutS);
  }

  /**
   * Cut open episodes, send what can be sent in time and let go; true when all was acknowledged. What was not is warned
   * of; it is sent by the next start as far as the storage kept it, and reported as dropped beyond that.
   * @param {number} [timeoutS]
   * @returns {Promise<boolean>}
   */
  close(timeoutS = 5) {
    this._closing ??= (async () => {
      this._bots.end();
      globalThis.document?.removeEventListener?.("visibilitychange", this._onHide);
      globalThis.window?.removeEventListener?.("online", this._onOnline);
      globalThis.window?.removeEventListener?.("pagehide", this._onGone);
      const isAll = await this._sender.finish(timeoutS);
      const { waitingSteps, isStored, linkError } = this._sender;
      if (!isAll && waitingSteps) {
        const fate = isStored ? "the next start sends what the storage kept" : "there is no storage that keeps them";
        const why = linkError || `no answer within ${timeoutS} s`;
        warn("closed", `${waitingSteps} steps were not acknowledged before close() gave up (${why}); ${fate}`);
      }
      this._link.close();
      return isAll;
    })();
    return this._closing;
  }

  /** The page goes for good: whoever comes next takes up what it keeps. */
  _leave() {
    this._hurry();
    this._sender.letGo();
  }

  /** The page may be gone soon: put everything that is closed where the next one finds it, and try to send it. */
  _hurry() {
    this._sender.collect({ inHurry: true });
    this._sender.wake();
  }
}

/** @param {unknown} consent */
function checkConsent(consent) {
  if (!["granted", "denied", "unknown"].includes(String(consent))) {
    throw new Refused("bad_consent", `consent is ${consent}; give granted, denied or unknown`);
  }
}

/** @param {string} player */
function checkPlayer(player) {
  if (typeof player !== "string" || !/^(?: |[^\p{C}\p{Z}])+$/u.test(player) || bytesOf(player).length > 256) {
    throw new Refused(
      "bad_player",
      `player ${String(player).slice(0, 40)} is not allowed; give 1 to 256 bytes of printable text`,
    );
  }
}

/** @param {string} url @param {boolean} isInsecure */
function checkAddress(url, isInsecure) {
  const parts = URL.canParse(url) ? new URL(url) : null;
  if (!parts || !["http:", "https:"].includes(parts.protocol) || parts.search || parts.hash || parts.username) {
    throw new Refused("bad_url", `url ${url} is no gateway's address; give https://HOST, or http://127.0.0.1:PORT`);
  }
  const isNear =
    /^(localhost|127(\.\d+){3}|\[::1\])$/.test(parts.hostname) || parts.origin === globalThis.location?.origin;
  if (parts.protocol === "http:" && !isNear && !isInsecure) {
    throw new Refused(
      "bad_url",
      `${url} would send your key in the open; use https://, or insecure: true on a network you trust`,
    );
  }
}

/** The browser's own storage, where there is one and the page may use it. @returns {TextStorage | null} */
function ownStorage() {
  try {
    return globalThis.window?.localStorage ?? null;
  } catch {
    return null;
  }
}

/**
 * How a game is connected; give `spec`, or `obs` and `actions`.
 * @typedef {object} Connecting
 * @property {string} url the gateway's address
 * @property {string} key
 * @property {Spec} [spec] as the platform has it
 * @property {Shape} [obs] a length, a shape, names or spaces
 * @property {Shape} [actions] a count, names or spaces
 * @property {boolean} [hasLegal] whether every step says which actions are legal
 * @property {number | null} [maxEpisodeSteps]
 * @property {string} [player] who plays unless an episode says; a random id that is kept in the storage
 * @property {Consent} [consent] whether what is played may be learned from; `unknown` unless said
 * @property {number} [lingerS] how long a closed step waits for others at most
 * @property {readonly string[]} [trust] public keys that may sign bots; the deployment's own, from the first meeting on
 * @property {boolean} [strict] throw on every bad input, not only on the first decision
 * @property {boolean} [insecure] allow http:// to other machines, where anybody on the way can read the key
 * @property {number} [capBytes] how much may wait unsent; beyond it the oldest is dropped, and said so
 * @property {string} [client] name and version of the game, for whoever looks at its steps later
 * @property {typeof globalThis.fetch} [fetch]
 * @property {TextStorage | null} [storage] where unsent frames and the last bot are kept; a browser's localStorage
 *   unless said. Without `length` and `key` nothing of an earlier program is found in it
 * @property {() => number} [now] milliseconds since 1970
 * @property {() => number} [random] from 0 to 1
 */

/**
 * A game that records to the platform at `url`. It is registered there, and its bot is followed from now on.
 *
 * Throws when the platform says that it will not take this game; when it cannot be reached, the game plays and records
 * all the same, and is registered later.
 * @param {string} name
 * @param {Connecting} how
 */
export async function connect(name, how) {
  const {
    url,
    key,
    obs,
    actions,
    hasLegal = false,
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
  } = how;
  checkAddress(url, insecure);
  checkConsent(consent);
  if (!/^[\x21-\x7e]+$/.test(key ?? ""))
    throw new Refused("no_key", "connect needs a key; copy it as `understudy up` printed it");
  trust.forEach(publicKey);
  const spec = how.spec
    ? checkedSpec(how.spec)
    : specOf(name, {
        obs: /** @type {Shape} */ (obs),
        actions: /** @type {Shape} */ (actions),
        hasLegal,
        maxEpisodeSteps,
      });
  if (spec.game !== name)
    throw new Refused("bad_spec", `connect was given the name ${name} and a spec of ${spec.game}; give one of them`);
  const [link, columns] = [new Link({ url, key, game: spec.game, fetch }), new Columns(spec)];
  /** @type {Clock} */
  const clock = { now: now ?? Date.now, monotonic: now ?? (() => performance.now()) };
  const kept = storage ?? memoryStorage();
  const player = how.player ?? ownPlayer(new Shelf(kept, "understudy/"));
  checkPlayer(player);
  /** @param {string[]} facts */
  const placeOf = (...facts) => `understudy/${sha256(bytesOf(facts.join("\0"))).slice(0, 16)}/`;
  // Not of the key: what waits belongs to the game's sessions, and another key may send it.
  const place = placeOf(link.address, spec.game);
  // Of the key: a deployment that was set up anew at this address has new ones, and is met anew.
  const [shelf, botShelf] = [new Shelf(kept, place), new Shelf(kept, placeOf(link.address, spec.game, key))];
  for (const one of [shelf, botShelf]) one.write("used", clock.now());
  sweep(kept, clock.now());
  // Pages that share the browser's storage share its locks; who shares another one is not known.
  const pageLocks = globalThis.navigator?.locks ?? null;
  const locks = storage && storage === ownStorage() ? pageLocks : null;
  const isPage = "document" in globalThis || "WorkerGlobalScope" in globalThis;
  const watch = new Watch({ locks: pageLocks, name: `understudy/watch/${link.address}`, isPage });
  const sender = new Sender({
    link,
    columns,
    client: client.slice(0, 128),
    clock,
    random,
    lingerMs: lingerS * 1000,
    capBytes,
    shelf: storage && shelf,
    holds: storage && new Holds({ shelf, clock, locks, place }),
  });
  const bots = new Bots({ link, spec, clock, random, shelf: botShelf, trust, watch });
  sender.onAnswer = () => bots.nudge();
  try {
    await sender.register();
  } catch (error) {
    if (!(error instanceof LinkFailed) || !error.mayPass) {
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

/** @param {Shelf} shelf */
function ownPlayer(shelf) {
  const known = shelf.read("player");
  if (typeof known === "string" && known) return known;
  const fresh = `p-${hexOf(crypto.getRandomValues(new Uint8Array(8)))}`;
  shelf.write("player", fresh);
  return fresh;
}
