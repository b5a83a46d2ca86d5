// For each line of input: serves live models to the client, valid and forged, and prints which bot plays after each.
import { createInterface } from "node:readline";
import { checkSigned, connect } from "../../clients/js/understudy.js";
import { storage } from "./storage.mjs";

const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/** A platform that serves the live models it is set to. */
function platform() {
  const state = { liveModels: null, policies: {}, isDown: false, asked: -1, tickets: null, ticketRequests: [] };
  const answer = (status, body) => new Response(body, { status });
  state.fetch = async (url, { method, signal, body }) => {
    if (state.isDown) throw new TypeError("down");
    if (method === "PUT") return answer(200, "{}");
    if (url.endsWith("/tickets")) {
      state.ticketRequests.push(JSON.parse(body));
      if (state.tickets === "stalls") await new Promise(() => {});
      if (!state.tickets) return answer(404, '{"error": {"code": "not_found", "detail": "no such path"}}');
      return answer(200, JSON.stringify({ ...state.tickets, tickets: state.tickets.tickets.splice(0, 64) }));
    }
    const policy = /\/models\/(\d+)\/policy$/.exec(url);
    if (policy && state.policies[policy[1]] === null) throw new TypeError("no response");
    if (policy) return answer(200, Buffer.from(state.policies[policy[1]] ?? "", "hex"));
    const model = /\/models\/(\d+)$/.exec(url);
    if (model) return answer(200, JSON.stringify({ model_no: Number(model[1]), signed: state.models[model[1]] }));
    const after = Number(/after=(\d+)/.exec(url)?.[1] ?? -1);
    state.asked = after;
    state.schema = /schema=(\w+)/.exec(url)?.[1] ?? null;
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
  const stored = storage();
  const server = platform();
  const seen = [];
  const names = [];
  let game = null;
  let clockMs = 0;
  for (const step of steps) {
    if (step.spoil)
      for (const [key, value] of stored.items)
        if (key.includes(step.spoil)) stored.items.set(key, value.slice(0, value.length / 2));
    if (step.start) {
      await game?.close(1);
      server.isDown = step.start.isOffline ?? false;
      const how = {
        url: "http://127.0.0.1:1",
        key: step.start.key ?? "uk_x",
        spec,
        fetch: server.fetch,
        storage: stored,
        trust: step.start.trust ?? [],
      };
      game = await connect(spec.game, { ...how, now: () => Date.now() + clockMs });
      game.onBot((name) => names.push(name));
    }
    if (step.otherPageSaw) {
      const key = [...stored.items.keys()].find((name) => name.includes("/bot/"));
      stored.items.set(key, JSON.stringify({ ...JSON.parse(stored.items.get(key)), seen: step.otherPageSaw }));
    }
    clockMs += 1000 * (step.afterS ?? 0);
    if (step.liveModels) {
      Object.assign(server, {
        liveModels: step.liveModels,
        policies: step.policies ?? server.policies,
        models: step.models ?? server.models,
        tickets: step.tickets ?? server.tickets,
      });
      const endMs = Date.now() + 60_000;
      while (!step.untilBot && server.asked < step.liveModels.number && Date.now() < endMs) await sleep(1);
    }
    server.isHasty = step.isHasty ?? server.isHasty;
    const endMs = Date.now() + 60_000;
    while (step.untilBot && game.bot !== step.untilBot && Date.now() < endMs) await sleep(5);
    if (step.promotesCanary) {
      // The live models change; the tickets, which have arrived, are not dropped yet.
      while (!game._bots._tickets.left.length && Date.now() < endMs) await sleep(1);
      game._bots._setLive({ ...game._bots._live, champion: game._bots._live.canary });
    }
    const models = [];
    const tickets = [];
    const ticketRequests = server.ticketRequests.length;
    while (models.length < (step.episodes ?? 1)) {
      // Others are fetched meanwhile, unless the gateway stalls.
      if (step.refills && models.length % 32 === 0) await sleep(5);
      const episode = game.episode();
      const action = episode.act([0, 0], { otherwise: spec.action_names[0] ?? 0, deterministic: true });
      models.push([episode.bot, action]);
      tickets.push(episode._rows._notes.at(-1)?.ticket ?? null);
      episode.cancel();
    }
    const { refusedBots, lastBotError } = game.stats();
    const result = {
      bot: game.bot,
      refused: refusedBots,
      error: lastBotError,
      models,
      tickets,
      ticketRequests: server.ticketRequests.slice(ticketRequests ? ticketRequests - 1 : 0),
      schema: server.schema,
      explored: Array.from({ length: 500 }, () => game.pickBot())
        .filter((bot) => bot?.temperature ?? bot?.noise)
        .map(({ name, temperature = null, noise = null, ticket = null }) => [name, temperature, noise, ticket]),
      even: game.pickBot({ skill: "even" })?.noise ?? null,
      picked: Array.from({ length: step.episodes ?? 1 }, () => game.pickBot()?.name ?? null),
      record: [...stored.items].find(([key]) => key.includes("/bot/"))?.[1],
      storage: [...stored.items.keys()].map((key) => key.split("/").slice(2).join("/")),
    };
    if (step.model)
      result.model = await game.model(step.model).then(
        (bot) => bot.name,
        (error) => error.code,
      );
    seen.push(result);
  }
  await game?.close(1);
  return { seen, names };
}

const checked = async ([text, trust]) =>
  checkSigned(text, trust).then(
    (entry) => ({ entry }),
    (error) => ({ code: error.code }),
  );
for await (const line of createInterface({ input: process.stdin })) {
  const request = JSON.parse(line);
  const output = {
    checked: await Promise.all((request.signed ?? []).map(checked)),
    scenarios: await Promise.all((request.scenarios ?? []).map(scenario)),
  };
  process.stdout.write(`${JSON.stringify(output)}\n`);
}
process.exit(0);
