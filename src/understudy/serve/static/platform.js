/**
 * The platform behind the page: the invitation it was opened with, the connection, models by number, how things stand.
 *
 * The key comes in the address's fragment, which browsers never send; it is kept for this tab alone.
 */

import { connect } from "./understudy.js";

/** What this browser keeps, and what this tab does; for as long as the page is open where it may keep nothing. */
export const kept = storage(() => localStorage);
const tab = storage(() => sessionStorage);
const RETRY_FIRST_S = 1;
const RETRY_CAP_S = 15;

/** @typedef {{game: string, key: string, bot: string}} Invitation */

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
  kept.setItem("understudy.player", name);
  return name;
}

export class Platform {
  /** @param {Invitation} invited @param {() => void} onBot is called when another champion plays from now on */
  constructor(invited, onBot) {
    this.invited = invited;
    this.onBot = onBot;
    /** @type {any} */
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

  /** @param {Float32Array} obs */
  rank(obs) {
    return this.game?.rank(obs) ?? [];
  }

  stats() {
    return this.game?.stats() ?? { recorded: 0, acked: 0, waiting: 0, refused: 0, dropped: 0, keepShare: 1, lastError: "", stopped: "" };
  }

  /** How things stand, in one word: alone, connecting, connected, offline or refused. */
  get state() {
    if (!this.invited.key) return "alone";
    if (this.failure && isFinal(this.failure.code)) return "refused";
    if (!this.game) return this.failure ? "offline" : "connecting";
    const { lastError, stopped } = this.stats();
    return stopped ? "refused" : isAway(lastError) ? "offline" : "connected";
  }

  /** Connect, however long it takes; only a key that is no good, or a game nobody knows, ends the trying. */
  async connect() {
    if (!this.invited.key) return;
    try {
      const spec = await this.#spec();
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

  /** The spec as the platform has it: the champion's, or else any. */
  async #spec() {
    const { schemas, champion } = await this.#json("");
    let schema = schemas[0];
    if (champion && schemas.length > 1) {
      const { signed } = await this.#json(`models/${champion}`);
      schema = JSON.parse(signed).entry.manifest.schema;
    }
    return this.#json(`specs/${schema}`);
  }

  /** @param {string} path */
  async #json(path) {
    const { game, key } = this.invited;
    const address = `/v1/games/${encodeURIComponent(game)}${path ? `/${path}` : ""}`;
    const answer = await fetch(address, { headers: { Authorization: `Bearer ${key}` }, cache: "no-store" });
    const told = await answer.json();
    if (answer.ok) return told;
    const { code = `http_${answer.status}`, detail = "the platform did not say why" } = told?.error ?? {};
    throw Object.assign(new Error(`${code}: ${detail}`), { code, detail });
  }
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

/** Whether a sender's last error says that nobody answered, or that it should come back later. @param {string} error */
function isAway(error) {
  return /^(unreachable|status_|not_ready|not_available|busy|too_many|too_slow|strange_answer|internal)/.test(error);
}
