/**
 * A match of rally: first to seven points; every serve is an episode of both seats, with one decision every four frames.
 *
 * Independent of the page: inputs are arguments, and events are reported through `hear`.
 */

import { UNTIL_THERE_IS_A_BOT, script } from "./opponents.js";
import * as rally from "./rally.js";

export const POINTS_TO_WIN = 7;
const BEFORE_SERVE = 48;
const AFTER_POINT = 42;
const KEYS = { ArrowUp: -1, KeyW: -1, ArrowDown: 1, KeyS: 1 };

/**
 * The types of a playable game.
 * @typedef {import("./opponents.js").Opponent} Opponent
 * @typedef {{kind: "serve" | "opponent" | "decision" | "point" | "over", [fact: string]: any}} Event
 * @typedef {(seat: number, facts: object) => any} Record starts an episode; null when not recording
 */

export class Match {
  static title = "rally";
  static keys = KEYS;
  static axis = /** @type {const} */ ("y");
  static follows = true;
  /** Slightly more than half a decision's paddle movement, so that the paddle comes to rest under any finger. */
  static slack = ((rally.FRAMES * rally.PADDLE_SPEED) / 2 + 1) / rally.HEIGHT;
  static reach = [rally.PADDLE / rally.HEIGHT, 1 - rally.PADDLE / rally.HEIGHT];
  static obsNames = rally.OBS_NAMES;
  static actionNames = rally.ACTION_NAMES;
  static buttons = ["up", "down"];
  static hint = "Arrow keys or W and S move your paddle, the left one; Space pauses. Or drag on the court.";
  static touchHint = "Drag on the court, or hold the buttons: yours is the left paddle.";
  frameMs = 1000 / 60;

  /**
   * @param {{opponent: () => Opponent, record: Record, hear: (event: Event) => void, random?: () => number}} options
   *   `opponent` is called before every serve, `record` at its first decision
   */
  constructor({ opponent, record, hear, random = Math.random }) {
    this.chosen = opponent;
    this.record = record;
    this.hear = hear;
    this.random = random;
    this.match = `web-${Array.from({ length: 4 }, () => this.#drawn().toString(36)).join("")}`.slice(0, 40);
    this.points = [0, 0];
    this.isOver = false;
    /** Episodes of the person and of the other seat. @type {any} */
    this.person = null;
    /** @type {any} */
    this.other = null;
    /** Whether an error occurred in this serve: then it is no longer recorded. */
    this.hasFailed = false;
    this.seed = this.frames = this.decisions = this.pause = 0;
    /** @type {rally.Court} */
    this.court = rally.serve(0);
    this.before = this.court;
    this.actions = [1, 1];
    this.opponent = opponent();
    this.#serve();
  }

  /** The score in words, for screen readers. */
  get words() {
    const [mine, theirs] = this.points;
    return `You ${mine}, ${this.opponent.label} ${theirs}; the first to ${POINTS_TO_WIN} points wins.`;
  }

  get score() {
    return this.points.join(" : ");
  }

  get summary() {
    const [mine, theirs] = this.points;
    return mine > theirs ? `You won ${mine} : ${theirs}` : `${this.opponent.label} won ${theirs} : ${mine}`;
  }

  /** Positions as integers: ball x and y, both paddles. */
  get place() {
    return [this.court.x, this.court.y, this.court.left, this.court.right];
  }

  /**
   * One frame.
   * @param {import("./inputs.js").Inputs} inputs
   */
  frame(inputs) {
    this.before = this.court;
    if (this.isOver) return;
    if (this.pause > 0) {
      this.pause -= 1;
      if (this.pause === 0 && rally.point(this.court) !== 0) this.#serve();
      return;
    }
    if (this.frames === 0) this.#decide(inputs);
    this.court = rally.frame(this.court, this.actions[0] - 1, this.actions[1] - 1);
    this.frames = (this.frames + 1) % rally.FRAMES;
    if (this.frames === 0) this.#after();
  }

  /** @param {CanvasRenderingContext2D} context @param {number} part @param {{dark: boolean}} options */
  draw(context, part, options) {
    const was = this.before;
    const is = this.court;
    /** @param {"x" | "y" | "left" | "right"} name */
    const between = (name) => was[name] + (is[name] - was[name]) * part;
    const shown = { ...is, x: between("x"), y: between("y"), left: between("left"), right: between("right") };
    rally.draw(context, shown, options);
  }

  /** Stops recording: the steps before the last decision, played with consent, are sent; nothing after them. */
  forget() {
    const episodes = [this.person, this.other];
    this.person = this.other = null;
    for (const episode of episodes) episode?.cancel();
  }

  /** Called after an error: a script finishes this serve, unrecorded; returns the message for the person. */
  recover() {
    this.hasFailed = true;
    this.opponent = script(UNTIL_THERE_IS_A_BOT);
    this.forget();
    return `a ${this.opponent.label} plays this serve, which is no longer recorded`;
  }

  get isRecorded() {
    return this.person !== null;
  }

  #serve() {
    this.seed = this.#drawn();
    this.court = this.before = rally.serve(this.seed);
    this.frames = this.decisions = 0;
    this.actions = [1, 1];
    this.pause = BEFORE_SERVE;
    this.hasFailed = false;
    this.opponent = this.chosen();
    this.hear({ kind: "serve", name: this.opponent.label });
  }

  /** @param {import("./inputs.js").Inputs} inputs */
  #decide(inputs) {
    const own = rally.observed(this.court, 0);
    const obs = rally.observed(this.court, 1);
    const mine = 1 + inputs.take(this.court.left / rally.HEIGHT);
    const facts = { match: this.match, seed: this.seed };
    const { opponent, decisions } = this;
    if (decisions === 0 && !this.hasFailed) {
      this.other = this.record(1, { ...facts, opponents: ["person"], bot: opponent.bot, by: opponent.by });
      this.person = this.record(0, { ...facts, opponents: [opponent.name], by: "person" });
      this.hear({ kind: "opponent", name: opponent.label, isRecorded: this.isRecorded });
    }
    const drawn = rally.drawnAt(this.seed, decisions);
    const theirs = opponent.decide({ episode: this.other, obs, view: rally.seen(this.court, 1), drawn });
    this.person?.acted(own, mine, { by: "person" });
    this.actions = [mine, theirs];
    this.decisions += 1;
    this.hear({ kind: "decision", obs, opponent });
  }

  #after() {
    const got = rally.point(this.court);
    const isLate = this.decisions >= rally.MAX_DECISIONS;
    if (got === 0 && !isLate) return;
    for (const [seat, episode, sign] of [[0, this.person, 1], [1, this.other, -1]]) {
      const result = got === 0 ? "draw" : got * sign > 0 ? "win" : "loss";
      episode?.reward(got * sign);
      episode?.end(rally.observed(this.court, seat), { truncated: got === 0, result });
    }
    this.person = this.other = null;
    if (got === 0) return this.#serve();
    this.points[got > 0 ? 0 : 1] += 1;
    this.pause = AFTER_POINT;
    this.isOver = Math.max(...this.points) >= POINTS_TO_WIN;
    this.hear({ kind: this.isOver ? "over" : "point", isMine: got > 0 });
  }

  #drawn() {
    return Math.floor(this.random() * 2 ** 31);
  }
}
