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

export class Panel {
  constructor() {
    this.noticeEnds = 0;
    this.thoughtAt = 0;
  }

  /** @param {string} text */
  notice(text) {
    const shown = element("notice");
    shown.textContent = text;
    shown.hidden = false;
    clearTimeout(this.noticeEnds);
    this.noticeEnds = setTimeout(() => (shown.hidden = true), NOTICE_MS);
  }

  /** @param {{score: string, words: string, opponent: {label: string} | null}} play @param {string} you */
  score(play, you) {
    element("score").textContent = play.score;
    element("you").textContent = you;
    element("court").setAttribute("aria-label", play.words);
  }

  /**
   * What lies over the court; nothing while the game runs.
   * @param {{message?: string, detail?: string, start?: string, quietly?: string}} what
   */
  overlay({ message = "", detail = "", start = "", quietly = "" }) {
    element("overlay").hidden = !message;
    element("message").textContent = message;
    element("detail").textContent = detail;
    for (const [id, text] of [["start", start], ["quietly", quietly]]) {
      element(id).textContent = text;
      element(id).hidden = !text;
    }
  }

  /** @param {import("./platform.js").Platform} platform @param {boolean} isRecording */
  stand(platform, isRecording) {
    const { recorded, acked, waiting, refused, dropped, keepShare } = platform.stats();
    const state = platform.state;
    element("state").dataset.state = state;
    // Read out when it changes; the count beside it is not.
    if (element("stand").textContent !== CHIPS[state]) element("stand").textContent = CHIPS[state];
    element("held").textContent = state === "offline" && waiting ? `, ${waiting} steps wait` : "";
    for (const [id, count] of [["recorded", recorded], ["acked", acked], ["waiting", waiting]]) {
      element(id).textContent = count.toLocaleString("en");
    }
    // Such as a page over plain http, where a browser cannot check who signed a bot.
    const { refusedBots, lastBotError } = platform.stats();
    if (!platform.bot && refusedBots) element("opponent-note").textContent = `No bot can play here: ${lastBotError}`;
    element("sending").textContent = this.#sending(platform, { state, isRecording, lost: refused + dropped, keepShare });
  }

  /** @param {import("./platform.js").Platform} platform @param {any} how */
  #sending(platform, { state, isRecording, lost, keepShare }) {
    const game = platform.invited.game;
    if (state === "alone") return `Nothing is recorded: this page has no key. Next: understudy play ${game} --web --data D`;
    if (state === "refused") {
      const why = platform.failure?.detail ?? platform.stats().stopped;
      return `Nothing more is sent: ${why} Next: understudy play ${game} --web --data D`;
    }
    if (!isRecording) return "Nothing is recorded.";
    if (!platform.game) return "The platform does not answer yet: what is played until then is not recorded.";
    if (state === "offline") return "The platform does not answer: play on, what waits is sent when it is back.";
    const left = lost ? ` ${lost} steps were not taken. ${platform.stats().lastError}` : "";
    return keepShare < 1 ? `The platform asks for ${Math.round(100 * keepShare)} % of the games just now.${left}` : left;
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
