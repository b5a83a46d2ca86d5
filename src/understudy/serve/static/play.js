/**
 * The play page: the frame loop and the controls.
 *
 *     inputs ─► match (or balance) ─► canvas
 *                   └► episodes of both seats ─► understudy.js ─► the platform, with the person's consent
 */

import { Balance } from "./cartpole.js";
import { Consent } from "./consent.js";
import { Inputs } from "./inputs.js";
import { Match, POINTS_TO_WIN } from "./match.js";
import { Choice, champion, model, script, skills } from "./opponents.js";
import { Panel, element, plain, write } from "./panel.js";
import { Platform, invitation, browserStorage } from "./platform.js";

const MAX_FRAMES_BEHIND = 8;
const NEWEST_MODELS = 20;
const STATUS_EVERY_MS = 250;
const BOT_EVERY_MS = 5000;
const CONSENT_TEXT =
  "If you agree, what you and the bot do is sent to this platform under a random name and trains the next bot.";

const invited = invitation();
/** @type {any} */
const Play = invited.game === Balance.title ? Balance : Match;
const isRally = Play === Match;
const hasPage = [Match.title, Balance.title].includes(invited.game);
const canvas = element("court");
const context = canvas.getContext("2d", { alpha: false });
const dark = matchMedia("(prefers-color-scheme: dark)");
const panel = new Panel();
const platform = new Platform(invited, Play, () => onBotChanged());
const choice = new Choice((number) => platform.model(number));
const consent = new Consent({ key: invited.key, storage: browserStorage, onChange: onConsentChange });

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
  // A slow machine plays slower; it does not skip frames.
  behindMs = Math.min(behindMs, MAX_FRAMES_BEHIND * play.frameMs);
  while (behindMs >= play.frameMs && phase === "playing") {
    behindMs -= play.frameMs;
    try {
      play.frame(inputs);
    } catch (error) {
      recover(error);
    }
  }
  paint();
}

/** Continues the game after an error; recording of this serve stops. @param {unknown} error */
function recover(error) {
  console.error(error);
  const outcome = play.recover();
  document.body.dataset.recording = "false";
  write("them", isRally ? play.opponent.label : "");
  panel.notice(`Something went wrong (${error instanceof Error ? error.message : error}): ${outcome}`);
}

function paint() {
  if (play) play.draw(context, Math.min(1, behindMs / play.frameMs), { dark: dark.matches });
}

function fit() {
  const box = canvas.getBoundingClientRect();
  const width = Math.round(box.width * devicePixelRatio);
  const height = Math.round(box.height * devicePixelRatio);
  if (canvas.width !== width || canvas.height !== height) {
    canvas.width = width;
    canvas.height = height;
  }
  paint();
}

// --- Events of a match ------------------------------------------------------------------------------------------------

/** @param {{kind: string, [fact: string]: any}} event */
function onEvent(event) {
  if (event.kind === "decision") {
    canvas.dataset.place = play.place.join(" ");
    if (element("thinks").checked && event.opponent) {
      panel.thoughts(event.opponent.label, event.opponent.rank(event.obs), Play.actionNames);
    }
    if (isRally) return;
  }
  if (event.kind === "serve" || event.kind === "opponent") write("them", isRally ? event.name : "");
  if (event.kind === "opponent") {
    document.body.dataset.recording = String(event.isRecorded);
    if (!element("opponent-note").dataset.busy) write("opponent-note", "");
  }
  if (event.kind === "over") {
    showStatus(); // the counts include the last steps of the match
    change("over");
    panel.overlay({ message: play.summary, detail: nextStep(), start: "Play again" });
    // Focus elsewhere on the page is left alone.
    if (document.activeElement === canvas) element("start").focus({ preventScroll: true });
  }
  showScore();
}

function showScore() {
  if (play) panel.score(play, isRally ? "You" : (play.opponent?.label ?? "You"));
}

