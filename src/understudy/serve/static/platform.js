/**
 * The page's connection to the platform: the invitation in its address, the game, models by number, the state.
 *
 * The key is in the address's fragment, which browsers never send; it is stored for this tab only.
 */

import { connect, sha256 } from "./understudy.js";

/** Storage of this browser and of this tab; in memory when the page may not store anything. */
export const browserStorage = storage(() => localStorage);
const tab = storage(() => sessionStorage);
const RETRY_FIRST_S = 1;
const RETRY_CAP_S = 15;
const ANSWER_MS = 10_000;

const NOTHING_YET = {
  recorded: 0, acked: 0, waiting: 0, refused: 0, dropped: 0, recordingRate: 1, lastError: "", stopped: "", refusedBots: 0,
  lastBotError: "", lastFollowError: "", badInputs: 0,
}; // prettier-ignore

/** @typedef {{game: string, key: string, bot: string}} Invitation */
/** @typedef {{obsNames: readonly string[], actionNames: readonly string[]}} Shape what a page's game sees and does */

/**
 * The game, key and bot in the address's fragment, or what this tab stored of an earlier one. The fragment is removed
 * from the address bar.
 * @returns {Invitation}
 */
export function invitation() {
  const fragment = new URLSearchParams(location.hash.slice(1));
  for (const name of ["game", "key", "bot"]) {
    const value = fragment.get(name);
    if (value !== null) tab.setItem(`understudy.${name}`, value);
  }
  // A new invitation does not inherit the bot of an older one.
  if ((fragment.has("game") || fragment.has("key")) && !fragment.has("bot")) tab.setItem("understudy.bot", "");
  if (location.hash) history.replaceState(null, "", location.pathname);
  const [game, key, bot] = ["game", "key", "bot"].map((name) => tab.getItem(`understudy.${name}`) ?? "");
  return { game: game || "rally", key, bot };
}

/** This browser's random player name; shown, so that its games can be erased. */
export function playerName() {
  const known = browserStorage.getItem("understudy.player");
  if (known) return known;
  const bytes = crypto.getRandomValues(new Uint8Array(6));
  const name = `web-${Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("")}`;
  try {
    browserStorage.setItem("understudy.player", name);
  } catch {
    // The storage is full: the name is used for this visit only.
  }
  return name;
}

