/**
 * Rally: two paddles and a ball on integers, the same match in every language, bit for bit.
 *
 * The game of `understudy.games.rally` for pages and Node: the same names in camelCase, checked against the same vectors
 * by `tests/clients/test_rally_js.py`. A serve is an episode; it ends when the ball leaves on one side, a point for the
 * other. All numbers fit into 32 bits, and only +, -, * and shifts are used.
 */

/**
 * Everything that moves; whole numbers. `left` and `right` are the middles of the paddles of seat 0 and seat 1.
 * @typedef {{x: number, y: number, speedX: number, speedY: number, left: number, right: number}} Court
 */
/**
 * How well a scripted opponent plays: in how many of 256 decisions it acts at random, how far off it may aim, how near
 * the ball must be before it reacts, and how far off its paddle may be before it moves.
 * @typedef {{lapse: number, aim: number, reach: number, slack: number}} Skill
 */
/** @typedef {[number, number, number, number, number, number]} View what a seat sees, as whole numbers */

export const GAME = "rally";
export const WIDTH = 4096;
export const HEIGHT = 3072;
/** Half the ball's size, which extends a paddle's reach. */
export const BALL = 48;
/** Half a paddle's height. */
export const PADDLE = 320;
/** The distance of a paddle's face from its side of the court. */
export const FACE = 160;
export const PADDLE_SPEED = 44;
export const SERVE_SPEED = 40;
export const MAX_SPEED = 96;
/** How much a hit adds to the ball's horizontal speed. */
export const FASTER = 4;
/** A hit sets the ball's vertical speed to its distance from the paddle's middle, times this, divided by 32. */
export const STEEPER = 6;
export const MAX_STEEP = 72;
/** Frames per decision. */
export const FRAMES = 4;
/** A serve without a miss is truncated after this many decisions. */
export const MAX_DECISIONS = 600;
export const OBS_NAMES = Object.freeze([
  "ball x",
  "ball y",
  "ball speed x",
  "ball speed y",
  "own paddle",
  "other paddle",
]);
export const ACTION_NAMES = Object.freeze(["up", "stay", "down"]);
/** Divisors of a view's numbers; powers of two, so that an observation has the same bits in every language. */
export const SCALES = Object.freeze([2048, 2048, 64, 64, 2048, 2048]);

const GOLDEN = 0x9e3779b9;

// --- The game --------------------------------------------------------------------------------------------------------

/**
 * The court at the first frame of a serve, determined by the seed.
 * @param {number} seed
 * @returns {Court}
 */
export function serve(seed) {
  const drawn = mixed(seed);
  return {
    x: WIDTH / 2,
    y: HEIGHT / 2 + ((drawn >>> 1) & 1023) - 512,
    speedX: ((drawn & 1) * 2 - 1) * SERVE_SPEED,
    speedY: ((drawn >>> 11) & 63) - 32,
    left: HEIGHT / 2,
    right: HEIGHT / 2,
  };
}

/**
 * A 32-bit hash of a number, as an unsigned integer.
 * @param {number} number
 */
export function mixed(number) {
  let bits = number >>> 0;
  bits = Math.imul(bits ^ (bits >>> 16), 0x7feb352d) >>> 0;
  bits = Math.imul(bits ^ (bits >>> 15), 0x846ca68b) >>> 0;
  return (bits ^ (bits >>> 16)) >>> 0;
}

/**
 * The random bits of one decision of a serve, from the serve's seed and the decision's number.
 * @param {number} seed
 * @param {number} decision
 */
export function drawnAt(seed, decision) {
  return mixed(mixed(seed) + (Math.imul(decision + 1, GOLDEN) >>> 0));
}

/**
 * One decision of both seats (0 up, 1 stay, 2 down): the court after it, and the point.
 *
 * 1: seat 0 scored, -1: seat 1 scored, 0: the ball is in play. After a point nothing moves.
 * @param {Court} court
 * @param {number} left
 * @param {number} right
 * @returns {[Court, number]}
 */
export function step(court, left, right) {
  let after = court;
  for (let at = 0; at < FRAMES; at++) after = frame(after, left - 1, right - 1);
  return [after, point(after)];
}

/**
 * 1 when the ball has left on the right, -1 on the left, else 0.
 * @param {Court} court
 */
export function point(court) {
  return court.x > WIDTH ? 1 : court.x < 0 ? -1 : 0;
}

/**
 * The court one frame later; a move is -1, 0 or 1. A page may draw each of the four frames of a decision.
 * @param {Court} court
 * @param {number} leftMove
 * @param {number} rightMove
 * @returns {Court}
 */
