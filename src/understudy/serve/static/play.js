/**
 * The play page: the loop of frames, and what its switches do.
 *
 *     inputs ─► match (or balance) ─► canvas
 *                   └► episodes of both seats ─► understudy.js ─► the platform, if the person wants that
 */

import { Balance } from "./cartpole.js";
import { Consent } from "./consent.js";
import { Inputs } from "./inputs.js";
import { Match, POINTS_TO_WIN } from "./match.js";
import { Choice, champion, model, script, skills } from "./opponents.js";
import { Panel, element, plain, write } from "./panel.js";
import { Platform, invitation, kept } from "./platform.js";

const MAX_FRAMES_BEHIND = 8;
const NEWEST_MODELS = 20;
const STAND_EVERY_MS = 250;
const ASKED = "If you like, what you and the bot do is sent to this platform under a random name and trains the next bot.";

const invited = invitation();
/** @type {any} */
const Play = invited.game === Balance.title ? Balance : Match;
const isRally = Play === Match;
const hasPage = [Match.title, Balance.title].includes(invited.game);
const canvas = element("court");
const context = canvas.getContext("2d", { alpha: false });
const dark = matchMedia("(prefers-color-scheme: dark)");
const panel = new Panel();
const platform = new Platform(invited, Play, () => castChanged());
const choice = new Choice((number) => platform.model(number));
const consent = new Consent({ key: invited.key, storage: kept, onChange: obey });

/** @typedef {"ready" | "playing" | "paused" | "over"} Phase */
/** @type {Phase} */
let phase = "ready";
let play = /** @type {any} */ (null);
let bot = "";

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
    try {
      play.frame(inputs);
    } catch (error) {
      stumble(error);
    }
  }
  paint();
}

/** Whatever went wrong, the person plays on; what was recorded of this serve ends here. @param {unknown} error */
function stumble(error) {
  console.error(error);
  const said = play.stumble();
  document.body.dataset.recording = "false";
  write("them", isRally ? play.opponent.label : "");
  panel.notice(`Something went wrong (${error instanceof Error ? error.message : error}): ${said}`);
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
      panel.thoughts(event.opponent.label, event.opponent.rank(event.obs), Play.actionNames);
    }
    if (isRally) return;
  }
  if (event.kind === "serve" || event.kind === "cast") write("them", isRally ? event.name : "");
  if (event.kind === "cast") {
    document.body.dataset.recording = String(event.isRecorded);
    if (!element("opponent-note").dataset.busy) write("opponent-note", "");
  }
  if (event.kind === "over") {
    change("over");
    panel.overlay({ message: play.summary, detail: next(), start: "Play again" });
    // Whoever is elsewhere on the page stays there.
    if (document.activeElement === canvas) element("start").focus({ preventScroll: true });
  }
  showScore();
}

function showScore() {
  if (play) panel.score(play, isRally ? "You" : (play.opponent?.label ?? "You"));
}

function next() {
  if (!consent.isGiven || !platform.game) return "";
  // Not all of it, where consent came late or the platform asks for a share.
  return `What was recorded of this ${isRally ? "match" : "attempt"} is on its way to the learner.`;
}

/** @param {Phase} to */
function change(to) {
  phase = to;
  document.body.dataset.phase = to;
  write("pause", to === "paused" ? "Go on" : "Pause");
  element("pause").disabled = to !== "playing" && to !== "paused";
}

/**
 * An episode of a seat; null where nothing is recorded. Both seats are the person's: forgetting them forgets both.
 * @type {import("./match.js").Record}
 */
function record(seat, facts) {
  return consent.isGiven && platform.game ? platform.game.episode({ seat, player: platform.player, ...facts }) : null;
}

function begin() {
  inputs.release();
  play = new Play({ opponent, record, hear });
  showScore();
  change("playing");
  uncover();
}

function pause() {
  inputs.release();
  if (phase === "playing") {
    change("paused");
    panel.overlay({ message: "Paused", start: "Go on" });
  } else if (phase === "paused") {
    change("playing");
    uncover();
  }
}

/** The court is free; the focus goes there only from a button that vanishes. */
function uncover() {
  const isGoing = document.activeElement === document.body || element("overlay").contains(document.activeElement);
  panel.overlay({});
  if (isGoing) canvas.focus({ preventScroll: true });
}

// --- Who plays --------------------------------------------------------------------------------------------------------

/** Who plays from the next serve on. */
function opponent() {
  const chosen = element("opponent").value;
  if (chosen === "you" || (!isRally && !platform.bot)) return null;
  if (chosen.startsWith("script ")) return script(chosen.slice(7));
  return choice.bot && chosen === `model ${choice.number}` ? model(choice.bot) : champion(platform);
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
  const none = isRally ? "no champion yet: casual script" : "no champion yet";
  list.replaceChildren(
    ...(isRally ? [] : [option("you", "you")]),
    option("champion", bot ? `champion ${bot}` : none, !isRally && !bot),
    ...group("older models", numbers.map((one) => option(`model ${one}`, `${invited.game}/${one}`))),
    ...group("scripts", isRally ? skills().map((skill) => option(`script ${skill}`, `${skill} script`)) : []),
  ); // prettier-ignore
  const isThere = Array.from(list.options).some((one) => one.value === before);
  list.value = isThere ? before : isRally ? "champion" : "you";
  if (list.value.startsWith("model ") && platform.game && !choice.number) choose();
  if (isRally && phase === "ready") write("them", opponent()?.label ?? "");
}

