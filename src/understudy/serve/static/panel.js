/**
 * Everything on the page besides the court: score, state, counts, notices, the bot's ranked actions.
 */

const STEPS_SHOWN = 50;
const NOTICE_MS = 6000;
const THOUGHTS_EVERY_MS = 200;
const CHIPS = {
  alone: "not connected", connecting: "connecting", connected: "connected", offline: "offline", refused: "not allowed",
}; // prettier-ignore

/** @param {string} id @returns {any} */
export const element = (id) => document.getElementById(id);

/** Writes text only if it changed: screen readers announce every write. @param {string} id @param {string} text */
export function write(id, text) {
  const node = element(id);
  if (node.textContent !== text) node.textContent = text;
}

/**
 * An error's message without its code, the server's address and the advice for a command line.
 * @param {any} error an error, or its message
 */
export function plain(error) {
  const text = String(error?.message ?? error).replace(/^[a-z_]+: /, "");
  return text.replace(/ \(\S+ answered \d+\)$/, "").replace(/(; .*|\.)$/s, "");
}

/**
 * Why there is no bot: the page has plain http, where browsers cannot verify signatures, or the first bot still needs
 * steps; their number is rounded, so that it does not change with every step.
 * @param {Pick<import("./platform.js").Platform, "bot" | "missingSteps" | "stats">} platform
 */
export function whyNoBot(platform) {
  const { refusedBots, lastBotError } = platform.stats();
  if (platform.bot) return "";
  if (refusedBots) return `No bot can play here: ${lastBotError}`;
  if (platform.missingSteps === null) return "";
  if (platform.missingSteps === 0) return "No bot yet: the first one is being trained.";
  const steps = STEPS_SHOWN * Math.ceil(platform.missingSteps / STEPS_SHOWN);
  return `No bot yet: the first one needs about ${steps.toLocaleString("en")} more steps of people who agree.`;
}

export class Panel {
  constructor() {
    this.noBot = "";
    this.noticeEnds = 0;
    this.thoughtAt = 0;
  }

  /** @param {string} text */
  notice(text) {
    const shown = element("notice");
    shown.textContent = text;
    shown.hidden = false;
    write("said", text);
    clearTimeout(this.noticeEnds);
    this.noticeEnds = setTimeout(() => (shown.hidden = true), NOTICE_MS);
  }

  /** @param {{score: string, words: string, opponent: {label: string} | null}} play @param {string} you */
  score(play, you) {
    write("score", play.score);
    write("you", you);
    if (element("court").getAttribute("aria-label") !== play.words) element("court").setAttribute("aria-label", play.words);
  }

  /**
   * Shows a message over the court; without one the overlay is hidden.
   * @param {{message?: string, detail?: string, start?: string, quietly?: string}} what
   */
  overlay({ message = "", detail = "", start = "", quietly = "" }) {
    const isNew = element("message").textContent !== message;
    element("overlay").hidden = !message;
    write("message", message);
    write("detail", detail);
    if (isNew) write("said", [message, detail].filter(Boolean).join(/[.!?]$/.test(message) ? " " : ". "));
    for (const [id, text] of [["start", start], ["quietly", quietly]]) {
      write(id, text);
      element(id).hidden = !text;
    }
  }

  /** @param {import("./platform.js").Platform} platform @param {boolean} isRecording */
  showStatus(platform, isRecording) {
    const { recorded, acked, waiting, refused, dropped, recordingRate } = platform.stats();
    const state = platform.state;
    element("state").dataset.state = state;
    // Announced by screen readers when it changes; the count beside it is not.
    write("stand", CHIPS[state]);
    write("held", state === "offline" && waiting ? `, ${waiting} steps wait` : "");
    for (const [id, count] of [["recorded", recorded], ["acked", acked], ["waiting", waiting]]) {
      write(String(id), count.toLocaleString("en"));
    }
    this.#botless(platform);
    write("sending", sending(platform, { state, isRecording, lost: refused + dropped, recordingRate }));
  }

