// Runs policies and observations from Python; prints the outputs of each head and the chosen actions.
import { readFileSync } from "node:fs";
import { decodeTensors, openPolicy } from "../../clients/js/understudy.js";

const request = JSON.parse(readFileSync(0, "utf8"));

function rowsOf(file) {
  const { columns } = decodeTensors(readFileSync(file));
  const count = Object.values(columns)[0].shape[0];
  return Array.from({ length: count }, (_, at) =>
    Object.fromEntries(
      Object.entries(columns).map(([name, { shape, data }]) => {
        const size = shape.slice(1).reduce((size, length) => size * length, 1);
        return [name, data.slice(at * size, (at + 1) * size)];
      }),
    ),
  );
}

/** One row in a game's form: the column itself, or parts by their path; a list of them for a policy with a stack. */
function seen(row, policy) {
  const stacked = Array.from({ length: policy.stack }, (_, at) => {
    const parts = Object.entries(row).map(([name, data]) => {
      const size = data.length / policy.stack;
      return [name.replace(/^obs\.?/, ""), data.slice(at * size, (at + 1) * size)];
    });
    return parts[0][0] === "" ? parts[0][1] : Object.fromEntries(parts);
  });
  return policy.stack > 1 ? stacked : stacked[0];
}

const plain = (action) => (ArrayBuffer.isView(action) ? Array.from(action) : action);
function run({ policy: file, obs, actionMasks }) {
  const policy = openPolicy(readFileSync(file));
  const rows = rowsOf(obs).map((row) => seen(row, policy));
  const isDiscrete = ["argmax", "epsilon_greedy", "categorical"].includes(policy.head.kind);
  return {
    outputs: rows.map((row) =>
      Object.fromEntries(Object.entries(policy.heads(row)).map(([name, head]) => [name, Array.from(head)])),
    ),
    actions: rows.map((row) => plain(policy.act(row))),
    masked: actionMasks ? rows.map((row, at) => policy.act(row, { actionMask: actionMasks[at] })) : null,
    ranks: isDiscrete ? rows.slice(0, 20).map((row, at) => policy.rank(row, { actionMask: actionMasks?.[at] ?? null })) : null,
    version: policy.version,
    schema: policy.schema,
  };
}

function drawn({ policy: file, obs, draws, actionMask }) {
  const policy = openPolicy(readFileSync(file));
  return Array.from({ length: draws }, () => plain(policy.act(obs, { deterministic: false, actionMask })));
}

const refused = (raw) => {
  try {
    openPolicy(Buffer.from(raw, "hex"));
    return "accepted";
  } catch (error) {
    return error.code ?? String(error);
  }
};
console.log(
  JSON.stringify({
    runs: (request.runs ?? []).map(run),
    drawn: (request.drawn ?? []).map(drawn),
    refused: (request.refused ?? []).map(refused),
  }),
);
