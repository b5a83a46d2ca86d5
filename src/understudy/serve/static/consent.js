/**
 * The person's consent to recording: stored per deployment in this browser, and effective in all of its tabs at once.
 */

import { sha256 } from "./understudy.js";

export class Consent {
  /**
   * @param {{key: string, storage: Pick<Storage, "getItem" | "setItem">, onChange: (isGiven: boolean) => void,
   *   page?: EventTarget}} options `key` distinguishes deployments at the same address
   */
  constructor({ key, storage, onChange, page = window }) {
    this.name = `understudy.consent.${sha256(new TextEncoder().encode(key)).slice(0, 16)}`;
    this.storage = storage;
    this.onChange = onChange;
    this.answer = storage.getItem(this.name);
    // `storage`: another tab changed it; `pageshow`: this tab was in the back/forward cache.
    page.addEventListener("storage", (event) => {
      const { key: name } = /** @type {StorageEvent} */ (event);
      if (name === this.name || name === null) this.#look();
    });
    page.addEventListener("pageshow", (event) => {
      if (/** @type {PageTransitionEvent} */ (event).persisted) this.#look();
    });
  }

  get isGiven() {
    return this.answer === "on";
  }

  /** Whether the person has not answered yet. */
  get isOpen() {
    return this.answer === null;
  }

  /** @param {boolean} isOn */
  set(isOn) {
    this.answer = isOn ? "on" : "off";
    // Takes effect before it is stored, because the storage may be full.
    this.onChange(isOn);
    try {
      this.storage.setItem(this.name, this.answer);
    } catch {
      // A stored "on" must not remain: the next visit asks again.
      this.#clear();
    }
  }

  #look() {
    const answer = this.storage.getItem(this.name);
    if (answer === this.answer) return;
    this.answer = answer;
    this.onChange(this.isGiven);
  }

  #clear() {
    const storage = /** @type {Partial<Storage>} */ (this.storage);
    try {
      storage.removeItem?.(this.name);
    } catch {
      // The next visit asks again.
    }
  }
}
