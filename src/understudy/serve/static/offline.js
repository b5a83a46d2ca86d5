/**
 * The page without its platform: kept as a whole when it was loaded, shown when the gateway does not answer.
 *
 * While it answers, everything comes from there, so nothing here can be too old for it. The gateway writes what there is
 * to keep, and a name for it that changes with any byte; a browser that sees another name takes the new page and
 * forgets the old one.
 */

/** @type {{version: string, pages: string[]}} */
const KEPT = JSON.parse('{"version": "", "pages": []}');
const STORE = `understudy-page-${KEPT.version}`;
const PATIENCE_MS = 4000;

/** @type {any} */
const worker = self;

worker.addEventListener("install", (/** @type {any} */ event) => {
  const fresh = KEPT.pages.map((address) => new Request(address, { cache: "no-cache" }));
  event.waitUntil(caches.open(STORE).then((store) => store.addAll(fresh)));
  worker.skipWaiting();
});

worker.addEventListener("activate", (/** @type {any} */ event) => event.waitUntil(forget()));

worker.addEventListener("fetch", (/** @type {any} */ event) => {
  const { pathname, origin } = new URL(event.request.url);
  // Everything else, such as steps and questions for bots, is none of its business.
  if (event.request.method !== "GET" || origin !== location.origin || !KEPT.pages.includes(pathname)) return;
  event.respondWith(answered(event.request, pathname));
});

/** Older pages of ours. */
async function forget() {
  const names = await caches.keys();
  const old = names.filter((name) => name.startsWith("understudy-page-") && name !== STORE);
  await Promise.all(old.map((name) => caches.delete(name)));
  await worker.clients.claim();
}

/**
 * What the gateway says; what is kept where it says nothing, or somebody else says that it is away.
 * @param {Request} request
 * @param {string} pathname
 */
async function answered(request, pathname) {
  const found = () => caches.open(STORE).then((store) => store.match(pathname, { ignoreVary: true }));
  // Until it begins to answer, and no longer: a file that takes long over a slow way is not broken off.
  const stop = new AbortController();
  const timer = setTimeout(() => stop.abort(), PATIENCE_MS);
  try {
    const answer = await fetch(request, { signal: stop.signal });
    return answer.status < 500 ? answer : ((await found()) ?? answer);
  } catch (error) {
    const kept = await found();
    if (kept) return kept;
    throw error;
  } finally {
    clearTimeout(timer);
  }
}
