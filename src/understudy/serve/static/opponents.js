/**
 * Who sits in the other seat: the champion, an older model, or a script of some skill.
 *
 * Who it is, is settled when a serve begins, recorded or not; a newer champion plays the next one. Without any, a script
 * plays, and says so.
 */

import { SKILLS, scripted, skillOf } from "./rally.js";

/** Its skill while there is no bot, or none that can play. */
export const UNTIL_THERE_IS_A_BOT = "casual";

/**
 * @typedef {{episode: any, obs: Float32Array, view: any, drawn: number}} Moment `episode` is null where nothing is recorded
 * @typedef {{action: number, name: string, value: number | null, probability: number | null}} Ranked
 * @typedef {{name: string, label: string, by: "bot" | "script", bot: any, decide: (moment: Moment) => number,
 *   rank: (obs: Float32Array) => Ranked[] | null}} Opponent `name` is what episodes say about it; `bot` a model
 * @typedef {{name: string, policy: any}} Bot a model, as the platform's game gives it
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
 * Whoever plays for the platform now: its champion, at times a canary, which says that it is on trial, a script while
 * there is none.
 * @param {import("./platform.js").Platform} platform
 * @returns {Opponent}
 */
export function champion(platform) {
  const bot = platform.cast();
  if (!bot) return script(UNTIL_THERE_IS_A_BOT);
  return model(bot, { label: bot.name === platform.bot ? bot.name : `${bot.name} (on trial)` });
}

/**
 * A model for one serve: it draws its actions and remembers what it saw in the same way, recorded or not.
 * @param {Bot} bot
 * @param {{label?: string}} [how] what people read
 * @returns {Opponent}
 */
export function model(bot, { label = bot.name } = {}) {
  const { name, policy } = bot;
  /** @type {Float32Array[]} */
  let seen = [];
  /** What it looks at: at the beginning, the first observation stands for those before it. */
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

/** The model that somebody chose by its number; one that arrives after another was chosen is left. */
export class Choice {
  /** @param {(number: number) => Promise<Bot>} fetched */
  constructor(fetched) {
    this.fetched = fetched;
    this.number = 0;
    /** @type {Bot | null} */
    this.bot = null;
  }

  /**
   * Whether the model with this number plays from now on; false when another was chosen meanwhile. Throws when it
   * cannot be had.
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
