// Runs Python's requests with rally.js; both must compute the same numbers.
import { readFileSync } from "node:fs";
import * as rally from "../../clients/js/rally.js";

const request = JSON.parse(readFileSync(0, "utf8"));
const court = ([x, y, speedX, speedY, left, right]) => ({ x, y, speedX, speedY, left, right });
const listed = (court) => [court.x, court.y, court.speedX, court.speedY, court.left, court.right];

const skillOf = ([lapse, aim, reach, slack]) => ({ lapse, aim, reach, slack });
function played({ seed, skills }) {
  let now = rally.serve(seed);
  for (let decision = 0; decision < rally.MAX_DECISIONS; decision++) {
    const drawn = [rally.drawnAt(seed, decision), rally.drawnAt(seed + 7, decision)];
    const chosen = [0, 1].map((seat) => rally.scripted(rally.seen(now, seat), skillOf(skills[seat]), drawn[seat]));
    const [after, point] = rally.step(now, chosen[0], chosen[1]);
    now = after;
    if (point !== 0) return { court: listed(now), point, decisions: decision + 1 };
  }
  return { court: listed(now), point: 0, decisions: rally.MAX_DECISIONS };
}

const signed = (numbers) => numbers.map((number) => (Object.is(number, -0) ? "-0" : number));
console.log(
  JSON.stringify({
    constants: Object.fromEntries(Object.entries(rally).filter(([, value]) => typeof value !== "function")),
    frames: (request.frames ?? []).map(([was, left, right]) => signed(listed(rally.frame(court(was), left, right)))),
    steps: (request.steps ?? []).map(([was, left, right]) => {
      const [now, point] = rally.step(court(was), left, right);
      return [...listed(now), point];
    }),
    views: (request.views ?? []).map(([was, seat]) => signed(rally.seen(court(was), seat))),
    observations: (request.views ?? []).map(([was, seat]) =>
      Buffer.from(rally.observed(court(was), seat).buffer).toString("hex"),
    ),
    serves: (request.seeds ?? []).map((seed) => listed(rally.serve(seed))),
    mixed: (request.seeds ?? []).map((seed) => rally.mixed(seed)),
    drawn: (request.decisions ?? []).map(([seed, decision]) => rally.drawnAt(seed, decision)),
    scripted: (request.scripted ?? []).map(([view, skill, drawn]) => rally.scripted(view, rally.SKILLS[skill], drawn)),
    matches: (request.matches ?? []).map(played),
  }),
);