function nextStep() {
  if (!consent.isGiven || !platform.game) return "";
  // Perhaps not all of it was recorded: consent may have come late, and the recording rate may be below 1.
  return `The recorded part of this ${isRally ? "match" : "attempt"} is being sent to the learner.`;
}

/** @param {Phase} to */
function change(to) {
  phase = to;
  document.body.dataset.phase = to;
  write("pause", to === "paused" ? "Resume" : "Pause");
  element("pause").disabled = to !== "playing" && to !== "paused";
}

/**
 * Starts an episode of a seat; null when not recording. Both seats belong to the person, so erasing them erases both.
 * @type {import("./match.js").Record}
 */
function record(seat, facts) {
  return consent.isGiven && platform.game ? platform.game.episode({ seat, player: platform.player, ...facts }) : null;
}

function begin() {
  inputs.release();
  play = new Play({ opponent, record, hear: onEvent });
  showScore();
  change("playing");
  hideOverlay();
}

function pause() {
  inputs.release();
  if (phase === "playing") {
    change("paused");
    panel.overlay({ message: "Paused", start: "Resume" });
  } else if (phase === "paused") {
    change("playing");
    hideOverlay();
  }
}

/** Hides the overlay; moves the focus to the court if it was on a button of the overlay. */
function hideOverlay() {
  const hadFocus = document.activeElement === document.body || element("overlay").contains(document.activeElement);
  panel.overlay({});
  if (hadFocus) canvas.focus({ preventScroll: true });
}

// --- The opponent -----------------------------------------------------------------------------------------------------

/** The opponent from the next serve on. */
function opponent() {
  const chosen = element("opponent").value;
  if (chosen === "you" || (!isRally && !platform.bot)) return null;
  if (chosen.startsWith("script ")) return script(chosen.slice(7));
  return choice.bot && chosen === `model ${choice.number}` ? model(choice.bot) : champion(platform);
}

function onBotChanged() {
  const newest = platform.bot;
  const turn = isRally ? "serve" : "attempt";
  if (bot && newest && newest !== bot) panel.notice(`${newest} is the new champion; it plays from the next ${turn}`);
  else if (!bot && newest && phase === "playing") panel.notice(`${newest} is ready; it plays from the next ${turn}`);
  bot = newest;
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
    const optgroup = Object.assign(document.createElement("optgroup"), { label });
    optgroup.append(...options);
    return options.length ? [optgroup] : [];
  };
  const number = platform.modelNo;
  const numbers = Array.from({ length: Math.min(Math.max(0, number - 1), NEWEST_MODELS) }, (_, at) => number - 1 - at);
  const requested = Number(before.replace("model ", ""));
  if (before.startsWith("model ") && requested > 0 && !numbers.includes(requested)) numbers.push(requested);
  const none = isRally ? "no champion yet: casual script" : "no champion yet";
  list.replaceChildren(
    ...(isRally ? [] : [option("you", "you")]),
    option("champion", bot ? `champion ${bot}` : none, !isRally && !bot),
    ...group("older models", numbers.map((modelNo) => option(`model ${modelNo}`, `${invited.game}/${modelNo}`))),
    ...group("scripts", isRally ? skills().map((skill) => option(`script ${skill}`, `${skill} script`)) : []),
  ); // prettier-ignore
  const isListed = Array.from(list.options).some((entry) => entry.value === before);
  list.value = isListed ? before : isRally ? "champion" : "you";
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
    write("opponent-note", `Fetching ${name}; the champion plays until it is ready.`);
  }
  try {
    const isCurrent = await choice.take(number);
    if (isCurrent && note.dataset.busy) write("opponent-note", `${name} is ready; it plays from the next ${turn} on.`);
    if (isCurrent) delete note.dataset.busy;
  } catch (error) {
    element("opponent").value = isRally ? "champion" : "you";
    pinNote(`${name} cannot play: ${plain(error)}.`);
  }
}

/** Shows a note until the person chooses something else. @param {string} text */
function pinNote(text) {
  element("opponent-note").dataset.busy = "yes";
  write("opponent-note", text);
}

