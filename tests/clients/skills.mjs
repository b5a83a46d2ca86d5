// Plays an episode with the bot for each request; prints what it did and the codes of invalid requests.
import { readFileSync } from "node:fs";
import { connect } from "../../clients/js/understudy.js";

const { url, key, spec, obs, plays, invalid, defaults } = JSON.parse(readFileSync(0, "utf8"));
const codeOf = (begin) => {
  try {
    begin();
    return "accepted";
  } catch (error) {
    return error.code;
  }
};

const offline = await connect(spec.game, { url: "http://127.0.0.1:9", key: "uk_x", spec, consent: "granted" });
const before = defaults.map((skill) => offline._bots.atSkill({}, { skill }).noise);
await offline.close(0);

const game = await connect(spec.game, { url, key, spec, consent: "granted", player: "js" });
if (!(await game.waitForBot(30))) throw new Error("no bot arrived");
const noises = [];
for (const { count, isPicked, ...how } of plays) {
  const episode = isPicked ? game.episode({ bot: game.pickBot(how) }) : game.episode(how);
  for (let at = 0; at < count; at++) episode.act(obs);
  episode.end(obs);
  noises.push(game.pickBot(how).noise ?? null);
}
const unrecorded = game.pickBot({ skill: "easy" });
const free = Array.from({ length: 400 }, () => unrecorded.policy.act(obs, unrecorded));
const codes = invalid.map((how) => [codeOf(() => game.episode(how)), codeOf(() => game.pickBot(how))]);
const sent = await game.close(30);
console.log(JSON.stringify({ before, noises, codes, sent, free }));
