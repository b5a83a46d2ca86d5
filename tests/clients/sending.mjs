// The sender with late, bad and missing responses; each scenario prints what it observed.
import { createServer } from "node:http";
import { setFlagsFromString } from "node:v8";
import { runInNewContext } from "node:vm";
import { connect } from "../../clients/js/understudy.js";
import { storage } from "./storage.mjs";

const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
const answer = (status, body) => new Response(status === 204 ? null : JSON.stringify(body), { status });
const failure = (status, code, retry_after_s = null) =>
  answer(status, { error: { code, detail: "as requested", retry_after_s } });
const ACCEPTED = { accepted: true, refused: null, retry_after_s: 0, error: "" };

/** Kind and number of each frame of a batch. */
function framesOf(raw) {
  const [bytes, frames] = [Buffer.from(raw), []];
  for (let at = 8 + bytes.readUInt32LE(4); at < bytes.length; at += 64 + bytes.readUInt32LE(at + 8)) {
    frames.push({ kind: bytes[at + 5], chunkNo: Number(bytes.readBigUInt64LE(at + 32)) });
  }
  return frames;
}

const frameNames = (stored) => [...stored.items.keys()].filter((key) => key.includes("/frame/"));

/** A gateway whose response to the n-th batch is `reply(frames, n)`; null: all frames accepted. */
function fakeGateway(reply = () => null) {
  const log = { batches: [], atMs: [], puts: 0, ended: "" };
  log.fetch = async (url, { method, body, signal, headers }) => {
    if (headers.Authorization === `Bearer ${log.ended}`) return failure(401, "revoked_key");
    if (method === "PUT")
      return ((log.puts += 1), log.isDown ? Promise.reject(new TypeError("down")) : answer(200, {}));
    if (url.includes("/bot")) {
      while (!signal.aborted) await sleep(2);
      throw new TypeError("aborted");
    }
    if (log.isDown) throw new TypeError("down");
    const frames = framesOf(body);
    log.batches.push(Buffer.from(body).toString("hex"));
    log.atMs.push(performance.now());
    return (
      (await reply(frames, log.batches.length)) ?? answer(200, { acks: frames.map(() => ACCEPTED), recording_rate: 1 })
    );
  };
  return log;
}

const opened = (log, more = {}) =>
  connect("test", {
    url: "http://127.0.0.1:1",
    key: "uk_x",
    obs: 3,
    actions: 4,
    fetch: log.fetch,
    consent: "granted",
    lingerS: 0.01,
    player: "ada",
    random: () => 0.01,
    ...more,
  });

function played(game, steps = 5) {
  const episode = game.episode();
  for (let at = 0; at < steps; at++) {
    episode.acted([at, 0, 1], at % 4);
    episode.reward(1);
  }
  episode.end([0, 0, 0]);
}

async function done(game, log, more = {}) {
  const isAll = await game.close(10);
  const { batches, atMs, puts } = log;
  return {
    isAll,
    stats: game.stats(),
    batches,
    frames: batches.map((raw) => framesOf(Buffer.from(raw, "hex"))),
    waits: atMs.slice(1).map((ms, at) => ms - atMs[at]),
    puts,
    ...more,
  };
}

