"""The JavaScript client sends every played row, with all cuts, ends, masks and lost responses."""

import uuid
from collections import defaultdict
from typing import Any

import numpy as np
import pytest

from tests.clients.nodes import needs_node, run_script
from tests.ingest.specs import KnownSpecs
from understudy.core.clock import SystemClock
from understudy.core.tensors import DTYPES
from understudy.experience.chunk import By, Chunk, RowKind, chunk_of
from understudy.experience.frame import Frame, FrameKind, decode_frame_batch, read_close, read_drop
from understudy.experience.game import GameSpec, game_spec
from understudy.experience.intake import Intake
from understudy.experience.session import Arrival, SessionState, admit
from understudy.experience.spaces import Box, Discrete, Space
from understudy.ingest.check import check

pytestmark = needs_node

ENDS = ["terminated", "terminated unseen", "truncated", "truncated unseen", "cancelled"]
PARTS: dict[str, Space] = {
    "far.away": Box((2,), DTYPES["F64"]),
    "on": Discrete(2, 0, DTYPES["I64"]),
}
PLANS: dict[str, dict[str, Any]] = {
    "many lengths": {"size": 3, "n": 4, "episodes": 60, "lengths": [1, 2, 3, 7, 20, 0, 33],
                     "ends": ENDS},
    "cut by linger": {"size": 3, "n": 4, "episodes": 25, "lengths": [9, 1, 30], "ends": ENDS,
                      "lingerS": 0.001, "pauses": 0.2},
    "cut by length": {"size": 2, "n": 2, "episodes": 3, "lengths": [1300, 511, 513],
                      "ends": ENDS[:3]},
    "cut by size": {"size": 5000, "n": 2, "episodes": 3, "lengths": [50], "ends": ENDS},
    "cut by notes": {"size": 1, "n": 2, "episodes": 900, "lengths": [1], "ends": ENDS[:1]},
    "masks": {"size": 3, "n": 5, "episodes": 30, "lengths": [4, 11], "ends": ENDS,
              "hasActionMask": True},
    "two seats": {"size": 3, "n": 3, "episodes": 20, "lengths": [5, 8], "ends": ENDS,
                  "seats": 2, "pauses": 0.1},
    "parts": {"look": "parts", "n": 3, "episodes": 20, "lengths": [6], "ends": ENDS},
    "consents": {"size": 3, "n": 3, "episodes": 30, "lengths": [1, 4], "ends": ENDS,
                 "consents": True},
    "lost answers": {"size": 3, "n": 3, "episodes": 12, "lengths": [9], "ends": ENDS,
                     "lingerS": 0.001, "pauses": 0.3, "loses": 0.3},
    "everything goes wrong": {"size": 3, "n": 3, "episodes": 100, "lengths": [9, 3, 40],
                              "ends": ENDS, "lingerS": 0.001, "pauses": 0.3, "seats": 2,
                              "consents": True, "hasActionMask": True, "chaos": 0.4},
}  # fmt: skip


def spec_of(plan: dict[str, Any]) -> GameSpec:
    obs: Any = PARTS if plan.get("look") == "parts" else plan["size"]
    return game_spec(
        "test", obs=obs, actions=plan["n"], has_action_mask=plan.get("hasActionMask", False)
    )


@pytest.fixture(scope="module")
def played() -> dict[str, Any]:
    plans = [
        plan
        | {
            "seed": seed,
            "obs": {path: space.to_json() for path, space in PARTS.items()}
            if plan.get("look")
            else plan["size"],
            "actions": plan["n"],
        }
        for seed, plan in enumerate(PLANS.values())
    ]
    return dict(zip(PLANS, run_script("episodes.mjs", {"plans": plans}), strict=True))


def accepted(
    spec: GameSpec, batches: list[str], *, closed: bool = True
) -> tuple[dict[uuid.UUID, list[Chunk]], dict[uuid.UUID, str], int]:
    """Chunks and players by session that pass every check, and the number of duplicates."""
    intake = Intake(bytes(32), spec.game, SystemClock())
    again = 0
    states: dict[uuid.UUID, SessionState] = {}
    chunks: dict[uuid.UUID, list[Chunk]] = defaultdict(list)
    seen: dict[tuple[uuid.UUID, int], Frame] = {}
    players: dict[uuid.UUID, str] = {}
    for raw in batches:
        batch = decode_frame_batch(bytes.fromhex(raw))
        players |= {session: str(name) for session, name in batch.players.items()}
        frames = [frame for frame in batch.frames if isinstance(frame, Frame)]
        assert len(frames) == len(batch.frames)
        for frame in intake.admit(frames, batch.players):
            assert isinstance(frame, Frame), frame
            checked = check(frame.encode(), specs=KnownSpecs(spec), received_s=frame.received_s)
            assert checked.outcome == "candidate", checked.refusal
            known = seen.setdefault((frame.session, frame.chunk_no), frame)
            if known is not frame:
                assert known.body == frame.body, "different bytes under the same number"
                again += 1
                continue
            chunk = chunk_of(frame) if frame.kind is FrameKind.DATA else None
            drop = read_drop(frame) if frame.kind is FrameKind.DROP else None
            arrival = Arrival(
                number=frame.chunk_no,
                player=frame.player,
                received_s=frame.received_s,
                kind="data" if chunk else "drop" if drop else "close",
                first_step=chunk.meta.first_step if chunk else -1,
                n_steps=chunk.meta.n_steps if chunk else drop.n_steps if drop else 0,
                dropped=drop.ranges if drop else (),
            )
            states[frame.session], refusal = admit(states.get(frame.session), arrival)
            assert refusal == ""
            if chunk:
                chunks[frame.session].append(chunk)
            elif not drop:
                now = states[frame.session]
                assert read_close(frame).n_steps == now.n_steps + now.dropped_steps
    assert all(state.closed is closed and state.missing() == () for state in states.values())
    return chunks, players, again


