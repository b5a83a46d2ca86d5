// Plays random episodes through the real client into a fetch that keeps every frame batch; prints the batches and the truth.
import { readFileSync } from "node:fs";
import { connect } from "../../clients/js/understudy.js";

const request = JSON.parse(readFileSync(0, "utf8"));
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

function drawing(seed) {
  let state = seed >>> 0;
  return () => {
    state = (Math.imul(state ^ (state >>> 15), 0x2c1b3c6d) + 0x9e3779b9) >>> 0;
    return (Math.imul(state ^ (state >>> 12), 0x297a2d39) >>> 0) / 2 ** 32;
  };
}

/** A gateway that accepts everything except for injected faults; `chaos` is their probability. */
function fakeGateway(random, { loses = 0, chaos = 0 }) {
  const batches = [];
  const answer = (status, body) => new Response(status === 204 ? null : JSON.stringify(body), { status });
  const fetch = async (url, { method, body, signal }) => {
    if (method === "PUT") return answer(200, {});
    if (url.includes("/bot")) {
      while (!signal.aborted) await sleep(5);
      throw new TypeError("aborted");
    }
    const [fault, how] = [random() < chaos, Math.floor(random() * 6)];
    if (fault && how === 0) throw new TypeError("connection refused"); // it never arrived
    if (fault && how === 1) return answer(503, { error: { code: "busy", detail: "later", retry_after_s: 0.01 } });
    if (fault && how === 2)
      return answer(404, { error: { code: "not_registered", detail: "who?", retry_after_s: null } });
    batches.push(Buffer.from(body).toString("hex"));
    if (random() < loses || (fault && how === 3)) throw new TypeError("connection reset"); // it arrived, but the client cannot know
    if (fault && how === 4) return answer(200, { acks: [], recording_rate: 1 });
    const raw = Buffer.from(body);
    const acks = [];
    for (let at = 8 + raw.readUInt32LE(4); at < raw.length; at += 64 + raw.readUInt32LE(at + 8)) {
      const accepted = !(fault && how === 5 && random() < 0.5);
      acks.push({ accepted, refused: null, retry_after_s: accepted ? 0 : 0.01, error: "" });
    }
    return answer(200, { acks, recording_rate: chaos ? 0.5 + random() / 2 : 1 });
  };
  return { fetch, batches };
}

async function play(plan) {
  const random = drawing(plan.seed);
  const below = (n) => Math.floor(random() * n);
  const { fetch, batches } = fakeGateway(random, plan);
  const { obs, actions, hasActionMask = false } = plan;
  const how = {
    url: "http://127.0.0.1:1",
    key: "uk_x",
    obs,
    actions,
    hasActionMask,
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
      for (const seat of open) {
        const actionMask = hasActionMask ? Array.from({ length: plan.n }, () => random() < 0.5) : null;
        const action = below(plan.n);
        if (actionMask) actionMask[action] = true;
        const decision = {
          obs: look(),
          action,
          actionMask,
          by: ["person", "bot", "script", "unknown"][below(4)],
          reward: 0,
        };
        seat.episode.acted(decision.obs, decision.action, { actionMask, by: decision.by });
        seat.steps.push(decision);
        for (let times = below(3); times > 0; times--) {
          const reward = Math.fround(random() - 0.5);
          decision.reward += reward;
          seat.episode.reward(reward);
        }
      }
      if (random() < (plan.pauses ?? 0)) await sleep(3);
    }
    for (const seat of open) {
      seat.end = plan.ends[below(plan.ends.length)];
      seat.isRecorded = seat.episode.isRecorded;
      const actionMask = hasActionMask ? Array(plan.n).fill(true) : null;
      seat.last = seat.end === "terminated unseen" || seat.end === "truncated unseen" ? null : look();
      if (seat.end === "cancelled") seat.episode.cancel();
      else if (seat.end === "left") seat.episode = null;
      else seat.episode.end(seat.last, { truncated: seat.end.startsWith("truncated"), result: "win", actionMask });
      truth.push({
        seat: seat.seat,
        player: seat.player,
        steps: seat.steps,
        end: seat.end,
        last: seat.last,
        number: seat.number,
        isRecorded: seat.isRecorded,
      });
    }
    if (plan.consents) game.setConsent(["granted", "denied", "unknown"][number % 3]);
    if (random() < (plan.pauses ?? 0)) await sleep(3);
  }
  const isAll = await game.close(60);
  return { batches, truth, isAll, stats: game.stats() };
}

const played = [];
for (const plan of request.plans) played.push(await play(plan));
console.log(JSON.stringify(played));