export function frame(court, leftMove, rightMove) {
  if (point(court) !== 0) return court;
  const left = moved(court.left, leftMove);
  const right = moved(court.right, rightMove);
  let x = court.x + court.speedX;
  let y = court.y + court.speedY;
  let speedX = court.speedX;
  let speedY = court.speedY;
  // Off the upper and the lower wall.
  if (y < BALL) {
    y = 2 * BALL - y;
    speedY = -speedY;
  } else if (y > HEIGHT - BALL) {
    y = 2 * (HEIGHT - BALL) - y;
    speedY = -speedY;
  }
  // Off a paddle, in the frame in which the ball passes its face.
  const near = FACE + BALL;
  const far = WIDTH - FACE - BALL;
  const isHitLeft = court.x >= near && x < near && Math.abs(y - left) <= PADDLE + BALL;
  const isHitRight = court.x <= far && x > far && Math.abs(y - right) <= PADDLE + BALL;
  if (isHitLeft || isHitRight) {
    const speed = Math.min(Math.abs(court.speedX) + FASTER, MAX_SPEED);
    speedX = isHitLeft ? speed : -speed;
    speedY = between(((y - (isHitLeft ? left : right)) * STEEPER) >> 5, -MAX_STEEP, MAX_STEEP);
    x = 2 * (isHitLeft ? near : far) - x;
  }
  // Adding 0 turns -0, which a bounce may produce, into 0.
  return { x, y, speedX, speedY: speedY + 0, left, right };
}

/** @param {number} paddle @param {number} move */
function moved(paddle, move) {
  return between(paddle + move * PADDLE_SPEED, PADDLE, HEIGHT - PADDLE);
}

/** @param {number} value @param {number} low @param {number} high */
function between(value, low, high) {
  return Math.max(low, Math.min(high, value));
}

/**
 * A seat's view, mirrored so that it is always on the left; dividing by `SCALES` gives the observation exactly.
 * @param {Court} court
 * @param {number} seat
 * @returns {View}
 */
export function seen(court, seat) {
  const side = seat === 0 ? 1 : -1;
  const [own, other] = seat === 0 ? [court.left, court.right] : [court.right, court.left];
  return [
    (court.x - WIDTH / 2) * side + 0,
    court.y - HEIGHT / 2,
    court.speedX * side,
    court.speedY,
    own - HEIGHT / 2,
    other - HEIGHT / 2,
  ];
}

/**
 * The observation of a seat: the six numbers of the registered spec.
 * @param {Court} court
 * @param {number} seat
 */
export function observed(court, seat) {
  return Float32Array.from(seen(court, seat), (part, at) => part / SCALES[at]);
}

// --- Opponents -------------------------------------------------------------------------------------------------------

/** @type {Readonly<Record<string, Skill>>} */
export const SKILLS = Object.freeze({
  beginner: { lapse: 64, aim: 200, reach: 700, slack: 150 },
  casual: { lapse: 48, aim: 160, reach: 1000, slack: 130 },
  good: { lapse: 24, aim: 140, reach: 1500, slack: 100 },
  strong: { lapse: 8, aim: 100, reach: 5000, slack: 60 },
});

/**
 * A skill by its name.
 * @param {string} name
 */
export function skillOf(name) {
  if (!Object.hasOwn(SKILLS, name)) {
    throw new Error(`unknown skill ${JSON.stringify(name)}; use one of ${Object.keys(SKILLS).join(", ")}`);
  }
  return SKILLS[name];
}

/**
 * A scripted opponent's action for its view; `drawn` is 32 fresh random bits from `drawnAt`.
 * @param {View} view
 * @param {Skill} skill
 * @param {number} drawn
 */
export function scripted(view, skill, drawn) {
  const [x, y, speedX, , own] = view;
  if ((drawn & 255) < skill.lapse) return (drawn >>> 20) % 3;
  const off = ((((drawn >>> 8) & 1023) - 512) * skill.aim) >> 9;
  const isMinded = speedX < 0 && x + WIDTH / 2 < skill.reach;
  const away = (isMinded ? y + off : 0) - own;
  return away < -skill.slack ? 0 : away > skill.slack ? 2 : 1;
}

// --- The view --------------------------------------------------------------------------------------------------------

/**
 * The court on a canvas, whatever its size.
 * @param {CanvasRenderingContext2D} context
 * @param {Court} court
 * @param {{dark?: boolean}} [how]
 */
export function draw(context, court, { dark = false } = {}) {
  const { width, height } = context.canvas;
  const acrossX = width / WIDTH;
  const acrossY = height / HEIGHT;
  /** @param {number} x @param {number} y @param {number} halfX @param {number} halfY @param {string} colour */
  const fill = (x, y, halfX, halfY, colour) => {
    context.fillStyle = colour;
    context.fillRect((x - halfX) * acrossX, (y - halfY) * acrossY, 2 * halfX * acrossX, 2 * halfY * acrossY);
  };
  fill(WIDTH / 2, HEIGHT / 2, WIDTH / 2, HEIGHT / 2, dark ? "#101014" : "#f6f6f2");
  for (let y = 64; y < HEIGHT; y += 256) fill(WIDTH / 2, y + 64, 8, 64, dark ? "#404048" : "#c8c8c4");
  fill(FACE - 40, court.left, 40, PADDLE, dark ? "#56b4e9" : "#0072b2");
  fill(WIDTH - FACE + 40, court.right, 40, PADDLE, dark ? "#e69f00" : "#d55e00");
  context.fillStyle = dark ? "#f0f0f0" : "#202020";
  context.beginPath();
  context.ellipse(court.x * acrossX, court.y * acrossY, BALL * acrossX, BALL * acrossY, 0, 0, 2 * Math.PI);
  context.fill();
}
