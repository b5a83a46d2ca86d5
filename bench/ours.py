"""Our side of every measure of bench/run.py: calls our learner, replay, actor and policies."""

import base64
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.against import payload
from bench.against.link import EVERY_STEPS, Link, Round, Training, serve
from understudy.core.names import new_session
from understudy.core.tensors import DTYPES, Array
from understudy.experience.chunk import Chunk, ChunkMeta, EpisodeNote, RowKind
from understudy.experience.game import GameSpec, game_spec
from understudy.experience.spaces import Box
from understudy.nn.heads import Head
from understudy.nn.network import Dense
from understudy.nn.policy import Policy

# --- Solving --------------------------------------------------------------------------------------


def solve(link: Link, request: dict[str, Any]) -> Round:
    """Train with `understudy.train`, with checkpoints; only evaluations run in the harness."""
    import jax  # noqa: F401  compilation is timed separately, also before the first step

    import understudy
    from understudy.act.evaluate import Evaluated
    from understudy.training import evaluation

    train = understudy.train  # imported now, before the clock starts

    clock = Training(link)
    steps = 0
    judged: tuple[Policy | None, dict[str, Any]] = (None, {})

    def evaluate(policy: Policy, *_: Any, episodes: int, **__: Any) -> Evaluated:
        nonlocal judged
        # A second call with the same policy asks for the second hundred episodes.
        is_second = judged[0] is policy
        if not is_second:
            judged = (
                policy,
                clock.look(steps, lambda: {"policy": base64.b64encode(policy.encode()).decode()}),
            )
        returns = np.full(episodes, judged[1]["held_out" if is_second else "mean"])
        return Evaluated(returns, n_cut=0)

    def on_event(event: Any) -> None:
        nonlocal steps
        steps = event.env_steps

    # `understudy.train` has no option to evaluate elsewhere, so the function is replaced.
    setattr(evaluation, "evaluate", evaluate)  # noqa: B010

    def run() -> dict[str, Any]:
        clock.start()
        with tempfile.TemporaryDirectory() as folder:
            train(
                "CartPole-v1",
                algorithm=request["do"].removeprefix("solve-"),
                seed=request["seed"],
                until=475.0,
                settings={"eval_every": EVERY_STEPS},
                out=Path(folder) / "run",
                on_event=on_event,
            )
        return {"steps": steps}

    return run


# --- Collecting -----------------------------------------------------------------------------------


def collect(_: Link, request: dict[str, Any]) -> Round:
    """Collect chunks that are ready to be stored, with sampled actions of a 64-64 policy."""
    from understudy.act.actor import Actor
    from understudy.act.vector import game_of, make_envs

    envs = make_envs("CartPole-v1", request["envs"], **request["settings"])
    game = game_of(envs)
    actor = Actor(envs, game, root_seed=0, created_ms=int(time.time() * 1000))
    policy = _policy(game, "64-64", kind="categorical")
    round_no = 0

    def run() -> dict[str, Any]:
        nonlocal round_no
        round_no += 1
        began_s = time.perf_counter()
        collected = actor.collect(policy, request["steps"], round_no=round_no)
        took_s = time.perf_counter() - began_s
        n_steps = sum(chunk.validate().meta.n_steps for chunk in collected.chunks)
        return {
            "values": {"collect": collected.env_steps / took_s},
            "right": n_steps == collected.env_steps,
        }

    return run


# --- Replay ---------------------------------------------------------------------------------------

_ROWS_PER_BLOCK = payload.BLOCK + 16
"""A chunk has one more row, for bootstrapping, and the ring rounds up to a multiple of 16."""