const scenarios = {
  /** Programs that end while the gateway is down, without a storage and with one. Runs first: it warns only once. */
  async unsent() {
    const warnings = [];
    const { warn } = console;
    const isAll = [];
    console.warn = (text) => warnings.push(text);
    for (const stored of [null, storage()]) {
      const log = fakeGateway();
      const game = await opened(log, { storage: stored });
      log.isDown = true;
      played(game);
      isAll.push([await game.flush(0.05), await game.close(0.05)]);
    }
    console.warn = warn;
    return { warnings, isAll };
  },
  async later() {
    const log = fakeGateway((_, n) => (n === 1 ? failure(503, "busy", 0.3) : null));
    const game = await opened(log);
    played(game);
    await game.flush();
    return done(game, log);
  },
  async oneLater() {
    const log = fakeGateway((frames, n) =>
      n === 1
        ? answer(200, {
            acks: frames.map((_, at) =>
              at ? ACCEPTED : { ...ACCEPTED, accepted: false, error: "full", retry_after_s: 0.1 },
            ),
            recording_rate: 1,
          })
        : null,
    );
    const game = await opened(log, { lingerS: 5 });
    game.setConsent("granted");
    played(game);
    game.setConsent("denied");
    played(game);
    await game.flush();
    return done(game, log);
  },
  async refused() {
    const log = fakeGateway((frames, n) =>
      n === 1
        ? answer(200, {
            acks: frames.map(() => ({ ...ACCEPTED, accepted: false, refused: "bad_rows: none of ours" })),
            recording_rate: 1,
          })
        : null,
    );
    const game = await opened(log);
    played(game);
    await game.flush();
    played(game);
    return done(game, log);
  },
  async tooLarge() {
    const log = fakeGateway((frames) => (frames.length > 2 ? failure(413, "too_large") : null));
    const game = await opened(log, { lingerS: 5 });
    for (let at = 0; at < 9; at++) {
      game.setConsent(at % 2 ? "granted" : "denied");
      played(game);
    }
    await game.flush();
    return done(game, log);
  },
  async tooSlow() {
    const log = fakeGateway((frames) => (frames.length > 4 ? Promise.reject(new TypeError("it takes too long")) : null));
    const game = await opened(log, { lingerS: 5 });
    for (let at = 0; at < 20; at++) {
      game.setConsent(at % 2 ? "granted" : "denied");
      played(game);
    }
    await game.flush();
    return done(game, log);
  },
  /** A proxy responds instead of the gateway, with each of these in turn. */
  async inBetween() {
    const responses = [
      new Response("<html>", { status: 400 }),
      new Response("<html>", { status: 413 }),
      new Response("<html>", { status: 403 }),
      answer(400, { error: { code: 400, message: "no" } }),
      answer(400, "bad_frame_batch"),
    ];
    const log = fakeGateway((_, n) => responses[n - 1]);
    const game = await opened(log);
    played(game);
    await game.flush();
    return done(game, log);
  },
  async redirected() {
    const served = async (work) => {
      const server = createServer(work).listen(0, "127.0.0.1");
      await new Promise((resolve) => server.once("listening", resolve));
      return [server, `http://127.0.0.1:${server.address().port}`];
    };
    let reached = 0;
    const [elsewhere, there] = await served((_, reply) => ((reached += 1), reply.end("{}")));
    const [gateway, url] = await served((_, reply) => reply.writeHead(307, { location: there }).end());
    const game = await opened({ fetch: globalThis.fetch }, { url });
    played(game);
    const isAll = await game.close(0.3);
    for (const server of [elsewhere, gateway]) server.close();
    return { reached, isAll, stats: game.stats() };
  },
  async poison() {
    const log = fakeGateway((frames) =>
      frames.some(({ kind, chunkNo }) => kind === 0 && chunkNo === 3) ? failure(400, "bad_frame_batch") : null,
    );
    const game = await opened(log, { lingerS: 5 });
    for (let at = 0; at < 7; at++) {
      game.setConsent(at % 2 ? "granted" : "denied");
      played(game);
    }
    await game.flush(20);
    return done(game, log);
  },
  async full() {
    const log = fakeGateway();
    const game = await opened(log, { capBytes: 30_000 });
    log.isDown = true;
    for (let at = 0; at < 60; at++) {
      game.setConsent(at % 2 ? "granted" : "denied");
      played(game, 20);
      if (at % 10 === 0) await sleep(15);
    }
    const away = game.stats();
    log.isDown = false;
    await game.flush();
    return done(game, log, { away });
  },
  async unsentFrames() {
    const [log, stored] = [fakeGateway(), storage()];
    const first = await opened(log, { storage: stored });
    log.isDown = true;
    played(first, 7);
    const isAll = await first.close(0.05);
    const left = frameNames(stored).length;
    log.isDown = false;
    const second = await opened(log, { storage: stored });
    played(second, 3);
    await second.flush();
    return done(second, log, {
      first: first.stats(),
      isFirstAll: isAll,
      left,
      after: frameNames(stored).length,
    });
  },
  async newKey() {
    const [log, stored] = [fakeGateway(), storage()];
    const first = await opened(log, { storage: stored });
    log.ended = "uk_x";
    played(first, 7);
    const isAll = await first.close(1);
    const { stopped, waiting } = first.stats();
    const second = await opened(log, { storage: stored, key: "uk_y" });
    await second.flush();
    return done(second, log, { isFirstAll: isAll, stopped, waiting, left: frameNames(stored).length });
  },
  /** Frames of two deployments wait in the storage; a page of one of them starts with its clock 30 days ahead. */
  async clockAhead() {
    const [log, stored, clock] = [fakeGateway(), storage(), { ms: Date.now() }];
    const how = (at) => ({ storage: stored, url: `http://127.0.0.${at}:1`, now: () => clock.ms, random: Math.random });
    for (const at of [1, 2]) {
      const game = await opened(log, how(at));
      log.isDown = true;
      played(game, 3);
      await game.flush(0); // its page is gone now, without closing
      game._sender.isClosed = true;
      log.isDown = false;
    }
    const before = frameNames(stored).length;
    clock.ms += 30 * 86_400_000;
    const game = await opened(log, how(2));
    await game.flush();
    return done(game, log, { before, after: frameNames(stored).length });
  },
  /** The platform puts off all frames of an earlier page; those of this one are sent nevertheless. */
  async putOff() {
    const stored = storage();
    const away = fakeGateway();
    const first = await opened(away, { storage: stored });
    away.isDown = true;
    for (let at = 0; at < 70; at++) {
      played(first, 1);
      first._sender.collect({ isAll: true });
    }
    await first.close(0);
    const later = { accepted: false, refused: null, retry_after_s: 0.01, error: "clocks_differ" };
    let isSecond = false;
    const log = fakeGateway((frames) =>
      answer(200, {
        acks: frames.map(({ chunkNo }) => (isSecond && chunkNo === 0 ? ACCEPTED : later)),
        recording_rate: 1,
      }),
    );
    const second = await opened(log, { storage: stored });
    await second.flush(0.05);
    isSecond = true;
    played(second, 4);
    await second.flush(0.5);
    const stats = second.stats();
    second._sender.end();
    second.close(0);
    return { adopted: stats.adopted, acked: stats.acked };
  },
  async beyondTheStorage() {
    const [log, stored] = [fakeGateway(), storage()];
    const first = await opened(log, { storage: stored, obs: 2000 });
    log.isDown = true;
    const episode = first.episode();
    for (let at = 0; at < 400; at++) episode.acted(Array(2000).fill(at), 0);
    episode.end(Array(2000).fill(0));
    const isAll = await first.close(0.05);
    const chars = [...stored.items].reduce((sum, [key, value]) => sum + key.length + value.length, 0);
    log.isDown = false;
    const second = await opened(log, { storage: stored, obs: 2000 });
    await second.flush();
    const keys = [...stored.items.keys()].filter((key) => /\/(frame|gap)\//.test(key));
    return done(second, log, { first: first.stats(), isFirstAll: isAll, chars, keys });
  },
  async overTheStorageAndBack() {
    const [log, stored] = [fakeGateway(), storage()];
    const game = await opened(log, { storage: stored, obs: 2000 });
    log.isDown = true;
    const episode = game.episode();
    for (let at = 0; at < 400; at++) episode.acted(Array(2000).fill(at), 0);
    episode.end(Array(2000).fill(0));
    await game.flush(0.05);
    const gaps = () => [...stored.items.keys()].filter((key) => key.includes("/gap/")).length;
    const away = gaps();
    log.isDown = false;
    await game.flush();
    return done(game, log, { away, back: gaps(), left: frameNames(stored).length });
  },
  /** A second page starts while the first one, which could not send, still runs; then the first one is gone. */
  async twoPages() {
    const [log, away, stored, clock] = [fakeGateway(), fakeGateway(), storage(), { ms: Date.now() }];
    const how = { storage: stored, now: () => clock.ms };
    const first = await opened(away, how);
    away.isDown = true;
    played(first, 7);
    await first.flush(0);
    const second = await opened(log, how);
    const held = second.stats().adopted;
    first._sender.isClosed = true; // gone without closing
    clock.ms += 200_000;
    second._sender.wake();
    for (let at = 0; at < 200 && !second.stats().adopted; at++) await sleep(5);
    return done(second, log, { held, left: frameNames(stored).length });
  },
  /** A page without locks sleeps until another one adopts its frames, and wakes in the middle of an episode. */
  async asleep() {
    const [log, stored, clock] = [fakeGateway(), storage(), { aheadMs: 0 }];
    const away = { fetch: (url, how) => (away.isDown ? Promise.reject(new TypeError("down")) : log.fetch(url, how)) };
    const how = { storage: stored, now: () => Date.now() + clock.aheadMs, obs: 2000 };
    const first = await opened(away, how);
    away.isDown = true;
    const decided = (episode, steps) => {
      for (let at = 0; at < steps; at++) episode.acted(Array(2000).fill(at), 0);
    };
    const whole = first.episode();
    decided(whole, 400);
    whole.end(Array(2000).fill(0));
    const open = first.episode();
    decided(open, 10);
    await first.flush(0.05);
    first._sender.wake = () => {}; // asleep
    const [asleepAt, second] = [first.stats(), ((clock.aheadMs += 200_000), await opened(log, how))];
    await second.flush();
    const taken = second.stats();
    delete first._sender.wake;
    away.isDown = false;
    first._sender._ownerLocks._heartbeat(); // its timer runs first
    decided(open, 10);
    open.end(Array(2000).fill(0));
    const isFirstAll = await first.close(10);
    const left = [...stored.items.keys()].filter((key) => /\/(frame|gap)\//.test(key));
    return done(second, log, { asleepAt, taken, isFirstAll, first: first.stats(), left });
  },
  /** A page is closed while a frame that did not fit into the storage is in flight; its outcome is unknown. */
  async underWay() {
    const [stored, clock, seen] = [storage(), { aheadMs: 0 }, []];
    const [lost, log] = [fakeGateway(() => new Promise(() => {})), fakeGateway()];
    const full = Object.create(stored, {
      setItem: {
        value(key, value) {
          if (key.includes("/frame/")) throw new Error("QuotaExceededError");
          stored.setItem(key, value);
        },
      },
    });
    const how = { storage: full, now: () => Date.now() + clock.aheadMs };
    const first = await opened(lost, how);
    played(first, 7);
    await first.flush(0.1);
    seen.push(lost.batches.length, first.stats().waiting);
    first._sender.isClosed = true; // gone without closing
    clock.aheadMs += 200_000;
    const second = await opened(log, how);
    await second.flush();
    return done(second, log, { seen, lost: lost.batches });
  },
  async twoPagesWithLocks() {
    const [log, away, stored, locks] = [fakeGateway(), fakeGateway(), storage(), new Set()];
    const request = async (name, _, work) => {
      if (locks.has(name)) return work(null);
      locks.add(name);
      return Promise.resolve(work({})).finally(() => locks.delete(name));
    };
    const listeners = {};
    const page = {
      localStorage: stored,
      addEventListener: (name, call) => (listeners[name] = call),
      removeEventListener: () => {},
    };
    Object.assign(globalThis, { window: page });
    Object.defineProperty(globalThis, "navigator", { value: { locks: { request } }, configurable: true });
    const first = await opened(away);
    away.isDown = true;
    played(first, 7);
    await first.flush(0);
    listeners.pagehide({ persisted: true }); // it may be restored
    const second = await opened(log);
    const held = second.stats().adopted;
    await second.close();
    first._onPageHide({ persisted: false });
    first._sender.isClosed = true;
    await sleep(5);
    const third = await opened(log);
    await third.flush();
    delete globalThis.window;
    delete globalThis.navigator;
    return done(third, log, { held, left: frameNames(stored).length });
  },
  async unregistered() {
    const log = fakeGateway((_, n) => (n === 1 ? failure(404, "not_registered") : null));
    const game = await opened(log);
    played(game);
    await game.flush();
    return done(game, log);
  },
  async strange() {
    const log = fakeGateway(
      (_, n) => [null, answer(200, { acks: [], recording_rate: 1 }), answer(200, "?"), answer(502, "<html>"), null][n],
    );
    const game = await opened(log);
    played(game);
    await game.flush();
    return done(game, log);
  },
  async badInput() {
    const log = fakeGateway();
    const game = await opened(log);
    const codes = [];
    const tried = (work) => {
      try {
        work();
        codes.push("");
      } catch (error) {
        codes.push(error.code);
      }
    };
    tried(() => game.episode().acted([1, 2], 0));
    tried(() => game.episode({ player: "" }));
    tried(() => game.episode({ seat: -1 }));
    tried(() => game.episode({ match: "x".repeat(200) }));
    const bad = [
      [[1, 2, NaN], 0],
      [[1, 2, 3], 4],
      [[1, 2, 3], "up"],
      [[1, 2, 3], 0.5],
      [["a", 2, 3], 0],
      [[1, 2, 3], 0, { by: "nobody" }],
      [[1, 2, 3], 0, { actionMask: [1, 1, 1, 1] }],
      [null, 0],
    ];
    for (const call of bad) {
      const episode = game.episode();
      episode.acted([0, 0, 0], 1);
      episode.acted([0, 0, 0], 1);
      tried(() => episode.acted(...call));
      episode.acted([0, 0, 0], 1);
      episode.end();
    }
    const late = game.episode();
    tried(() => late.reward(1));
    played(game);
    const over = game.episode();
    over.end();
    tried(() => over.acted([0, 0, 0], 1));
    tried(() => game.rank([0, 0, 0]));
    return done(game, log, { codes });
  },
  async onlyItself() {
    const log = fakeGateway();
    const game = await opened(log);
    const warned = [];
    const { warn } = console;
    console.warn = (text) => warned.push(text);
    const lasts = [];
    const one = (play) => {
      const episode = game.episode();
      play(episode);
      lasts.push(game.stats().lastBadInput.split(":")[0]);
    };
    const decided = (episode) => episode.acted([0, 0, 0], 1);
    try {
      played(game, 1);
      for (const _ of [1, 2]) {
        one((episode) => (episode.reward(1), decided(episode), episode.reward(2), episode.end()));
        one((episode) => (decided(episode), decided(episode), episode.end(undefined, { truncated: true })));
        one((episode) => (decided(episode), episode.end([1, 1, 1], { result: "x".repeat(65) })));
        one((episode) => (decided(episode), episode.end([NaN, 0, 0])));
        one((episode) => (decided(episode), decided(episode), episode.end([1, 1, 1], { truncated: "x" })));
        one((episode) => (decided(episode), decided(episode), episode.reward(1e30), episode.end()));
        one((episode) => (decided(episode), decided(episode), episode.reward(null), episode.end()));
        one((episode) => (decided(episode), decided(episode), episode.acted([1e30, 0, 0], 1), episode.end()));
      }
      one((episode) => (decided(episode), episode.reward(1e20), episode.end([Math.fround(1e20), -1e20, 0])));
    } finally {
      console.warn = warn;
    }
    return done(game, log, { warned, lasts });
  },
  async edges() {
    const log = fakeGateway();
    const whole = (dtype) => ({ space: "box", dtype, shape: [], low: null, high: null });
    const how = { obs: { u: whole("U64"), i: whole("I64") }, actions: 4, hasActionMask: true, strict: true };
    const game = await opened(log, how);
    const tried = (obs, actionMask = null) => {
      const episode = game.episode();
      try {
        episode.acted({ u: 0, i: 0, ...obs }, 1, { actionMask });
        episode.end({ u: 0, i: 0 });
        return "";
      } catch (error) {
        return error.code;
      }
    };
    const bad = [2 ** 64, 2n ** 64n, -1, -1n].map((u) => tried({ u }));
    bad.push(...[2 ** 63, 2n ** 63n, -(2n ** 63n) - 1n, -(2 ** 64)].map((i) => tried({ i })));
    const masks = [256, 257, 0.5, NaN, -1, 2, "1", undefined, null].map((flag) => tried({}, [flag, 1, 1, 1]));
    masks.push(tried({}, [1, 1, 1]));
    const good = [tried({ u: 2n ** 64n - 1n, i: -(2n ** 63n) }), tried({ u: 2 ** 63, i: 2n ** 63n - 1n })];
    good.push(tried({}, [true, 1, false, 0]), tried({}, Uint8Array.of(0, 1, 0, 0)));
    return done(game, log, { bad, masks, good });
  },
  async online() {
    const [listeners, log] = [{}, fakeGateway()];
    const page = { addEventListener: (name, call) => (listeners[name] = call), removeEventListener: () => {} };
    globalThis.window = page;
    let asked = 0;
    const fetch = async (url, how) => {
      if (!url.includes("/bot")) return log.fetch(url, how);
      asked += 1;
      if (asked === 1) return failure(503, "not_ready", 30);
      await sleep(2);
      return answer(204);
    };
    const game = await opened({ fetch }, { storage: null });
    while (!game.stats().lastFollowError) await sleep(1);
    const { lastFollowError, lastError } = game.stats();
    const before = asked;
    listeners.online();
    for (let at = 0; at < 200 && game.stats().lastFollowError; at++) await sleep(5);
    const after = [asked, game.stats().lastFollowError];
    delete globalThis.window;
    return done(game, log, { lastFollowError, lastError, before, after });
  },
  /** The poll for bots fails and is due again in half a minute; then steps are acknowledged. */
  async answered() {
    const [log, asked] = [fakeGateway(), []];
    const fetch = async (url, how) => {
      if (!url.includes("/bot")) return log.fetch(url, how);
      asked.push(url.split("&").at(-1));
      if (asked.length === 1) throw new TypeError("down");
      return url.endsWith("wait_s=0") ? answer(204) : log.fetch(url, how);
    };
    const game = await opened({ fetch }, { storage: null, random: () => 60 });
    while (!game.stats().lastFollowError) await sleep(1);
    await sleep(100);
    const before = asked.length;
    played(game);
    for (let at = 0; at < 600 && game.stats().lastFollowError; at++) await sleep(5);
    return done(game, log, { before, asked, lastFollowError: game.stats().lastFollowError });
  },
  /** A page that polls for bots, loses its key, gets another one, and is closed. */
  async watched() {
    const [log, held] = [fakeGateway(), new Set()];
    const request = async (name, _, work) => {
      if (held.has(name)) return work(null);
      held.add(name);
      return Promise.resolve(work({})).finally(() => held.delete(name));
    };
    const page = { visibilityState: "visible", addEventListener: () => {}, removeEventListener: () => {} };
    globalThis.document = page;
    Object.defineProperty(globalThis, "navigator", { value: { locks: { request } }, configurable: true });
    let asked = 0;
    const fetch = (url, how) => {
      asked += url.includes("/bot") ? 1 : 0;
      return asked === 1 && url.includes("/bot") ? failure(401, "revoked_key") : log.fetch(url, how);
    };
    const seen = [];
    const game = await opened({ fetch }, { storage: null });
    while (!game.stats().lastFollowError) await sleep(1);
    await sleep(5);
    seen.push(held.size);
    game.useKey("uk_y");
    while (asked < 2) await sleep(1);
    seen.push(held.size);
    await game.close();
    await sleep(5);
    seen.push(held.size);
    delete globalThis.document;
    delete globalThis.navigator;
    return done(game, log, { seen });
  },
  async forgotten() {
    setFlagsFromString("--expose-gc");
    const gc = runInNewContext("gc");
    const log = fakeGateway();
    const game = await opened(log);
    (() => {
      const episode = game.episode();
      for (let at = 0; at < 4; at++) episode.acted([at, 0, 0], 0);
    })();
    for (let at = 0; at < 200 && game.stats().openEpisodes; at++) {
      await sleep(5);
      gc();
      await game.flush(1);
    }
    const { openEpisodes } = game.stats();
    return done(game, log, { openEpisodes });
  },
  async hidden() {
    const listeners = {};
    globalThis.document = {
      visibilityState: "visible",
      addEventListener: (name, call) => (listeners[name] = call),
      removeEventListener: () => {},
    };
    const [log, stored] = [fakeGateway(), storage()];
    const game = await opened(log, { storage: stored, lingerS: 60 });
    const episode = game.episode();
    for (let at = 0; at < 4; at++) episode.acted([at, 0, 0], 0);
    const before = frameNames(stored).length;
    globalThis.document.visibilityState = "hidden";
    listeners.visibilitychange();
    const after = frameNames(stored).length;
    delete globalThis.document;
    return done(game, log, { before, after });
  },
  async slow() {
    const [stored, frames] = [storage(), () => frameNames(stored).length];
    let answered = () => {};
    const log = fakeGateway((_, n) => (n === 1 ? new Promise((resolve) => (answered = () => resolve(null))) : null));
    const game = await opened(log, { storage: stored });
    played(game);
    while (!log.batches.length) await sleep(1);
    const before = frames();
    played(game);
    while (frames() === before) await sleep(1);
    const during = frames();
    answered();
    return done(game, log, { before, during });
  },
  async offered() {
    const log = fakeGateway();
    const game = await opened(log);
    const episode = game.episode({ by: "script" });
    const actions = [
      episode.act([0, 0, 0], { otherwise: 2 }),
      episode.act([0, 0, 0], { otherwise: (obs) => obs.length }),
      episode.act([0, 0, 0]),
    ];
    episode.acted([0, 0, 0], 1);
    episode.end([0, 0, 0]);
    return done(game, log, { actions, player: game.player });
  },
  /** Images are compressed in the background; a hidden page stores them at once, uncompressed. */
  async images() {
    const [log, stored] = [fakeGateway(), storage()];
    const obs = { space: "box", dtype: "U8", shape: [84, 84], low: null, high: null };
    const game = await opened(log, { obs, storage: stored });
    const play = (steps) => {
      const episode = game.episode();
      for (let at = 0; at < steps; at++) episode.acted(new Uint8Array(84 * 84).fill(at), at % 4);
      episode.end(new Uint8Array(84 * 84).fill(steps));
    };
    play(150);
    const isFlushed = await game.flush();
    const small = log.batches.reduce((sum, raw) => sum + raw.length / 2, 0);
    log.isDown = true;
    play(10);
    game._saveNow();
    const chars = frameNames(stored).map((key) => stored.items.get(key).length);
    log.isDown = false;
    return done(game, log, { isFlushed, small, chars });
  },
  async own() {
    const [log, stored] = [fakeGateway(), storage()];
    const names = [];
    for (let at = 0; at < 2; at++) {
      const game = await opened(log, { storage: stored, player: undefined });
      names.push(game.player);
      await game.close();
    }
    return { names, isClosed: true };
  },
};

const output = {};
const requested = process.argv.slice(2);
for (const [name, scenario] of Object.entries(scenarios)) {
  if (!requested.length || requested.includes(name)) output[name] = await scenario();
}
// Exiting at once would lose output that the pipe has not read yet.
process.stdout.write(JSON.stringify(output), () => process.exit(0));
