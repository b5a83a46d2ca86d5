// What understudy.js writes for Python's requests: specs, JSON, checksums and the example batch of docs/protocol.md.
import { readFileSync } from "node:fs";
import * as us from "../../clients/js/understudy.js";

const requested = JSON.parse(readFileSync(0, "utf8"));
const hex = (bytes) => Buffer.from(bytes).toString("hex");

function frameBatch() {
  const spec = us.specOf("cart", { obs: 2, actions: ["left", "right"] });
  const session = "019a86a0-1000-7000-8000-0123456789ab";
  const column = (dtype, data, ...shape) => ({ dtype, shape: [3, ...shape], data });
  const chunk = us.encodeChunk(
    {
      game: "cart",
      schema: us.schemaOf(spec),
      session,
      chunkNo: 0,
      firstStep: 0,
      nSteps: 2,
      consent: "granted",
      client: "example/1",
      episodes: [{ row: 0, seat: 0 }],
    },
    {
      obs: column("F32", Float32Array.of(0.5, -0.5, 0.25, 0, 0, 1), 2),
      action: column("I32", Int32Array.of(1, 0, 0)),
      reward: column("F32", Float32Array.of(1, 1, 0)),
      row: column("U8", Uint8Array.of(0, 0, 1)),
      is_first: column("BOOL", Uint8Array.of(1, 0, 0)),
      terminated: column("BOOL", Uint8Array.of(0, 1, 0)),
      truncated: column("BOOL", Uint8Array.of(0, 0, 0)),
    },
  );
  return hex(us.encodeFrameBatch([us.encodeFrame("data", session, 0, chunk)], { [session]: "ada", other: "eve" }));
}

const refused = (work) => {
  try {
    return work();
  } catch (error) {
    return `${error.code}`;
  }
};
const shape = (entry) => ({
  obs: entry.obs,
  actions: entry.actions,
  hasActionMask: entry.has_action_mask,
  maxEpisodeSteps: entry.max_episode_steps,
});
console.log(
  JSON.stringify({
    frameBatch: frameBatch(),
    specs: (requested.specs ?? []).map((entry) => {
      const spec = us.specOf(entry.game, shape(entry));
      return [us.specJson(spec), us.schemaOf(spec)];
    }),
    again: (requested.texts ?? []).map((text) => us.specJson(JSON.parse(text))),
    refused: (requested.refused ?? []).map((entry) => refused(() => us.specJson(us.specOf(entry.game, shape(entry))))),
    json: (requested.values ?? []).map((value) => us.canonicalJson(value)),
    sums: (requested.raw ?? []).map((raw) => [us.crc32(Buffer.from(raw, "hex")), us.sha256(Buffer.from(raw, "hex"))]),
    sessions: (requested.sessions ?? []).map(([ms, random]) => us.newSession(ms, Buffer.from(random, "hex"))),
    tensors: (requested.tensors ?? []).map((raw) =>
      refused(() => {
        const { columns, metadata } = us.decodeTensors(Buffer.from(raw, "hex"));
        return hex(us.encodeTensors(columns, metadata));
      }),
    ),
  }),
);