def obs_at(spec: GameSpec, chunk: Chunk, at: int) -> list[float]:
    return [float(x) for name in spec.obs_columns for x in np.ravel(chunk.columns[name][at])]


def flat(spec: GameSpec, obs: Any) -> list[float]:
    return [*obs["far"]["away"], obs["on"]] if isinstance(obs, dict) else obs


def expected_steps(spec: GameSpec, episode: dict[str, Any]) -> list[tuple[Any, ...]]:
    """The expected rows of an episode.

    Each: obs, action, reward, next obs, terminated, truncated, first, by, action_mask.
    """
    steps = episode["steps"]
    end = episode["end"]
    last = episode["last"]
    is_cut = end in ("truncated unseen", "cancelled")
    seen = [flat(spec, step["obs"]) for step in steps]
    after = [*seen[1:], flat(spec, last) if last is not None else (seen[-1] if seen else None)]
    rows = [
        (
            seen[at],
            step["action"],
            float(np.float32(step["reward"])),
            after[at],
            end.startswith("terminated") and at == len(steps) - 1,
            end == "truncated" and at == len(steps) - 1,
            at == 0,
            By[step["by"].upper()],
            step["actionMask"],
        )
        for at, step in enumerate(steps)
    ]
    return rows[:-1] if is_cut else rows


@pytest.mark.parametrize("name", PLANS)
def test_every_stored_row_equals_the_played_one(played: dict[str, Any], name: str):
    spec = spec_of(PLANS[name])
    found = played[name]
    chunks, players, again = accepted(spec, found["batches"])
    expected: dict[tuple[str, int], list[Any]] = defaultdict(list)
    for episode in found["truth"]:
        if episode["isRecorded"]:
            expected[episode["player"], episode["seat"]] += expected_steps(spec, episode)
    got: dict[tuple[str, int], list[Any]] = {}
    for session, some in chunks.items():
        rows = []
        for chunk in sorted(some, key=lambda chunk: chunk.meta.chunk_no):
            columns = chunk.columns
            for at in np.flatnonzero(columns["row"] == RowKind.STEP).tolist():
                action_mask = (
                    columns["action_mask"][at].tolist() if "action_mask" in columns else None
                )
                rows.append(
                    (
                        obs_at(spec, chunk, at),
                        int(columns["action"][at]),
                        float(columns["reward"][at]),
                        obs_at(spec, chunk, at + 1),
                        bool(columns["terminated"][at]),
                        bool(columns["truncated"][at]),
                        bool(columns["is_first"][at]),
                        By(int(columns["by"][at])),
                        action_mask,
                    )
                )
        seat = some[0].meta.episodes[0].seat
        assert (players[session], seat) not in got, "one session for each player and seat"
        got[players[session], seat] = rows
    assert got == {place: rows for place, rows in expected.items() if rows}
    stats = found["stats"]
    assert found["isAll"]
    assert stats["recorded"] == stats["acked"] == sum(len(rows) for rows in got.values())
    assert (stats["waiting"], stats["refused"], stats["dropped"]) == (0, 0, 0)
    # The last decision of an episode that is truncated without an observation is dropped.
    assert stats["badInputs"] == sum(
        episode["end"] == "truncated unseen" and len(episode["steps"]) > 0
        for episode in found["truth"]
    )
    assert (again > 0) == (name in ("lost answers", "everything goes wrong"))
    skipped = sum(
        len(expected_steps(spec, episode))
        for episode in found["truth"]
        if not episode["isRecorded"]
    )
    assert stats["skipped"] == skipped
    assert (skipped > 0) == (name == "everything goes wrong")


@pytest.mark.parametrize("name", PLANS)
def test_notes_hold_the_metadata_of_each_episode(played: dict[str, Any], name: str):
    spec = spec_of(PLANS[name])
    found = played[name]
    chunks, _, _ = accepted(spec, found["batches"])
    truth = {(episode["seat"], episode["number"]): episode for episode in found["truth"]}
    ends: dict[tuple[int, int], Any] = {}
    for some in chunks.values():
        for chunk in sorted(some, key=lambda chunk: chunk.meta.chunk_no):
            for note in chunk.meta.episodes:
                assert note.match == f"m{note.seed}"
                assert note.opponents == ("script",)
                ends[note.seat, int(note.seed or 0)] = (note.cut, note.result)
    for place, episode in truth.items():
        if episode["isRecorded"] and expected_steps(spec, episode):
            is_cut = episode["end"] in ("truncated unseen", "cancelled")
            expected = (is_cut, None if episode["end"] == "cancelled" else "win")
            # An episode cut right after a chunk has no later chunk that could record the cut.
            assert ends[place] == expected or (is_cut and ends[place] == (False, None))


def test_chunks_are_cut_at_their_limits(played: dict[str, Any]):
    for name, least in {
        "cut by linger": 6,
        "cut by length": 4,
        "cut by size": 6,
        "cut by notes": 2,
    }.items():
        chunks, _, _ = accepted(spec_of(PLANS[name]), played[name]["batches"])
        assert sum(len(some) for some in chunks.values()) >= least, name
    consents = [
        chunk.meta.consent
        for some in accepted(spec_of(PLANS["consents"]), played["consents"]["batches"])[0].values()
        for chunk in some
    ]
    assert set(consents) == {"granted", "denied", "unknown"}
