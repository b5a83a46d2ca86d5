/**
 * Service worker: caches the whole page, and serves it when the gateway does not respond.
 *
 * While the gateway responds, every file comes from it, so the cache is never stale. The gateway inserts the list of
 * files and a version that changes with any byte; a new version replaces the old cache.
 */

/** @type {{version: string, pages: string[]}} */
const KEPT = JSON.parse('{"version": "", "pages": []}');
const STORE = `understudy-page-${KEPT.version}`;
const TIMEOUT_MS = 4000;

/** @type {any} */
const worker = self;

worker.addEventListener("install", (/** @type {any} */ event) => {
  const fresh = KEPT.pages.map((address) => new Request(address, { cache: "no-cache" }));
  event.waitUntil(caches.open(STORE).then((store) => store.addAll(fresh)));
  worker.skipWaiting();
});

worker.addEventListener("activate", (/** @type {any} */ event) => event.waitUntil(removeOldCaches()));

worker.addEventListener("fetch", (/** @type {any} */ event) => {
  const { pathname, origin } = new URL(event.request.url);
  // Other requests, such as steps and polls for bots, are not intercepted.
  if (event.request.method !== "GET" || origin !== location.origin || !KEPT.pages.includes(pathname)) return;
  event.respondWith(respond(event.request, pathname));
});

/** Deletes the caches of older versions. */
async function removeOldCaches() {
  const names = await caches.keys();
  const old = names.filter((name) => name.startsWith("understudy-page-") && name !== STORE);
  await Promise.all(old.map((name) => caches.delete(name)));
  await worker.clients.claim();
}

/**
 * The gateway's response; the cached file when it does not respond, or responds with a 5xx status.
 * @param {Request} request
 * @param {string} pathname
 */
async function respond(request, pathname) {
  const cached = () => caches.open(STORE).then((store) => store.match(pathname, { ignoreVary: true }));
  // Limits the time to the first byte only: a slow download is not interrupted.
  const stop = new AbortController();
  const timer = setTimeout(() => stop.abort(), TIMEOUT_MS);
  try {
    const answer = await fetch(request, { signal: stop.signal });
    return answer.status < 500 ? answer : ((await cached()) ?? answer);
  } catch (error) {
    const file = await cached();
    if (file) return file;
    throw error;
  } finally {
    clearTimeout(timer);
  }
}
