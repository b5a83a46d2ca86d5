/**
 * Who sits in the other seat: the champion, an older model, or a script of some skill.
 *
 * The champion is the platform's: a newer one plays the next serve. Without any, a script plays, and says so.
 */

import { SKILLS, scripted, skillOf } from "./rally.js";

const UNTIL_THERE_IS_A_BOT = "casual";

/**
 * @typedef {{episode: any, obs: Float32Array, view: any, drawn: number}} Moment `episode` is null where nothing is recorded
 * @typedef {{action: number, name: string, value: number | null, probability: number | null}} Ranked
 * @typedef {{name: string, label: string, by: "bot" | "script", bot: any, decide: (moment: Moment) => number,
 *   rank: (obs: Float32Array) => Ranked[] | null}} Opponent `name` is what episodes say about it; `bot` a model by number
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
 * Whoever is champion; `platform` may not be connected yet.
 * @param {import("./platform.js").Platform} platform
 * @returns {Opponent}
 */
export function champion(platform) {
  const until = script(UNTIL_THERE_IS_A_BOT);
  if (!platform.bot) return until;
  return {
    name: platform.bot,
    label: platform.bot,
    by: "bot",
    bot: null,
    decide(moment) {
      const { episode, obs, view, drawn } = moment;
      if (!episode) return platform.rank(obs)[0]?.action ?? until.decide(moment);
      const otherwise = view ? () => scripted(view, SKILLS[UNTIL_THERE_IS_A_BOT], drawn) : undefined;
      return episode.act(obs, { otherwise });
    },
    rank: (obs) => platform.rank(obs),
  };
}

/**
 * A model by its number, as the platform gave it.
 * @param {{name: string, policy: any}} bot
 * @returns {Opponent}
 */
export function older(bot) {
  const { name, policy } = bot;
  return {
    name,
    label: name,
    by: "bot",
    bot,
    decide: ({ episode, obs }) => (episode ? episode.act(obs) : policy.act(obs)),
    rank: (obs) => policy.rank(obs),
  };
}
