/**
 * The person's input: keys, buttons and touch, combined into one direction.
 *
 * A short tap counts for one decision even if it ended before the game read it.
 */

/** While one of these is down, browsers may not report the release of other keys. */
const MODIFIERS = ["Alt", "AltGraph", "Control", "Meta"];

export class Inputs {
  /**
   * @param {{canvas: HTMLCanvasElement, minus: HTMLElement, plus: HTMLElement, keys: Record<string, number>,
   *   axis: "x" | "y", follows: boolean, slack?: number, reach?: readonly number[], isOn?: () => boolean}} options
   *   `keys` maps key codes to -1 or 1; `follows`: a finger sets the target position, otherwise the side; `slack`: the
   *   distance from the target at which the paddle rests; `reach`: the range of positions; `isOn`: whether the game
   *   takes keys now
   */
  constructor({ canvas, minus, plus, keys, axis, follows, slack = 0, reach = [0, 1], isOn = () => true }) {
    this.keys = keys;
    this.follows = follows;
    this.axis = axis;
    this.slack = slack;
    this.reach = reach;
    this.isOn = isOn;
    /** @type {string[]} Held keys and buttons, the newest last. */
    this.held = [];
    this.tapped = 0;
    /** @type {number | null} The first pointer on the court; others are ignored. */
    this.pointer = null;
    /** @type {number | null} Where the finger is, from 0 to 1. */
    this.finger = null;
    /** @type {number | null} The finger's last position since the last decision, even if it was lifted since. */
    this.touched = null;
    document.addEventListener("keydown", (event) => this.#down(event));
    document.addEventListener("keyup", (event) => this.#up(event));
    window.addEventListener("blur", () => this.release());
    this.#button(minus, "minus", -1);
    this.#button(plus, "plus", 1);
    this.#touch(canvas);
    /** @type {Record<string, number>} */
    this.directions = { ...keys, minus: -1, plus: 1 };
  }

  /**
   * The direction of this decision: -1, 0 or 1.
   * @param {number} own the position of the person's paddle, from 0 to 1
   */
  take(own) {
    const tapped = this.tapped;
    const finger = this.finger ?? this.touched;
    this.tapped = 0;
    this.touched = null;
    if (finger !== null) {
      if (!this.follows) return finger < 0.5 ? -1 : 1;
      const [low, high] = this.reach;
      const away = Math.min(high, Math.max(low, finger)) - own;
      return Math.abs(away) <= this.slack ? 0 : Math.sign(away);
    }
    const newest = this.held.at(-1);
    return newest ? this.directions[newest] : tapped;
  }

  release() {
    this.held = [];
    this.tapped = 0;
    this.pointer = this.finger = this.touched = null;
  }

  /** @param {KeyboardEvent} event */
  #down(event) {
    const direction = this.keys[event.code];
    if (!direction || !this.isOn() || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.target instanceof Element && event.target.closest("select")) return;
    event.preventDefault();
    this.#hold(event.code, true, direction);
  }

  /** @param {KeyboardEvent} event */
  #up(event) {
    if (MODIFIERS.includes(event.key)) this.release();
    else if (this.keys[event.code]) this.#hold(event.code, false, 0);
  }

  /** @param {string} name @param {boolean} isDown @param {number} direction */
  #hold(name, isDown, direction) {
    if (isDown && this.held.includes(name)) return;
    this.held = this.held.filter((held) => held !== name);
    if (isDown) {
      this.held.push(name);
      this.tapped = direction;
    }
  }

  /** @param {HTMLElement} button @param {string} name @param {number} direction */
  #button(button, name, direction) {
    /** @type {number | null} */
    let pointer = null;
    button.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      event.preventDefault();
      // Replaces an earlier pointer: a pause may have released the button while that one was still down.
      pointer = event.pointerId;
      button.setPointerCapture(event.pointerId);
      this.#hold(name, true, direction);
    });
    for (const end of ["pointerup", "pointercancel", "lostpointercapture"]) {
      button.addEventListener(end, (event) => {
        if (/** @type {PointerEvent} */ (event).pointerId === pointer) this.#hold(name, false, direction);
      });
    }
    button.addEventListener("contextmenu", (event) => event.preventDefault());
    // Enter or an assistive device presses the button: one step.
    button.addEventListener("click", (event) => {
      if (event.detail === 0) this.tapped = direction;
    });
  }

  /** @param {HTMLCanvasElement} canvas */
  #touch(canvas) {
    /** @param {PointerEvent} event */
    const follow = (event) => {
      const box = canvas.getBoundingClientRect();
      const at = this.axis === "y" ? (event.clientY - box.top) / box.height : (event.clientX - box.left) / box.width;
      this.finger = this.touched = Math.min(1, Math.max(0, at));
    };
    canvas.addEventListener("pointerdown", (event) => {
      if (this.pointer !== null || !event.isPrimary || event.button !== 0) return;
      this.pointer = event.pointerId;
      canvas.setPointerCapture(event.pointerId);
      follow(event);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (event.pointerId === this.pointer) follow(event);
    });
    for (const end of ["pointerup", "pointercancel", "lostpointercapture"]) {
      canvas.addEventListener(end, (event) => {
        if (/** @type {PointerEvent} */ (event).pointerId === this.pointer) this.pointer = this.finger = null;
      });
    }
  }
}