// --- Consent ----------------------------------------------------------------------------------------------------------

/** Consent changed in this tab or another one. @param {boolean} isGiven */
function onConsentChange(isGiven) {
  if (!isGiven) play?.forget();
  showConsent();
  document.body.dataset.recording = String(Boolean(play?.isRecorded));
  panel.showStatus(platform, isGiven);
  if (phase === "ready" && hasPage) welcome();
}

/** Whether the welcome must ask for consent; not when nothing can be recorded anyway. */
const mustAskConsent = () => consent.isOpen && !platform.isBlocked;

function showConsent() {
  element("consent").checked = consent.isGiven && !platform.isBlocked;
  element("consent").disabled = platform.isBlocked;
}

let wasBlocked = platform.isBlocked;

function showStatus() {
  panel.showStatus(platform, consent.isGiven);
  if (platform.isBlocked === wasBlocked) return;
  wasBlocked = platform.isBlocked;
  showConsent();
  if (phase === "ready") welcome();
}

function welcome() {
  panel.overlay({
    message: isRally ? `Rally: first to ${POINTS_TO_WIN} points` : "Keep the pole upright",
    detail: mustAskConsent() ? CONSENT_TEXT : "",
    start: mustAskConsent() ? "Play and teach the bot" : "Play",
    quietly: mustAskConsent() ? "Play, and record nothing" : "",
  });
}

/** Registers the service worker that caches this page for offline visits, where the browser supports it. */
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
  // Only the welcome's button mentions consent; in later phases the same button does not grant it.
  if (phase === "ready" && mustAskConsent()) consent.set(true);
  if (phase === "paused") pause();
  else begin();
});
element("quietly").addEventListener("click", () => {
  consent.set(false);
  begin();
});
element("pause").addEventListener("click", pause);
element("opponent").addEventListener("change", choose);
element("consent").addEventListener("change", () => consent.set(element("consent").checked));
element("thinks").addEventListener("change", () => (element("thoughts").hidden = !element("thinks").checked));
document.addEventListener("keydown", (event) => {
  const isBusy = event.target instanceof Element && event.target.closest("select, input, button");
  if ((event.code !== "Space" && event.code !== "Escape" && event.code !== "KeyP") || event.repeat || isBusy) return;
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  if (phase === "playing" || phase === "paused") pause();
  // Consent is given only by the button that says so, never by a key that starts the game.
  else if (event.code === "Space" && mustAskConsent()) element("start").focus();
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
// Screen readers would announce every step; the final message reports the count.
if (!isRally) element("score").setAttribute("aria-live", "off");
element("whom").textContent = isRally ? "Play against" : "Who balances";
element("minus").setAttribute("aria-label", Play.buttons[0]);
element("plus").setAttribute("aria-label", Play.buttons[1]);
if (!isRally) {
  element("minus").textContent = "◀";
  element("plus").textContent = "▶";
}
element("player").textContent = platform.player;
element("forget").textContent = `understudy data forget ${platform.player}`;
showConsent();
listOpponents();
if (invited.bot && invited.bot !== "champion" && !/^[1-9]\d*$/.test(invited.bot)) {
  pinNote(`The address names bot ${invited.bot.slice(0, 20)}, which is not a model number: choose one here.`);
}
// A still picture behind the welcome.
play = new Play({ opponent, record: () => null, hear: () => {} });
showScore();
change("ready");
new ResizeObserver(fit).observe(canvas);
if (hasPage) {
  welcome();
  setInterval(showStatus, STATUS_EVERY_MS);
  showStatus();
  requestAnimationFrame((nowMs) => {
    lastMs = nowMs;
    tick(nowMs);
  });
  platform.connect().then(() => platform.lookForBot());
  setInterval(() => platform.lookForBot(), BOT_EVERY_MS);
  keepPage();
} else {
  const detail = `There are pages for ${Match.title} and ${Balance.title}.`;
  panel.overlay({ message: `There is no page for ${invited.game}`, detail });
}
