// A game in plain JavaScript (Node 20) that registers itself, plays with the bot and sends its steps (docs/protocol.md).
// Run `understudy up`, its two exports, then: node examples/node_client.mjs 20
import { randomBytes } from "node:crypto";

const url = `${process.env.UNDERSTUDY_URL}/v1/games/guess-js`;
const headers = { Authorization: `Bearer ${process.env.UNDERSTUDY_KEY}`, "Content-Type": "application/json" };
const spec = {
  action: { "": { dtype: "I32", n: 16, space: "discrete", start: 0 } }, action_names: [], format: 1, game: "guess-js",
  has_action_mask: false, max_episode_steps: null, obs_names: ["low", "high"],
  obs: { "": { dtype: "F32", high: null, low: null, shape: [2], space: "box" } },
};

async function call(method, path, body) {
  const response = await fetch(url + path, { method, headers, body: JSON.stringify(body) });
  if (!response.ok) throw new Error(`${response.status}: ${(await response.json()).error.detail}`);
  return response.json();
}

await call("PUT", "", spec);
const hex = Date.now().toString(16).padStart(12, "0"); // a session id is a UUIDv7, which starts with the time
const session = `${hex.slice(0, 8)}-${hex.slice(8)}-7000-8000-${randomBytes(6).toString("hex")}`;
let [steps, won] = [0, 0];
for (let chunk_no = 0; chunk_no < Number(process.argv[2]); chunk_no++) {
  const columns = { obs: [], action: [], by: [], reward: [], row: [], is_first: [], terminated: [], truncated: [] };
  const add = (...row) => Object.keys(columns).forEach((name, at) => columns[name].push(row[at]));
  let [low, high, over, secret] = [0, 15, false, Math.floor(Math.random() * 16)];
  while (!over) {
    const { action, is_fallback } = await call("POST", "/act", { obs: [low, high], deterministic: false });
    over = action === secret || action < low || action > high;
    won += action === secret;
    const reward = !over ? -0.1 : action === secret ? 1 : -1;
    add([low, high], action, is_fallback ? 3 : 2, reward, 0, columns.row.length === 0, over, false);
    if (!over) [low, high] = action < secret ? [action + 1, high] : [low, action - 1];
  }
  add([low, high], 0, 0, 0, 1, false, false, false); // the final observation
  await call("POST", "/columns", { player: "js", session, chunk_no, first_step: steps, consent: "granted", columns });
  steps += columns.row.length - 1;
}
await call("POST", "/close", { player: "js", session, chunk_no: Number(process.argv[2]), n_steps: steps });
console.log(`won ${won} of ${process.argv[2]} rounds in ${steps} guesses`);