async function choose() {
  const chosen = element("opponent").value;
  const note = element("opponent-note");
  const turn = isRally ? "serve" : "attempt";
  delete note.dataset.busy;
  write("opponent-note", phase === "playing" ? `From the next ${turn} on.` : "");
  const number = chosen.startsWith("model ") ? Number(chosen.slice(6)) : 0;
  const name = `${invited.game}/${number}`;
  if (number && !(choice.bot && choice.number === number)) {
    note.dataset.busy = "yes";
    write("opponent-note", `Fetching ${name}; the champion plays until it is here.`);
  }
  try {
    const isMeant = await choice.take(number);
    if (isMeant && note.dataset.busy) write("opponent-note", `${name} is here; it plays from the next ${turn} on.`);
    if (isMeant) delete note.dataset.busy;
  } catch (error) {
    element("opponent").value = isRally ? "champion" : "you";
    stay(`${name} cannot play: ${plain(error)}.`);
  }
}

/** A note that stands until something else is chosen: whoever chose it wants to know. @param {string} text */
function stay(text) {
  element("opponent-note").dataset.busy = "yes";
  write("opponent-note", text);
}

// --- Consent ----------------------------------------------------------------------------------------------------------

/** What this tab, or another one, just said about recording. @param {boolean} isGiven */
function obey(isGiven) {
  if (!isGiven) play?.forget();
  showConsent();
  document.body.dataset.recording = String(Boolean(play?.isRecorded));
  panel.stand(platform, isGiven);
  if (phase === "ready" && hasPage) welcome();
}

/** Whether the welcome has to ask; not where nothing can be recorded, whatever is said. */
const isAsked = () => consent.isOpen && !platform.isShut;

function showConsent() {
  element("consent").checked = consent.isGiven && !platform.isShut;
  element("consent").disabled = platform.isShut;
}

let wasShut = platform.isShut;

function stand() {
  panel.stand(platform, consent.isGiven);
  if (platform.isShut === wasShut) return;
  wasShut = platform.isShut;
  showConsent();
  if (phase === "ready") welcome();
}

function welcome() {
  panel.overlay({
    message: isRally ? `Rally: first to ${POINTS_TO_WIN} points` : "Keep the pole upright",
    detail: isAsked() ? ASKED : "",
    start: isAsked() ? "Play and teach the bot" : "Play",
    quietly: isAsked() ? "Play, and record nothing" : "",
  });
}

/** Have the browser keep this page for a visit without the platform; one that cannot shows its own error then. */
function keepPage() {
  const rule = { createScriptURL: (/** @type {string} */ address) => address };
  const policy = /** @type {any} */ (globalThis).trustedTypes?.createPolicy("offline", rule) ?? rule;
  navigator.serviceWorker?.register(policy.createScriptURL("/static/offline.js"), { scope: "/play" }).catch(() => {});
}

// --- The page ---------------------------------------------------------------------------------------------------------

const inputs = new Inputs({
  canvas, minus: element("minus"), plus: element("plus"), keys: Play.keys, axis: Play.axis, follows: Play.follows,
  slack: Play.slack, reach: Play.reach, isOn: () => phase === "playing",
}); // prettier-ignore

element("start").addEventListener("click", () => {
  // Later the button says something else, even where the answer was taken out of the storage meanwhile.
  if (phase === "ready" && isAsked()) consent.say(true);
  if (phase === "paused") pause();
  else begin();
});
element("quietly").addEventListener("click", () => {
  consent.say(false);
  begin();
});
element("pause").addEventListener("click", pause);
element("opponent").addEventListener("change", choose);
element("consent").addEventListener("change", () => consent.say(element("consent").checked));
element("thinks").addEventListener("change", () => (element("thoughts").hidden = !element("thinks").checked));
document.addEventListener("keydown", (event) => {
  const isBusy = event.target instanceof Element && event.target.closest("select, input, button");
  if ((event.code !== "Space" && event.code !== "Escape" && event.code !== "KeyP") || event.repeat || isBusy) return;
  if (event.ctrlKey || event.metaKey || event.altKey) return;
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
showConsent();
listOpponents();
if (invited.bot && invited.bot !== "champion" && !/^[1-9]\d*$/.test(invited.bot)) {
  stay(`The address asks for bot ${invited.bot.slice(0, 20)}, which is no model's number: choose one here.`);
}
// Something to see behind the welcome; nobody plays it.
play = new Play({ opponent, record: () => null, hear: () => {} });
showScore();
change("ready");
new ResizeObserver(fit).observe(canvas);
if (hasPage) {
  welcome();
  setInterval(stand, STAND_EVERY_MS);
  stand();
  requestAnimationFrame((nowMs) => {
    lastMs = nowMs;
    tick(nowMs);
  });
  platform.connect();
  keepPage();
} else {
  panel.overlay({ message: `There is no page for ${invited.game}`, detail: `There are for ${Match.title} and ${Balance.title}.` });
}