export class Platform {
  /**
   * @param {Invitation} invited
   * @param {Shape} shape what the page's game sees and does
   * @param {() => void} onBot called when the champion changes
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
    /** @type {number | null} Steps that the first bot still needs; null while there is a bot, or it is not known. */
    this.missingSteps = null;
  }

  get bot() {
    return this.game?.bot ?? "";
  }

  /** The champion's number; 0 without one. */
  get modelNo() {
    return Number(this.bot.split("/").at(-1)) || 0;
  }

  /**
   * The bot for a serve that starts now: the champion, or what the gateway drew; null while there is none.
   * @returns {import("./opponents.js").Bot | null}
   */
  pickBot() {
    // The same draw as an episode's, also for serves that are not recorded.
    return this.game?.pickBot() ?? null;
  }

  /** Whether this visit cannot be recorded: there is no key, or the platform rejected it. */
  get isBlocked() {
    return !this.invited.key || (!this.game && this.failure !== null && isFinal(this.failure.code));
  }

  stats() {
    return this.game?.stats() ?? NOTHING_YET;
  }

  /** The connection's state: alone, connecting, connected, offline or refused. */
  get state() {
    if (!this.invited.key) return "alone";
    if (this.failure && isFinal(this.failure.code)) return "refused";
    if (!this.game) return this.failure ? "offline" : "connecting";
    const { waiting, lastError, lastBotError, lastFollowError, stopped } = this.stats();
    // While nothing is sent, only the follower notices that the platform is away or rejects the key: the sender's last
    // error is current only while steps wait.
    if (stopped || isNoKey(lastFollowError)) return "refused";
    return [waiting ? lastError : "", lastBotError, lastFollowError].some(isAway) ? "offline" : "connected";
  }

  /** Connects, retrying until it succeeds; only a rejected key and an unknown or different game are final. */
  async connect() {
    if (!this.invited.key) return;
    try {
      const spec = await this.#spec().then((fetched) => this.#store(fetched), (error) => this.#stored(error));
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

  /** Asks how many steps the first bot still needs, while there is none. */
  async lookForBot() {
    if (!this.game || this.bot) {
      this.missingSteps = null;
      return;
    }
    try {
      this.missingSteps = (await this.#json("")).missing_steps ?? null;
    } catch {
      // The platform is away, which the state shows: the last number stays.
    }
  }

  /**
   * Fetches a model by its number, verified like the champion.
   * @param {number} number
   */
  async model(number) {
    if (!this.game) throw new Error("the platform does not respond");
    return this.game.model(number);
  }

  /** The platform's spec: the champion's, or else any that matches this page's game. */
  async #spec() {
    const { schemas, champion } = await this.#json("");
    let first = "";
    if (champion && schemas.length > 1) {
      const { signed } = await this.#json(`models/${champion}`);
      first = JSON.parse(signed).entry.manifest.schema;
    }
    const specs = [];
    for (const schema of [first, ...schemas.filter((/** @type {string} */ name) => name !== first)].filter(Boolean)) {
      specs.push(await this.#json(`specs/${schema}`));
      if (fits(specs.at(-1), this.shape)) return specs.at(-1);
    }
    throw Object.assign(new Error("wrong_shape"), { code: "wrong_shape", detail: misfit(specs[0], this.shape) });
  }

  /** Stores the spec for a visit without the platform. @param {any} spec */
  #store(spec) {
    try {
      browserStorage.setItem(this.#name, JSON.stringify(spec));
    } catch {
      // The storage is full: a visit without the platform is not recorded.
    }
    return spec;
  }

  /** The stored spec of an earlier visit, when the platform does not respond. @param {any} error */
  #stored(error) {
    const spec = JSON.parse(browserStorage.getItem(this.#name) ?? "null");
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
    const body = await answer.json();
    if (answer.ok) return body;
    const { code = `http_${answer.status}`, detail = "the platform gave no reason" } = body?.error ?? {};
    throw Object.assign(new Error(`${code}: ${detail}`), { code, detail });
  }
}

/**
 * Whether a spec matches the page's game: the same number of observations and actions, and the same names if it has any.
 * @param {any} spec
 * @param {Shape} shape
 */
export function fits(spec, { obsNames, actionNames }) {
  const obs = spec?.obs?.[""];
  const action = spec?.action?.[""];
  const isSized = obs?.space === "box" && String(obs.shape) === String(obsNames.length);
  const isActed = action?.space === "discrete" && action.n === actionNames.length && action.start === 0;
  /** @param {readonly string[] | undefined} names @param {readonly string[]} expected */
  const isNamed = (names, expected) => !names?.length || names.join("\n") === expected.join("\n");
  return isSized && isActed && isNamed(spec.obs_names, obsNames) && isNamed(spec.action_names, actionNames);
}

/**
 * A sentence that says how a spec differs from the page's game.
 * @param {any} spec
 * @param {Shape} shape
 */
function misfit(spec, { obsNames, actionNames }) {
  if (!spec) return "the platform has no such game.";
  /** @param {readonly string[]} names @param {any} space */
  const described = (names, space) => names?.join(", ") || JSON.stringify(space);
  return (
    `the platform's ${spec.game} is not this page's game: its observations are ${described(spec.obs_names, spec.obs)} ` +
    `and its actions ${described(spec.action_names, spec.action)}; this page has ${obsNames.join(", ")} and ` +
    `${actionNames.join(", ")}.`
  );
}

/** @param {() => Storage} open throws when storage is disabled @returns {Pick<Storage, "getItem" | "setItem">} */
function storage(open) {
  try {
    const opened = open();
    opened.setItem("understudy.try", "");
    opened.removeItem("understudy.try");
    return opened;
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

/** Whether an error means that the platform is unreachable or temporarily unavailable. @param {string} error */
function isAway(error) {
  return /^(unreachable|status_|not_ready|not_available|busy|too_many|too_slow|strange_answer|internal)/.test(error);
}
