// Serves live models to the client, valid and forged, and prints which bot plays after each.
import { readFileSync } from "node:fs";
import { checkSigned, connect } from "../../clients/js/understudy.js";
import { storage } from "./storage.mjs";

const given = JSON.parse(readFileSync(0, "utf8"));
const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/** A platform that serves the live models it is set to. */
function platform() {
  const state = { liveModels: null, policies: {}, isDown: false, asked: -1 };
  const answer = (status, body) => new Response(body, { status });
  state.fetch = async (url, { method, signal }) => {
    if (state.isDown) throw new TypeError("down");
    if (method === "PUT") return answer(200, "{}");
    const policy = /\/models\/(\d+)\/policy$/.exec(url);
    if (policy && state.policies[policy[1]] === null) throw new TypeError("no response");
    if (policy) return answer(200, Buffer.from(state.policies[policy[1]] ?? "", "hex"));
    const model = /\/models\/(\d+)$/.exec(url);
    if (model) return answer(200, JSON.stringify({ model_no: Number(model[1]), signed: state.models[model[1]] }));
    const after = Number(/after=(\d+)/.exec(url)?.[1] ?? -1);
    state.asked = after;
    while (!(state.liveModels && state.liveModels.number > after)) {
      if (signal.aborted) throw new TypeError("aborted");
      await sleep(1);
      if (state.isHasty) return answer(204, null); // it does not hold a long poll
    }
    return answer(200, JSON.stringify(state.liveModels));
  };
  return state;
}

async function scenario({ steps, spec }) {
  const [kept, told, seen] = [storage(), platform(), []];
  let [game, names, clockMs] = [null, [], 0];
  for (const step of steps) {
    if (step.spoil)
      for (const [key, value] of kept.kept)
        if (key.includes(step.spoil)) kept.kept.set(key, value.slice(0, value.length / 2));
    if (step.start) {
      await game?.close(1);
      told.isDown = step.start.isOffline ?? false;
      const how = {
        url: "http://127.0.0.1:1",
        key: step.start.key ?? "uk_x",
        spec,
        fetch: told.fetch,
        storage: kept,
        trust: step.start.trust ?? [],
      };
      game = await connect(spec.game, { ...how, now: () => Date.now() + clockMs });
      game.onBot((name) => names.push(name));
    }
    if (step.otherPageSaw) {
      const key = [...kept.kept.keys()].find((one) => one.endsWith("/bot"));
      kept.kept.set(key, JSON.stringify({ ...JSON.parse(kept.kept.get(key)), seen: step.otherPageSaw }));
    }
    clockMs += 1000 * (step.afterS ?? 0);
    if (step.tell) {
      Object.assign(told, {
        liveModels: step.tell,
        policies: step.policies ?? told.policies,
        models: step.models ?? told.models,
      });
      const endMs = Date.now() + 60_000;
      while (!step.wanted && told.asked < step.tell.number && Date.now() < endMs) await sleep(1);
    }
    told.isHasty = step.isHasty ?? told.isHasty;
    const endMs = Date.now() + 60_000;
    while (step.wanted && game.bot !== step.wanted && Date.now() < endMs) await sleep(5);
    const models = Array.from({ length: step.episodes ?? 1 }, () => {
      const episode = game.episode();
      const action = episode.act([0, 0], { otherwise: spec.action_names[0] ?? 0, deterministic: true });
      episode.cancel();
      return [episode.bot, action];
    });
    const { refusedBots, lastBotError } = game.stats();
    const one = {
      bot: game.bot,
      refused: refusedBots,
      error: lastBotError,
      models,
      picked: Array.from({ length: step.episodes ?? 1 }, () => game.pickBot()?.name ?? null),
      record: [...kept.kept].find(([key]) => key.endsWith("/bot"))?.[1],
      kept: [...kept.kept.keys()].map((key) => key.split("/").slice(2).join("/")),
    };
    if (step.model)
      one.model = await game.model(step.model).then(
        (bot) => bot.name,
        (error) => error.code,
      );
    seen.push(one);
  }
  await game?.close(1);
  return { seen, names };
}

const checked = async ([text, trust]) =>
  checkSigned(text, trust).then(
    (entry) => ({ entry }),
    (error) => ({ code: error.code }),
  );
const found = {
  checked: await Promise.all((given.signed ?? []).map(checked)),
  scenarios: await Promise.all((given.scenarios ?? []).map(scenario)),
};
// Exiting at once would lose output that the pipe has not read yet.
process.stdout.write(JSON.stringify(found), () => process.exit(0));
