/**
 * The play page: the loop of frames, and what its switches do.
 *
 *     inputs ─► match (or balance) ─► canvas
 *                   └► episodes of both seats ─► understudy.js ─► the platform, if the person wants that
 */

import { Balance } from "./cartpole.js";
import { Inputs } from "./inputs.js";
import { Match, POINTS_TO_WIN } from "./match.js";
import { champion, older, script, skills } from "./opponents.js";
import { Panel, element } from "./panel.js";
import { Platform, invitation, kept } from "./platform.js";
import { ACTION_NAMES } from "./rally.js";

const MAX_FRAMES_BEHIND = 8;
const NEWEST_MODELS = 20;
const STAND_EVERY_MS = 250;
const ASKED = "If you like, what you and the bot do is sent to this platform under a random name and trains the next bot.";

const invited = invitation();
/** @type {any} */
const Play = invited.game === Balance.title ? Balance : Match;
const isRally = Play === Match;
const names = isRally ? ACTION_NAMES : Balance.buttons;
const canvas = element("court");
const context = canvas.getContext("2d", { alpha: false });
const dark = matchMedia("(prefers-color-scheme: dark)");
const panel = new Panel();
const platform = new Platform(invited, () => castChanged());

/** @type {"ready" | "playing" | "paused" | "over"} */
let phase = "ready";
let play = /** @type {any} */ (null);
let bot = "";
/** @type {{number: number, opponent: import("./opponents.js").Opponent} | null} */
let chosenModel = null;

// --- The loop ---------------------------------------------------------------------------------------------------------

let lastMs = 0;
let behindMs = 0;

/** @param {number} nowMs */
function tick(nowMs) {
  requestAnimationFrame(tick);
  behindMs += nowMs - lastMs;
  lastMs = nowMs;
  if (phase !== "playing") {
    behindMs = 0;
    return;
  }
  // A machine that cannot keep up plays slower; it does not jump.
  behindMs = Math.min(behindMs, MAX_FRAMES_BEHIND * play.frameMs);
  while (behindMs >= play.frameMs && phase === "playing") {
    behindMs -= play.frameMs;
    play.frame(inputs);
  }
  paint();
}

function paint() {
  if (play) play.draw(context, Math.min(1, behindMs / play.frameMs), { dark: dark.matches });
}

function fit() {
  const box = canvas.getBoundingClientRect();
  const size = [Math.round(box.width * devicePixelRatio), Math.round(box.height * devicePixelRatio)];
  if (canvas.width !== size[0] || canvas.height !== size[1]) [canvas.width, canvas.height] = size;
  paint();
}

// --- What happens in a match ------------------------------------------------------------------------------------------

/** @param {{kind: string, [fact: string]: any}} event */
function hear(event) {
  if (event.kind === "decision") {
    canvas.dataset.place = play.place.join(" ");
    if (element("thinks").checked && event.opponent) {
      panel.thoughts(event.opponent.label, event.opponent.rank(event.obs), names);
    }
    if (isRally) return;
  }
  if (event.kind === "serve" || event.kind === "cast") element("them").textContent = isRally ? event.name : "";
  if (event.kind === "cast") {
    document.body.dataset.recording = String(event.isRecorded);
    if (!element("opponent-note").dataset.busy) element("opponent-note").textContent = "";
  }
  if (event.kind === "over") {
    change("over");
    panel.overlay({ message: play.summary, detail: next(), start: "Play again" });
    element("start").focus({ preventScroll: true });
  }
  showScore();
}

function showScore() {
  if (play) panel.score(play, isRally ? "You" : (play.opponent?.label ?? "You"));
}

function next() {
  if (!isRecording() || !platform.game) return "";
  return isRally ? "Every serve of this match is on its way to the learner." : "This attempt is on its way to the learner.";
}

/** @param {typeof phase} to */
function change(to) {
  phase = to;
  document.body.dataset.phase = to;
  element("pause").textContent = to === "paused" ? "Go on" : "Pause";
  element("pause").disabled = to !== "playing" && to !== "paused";
}