def replay(_: Link, request: dict[str, Any]) -> Round:
    """Insert, sample and update; rows arrive in chunks of 512 with priorities, as from actors."""
    from understudy.algorithm import Transitions
    from understudy.learn.replay import HostReplay
    from understudy.replay import Drawn, ReplayConfig

    kind = request["payload"]
    game = game_spec(
        "bench-replay", obs=4 if kind == "vector" else Box(payload.FRAME, DTYPES["U8"]), actions=2
    )
    capacity = -(-request["capacity"] // payload.BLOCK) * _ROWS_PER_BLOCK
    needs = Transitions(batch=payload.BLOCK, prioritised=True)
    rows = HostReplay(game, needs, ReplayConfig(capacity=capacity, alpha=request["alpha"]))
    rng = np.random.default_rng(0)
    session = new_session(time.time())

    def make(first: int) -> Chunk:
        return _chunk(game, kind, first, session)

    def update(drawn: Drawn, values: Array) -> None:
        rows.feedback(drawn.rows, drawn.stamps, values.reshape(drawn.rows.shape))

    while rows.n_steps_inserted < request["capacity"]:
        rows.insert(make(rows.n_steps_inserted))

    def run() -> dict[str, Any]:
        values, drawn = payload.cycles(
            make,
            rows.insert,
            lambda: rows.draw(1, rng=rng, beta=request["beta"]),
            update,
            first=rows.n_steps_inserted,
            count=request["cycles"],
        )
        batch = drawn.batches
        columns = (batch.obs["obs"], batch.next_obs["obs"], batch.reward, batch.weight)
        return {
            "values": values,
            "right": payload.is_right(*(np.asarray(column)[0] for column in columns)),
        }

    return run


def _chunk(game: GameSpec, kind: str, first: int, session: uuid.UUID) -> Chunk:
    """The block that starts at this row, as 512 steps of one endless episode."""
    block = payload.block(kind, first)
    n_rows = payload.BLOCK + 1
    flags = np.zeros(n_rows, np.bool_)
    is_first = flags.copy()
    row = np.full(n_rows, RowKind.STEP, np.uint8)
    is_first[0] = first == 0
    row[-1] = RowKind.BOOTSTRAP

    def padded(values: Array, dtype: Any) -> Array:
        return np.append(values, values[-1:], axis=0).astype(dtype)

    columns = {
        "obs": np.append(block["obs"], block["next_obs"][-1:], axis=0),
        "action": padded(block["action"], np.int32),
        "reward": padded(block["reward"], np.float32),
        "priority": padded(block["priority"], np.float32),
        "terminated": flags,
        "truncated": flags.copy(),
        "is_first": is_first,
        "row": row,
    }
    meta = ChunkMeta(
        game=game.game,
        schema=game.schema,
        session=session,
        chunk_no=first // payload.BLOCK,
        first_step=first,
        n_steps=payload.BLOCK,
        kind="actor",
        consent="granted",
        episodes=(EpisodeNote(row=0),),
    )
    return Chunk(meta, columns).validate()


# --- Inference ------------------------------------------------------------------------------------


def inference(_: Link, request: dict[str, Any]) -> Round:
    """`act`: from an env's observation to an action for `env.step`; or `decide` on a batch of 1."""

    def make(net: str) -> Callable[[Array], int]:
        obs: Any = Box(payload.FRAME, DTYPES["U8"]) if net == "Nature" else 4
        game = game_spec(f"bench-{net}", obs=obs, actions=payload.NETS[net][-1])
        policy = _policy(game, net, kind="argmax")
        if request["settings"].get("call") == "decide":
            return lambda obs: int(
                policy.decide({"obs": obs[None]}, None, deterministic=True).action[0]
            )
        return policy.act

    return payload.inference(make, request)


def _policy(game: GameSpec, net: str, *, kind: str) -> Policy:
    """A policy with the weights that all contestants use; our convolutions have channels last."""
    from understudy.learn.architecture import network_for

    convs, dense = payload.weights(net)
    *hidden, last = [len(bias) for _, bias in dense]
    stack = 4 if convs else 1
    name = "q" if kind == "argmax" else "logits"
    spec = network_for(game, heads={name: (Dense(last),)}, widths=hidden, stack=stack)
    arrays: list[Array] = [
        array for kernel, bias in convs for array in (kernel.transpose(2, 3, 1, 0), bias)
    ]
    if convs:
        kernel, bias = dense[0]
        channels = len(convs[-1][1])
        side = round((len(kernel) / channels) ** 0.5)
        dense[0] = (
            kernel.reshape(channels, side, side, -1).transpose(1, 2, 0, 3).reshape(kernel.shape),
            bias,
        )
    arrays += [array for pair in dense for array in pair]
    weights = dict(zip(_in_order(spec.shapes()), arrays, strict=True))
    return Policy(game, spec, weights, Head(kind, last), stack=stack)


def _in_order(names: Sequence[str] | Any) -> list[str]:
    """Weight names from the input to the head, kernels before their biases."""
    places = {"inputs": 0, "trunk": 1, "heads": 2}
    return sorted(
        names,
        key=lambda name: (
            places[name.split(".")[0]],
            int(name.split(".")[-2]),
            name.endswith("bias"),
        ),
    )


if __name__ == "__main__":
    work = {
        "solve-dqn": solve,
        "solve-ppo": solve,
        "collect": collect,
        "replay": replay,
        "inference": inference,
    }
    serve(["understudy", "jax", "numpy"], work)
