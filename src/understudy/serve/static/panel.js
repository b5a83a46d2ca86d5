/**
 * Everything on the page that is no court: score, state, counts, notices, the bot's thoughts.
 */

const NOTICE_MS = 6000;
const THOUGHTS_EVERY_MS = 200;
const CHIPS = {
  alone: "not connected", connecting: "connecting", connected: "connected", offline: "offline", refused: "not allowed",
}; // prettier-ignore

/** @param {string} id @returns {any} */
export const element = (id) => document.getElementById(id);

/** Write only what has changed: a reader would say it again. @param {string} id @param {string} text */
export function write(id, text) {
  const found = element(id);
  if (found.textContent !== text) found.textContent = text;
}

/**
 * What an error says, without its code, who answered, and what somebody at a command line could do about it.
 * @param {any} error an error, or its message
 */
export function plain(error) {
  const text = String(error?.message ?? error).replace(/^[a-z_]+: /, "");
  return text.replace(/ \(\S+ answered \d+\)$/, "").replace(/(; .*|\.)$/s, "");
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
   * What lies over the court; nothing while the game runs.
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
  stand(platform, isRecording) {
    const { recorded, acked, waiting, refused, dropped, keepShare } = platform.stats();
    const state = platform.state;
    element("state").dataset.state = state;
    // Read out when it changes; the count beside it is not.
    write("stand", CHIPS[state]);
    write("held", state === "offline" && waiting ? `, ${waiting} steps wait` : "");
    for (const [id, count] of [["recorded", recorded], ["acked", acked], ["waiting", waiting]]) {
      write(String(id), count.toLocaleString("en"));
    }
    this.#botless(platform);
    write("sending", sending(platform, { state, isRecording, lost: refused + dropped, keepShare }));
  }

  /**
   * Why there is no bot, such as a page over plain http, where a browser cannot check who signed one. Once, and left
   * standing until something else is chosen: a reader would say it again.
   * @param {import("./platform.js").Platform} platform
   */
  #botless(platform) {
    const { refusedBots, lastBotError } = platform.stats();
    const text = !platform.bot && refusedBots ? `No bot can play here: ${lastBotError}` : "";
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
   * @param {string} who
   * @param {import("./opponents.js").Ranked[] | null} ranked best first
   * @param {readonly string[]} names
   */
  thoughts(who, ranked, names) {
    const now = performance.now();
    if (now - this.thoughtAt < THOUGHTS_EVERY_MS) return;
    this.thoughtAt = now;
    const isRanked = Boolean(ranked?.length);
    element("thinker").textContent = isRanked ? `${who}, for what it does now` : `${who} follows rules and ranks nothing.`;
    element("thoughts").querySelector("thead").hidden = !isRanked;
    const best = ranked?.[0];
    const isValue = best?.value !== null && best?.value !== undefined;
    element("measure").textContent = isValue ? "value" : "chance";
    const values = (ranked ?? []).map((one) => Number(isValue ? one.value : one.probability));
    const [low, high] = isValue ? [Math.min(-1, ...values), Math.max(1, ...values)] : [0, 1];
    const rows = (ranked ?? []).map((one, at) => ({ ...one, rank: at + 1, shown: values[at] }));
    // In the order of the actions: rows that change places at every decision cannot be read.
    rows.sort((one, other) => one.action - other.action);
    element("thoughts").querySelector("tbody").replaceChildren(...rows.map((one) => {
      const row = document.createElement("tr");
      row.className = one.rank === 1 ? "best" : "";
      for (const text of [one.rank, names[one.action] ?? one.name, one.shown.toFixed(isValue ? 3 : 2)]) {
        row.insertCell().textContent = String(text);
      }
      const bar = document.createElement("div");
      bar.className = "bar";
      bar.style.width = `${(100 * (one.shown - low)) / (high - low)}%`;
      const cell = row.insertCell();
      cell.setAttribute("aria-hidden", "true");
      cell.append(bar);
      return row;
    })); // prettier-ignore
  }
}

/**
 * What becomes of the steps, in words; nothing to say while all is well.
 * @param {import("./platform.js").Platform} platform
 * @param {any} how
 */
export function sending(platform, { state, isRecording, lost, keepShare }) {
  const { game } = platform.invited;
  const next = `Next: understudy play ${game} --web --data D`;
  const { stopped, badInputs, lastError, lastFollowError } = platform.stats();
  if (state === "alone") return `Nothing is recorded: this page has no key. ${next}`;
  if (platform.failure?.code === "wrong_shape") {
    return `Nothing is recorded: ${platform.failure.detail} Next: another data folder, or another name for that game.`;
  }
  if (state === "refused") {
    const why = plain((platform.failure?.detail ?? stopped) || lastFollowError);
    return `${platform.isShut ? "Nothing is recorded" : "Nothing more is sent"}: ${why}. ${next}`;
  }
  if (!isRecording) return "Nothing is recorded.";
  if (!platform.game) return "The platform does not answer yet: what is played until then is not recorded.";
  if (state === "offline") return "The platform does not answer: play on, what waits is sent when it is back.";
  return [
    keepShare < 1 ? `The platform asks for ${Math.round(100 * keepShare)} % of the games just now.` : "",
    lost ? `${lost} steps were not taken. ${lastError}` : "",
    badInputs ? `${badInputs} times what was played did not fit the game as the platform knows it, and was left out.` : "",
  ].filter(Boolean).join(" "); // prettier-ignore
}
