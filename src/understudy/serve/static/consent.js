/**
 * Whether games of this browser may be recorded: asked anew by every deployment, obeyed by all of its tabs at once.
 */

import { sha256 } from "./understudy.js";

export class Consent {
  /**
   * @param {{key: string, storage: Pick<Storage, "getItem" | "setItem">, onChange: (isGiven: boolean) => void,
   *   page?: EventTarget}} how `key`: a deployment's key tells it from another at the same address
   */
  constructor({ key, storage, onChange, page = window }) {
    this.name = `understudy.consent.${sha256(new TextEncoder().encode(key)).slice(0, 16)}`;
    this.storage = storage;
    this.onChange = onChange;
    this.said = storage.getItem(this.name);
    // Another tab switched it; `pageshow`: this one slept meanwhile.
    page.addEventListener("storage", (event) => {
      const { key: name } = /** @type {StorageEvent} */ (event);
      if (name === this.name || name === null) this.#look();
    });
    page.addEventListener("pageshow", (event) => {
      if (/** @type {PageTransitionEvent} */ (event).persisted) this.#look();
    });
  }

  get isGiven() {
    return this.said === "on";
  }

  /** Whether nobody has said yet what may happen with the games of this browser. */
  get isOpen() {
    return this.said === null;
  }

  /** @param {boolean} isOn */
  say(isOn) {
    this.said = isOn ? "on" : "off";
    // First it is obeyed, then it is written down: there may be no room for that.
    this.onChange(isOn);
    try {
      this.storage.setItem(this.name, this.said);
    } catch {
      // An old "on" must not stay: then the next visit is asked again.
      this.#clear();
    }
  }

  #look() {
    const said = this.storage.getItem(this.name);
    if (said === this.said) return;
    this.said = said;
    this.onChange(this.isGiven);
  }

  #clear() {
    const storage = /** @type {Partial<Storage>} */ (this.storage);
    try {
      storage.removeItem?.(this.name);
    } catch {
      // What cannot be written is said again at the next visit.
    }
  }
}
