/**
 * CartPole-v1: keep a pole upright on a cart; the equations of `understudy.games.cartpole`, and a canvas to see them.
 *
 * The physics is that of the Python game. A step is a fiftieth of a second, too short for people: they play fewer steps
 * per second than bots.
 */

const GRAVITY = 9.8;
const PUSH = 10;
const POLE_MASS = 0.1;
const TOTAL_MASS = POLE_MASS + 1;
const HALF_POLE = 0.5;
const POLE_MOMENT = POLE_MASS * HALF_POLE;
const STEP_S = 0.02;
export const MAX_POSITION = 2.4;
export const MAX_ANGLE = (12 * 2 * Math.PI) / 360;
export const MAX_STEPS = 500;
const RESET_BOUND = 0.05;
const PEOPLE_HZ = 20;
const BOTS_HZ = 50;

/** @typedef {[number, number, number, number]} State position, velocity, angle, angular velocity */

/** @param {() => number} random @returns {State} */
export function reset(random = Math.random) {
  const drawn = () => (2 * random() - 1) * RESET_BOUND;
  return [drawn(), drawn(), drawn(), drawn()];
}

/**
 * The next state; action 1 pushes right, 0 left. The order of operations is that of the Python game.
 * @param {State} state
 * @param {number} action
 * @returns {State}
 */
export function step([position, velocity, angle, spin], action) {
  const push = action === 1 ? PUSH : -PUSH;
  const cosine = Math.cos(angle);
  const sine = Math.sin(angle);
  const pull = (push + POLE_MOMENT * (spin * spin) * sine) / TOTAL_MASS;
  const turn = (GRAVITY * sine - cosine * pull) / (HALF_POLE * (4 / 3 - (POLE_MASS * (cosine * cosine)) / TOTAL_MASS));
  const shove = pull - (POLE_MOMENT * turn * cosine) / TOTAL_MASS;
  return [position + STEP_S * velocity, velocity + STEP_S * shove, angle + STEP_S * spin, spin + STEP_S * turn];
}

/** @param {State} state */
export function hasFallen([position, , angle]) {
  return Math.abs(position) > MAX_POSITION || Math.abs(angle) > MAX_ANGLE;
}

/** An attempt at balancing, by the person or by a bot. Every attempt is an episode. */
export class Balance {
  static title = "CartPole-v1";
  static keys = { ArrowLeft: -1, KeyA: -1, ArrowRight: 1, KeyD: 1 };
  static axis = /** @type {const} */ ("x");
  static follows = false;
  static buttons = ["left", "right"];
  static obsNames = ["position", "velocity", "angle", "angular velocity"];
  static actionNames = ["left", "right"];
  static hint = "Arrow keys or A and D push the cart, which keeps its last push; Space pauses.";
  static touchHint = "Touch the left or the right half of the court to push the cart; it keeps its last push.";

  /**
   * @param {{opponent: () => import("./opponents.js").Opponent | null, record: import("./match.js").Record,
   *   hear: (event: any) => void, random?: () => number}} how without an opponent the person plays
   */
  constructor({ opponent, record, hear, random = Math.random }) {
    this.hear = hear;
    this.opponent = opponent();
    this.frameMs = 1000 / (this.opponent ? BOTS_HZ : PEOPLE_HZ);
    this.state = this.before = reset(random);
    this.steps = 0;
    this.isOver = false;
    this.last = 1;
    this.episode = record(0, { bot: this.opponent?.bot, by: this.opponent ? "bot" : "person" });
    hear({ kind: "opponent", name: this.opponent?.label ?? "You", isRecorded: this.isRecorded });
  }

  get score() {
    return String(this.steps);
  }

  get words() {
    return `${this.opponent?.label ?? "You"} kept the pole up for ${this.steps} of ${MAX_STEPS} steps.`;
  }

  get summary() {
    return this.words;
  }

  get place() {
    return this.state.map((part) => Math.round(part * 1000));
  }

  /** @param {import("./inputs.js").Inputs} inputs */
  frame(inputs) {
    this.before = this.state;
    if (this.isOver) return;
    const obs = Float32Array.from(this.state);
    const { episode } = this;
    if (this.opponent) this.last = this.opponent.decide({ episode, obs, view: null, drawn: 0 });
    else {
      const direction = inputs.take(0.5);
      if (direction) this.last = direction > 0 ? 1 : 0;
      episode?.acted(obs, this.last, { by: "person" });
    }
    this.hear({ kind: "decision", obs, opponent: this.opponent });
    this.state = step(this.state, this.last);
    this.steps += 1;
    episode?.reward(1);
    const isDown = hasFallen(this.state);
    if (isDown || this.steps >= MAX_STEPS) {
      episode?.end(Float32Array.from(this.state), { truncated: !isDown, result: this.steps });
      this.episode = null;
      this.isOver = true;
      this.hear({ kind: "over", isMine: !isDown });
    }
  }

  /** Stops recording: the steps before the last decision, played with consent, are sent; nothing after them. */
  forget() {
    const { episode } = this;
    this.episode = null;
    episode?.cancel();
  }

  /** Called after an error: the person continues, unrecorded; returns the message for the person. */
  recover() {
    this.opponent = null;
    this.frameMs = 1000 / PEOPLE_HZ;
    this.forget();
    return "you continue this attempt, which is no longer recorded";
  }

  get isRecorded() {
    return this.episode !== null;
  }

  /** @param {CanvasRenderingContext2D} context @param {number} part @param {{dark: boolean}} how */
  draw(context, part, { dark }) {
    const { width, height } = context.canvas;
    const was = this.before;
    const is = this.state;
    const [position, angle] = [0, 2].map((at) => was[at] + (is[at] - was[at]) * part);
    const scale = width / (2.3 * MAX_POSITION);
    const x = width / 2 + position * scale;
    const floor = height * 0.78;
    context.fillStyle = dark ? "#101014" : "#f6f6f2";
    context.fillRect(0, 0, width, height);
    context.fillStyle = dark ? "#404048" : "#c8c8c4";
    context.fillRect(0, floor, width, Math.max(1, height / 200));
    for (const side of [-1, 1]) context.fillRect(width / 2 + side * MAX_POSITION * scale - 2, floor - 14, 4, 28);
    context.fillStyle = dark ? "#56b4e9" : "#0072b2";
    context.fillRect(x - 0.28 * scale, floor - 0.18 * scale, 0.56 * scale, 0.18 * scale);
    context.save();
    context.translate(x, floor - 0.18 * scale);
    context.rotate(angle);
    context.fillStyle = dark ? "#e69f00" : "#d55e00";
    context.fillRect(-0.035 * scale, -scale, 0.07 * scale, scale);
    context.restore();
  }
}
