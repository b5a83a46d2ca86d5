// What understudy.js writes for what Python asks for: specs, JSON, sums and the worked parcel of docs/protocol.md.
import { readFileSync } from "node:fs";
import * as us from "../../clients/js/understudy.js";

const given = JSON.parse(readFileSync(0, "utf8"));
const hex = (bytes) => Buffer.from(bytes).toString("hex");

function parcel() {
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
  return hex(us.encodeParcel([us.encodeFrame("data", session, 0, chunk)], { [session]: "ada", other: "eve" }));
}

const refused = (work) => {
  try {
    return work();
  } catch (error) {
    return `${error.code}`;
  }
};
const shape = (one) => ({
  obs: one.obs,
  actions: one.actions,
  hasLegal: one.has_legal,
  maxEpisodeSteps: one.max_episode_steps,
});
console.log(
  JSON.stringify({
    parcel: parcel(),
    specs: (given.specs ?? []).map((one) => {
      const spec = us.specOf(one.game, shape(one));
      return [us.specJson(spec), us.schemaOf(spec)];
    }),
    again: (given.texts ?? []).map((text) => us.specJson(JSON.parse(text))),
    refused: (given.refused ?? []).map((one) => refused(() => us.specJson(us.specOf(one.game, shape(one))))),
    json: (given.values ?? []).map((value) => us.canonicalJson(value)),
    sums: (given.raw ?? []).map((raw) => [us.crc32(Buffer.from(raw, "hex")), us.sha256(Buffer.from(raw, "hex"))]),
    sessions: (given.sessions ?? []).map(([ms, random]) => us.newSession(ms, Buffer.from(random, "hex"))),
    tensors: (given.tensors ?? []).map((raw) =>
      refused(() => {
        const { columns, metadata } = us.decodeTensors(Buffer.from(raw, "hex"));
        return hex(us.encodeTensors(columns, metadata));
      }),
    ),
  }),
);
