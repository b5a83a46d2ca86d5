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
 * One file, no build, no dependency; Node 20 or newer, and every browser with WebCrypto. Nothing here makes a game wait:
 * the calls of an episode are synchronous, and whatever the network does is dealt with behind them. The bytes are those
 * of docs/protocol.md and docs/formats.md; the promises are those of the Python client. Sections, each with one job:
 *
 *     text and bytes · specs · tensors, chunks, frames, parcels · rows of an episode · policies · signed documents ·
 *     the link · the sender · bots · sessions and episodes · connect
 */

export const VERSION = "0.1.0";

// --- Text and bytes ---------------------------------------------------------------------------------------------------

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

/** The first 32 bits behind the point of the roots of the first 64 primes: square roots begin a SHA-256, cube roots mix it. */
const [SHA_BEGIN, SHA_MIX] = (() => {
  const primes = [2];
  for (let one = 3; primes.length < 64; one += 2) if (primes.every((prime) => one % prime)) primes.push(one);
  /** @param {number} power */
  const roots = (power) => Uint32Array.from(primes, (prime) => (prime ** power % 1) * 2 ** 32);
  return [roots(1 / 2).slice(0, 8), roots(1 / 3)];
})();

/**
 * SHA-256 in hex. Our own, since WebCrypto's is there on https pages only, and recording must work on any.
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
  const [a, b] = [Array.from(one, (letter) => letter.codePointAt(0) ?? 0), Array.from(other, (letter) => letter.codePointAt(0) ?? 0)];
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
    if (!Number.isFinite(value)) throw new Refused("not_finite", `${value} cannot be written as JSON; give a finite number`);
    return Number.isSafeInteger(value) ? String(value + 0) : floatText(value);
  }
  if (Array.isArray(value)) return `[${value.map(canonicalJson).join(",")}]`;
  if (typeof value !== "object") throw new Refused("bad_json", `a ${typeof value} cannot be written as JSON`);
  const fields = Object.entries(value).filter(([, field]) => field !== undefined);
  fields.sort(([one], [other]) => byCodePoint(one, other));
  return `{${fields.map(([name, field]) => `${JSON.stringify(name)}:${canonicalJson(field)}`).join(",")}}`;
}

// --- Specs ------------------------------------------------------------------------------------------------------------

/**
 * One part of an observation or action, as a spec describes it.
 * @typedef {{space: "box", dtype: string, shape: number[], low: number | number[] | null, high: number | number[] | null}} Box
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
/** @typedef {number | readonly number[] | readonly string[] | Space | Record<string, Space>} Shape a length, a shape, names or spaces */

/** @typedef {Uint8Array | Int8Array | Uint16Array | Int16Array | Uint32Array | Int32Array | Float32Array | Float64Array | BigUint64Array | BigInt64Array} TypedArray */

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
  const [seen, obsNames] = spacesOf("obs", obs, (shape) => ({ space: "box", dtype: "F32", shape, low: null, high: null }));
  const [done, actionNames] = spacesOf("actions", actions, ([n]) => ({ space: "discrete", dtype: "I32", n, start: 0 }));
  return checkedSpec({
    format: 1, game, obs: seen, action: done, obs_names: obsNames, action_names: actionNames, has_legal: hasLegal,
    max_episode_steps: maxEpisodeSteps,
  }); // prettier-ignore
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
    if (given.length && given.every((name) => typeof name === "string")) return [{ "": make([given.length]) }, [...given]];
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
    throw new Refused("bad_name", `game ${JSON.stringify(given.game)}; give 1 to 63 of A-Z a-z 0-9 . _ -, such as "my-game"`);
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
  for (const [names, size] of /** @type {[readonly string[], number][]} */ ([[spec.action_names, discrete?.n ?? -1], [spec.obs_names, flat]])) {
    if (names.length && (names.length !== size || new Set(names).size !== size)) {
      throw new Refused("bad_spec", `names ${names.slice(0, 8)} do not fit ${size} elements; give each its own name`);
    }
  }
  if (spec.has_legal && !discrete) throw new Refused("bad_spec", "legal masks need a single discrete action");
  return spec;
}

