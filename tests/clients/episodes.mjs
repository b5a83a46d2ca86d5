// Plays random episodes through the real client into a fetch that keeps every parcel; prints the parcels and the truth.
import { readFileSync } from "node:fs";
import { connect } from "../../clients/js/understudy.js";

const given = JSON.parse(readFileSync(0, "utf8"));
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

function drawing(seed) {
  let state = seed >>> 0;
  return () => {
    state = (Math.imul(state ^ (state >>> 15), 0x2c1b3c6d) + 0x9e3779b9) >>> 0;
    return (Math.imul(state ^ (state >>> 12), 0x297a2d39) >>> 0) / 2 ** 32;
  };
}

/** A gateway that takes everything, after it lost some answers on their way. */
function door(random, loses) {
  const parcels = [];
  const answer = (status, body) => new Response(status === 204 ? null : JSON.stringify(body), { status });
  const fetch = async (url, { method, body }) => {
    if (method === "PUT") return answer(200, {});
    if (url.includes("/bot")) return sleep(50).then(() => answer(204));
    parcels.push(Buffer.from(body).toString("hex"));
    if (random() < loses) throw new TypeError("connection reset"); // it arrived, and nobody will know
    const frames =
      Number(
        Buffer.from(body)
          .subarray(8 + body[4] + 256 * body[5])
          .toString("latin1")
          .split("UNDY").length,
      ) - 1;
    const accepted = { accepted: true, refused: null, retry_after_s: 0, error: "" };
    return answer(200, { acks: Array(frames).fill(accepted), keep_share: given.keepShare ?? 1 });
  };
  return { fetch, parcels };
}

async function play(plan) {
  const random = drawing(plan.seed);
  const below = (n) => Math.floor(random() * n);
  const { fetch, parcels } = door(random, plan.loses ?? 0);
  const { obs, actions, hasLegal = false } = plan;
  const how = {
    url: "http://127.0.0.1:1",
    key: "uk_x",
    obs,
    actions,
    hasLegal,
    fetch,
    consent: "granted",
    lingerS: plan.lingerS ?? 1,
  };
  const game = await connect("test", { ...how, random });
  const look =
    plan.look === "parts"
      ? () => ({ far: { away: [random(), random()] }, on: below(2) })
      : () => Array.from({ length: plan.size }, () => Math.fround(random() * 8 - 4));
  const truth = [];
  const seats = Array.from({ length: plan.seats ?? 1 }, (_, seat) => ({ seat, player: `player ${seat}` }));
  for (let number = 0; number < plan.episodes; number++) {
    const length = plan.lengths[number % plan.lengths.length];
    const facts = { match: `m${number}`, seed: number, opponents: ["script"] };
    const open = seats.map(({ seat, player }) => ({
      episode: game.episode({ ...facts, seat, player }),
      seat,
      player,
      steps: [],
      number,
    }));
    for (let step = 0; step < length; step++) {
      for (const one of open) {
        const legal = hasLegal ? Array.from({ length: plan.n }, () => random() < 0.5) : null;
        const action = below(plan.n);
        if (legal) legal[action] = true;
        const decision = {
          obs: look(),
          action,
          legal,
          by: ["person", "bot", "script", "unknown"][below(4)],
          reward: 0,
        };
        one.episode.acted(decision.obs, decision.action, { legal, by: decision.by });
        one.steps.push(decision);
        for (let times = below(3); times > 0; times--) {
          const reward = Math.fround(random() - 0.5);
          decision.reward += reward;
          one.episode.reward(reward);
        }
      }
      if (random() < (plan.pauses ?? 0)) await sleep(3);
    }
    for (const one of open) {
      one.end = plan.ends[below(plan.ends.length)];
      const legal = hasLegal ? Array(plan.n).fill(true) : null;
      one.last = one.end === "terminated unseen" || one.end === "truncated unseen" ? null : look();
      if (one.end === "cancelled") one.episode.cancel();
      else if (one.end === "left") one.episode = null;
      else one.episode.end(one.last, { truncated: one.end.startsWith("truncated"), result: "win", legal });
      truth.push({
        seat: one.seat,
        player: one.player,
        steps: one.steps,
        end: one.end,
        last: one.last,
        number: one.number,
      });
    }
    if (plan.consents) game.setConsent(["granted", "denied", "unknown"][number % 3]);
    if (random() < (plan.pauses ?? 0)) await sleep(3);
  }
  const isAll = await game.close(20);
  return { parcels, truth, isAll, stats: game.stats() };
}

const played = [];
for (const plan of given.plans) played.push(await play(plan));
console.log(JSON.stringify(played));
