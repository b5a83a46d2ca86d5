// Plays rally over HTTP until stopped: seat 0 as a person, seat 1 by the bot. Prints its stats and the truth.
import { createInterface } from "node:readline";
import { connect } from "../../clients/js/understudy.js";
import * as rally from "../../clients/js/rally.js";

const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const print = (what) => console.log(JSON.stringify(what));
const lines = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const options = JSON.parse((await lines.next()).value);

/** @type {any} */
let game;
try {
  const spec = { obs: rally.OBS_NAMES, actions: rally.ACTION_NAMES };
  game = await connect("rally", { ...options, ...spec, player: "ada", lingerS: 0.05 });
} catch (error) {
  print({ failed: error.code, detail: error.detail });
  process.exit(0);
}
let isOver = false;
const truth = [];
const bots = [];
game.onBot((name) => bots.push(name));
let [decisions, slow] = [0, 0];

async function play() {
  for (let seed = 0; !isOver; seed++) {
    const facts = { match: `serve-${seed}`, seed };
    const seats = [
      game.episode({ ...facts, seat: 0, opponents: ["bot"] }),
      game.episode({ ...facts, seat: 1, player: "bob", opponents: ["person"] }),
    ];
    let [court, point] = [rally.serve(seed), 0];
    const serve = { seed, actions: [], isRecorded: seats.map((seat) => seat.isRecorded) };
    for (let at = 0; point === 0 && at < 60; at++) {
      const beganMs = performance.now();
      const mine = rally.scripted(rally.seen(court, 0), rally.SKILLS.casual, rally.drawnAt(seed, at));
      seats[0].acted(rally.observed(court, 0), rally.ACTION_NAMES[mine]);
      const theirs = seats[1].act(rally.observed(court, 1), { otherwise: 1 });
      [court, point] = rally.step(court, mine, theirs);
      if (point) seats.forEach((seat, side) => seat.reward(side ? -point : point));
      serve.actions.push([mine, theirs]);
      decisions += 1;
      slow += performance.now() - beganMs > 20; // the calls themselves; a busy machine holds up a few
      await sleep(options.pauseMs ?? 2);
    }
    serve.isTruncated = point === 0;
    serve.model = seats[1].bot;
    seats.forEach((seat, side) => seat.end(rally.observed(court, side), { truncated: point === 0, result: point }));
    truth.push(serve);
  }
}

const playing = play();
const reporting = setInterval(() => print({ ...game.stats(), decisions, slow }), 50);
for await (const line of lines) {
  const command = JSON.parse(line);
  if (command.key) game.useKey(command.key);
  if (command.stop !== undefined) {
    isOver = true;
    await playing;
    clearInterval(reporting);
    const isAll = await game.close(command.stop);
    const over = { over: true, isAll, truth, bots, decisions, slow, stats: game.stats() };
    process.stdout.write(`${JSON.stringify(over)}\n`, () => process.exit(0));
  }
}
