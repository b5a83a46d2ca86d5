/**
 * The platform behind the page: the invitation it was opened with, the connection, models by number, how things stand.
 *
 * The key comes in the address's fragment, which browsers never send; it is kept for this tab alone.
 */

import { connect, sha256 } from "./understudy.js";

/** What this browser keeps, and what this tab does; for as long as the page is open where it may keep nothing. */
export const kept = storage(() => localStorage);
const tab = storage(() => sessionStorage);
const RETRY_FIRST_S = 1;
const RETRY_CAP_S = 15;
const ANSWER_MS = 10_000;

const NOTHING_YET = {
  recorded: 0, acked: 0, waiting: 0, refused: 0, dropped: 0, keepShare: 1, lastError: "", stopped: "", refusedBots: 0,
  lastBotError: "", lastFollowError: "", badInputs: 0,
}; // prettier-ignore

/** @typedef {{game: string, key: string, bot: string}} Invitation */
/** @typedef {{obsNames: readonly string[], actionNames: readonly string[]}} Shape what a page's game sees and does */

/**
 * What the address says after its #, and what this tab remembers; the fragment is taken out of the address bar.
 * @returns {Invitation}
 */
export function invitation() {
  const given = new URLSearchParams(location.hash.slice(1));
  for (const name of ["game", "key", "bot"]) {
    const value = given.get(name);
    if (value !== null) tab.setItem(`understudy.${name}`, value);
  }
  // Another invitation: the bot that an older one chose is not meant.
  if ((given.has("game") || given.has("key")) && !given.has("bot")) tab.setItem("understudy.bot", "");
  if (location.hash) history.replaceState(null, "", location.pathname);
  const [game, key, bot] = ["game", "key", "bot"].map((name) => tab.getItem(`understudy.${name}`) ?? "");
  return { game: game || "rally", key, bot };
}

/** A random name for whoever plays in this browser; shown, so that its games can be forgotten again. */
export function playerName() {
  const known = kept.getItem("understudy.player");
  if (known) return known;
  const bytes = crypto.getRandomValues(new Uint8Array(6));
  const name = `web-${Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("")}`;
  try {
    kept.setItem("understudy.player", name);
  } catch {
    // A storage that is full: the name is for this visit alone.
  }
  return name;
}

export class Platform {
  /**
   * @param {Invitation} invited
   * @param {Shape} shape what the page's game sees and does
   * @param {() => void} onBot is called when another champion plays from now on
   */
  constructor(invited, shape, onBot) {
    this.invited = invited;
    this.shape = shape;
    this.onBot = onBot;
    /** @type {import("./understudy.js").Game | null} */
    this.game = null;
    this.player = playerName();
    /** @type {{code: string, detail: string} | null} Why there is no connection. */
    this.failure = invited.key ? null : { code: "no_key", detail: "This page was opened without a key." };
    this.retryS = RETRY_FIRST_S;
  }

  get bot() {
    return this.game?.bot ?? "";
  }

  /** The champion's number; 0 without one. */
  get modelNo() {
    return Number(this.bot.split("/").at(-1)) || 0;
  }

  /**
   * Who plays the serve that begins now: the champion, or a canary with its share; null while there is none.
   * @returns {import("./opponents.js").Bot | null}
   */
  cast() {
    // As an episode would draw it; here it is drawn for serves that are not recorded, too.
    return this.game?.cast() ?? null;
  }

  /** Whether nothing of this visit can be recorded: there is no key, or the platform will not have it. */
  get isShut() {
    return !this.invited.key || (!this.game && this.failure !== null && isFinal(this.failure.code));
  }

  stats() {
    return this.game?.stats() ?? NOTHING_YET;
  }

  /** How things stand, in one word: alone, connecting, connected, offline or refused. */
  get state() {
    if (!this.invited.key) return "alone";
    if (this.failure && isFinal(this.failure.code)) return "refused";
    if (!this.game) return this.failure ? "offline" : "connecting";
    const { waiting, lastError, lastBotError, lastFollowError, stopped } = this.stats();
    // Whoever sends nothing learns from the follower alone that nobody answers, or that the key is no good: the sender's
    // error stays as it was until it tries again, which it does while something waits.
    if (stopped || isNoKey(lastFollowError)) return "refused";
    return [waiting ? lastError : "", lastBotError, lastFollowError].some(isAway) ? "offline" : "connected";
  }

  /** Connect, however long it takes; only a key that is no good, or a game nobody knows, ends the trying. */
  async connect() {
    if (!this.invited.key) return;
    try {
      const spec = await this.#spec().then((one) => this.#keep(one), (error) => this.#last(error));
      this.game = await connect(this.invited.game, {
        url: location.origin, key: this.invited.key, spec, player: this.player, consent: "granted",
      }); // prettier-ignore
      this.failure = null;
      this.game.onBot(this.onBot);
      this.onBot();
    } catch (thrown) {
      const error = /** @type {any} */ (thrown);
      this.failure = { code: String(error?.code ?? "no_answer"), detail: String(error?.detail ?? error?.message ?? error) };
      if (isFinal(this.failure.code)) return;
      setTimeout(() => this.connect(), this.retryS * 1000 * (0.5 + Math.random()));
      this.retryS = Math.min(2 * this.retryS, RETRY_CAP_S);
    }
  }