/** @param {string} path @param {Space} given @returns {Space} */
function checkedSpace(path, given) {
  const type = DTYPES[given.dtype];
  if (!type) throw new Refused("bad_spec", `${path || "a part"} is of dtype ${given.dtype}; give one of ${Object.keys(DTYPES)}`);
  if (given.space !== "box") return given;
  /** @param {number | number[] | null} bound @param {number} end */
  const bound = (bound, end) => {
    if (bound === null) return null;
    const values = (Array.isArray(bound) ? bound : [bound]).map((one) => (given.dtype === "F32" ? Math.fround(one) : one) + 0);
    if (new Set(values).size > 1) return values;
    return type.ends && values[0] === type.ends[end] ? null : values[0];
  };
  return { ...given, low: bound(given.low, 0), high: bound(given.high, 1) };
}

/**
 * The spec exactly as it is registered.
 * @param {Spec} spec
 */
export function specJson(spec) {
  /** @param {Record<string, Space>} spaces */
  const written = (spaces) =>
    Object.fromEntries(
      Object.entries(spaces).map(([path, space]) => {
        if (space.space !== "box" || !isFloat(space.dtype)) return [path, space];
        /** @param {number | number[] | null} bound */
        const bound = (bound) => (Array.isArray(bound) ? bound.map((one) => new Float(one)) : bound === null ? null : new Float(bound));
        return [path, { ...space, low: bound(space.low), high: bound(space.high) }];
      }),
    );
  return canonicalJson({ ...spec, obs: written(spec.obs), action: written(spec.action) });
}

/**
 * The SHA-256 of a spec, by which its chunks and bots name it.
 * @param {Spec} spec
 */
export const schemaOf = (spec) => sha256(bytesOf(specJson(spec)));

/** @typedef {{name: string, path: string, space: Space, dtype: string, shape: readonly number[], size: number}} Part a column of a spec */

/** @param {"obs" | "action" | "raw_action"} what @param {Record<string, Space>} spaces @returns {Part[]} */
function partsOf(what, spaces) {
  return Object.keys(spaces).sort(byCodePoint).map((path) => {
    const [space, name] = [spaces[path], path ? `${what}.${path}` : what];
    return { name, path, space, dtype: space.dtype, shape: shapeOf(space), size: product(shapeOf(space)) };
  }); // prettier-ignore
}

// --- Tensors, chunks, frames, parcels ---------------------------------------------------------------------------------

/** @typedef {{dtype: string, shape: readonly number[], data: TypedArray}} Column */

/**
 * A safetensors file: columns and metadata sorted by name, the data aligned to 64.
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
  const raw = names.map((name) => columns[name].data).map((data) => new Uint8Array(data.buffer, data.byteOffset, data.byteLength));
  return joined([padded, ...raw]);
}

/**
 * The columns and metadata of a safetensors file; Refused unless the bytes are exactly one.
 * @param {Uint8Array} raw
 * @returns {{columns: Record<string, Column>, metadata: Record<string, string>}}
 */