/**
 * An episode of a seat; null where nothing is recorded. Both seats are the person's: forgetting them forgets both.
 * @type {import("./match.js").Record}
 */
function record(seat, facts) {
  return isRecording() && platform.game ? platform.game.episode({ seat, player: platform.player, ...facts }) : null;
}

function begin() {
  inputs.release();
  play = new Play({ opponent, record, hear });
  showScore();
  change("playing");
  panel.overlay({});
  canvas.focus({ preventScroll: true });
}

function pause() {
  if (phase === "playing") {
    change("paused");
    panel.overlay({ message: "Paused", start: "Go on" });
  } else if (phase === "paused") {
    change("playing");
    panel.overlay({});
    canvas.focus({ preventScroll: true });
  }
}

// --- Who plays --------------------------------------------------------------------------------------------------------

/** Who plays from the next serve on. */
function opponent() {
  const choice = element("opponent").value;
  if (choice === "you" || (!isRally && !platform.bot)) return null;
  if (choice.startsWith("script ")) return script(choice.slice(7));
  if (chosenModel && choice === `model ${chosenModel.number}`) return chosenModel.opponent;
  return champion(platform);
}

function castChanged() {
  const now = platform.bot;
  if (bot && now && now !== bot) panel.notice(`${now} is the new champion; it plays from the next ${isRally ? "serve" : "attempt"}`);
  else if (!bot && now && phase === "playing") panel.notice(`${now} is here; it plays from the next ${isRally ? "serve" : "attempt"}`);
  bot = now;
  document.body.dataset.bot = bot;
  listOpponents();
}

function listOpponents() {
  const list = element("opponent");
  const before = list.value || (invited.bot && invited.bot !== "champion" ? `model ${invited.bot}` : "");
  /** @param {string} value @param {string} text */
  const option = (value, text, disabled = false) => Object.assign(new Option(text, value), { disabled });
  /** @param {string} label @param {HTMLOptionElement[]} options */
  const group = (label, options) => {
    const made = Object.assign(document.createElement("optgroup"), { label });
    made.append(...options);
    return options.length ? [made] : [];
  };
  const number = platform.modelNo;
  const numbers = Array.from({ length: Math.min(Math.max(0, number - 1), NEWEST_MODELS) }, (_, at) => number - 1 - at);
  const asked = Number(before.replace("model ", ""));
  if (before.startsWith("model ") && asked > 0 && !numbers.includes(asked)) numbers.push(asked);
  const none = isRally ? "champion (none yet: a casual script)" : "champion (none yet)";
  list.replaceChildren(
    ...(isRally ? [] : [option("you", "you")]),
    option("champion", bot ? `champion ${bot}` : none, !isRally && !bot),
    ...group("older models", numbers.map((one) => option(`model ${one}`, `${invited.game}/${one}`))),
    ...group("scripts", isRally ? skills().map((skill) => option(`script ${skill}`, `${skill} script`)) : []),
  ); // prettier-ignore
  const isThere = Array.from(list.options).some((one) => one.value === before);
  list.value = isThere ? before : isRally ? "champion" : "you";
  if (list.value.startsWith("model ") && platform.game && chosenModel === null) choose();
  if (isRally && phase === "ready") element("them").textContent = opponent()?.label ?? "";
}

async function choose() {
  const choice = element("opponent").value;
  const note = element("opponent-note");
  const turn = isRally ? "serve" : "attempt";
  delete note.dataset.busy;
  note.textContent = phase === "playing" ? `From the next ${turn} on.` : "";
  const number = choice.startsWith("model ") ? Number(choice.slice(6)) : 0;
  if (!number || chosenModel?.number === number) return;
  const name = `${invited.game}/${number}`;
  note.dataset.busy = "yes";
  note.textContent = `Fetching ${name}; the champion plays until it is here.`;
  try {
    chosenModel = { number, opponent: older(await platform.model(number)) };
    note.textContent = `${name} is here; it plays from the next ${turn} on.`;
    delete note.dataset.busy;
  } catch (error) {
    note.textContent = `${name} cannot play: ${error instanceof Error ? error.message : error}. The champion does.`;
  }
}