  /**
   * A model by its number, checked like the champion.
   * @param {number} number
   */
  async model(number) {
    if (!this.game) throw new Error("the platform does not answer");
    return this.game.model(number);
  }

  /** The spec as the platform has it: the champion's, or else any that is this page's game. */
  async #spec() {
    const { schemas, champion } = await this.#json("");
    let first = "";
    if (champion && schemas.length > 1) {
      const { signed } = await this.#json(`models/${champion}`);
      first = JSON.parse(signed).entry.manifest.schema;
    }
    const found = [];
    for (const schema of [first, ...schemas.filter((/** @type {string} */ one) => one !== first)].filter(Boolean)) {
      found.push(await this.#json(`specs/${schema}`));
      if (fits(found.at(-1), this.shape)) return found.at(-1);
    }
    throw Object.assign(new Error("wrong_shape"), { code: "wrong_shape", detail: misfit(found[0], this.shape) });
  }

  /** What this deployment said last is enough to begin without it. @param {any} spec */
  #keep(spec) {
    try {
      kept.setItem(this.#name, JSON.stringify(spec));
    } catch {
      // No room: then a visit without the platform is not recorded.
    }
    return spec;
  }

  /** The spec of an earlier visit, where the platform does not answer at all. @param {any} error */
  #last(error) {
    const spec = JSON.parse(kept.getItem(this.#name) ?? "null");
    if (!spec || isFinal(String(error?.code ?? "")) || !fits(spec, this.shape)) throw error;
    return spec;
  }

  get #name() {
    const { key, game } = this.invited;
    return `understudy.spec.${sha256(new TextEncoder().encode(`${key} ${game}`)).slice(0, 16)}`;
  }

  /** @param {string} path */
  async #json(path) {
    const { game, key } = this.invited;
    const address = `/v1/games/${encodeURIComponent(game)}${path ? `/${path}` : ""}`;
    const answer = await fetch(address, {
      headers: { Authorization: `Bearer ${key}` }, cache: "no-store", signal: AbortSignal.timeout(ANSWER_MS),
    }); // prettier-ignore
    const told = await answer.json();
    if (answer.ok) return told;
    const { code = `http_${answer.status}`, detail = "the platform did not say why" } = told?.error ?? {};
    throw Object.assign(new Error(`${code}: ${detail}`), { code, detail });
  }
}

/**
 * Whether a spec is that of the page's game: as many numbers and actions, and the same names where it has any.
 * @param {any} spec
 * @param {Shape} shape
 */
export function fits(spec, { obsNames, actionNames }) {
  const [obs, action] = [spec?.obs?.[""], spec?.action?.[""]];
  const isSized = obs?.space === "box" && String(obs.shape) === String(obsNames.length);
  const isActed = action?.space === "discrete" && action.n === actionNames.length && action.start === 0;
  /** @param {readonly string[] | undefined} names @param {readonly string[]} wanted */
  const isNamed = (names, wanted) => !names?.length || names.join("\n") === wanted.join("\n");
  return isSized && isActed && isNamed(spec.obs_names, obsNames) && isNamed(spec.action_names, actionNames);
}

/**
 * What is wrong, in a sentence.
 * @param {any} spec
 * @param {Shape} shape
 */
function misfit(spec, { obsNames, actionNames }) {
  if (!spec) return "the platform knows no such game.";
  /** @param {readonly string[]} names @param {any} space */
  const told = (names, space) => names?.join(", ") || JSON.stringify(space);
  return (
    `the platform's ${spec.game} is another game than this page's: it sees ${told(spec.obs_names, spec.obs)} and does ` +
    `${told(spec.action_names, spec.action)}; here one sees ${obsNames.join(", ")} and does ${actionNames.join(", ")}.`
  );
}

/** @param {() => Storage} find a browser that is told to keep nothing throws here @returns {Pick<Storage, "getItem" | "setItem">} */
function storage(find) {
  try {
    const found = find();
    found.setItem("understudy.try", "");
    found.removeItem("understudy.try");
    return found;
  } catch {
    const memory = new Map();
    return { getItem: (name) => memory.get(name) ?? null, setItem: (name, value) => void memory.set(name, value) };
  }
}

/** @param {string} code */
function isFinal(code) {
  return /^(no_key|wrong_|revoked_key|expired_key|not_registered|bad_name|not_found)/.test(code);
}

/** @param {string} error */
function isNoKey(error) {
  return /^(no_key|wrong_|revoked_key|expired_key)/.test(error);
}

/** Whether a sender's last error says that nobody answered, or that it should come back later. @param {string} error */
function isAway(error) {
  return /^(unreachable|status_|not_ready|not_available|busy|too_many|too_slow|strange_answer|internal)/.test(error);
}
