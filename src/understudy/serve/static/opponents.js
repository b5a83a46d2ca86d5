/**
 * The opponent in the other seat: the champion, an older model, or a script of some skill.
 *
 * It is chosen when a serve starts, recorded or not; a newer champion plays the next serve. Without a model a script
 * plays, and its label says so.
 */

import { SKILLS, scripted, skillOf } from "./rally.js";

/** The script's skill while there is no bot. */
export const UNTIL_THERE_IS_A_BOT = "casual";

/**
 * @typedef {{episode: any, obs: Float32Array, view: any, drawn: number}} Moment `episode` is null when not recording
 * @typedef {{action: number, name: string, value: number | null, probability: number | null}} Ranked
 * @typedef {{name: string, label: string, by: "bot" | "script", bot: any, decide: (moment: Moment) => number,
 *   rank: (obs: Float32Array) => Ranked[] | null}} Opponent `name` is recorded in episodes; `bot` is a model
 * @typedef {{name: string, policy: any}} Bot a model from the platform's game
 */

/** @returns {string[]} */
export const skills = () => Object.keys(SKILLS);

/**
 * @param {string} skill
 * @returns {Opponent}
 */
export function script(skill) {
  const facts = skillOf(skill);
  return {
    name: "script",
    label: `${skill} script`,
    by: "script",
    bot: null,
    decide({ episode, obs, view, drawn }) {
      const action = scripted(view, facts, drawn);
      episode?.acted(obs, action, { by: "script" });
      return action;
    },
    rank: () => null,
  };
}

/**
 * The platform's current opponent: its champion, a canary labelled "on trial", or a script while there is none.
 * @param {import("./platform.js").Platform} platform
 * @returns {Opponent}
 */
export function champion(platform) {
  const bot = platform.pickBot();
  if (!bot) return script(UNTIL_THERE_IS_A_BOT);
  return model(bot, { label: bot.name === platform.bot ? bot.name : `${bot.name} (on trial)` });
}

/**
 * A model for one serve; it samples actions and stacks observations in the same way whether recorded or not.
 * @param {Bot} bot
 * @param {{label?: string}} [options] `label`: the displayed name
 * @returns {Opponent}
 */
export function model(bot, { label = bot.name } = {}) {
  const { name, policy } = bot;
  /** @type {Float32Array[]} */
  let seen = [];
  /** The stacked observations; at the start the first one is repeated. */
  const view = () => (policy.stack > 1 ? [...Array(policy.stack - seen.length).fill(seen[0]), ...seen] : seen[0]);
  return {
    name,
    label,
    by: "bot",
    bot,
    decide({ episode, obs }) {
      seen = [...seen, Float32Array.from(obs)].slice(-policy.stack);
      return episode ? episode.act(obs) : policy.act(view(), { deterministic: false });
    },
    rank: () => (seen.length ? policy.rank(view()) : null),
  };
}

/** The model chosen by number; a download that finishes after another choice is ignored. */
export class Choice {
  /** @param {(number: number) => Promise<Bot>} fetched */
  constructor(fetched) {
    this.fetched = fetched;
    this.number = 0;
    /** @type {Bot | null} */
    this.bot = null;
  }

  /**
   * Fetches the model with this number; false when another one was chosen meanwhile. Throws when it is not available.
   * @param {number} number 0: none
   */
  async take(number) {
    if (number === this.number && this.bot) return true;
    this.number = number;
    this.bot = null;
    if (!number) return true;
    try {
      const bot = await this.fetched(number);
      if (this.number !== number) return false;
      this.bot = bot;
      return true;
    } catch (error) {
      if (this.number !== number) return false;
      this.number = 0;
      throw error;
    }
  }
}