// --- Consent ----------------------------------------------------------------------------------------------------------

const isRecording = () => kept.getItem("understudy.consent") === "on";

/** @param {boolean} isOn */
function consent(isOn) {
  kept.setItem("understudy.consent", isOn ? "on" : "off");
  element("consent").checked = isOn;
  if (!isOn) play?.forget();
  document.body.dataset.recording = String(Boolean(play?.isRecorded));
  panel.stand(platform, isOn);
}

/** Whether nobody has said yet what may happen with the games of this browser. */
const isAsked = () => kept.getItem("understudy.consent") === null && invited.key !== "";

function welcome() {
  panel.overlay({
    message: isRally ? `Rally: first to ${POINTS_TO_WIN} points` : "Keep the pole upright",
    detail: isAsked() ? ASKED : "",
    start: isAsked() ? "Play and teach the bot" : "Play",
    quietly: isAsked() ? "Play, and record nothing" : "",
  });
}

// --- The page ---------------------------------------------------------------------------------------------------------

const inputs = new Inputs({
  canvas, minus: element("minus"), plus: element("plus"), keys: Play.keys, axis: Play.axis, follows: Play.follows,
}); // prettier-ignore

element("start").addEventListener("click", () => {
  if (isAsked()) consent(true);
  if (phase === "paused") pause();
  else begin();
});
element("quietly").addEventListener("click", () => {
  consent(false);
  begin();
});
element("pause").addEventListener("click", pause);
element("opponent").addEventListener("change", choose);
element("consent").addEventListener("change", () => consent(element("consent").checked));
element("thinks").addEventListener("change", () => (element("thoughts").hidden = !element("thinks").checked));
document.addEventListener("keydown", (event) => {
  const isBusy = event.target instanceof Element && event.target.closest("select, input, button");
  if ((event.code !== "Space" && event.code !== "Escape" && event.code !== "KeyP") || event.repeat || isBusy) return;
  event.preventDefault();
  if (phase === "playing" || phase === "paused") pause();
  // Consent is given by pressing the button that says so, never by a key that merely starts.
  else if (event.code === "Space" && isAsked()) element("start").focus();
  else if (event.code === "Space" && !element("start").hidden) element("start").click();
});
document.addEventListener("visibilitychange", () => {
  if (document.hidden && phase === "playing") pause();
});
addEventListener("hashchange", () => location.reload());
dark.addEventListener("change", paint);

document.title = `understudy: ${Play.title}`;
document.body.dataset.game = Play.title;
element("title").textContent = Play.title;
element("keys").textContent = matchMedia("(any-pointer: coarse)").matches ? Play.touchHint : Play.hint;
// Steps would be read out without an end; the message at the end says how many there were.
if (!isRally) element("score").setAttribute("aria-live", "off");
element("whom").textContent = isRally ? "Play against" : "Who balances";
element("minus").setAttribute("aria-label", Play.buttons[0]);
element("plus").setAttribute("aria-label", Play.buttons[1]);
if (!isRally) [element("minus").textContent, element("plus").textContent] = ["◀", "▶"];
element("player").textContent = platform.player;
element("forget").textContent = `understudy data forget ${platform.player}`;
element("consent").checked = isRecording();
element("consent").disabled = !invited.key;
listOpponents();
// Something to see behind the welcome; nobody plays it.
play = new Play({ opponent, record: () => null, hear: () => {} });
showScore();
change("ready");
new ResizeObserver(fit).observe(canvas);
if ([Match.title, Balance.title].includes(invited.game)) {
  welcome();
  setInterval(() => panel.stand(platform, isRecording()), STAND_EVERY_MS);
  panel.stand(platform, isRecording());
  requestAnimationFrame((nowMs) => {
    lastMs = nowMs;
    tick(nowMs);
  });
  platform.connect();
} else {
  panel.overlay({ message: `There is no page for ${invited.game}`, detail: `There are for ${Match.title} and ${Balance.title}.` });
}