  /**
   * Shows why there is no bot. Written once, until something else is chosen: screen readers announce every write.
   * @param {import("./platform.js").Platform} platform
   */
  #botless(platform) {
    const text = whyNoBot(platform);
    if (text === this.noBot) return;
    const note = element("opponent-note");
    if (text || note.textContent === this.noBot) {
      write("opponent-note", text);
      if (text) note.dataset.busy = "yes";
      else delete note.dataset.busy;
    }
    this.noBot = text;
  }

  /**
   * The bot's ranked actions.
   * @param {string} name
   * @param {import("./opponents.js").Ranked[] | null} ranked best first
   * @param {readonly string[]} names
   */
  thoughts(name, ranked, names) {
    const now = performance.now();
    if (now - this.thoughtAt < THOUGHTS_EVERY_MS) return;
    this.thoughtAt = now;
    const isRanked = Boolean(ranked?.length);
    const ranking = `${name}, for its current decision`;
    element("thinker").textContent = isRanked ? ranking : `${name} follows fixed rules and does not rank actions.`;
    element("thoughts").querySelector("thead").hidden = !isRanked;
    const best = ranked?.[0];
    const isValue = best?.value !== null && best?.value !== undefined;
    element("measure").textContent = isValue ? "value" : "chance";
    const values = (ranked ?? []).map((entry) => Number(isValue ? entry.value : entry.probability));
    const [low, high] = isValue ? [Math.min(-1, ...values), Math.max(1, ...values)] : [0, 1];
    const entries = (ranked ?? []).map((entry, at) => ({ ...entry, rank: at + 1, shown: values[at] }));
    // In the order of the actions: rows that swap at every decision are unreadable.
    entries.sort((left, right) => left.action - right.action);
    element("thoughts").querySelector("tbody").replaceChildren(...entries.map((entry) => {
      const row = document.createElement("tr");
      row.className = entry.rank === 1 ? "best" : "";
      for (const text of [entry.rank, names[entry.action] ?? entry.name, entry.shown.toFixed(isValue ? 3 : 2)]) {
        row.insertCell().textContent = String(text);
      }
      const bar = document.createElement("div");
      bar.className = "bar";
      bar.style.width = `${(100 * (entry.shown - low)) / (high - low)}%`;
      const cell = row.insertCell();
      cell.setAttribute("aria-hidden", "true");
      cell.append(bar);
      return row;
    })); // prettier-ignore
  }
}

/**
 * A sentence about recording and sending; empty while there is nothing to report.
 * @param {import("./platform.js").Platform} platform
 * @param {any} how
 */
export function sending(platform, { state, isRecording, lost, recordingRate }) {
  const { game } = platform.invited;
  const next = `Next: understudy play ${game} --web --data D`;
  const { stopped, badInputs, lastError, lastFollowError } = platform.stats();
  if (state === "alone") return `Nothing is recorded: this page has no key. ${next}`;
  if (platform.failure?.code === "wrong_shape") {
    return `Nothing is recorded: ${platform.failure.detail} Next: use another data folder, or another name for that game.`;
  }
  if (state === "refused") {
    const why = plain((platform.failure?.detail ?? stopped) || lastFollowError);
    return `${platform.isBlocked ? "Nothing is recorded" : "Nothing more is sent"}: ${why}. ${next}`;
  }
  if (!isRecording) return "Nothing is recorded.";
  if (!platform.game) return "The platform does not respond yet: nothing is recorded until it does.";
  if (state === "offline") return "The platform does not respond: keep playing, waiting steps are sent when it is back.";
  return [
    recordingRate < 1 ? `The platform currently records ${Math.round(100 * recordingRate)} % of the games.` : "",
    lost ? `${lost} steps were rejected or dropped. ${lastError}` : "",
    badInputs ? `${badInputs} inputs did not match the platform's spec of this game and were not recorded.` : "",
  ].filter(Boolean).join(" "); // prettier-ignore
}