export function decodeTensors(raw) {
  const bad = (/** @type {string} */ why) => new Refused("bad_tensors", why);
  const length = raw.length < 8 ? -1 : Number(new DataView(raw.buffer, raw.byteOffset).getBigUint64(0, true));
  if (length < 2 || length > 256 * 1024 || 8 + length > raw.length) throw bad(`${raw.length} bytes with a header of ${length}`);
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
  const inOrder = Object.keys(entries).sort((one, other) => entries[one].data_offsets?.[0] - entries[other].data_offsets?.[0]);
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
 * @property {readonly string[]} [opponents] what the others were (`person`, `script`, a model's name), never a player's name
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
  return encodeTensors(columns, {
    format: "understudy-chunk/1", game: meta.game, schema: meta.schema, session: meta.session,
    chunk_no: String(meta.chunkNo), first_step: String(meta.firstStep), n_steps: String(meta.nSteps),
    kind: meta.kind ?? "player", consent: meta.consent, client: meta.client, episodes: canonicalJson(meta.episodes.map(noteJson)),
  }); // prettier-ignore
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
  if (body.length > MAX_BODY_BYTES) throw new Refused("too_large", `a body of ${body.length} bytes; at most ${MAX_BODY_BYTES} fit`);
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

// --- Rows of an episode -----------------------------------------------------------------------------------------------

const MAX_STEPS = 512;
const CUT_BYTES = 440 * 1024;
const MAX_NOTE_BYTES = 32 * 1024;
const [STEP, FINAL, BOOTSTRAP] = [0, 1, 2];
const [EMPTY, STAGED, OPEN] = [0, 1, 2];
/** @type {Readonly<Record<string, number>>} */
const BY = Object.freeze({ unknown: 0, person: 1, bot: 2, script: 3 });
/** @typedef {"unknown" | "person" | "bot" | "script"} Decider */

/** @typedef {{logp: number, version: number, rawAction: ArrayLike<number> | null}} Extras what a policy knows about its choice */
/** @typedef {{columns: Record<string, Column>, nSteps: number, consent: Consent, episodes: Note[]}} Block closed rows, ready to be a chunk */

/**
 * What a value of a part looks like as flat numbers; Refused when it does not fit.
 * @param {Part} part
 * @param {any} value a number, an array, a typed array, or arrays of arrays
 * @param {{bounds: boolean, as?: TypedArray, at?: number}} how `bounds`: floats must lie in them as well
 */
function written(part, value, { bounds, as = DTYPES[part.dtype].make(part.size), at = 0 }) {
  const flat = ArrayBuffer.isView(value) ? /** @type {any} */ (value) : Array.isArray(value) ? value.flat(Infinity) : [value];
  if (flat.length !== part.size) {
    throw new Refused("bad_shape", `${part.name} has ${flat.length} numbers; this game was connected with shape [${part.shape}]`);
  }
  const [isReal, isBig] = [isFloat(part.dtype), as instanceof BigInt64Array || as instanceof BigUint64Array];
  for (let index = 0; index < part.size; index++) {
    const given = flat[index];
    const number = typeof given === "boolean" || typeof given === "bigint" ? Number(given) : given;
    if (typeof number !== "number") throw new Refused("bad_dtype", `${part.name} holds ${String(given).slice(0, 40)}; give numbers`);
    if (isReal ? !Number.isFinite(part.dtype === "F32" ? Math.fround(number) : number) : Number.isNaN(number)) {
      throw new Refused("not_finite", `${part.name} holds ${number}; give finite numbers`);
    }
    if (!isReal && !Number.isInteger(number)) throw new Refused("bad_dtype", `${part.name} holds ${number}; give whole numbers`);
    if ((bounds || !isReal) && !holds(part, index, number)) {
      throw new Refused("not_in_space", `${part.name} holds ${number}, which lies outside ${JSON.stringify(part.space)}`);
    }
    as[at * part.size + index] = /** @type {never} */ (isBig ? BigInt(given) : number);
  }
  return as;
}

/** @param {Part} part @param {number} index @param {number} number */
function holds(part, index, number) {
  const { space } = part;
  if (space.space === "discrete") return number >= space.start && number < space.start + space.n;
  if (space.space === "multi_discrete") return number >= 0 && number < space.counts[index];
  if (space.space === "multi_binary") return number === 0 || number === 1;
  const [low, high] = [space.low, space.high].map((bound) => (Array.isArray(bound) ? bound[index] : bound));
  const ends = DTYPES[part.dtype].ends ?? [-Infinity, Infinity];
  const rounded = part.dtype === "F32" ? Math.fround(number) : number;
  return rounded >= (low ?? ends[0]) && rounded <= (high ?? ends[1]);
}

/** @param {Part} part @param {any} value @returns {any} what stands at a part's path, however it was nested */
function partOf(part, value) {
  if (!part.path || value?.[part.path] !== undefined) return part.path ? value[part.path] : value;
  const found = part.path.split(".").reduce((inner, key) => inner?.[key], value);
  if (found === undefined) throw new Refused("bad_shape", `${part.name} is missing; give all parts that the game was connected with`);
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
      return { ...part, dtype, space: /** @type {Space} */ ({ space: "box", dtype, shape: part.shape, low: null, high: null }) };
    });
    const only = spec.action[""];
    /** The action space when it is a single discrete one. */
    this.discrete = only?.space === "discrete" ? only : null;
    /** @type {[string, string, readonly number[]][]} name, dtype and shape of everything a row may hold */
    this.layout = [...this.obs, ...this.action, ...this.raw].map((part) => [part.name, part.dtype, part.shape]);
    this.layout.push(
      ["reward", "F32", []], ["terminated", "BOOL", []], ["truncated", "BOOL", []], ["is_first", "BOOL", []], ["row", "U8", []],
      ["by", "U8", []], ["frames", "U16", []], ["t_ms", "U32", []], ["logp", "F32", []], ["version", "U32", []],
    ); // prettier-ignore
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
    const known = this.spec.action_names.length ? `one of ${this.spec.action_names.slice(0, 12)}` : "a number: this game has no action names";
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
    const mask = Uint8Array.from(legal, (flag) => Number(flag));
    if (mask.length !== n || mask.some((flag) => flag > 1)) {
      throw new Refused("bad_shape", `legal has ${mask.length} flags; give one for each of the ${n} actions`);
    }
    return mask;
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
      columns.layout.map(([name, dtype, shape]) => [name, { dtype, shape, data: DTYPES[dtype].make(columns.nRows * product(shape)) }]),
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

  /** @param {Note} note @param {Consent} consent @returns {Block | null} the block before it, when that has another consent */
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
    for (const part of parts) written(part, partOf(part, numbered), { bounds: true, as: this._data[part.name].data, at });
    if (discrete && this._data.legal && !this._data.legal.data[at * discrete.n + numbered - discrete.start]) {
      throw new Refused("illegal_action", `action ${action} is not legal in its own mask`);
    }
    if (!(frames >= 0)) throw new Refused("bad_frames", `frames is ${frames}; give how many frames the decision lasts, from 0`);
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
    if (!Number.isFinite(Math.fround(total))) throw new Refused("not_finite", `reward ${reward} is no finite number in float32`);
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
      for (const { name, size } of this._columns.obs) this._data[name].data.copyWithin(at * size, (at - 1) * size, at * size);
      this._mark(at, legal);
    }
    this._put(this._at, truncated ? { truncated: 1 } : { terminated: 1 });
    this._close(tMs);
    this._put(at, { row: FINAL });
    this._leave(at + 1, { ...this._note, result });
  }

  /** Stop the episode where it is known: an open step is dropped, a staged observation kept. @param {string | number} [result] */
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
    const block = { columns: this._copied(0, nRows), nSteps: this.closedSteps, consent: this._consent, episodes: notes };
    for (const name of ["logp", "version", ...this._columns.raw.map((part) => part.name)]) {
      if (!this._used.has(name)) delete block.columns[name];
    }
    for (const { data } of Object.values(this._data)) data.fill(/** @type {never} */ (data instanceof BigInt64Array || data instanceof BigUint64Array ? 0n : 0));
    for (const [name, column] of Object.entries(inWork ?? {})) this._data[name].data.set(/** @type {any} */ (column.data));
    [this._notes, this._used, this._noteBytes, this._at, this._episodeRow, this.closedSteps] = [carried, new Set(), 0, 0, 0, 0];
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
    for (const part of this._columns.obs) written(part, partOf(part, obs), { bounds: false, as: this._data[part.name].data, at });
    this._mark(at, legal);
  }

  /** @param {number} at @param {any} legal */
  _mark(at, legal) {
    const [column, mask] = [this._data.legal, this._columns.mask(legal)];
    if (mask && !column) throw new Refused("bad_columns", "a legal mask was given; connect with hasLegal: true to record it");
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
  const { seat, match = "", model = "", opponents = [], result = "", seed = 0, ...rest } = note;
  const isCount = (/** @type {unknown} */ one, /** @type {number} */ below) =>
    typeof one === "bigint" ? one >= 0n && one < 2n ** 64n : Number.isSafeInteger(one) && Number(one) >= 0 && Number(one) < below;
  const isText = (/** @type {unknown} */ one, /** @type {number} */ most) => typeof one === "string" && one.length <= most;
  const isFine =
    isCount(seat, 2 ** 32) && isCount(seed, 2 ** 64) && isText(match, 128) && isText(model, 128) && Array.isArray(opponents) &&
    opponents.length <= 64 && opponents.every((one) => isText(one, 128)) &&
    (isText(result, 64) || (typeof result === "number" && Math.abs(result) < 1e300)); // prettier-ignore
  if (!isFine) throw new Refused("bad_metadata", `an episode has a field of the wrong type or size: ${canonicalJson({ ...noteJson(note), ...rest }).slice(0, 120)}`);
}

// --- Policies ---------------------------------------------------------------------------------------------------------

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
 * @type {Record<string, (layer: Layer, shape: readonly number[], weight: (name: string, shape: number[]) => Float32Array) => [Run, number[]]>}
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
    const [mean, by] = [weight("mean", [...shape]), weight("var", [...shape]).map((one) => 1 / Math.sqrt(fround(one + 1e-8)))];
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
      x.forEach((one, at) => Number.isInteger(one) && one >= start && one < start + n && (out[at * n + one - start] = 1));
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
            if (by !== 0) for (let channel = 0; channel < channels; channel++) sums[channel] += by * kernel[tap + channel];
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
/** @typedef {{action: any, logp: number, raw: Float32Array | null}} Choice an action as the game takes it, and what the policy knows of it */
/** @typedef {{action: number, name: string, value: number | null, probability: number | null}} Advice */
/** @typedef {{legal?: ArrayLike<boolean | number> | null, deterministic?: boolean, random?: () => number}} Choosing */

/** Observations to actions: a game, a network, its weights and a head. Made by `openPolicy`; it never changes. */
export class Policy {
  /** @param {Record<string, string>} facts @param {Weights} weights */
  constructor(facts, weights) {
    /** @type {Spec} */
    this.game = JSON.parse(facts.game);
    /** @type {{inputs: Record<string, {shape: number[], dtype: string, layers: Layer[]}>, trunk: Layer[], heads: Record<string, Layer[]>}} */
    const network = JSON.parse(facts.network);
    /** @type {Head} */
    this.head = JSON.parse(facts.head);
    this.stack = Number(facts.stack);
    this.version = Number(facts.version);
    this.schema = sha256(bytesOf(facts.game));
    this._columns = new Columns(this.game);
    this._outputs = OUTPUTS[this.head.kind];
    if (!this._outputs) throw new Refused("bad_policy", `head ${this.head.kind} is not known; known are ${Object.keys(OUTPUTS)}`);
    const unused = new Set(Object.keys(weights));
    /** @param {string} place @param {Layer[]} layers @param {readonly number[]} shape @returns {[Run[], readonly number[]]} */
    const compiled = (place, layers, shape) => {
      const steps = layers.map((layer, index) => {
        const make = Object.hasOwn(LAYERS, layer.layer) ? LAYERS[layer.layer] : undefined;
        if (!make) throw new Refused("bad_policy", `${place} holds a layer ${layer.layer}; known are ${Object.keys(LAYERS)}`);
        const [run, after] = make(layer, shape, (name, wanted) => {
          const column = weights[`${place}.${index}.${name}`];
          if (!column || column.dtype !== "F32" || column.shape.join() !== wanted.join() || !(/** @type {Float32Array} */ (column.data).every(Number.isFinite))) {
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
    this.inputs = Object.keys(network.inputs).sort(byCodePoint).map((name) => {
      const { shape, dtype, layers } = network.inputs[name];
      const part = this._columns.obs.find((one) => one.name === name);
      if (!part || part.dtype !== dtype || [...before, ...part.shape].join() !== shape.join()) {
        throw new Refused("bad_policy", `input ${name} is ${dtype}[${shape}], which the game does not have`);
      }
      const [steps, after] = compiled(`inputs.${name}`, layers, shape);
      features += product(after);
      return { name, dtype, size: product(shape), isExact: layers[0]?.layer === "one_hot", steps };
    }); // prettier-ignore
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
    if (missing.length || unused.size) throw new Refused("bad_policy", `outputs ${missing} are missing, weights ${[...unused]} unknown`);
    this._features = new Float32Array(features);
  }

  /**
   * What every head of the network gives for an observation; with a stack, for the list of the last ones.
   * @param {any} obs
   * @returns {Record<string, Float32Array>}
   */
  heads(obs) {
    return this.forward(this.read(this.stack > 1 ? obs : [obs]), Object.keys(this._heads));
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
   * The legal actions of a discrete game, best first, each with its value or its probability, whichever the policy knows.
   * @param {any} obs
   * @param {{legal?: ArrayLike<boolean | number> | null}} [how]
   * @returns {Advice[]}
   */
  rank(obs, { legal = null } = {}) {
    const { discrete } = this._columns;
    if (!discrete) throw new Refused("not_discrete", `${this.game.game} has no discrete actions to rank; use act instead`);
    const mask = this._mask(legal);
    const rows = this.stack > 1 ? (Array.isArray(obs) && obs.length === this.stack ? obs : Array(this.stack).fill(obs)) : [obs];
    const scores = masked(this.forward(this.read(rows), this._outputs)[this._outputs[0]], mask);
    const most = Math.max(...scores);
    const total = scores.reduce((sum, score) => sum + Math.exp(score - most), 0);
    const isValue = this._outputs[0] === "q";
    const ranked = Array.from(scores.keys()).filter((at) => !mask || mask[at]).sort((one, other) => scores[other] - scores[one] || one - other);
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
    if (rows.length !== this.stack) throw new Refused("bad_shape", `${rows.length} observations were given; this policy looks at ${this.stack}`);
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
    if (deterministic || this.head.kind !== "categorical") return { action: discrete.start + largest(scores), logp: 0, raw: null };
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
    if (mask && !mask.includes(1)) throw new Refused("illegal_action", "legal allows no action; give a mask with one, or end the episode");
    return mask;
  }
}

/** @type {Record<string, string[]>} what each kind of head reads */
const OUTPUTS = {
  argmax: ["q"], epsilon_greedy: ["q"], categorical: ["logits"], gaussian_clipped: ["mean", "log_std"], gaussian_tanh: ["mean", "log_std"],
}; // prettier-ignore

/** Outputs in which illegal actions lie below every legal one. @param {Float32Array} scores @param {Uint8Array | null} mask */
const masked = (scores, mask) => (mask ? scores.map((score, at) => (mask[at] ? Math.max(score, LOWEST) : ILLEGAL)) : scores);

/** @param {Float32Array} scores */
const largest = (scores) => scores.reduce((best, score, at) => (score > scores[best] ? at : best), 0);

/**
 * The policy that these bytes are; Refused unless they are exactly one. Whoever wants to know whose it is checks that first.
 * @param {Uint8Array} raw
 */
export function openPolicy(raw) {
  const { columns, metadata } = decodeTensors(raw);
  if (metadata.format !== "understudy-policy/1") throw new Refused("bad_version", `format ${metadata.format}; this build reads understudy-policy/1`);
  try {
    return new Policy(metadata, columns);
  } catch (error) {
    throw error instanceof Refused ? error : new Refused("bad_policy", `it cannot be read: ${error}`);
  }
}
