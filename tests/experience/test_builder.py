"""ChunkBuilder writes rows exactly as the format requires, for any order of calls."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from understudy.core.errors import Refused
from understudy.core.names import new_session
from understudy.core.tensors import DTYPES
from understudy.experience.builder import (
    MAX_NOTE_BYTES,
    ChunkBuilder,
    Extras,
    RowLayout,
    encode_block,
)
from understudy.experience.chunk import (
    CUT_BYTES,
    MAX_STEPS,
    By,
    Chunk,
    EpisodeNote,
    RowKind,
    chunk_of,
)
from understudy.experience.game import GameSpec, game_spec
from understudy.experience.spaces import MAX_NUMBER, Box, Discrete

SPEC = game_spec("my-game", obs=2, actions=3)
NOTE = EpisodeNote(row=0)
LONG = "x" * 99
HALF: Any = 1.5


def obs(i: float) -> np.ndarray:
    return np.array([i, -i], np.float32)


def new_builder(spec: GameSpec = SPEC, **settings: Any) -> ChunkBuilder:
    return ChunkBuilder(spec, session=new_session(1_800_000_000.0), client="test", **settings)


def taken(builder: ChunkBuilder, chunk_no: int = 0, first_step: int = 0) -> Chunk:
    block = builder.take()
    assert block is not None
    ((encoded),) = encode_block(block, chunk_no=chunk_no, first_step=first_step)
    assert encoded.frame is not None
    return chunk_of(encoded.frame)


def test_an_episode_becomes_steps_and_a_final_row():
    builder = new_builder()
    builder.begin(EpisodeNote(row=0, seat=2, match="m", seed=7), consent="granted")
    builder.decide(obs(0), 1, by=By.PERSON, frames=4, t_ms=10)
    builder.add_reward(0.5)
    builder.add_reward(0.25)
    builder.decide(obs(1), 2, by=By.BOT, t_ms=20)
    builder.finish(obs(2), terminated=True, result="won")
    chunk = taken(builder)
    columns = {name: column.tolist() for name, column in chunk.columns.items()}
    assert columns == {
        "obs": [[0, 0], [1, -1], [2, -2]],
        "action": [1, 2, 0],
        "reward": [0.75, 0, 0],
        "row": [0, 0, 1],
        "terminated": [False, True, False],
        "truncated": [False] * 3,
        "is_first": [True, False, False],
        "by": [1, 2, 0],
        "frames": [4, 1, 0],
        "t_ms": [10, 20, 0],
    }
    assert chunk.meta.episodes == (EpisodeNote(row=0, seat=2, match="m", seed=7, result="won"),)
    assert (chunk.meta.n_steps, chunk.meta.consent, chunk.meta.kind, chunk.meta.client) == (
        2,
        "granted",
        "player",
        "test",
    )


def test_taking_a_block_mid_episode_leaves_a_bootstrap_row_and_continues():
    builder = new_builder()
    builder.begin(NOTE)
    for at in range(3):
        builder.decide(obs(at), at, t_ms=at)
    builder.add_reward(5.0)
    first = taken(builder)
    assert first.columns["row"].tolist() == [0, 0, 2]
    assert first.columns["action"].tolist() == [0, 1, 0]
    assert first.columns["obs"].tolist()[-1] == [2, -2]
    assert builder.take() is None
    builder.add_reward(1.0)
    builder.finish(obs(3), terminated=False, truncated=True)
    second = taken(builder, 1, 2)
    assert second.columns["obs"].tolist() == [[2, -2], [3, -3]]
    assert second.columns["reward"].tolist() == [6.0, 0.0]
    assert second.columns["is_first"].tolist() == [False, False]
    assert second.columns["truncated"].tolist() == [True, False]
    assert [note.row for note in second.meta.episodes] == [0]


def test_an_episode_without_closed_steps_moves_to_the_next_block():
    builder = new_builder()
    builder.begin(NOTE)
    builder.decide(obs(0), 0)
    builder.finish(obs(1), terminated=True)
    builder.begin(EpisodeNote(row=0, match="second"))
    builder.decide(obs(5), 1)
    first = taken(builder)
    assert first.columns["row"].tolist() == [0, 1]
    assert [note.match for note in first.meta.episodes] == [None]
    builder.finish(obs(6), terminated=True)
    second = taken(builder, 1, 1)
    assert second.columns["is_first"].tolist() == [True, False]
    assert [note.match for note in second.meta.episodes] == ["second"]


def test_a_cut_drops_the_open_step_and_keeps_its_observation():
    builder = new_builder()
    builder.begin(NOTE)
    builder.decide(obs(0), 1)
    builder.add_reward(1.0)
    builder.decide(obs(1), 2, extras=Extras(logp=-1.0))
    builder.add_reward(9.0)
    builder.cut(result=0.5)
    builder.begin(NOTE)
    builder.decide(obs(7), 0)
    builder.finish(obs(8), terminated=True)
    chunk = taken(builder)
    assert chunk.columns["row"].tolist() == [0, 2, 0, 1]
    assert chunk.columns["reward"].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert chunk.columns["action"].tolist() == [1, 0, 0, 0]
    assert "logp" not in chunk.columns
    assert [(note.row, note.cut, note.result) for note in chunk.meta.episodes] == [
        (0, True, 0.5),
        (2, False, None),
    ]


def test_a_cut_without_a_closed_step_leaves_nothing():
    builder = new_builder()
    for _ in range(3):
        builder.begin(NOTE)
        builder.decide(obs(0), 1, extras=Extras(version=3))
        builder.cut()
    assert builder.take() is None
    builder.begin(NOTE)
    builder.decide(obs(1), 0)
    builder.decide(obs(2), 0)
    taken(builder)
    builder.cut()
    assert builder.take() is None
    builder.begin(NOTE)
    builder.decide(obs(3), 0)
    builder.finish(None, terminated=True)
    chunk = taken(builder, 1, 1)
    assert chunk.columns["obs"].tolist()[0] == [3, -3]
    assert len(chunk.meta.episodes) == 1


def test_a_staged_observation_is_a_bootstrap_row_without_loss():
    builder = new_builder()
    builder.begin(NOTE)
    builder.stage(obs(0))
    builder.act(1)
    builder.add_reward(1.0)
    builder.stage(obs(1))
    chunk = taken(builder)
    assert chunk.columns["row"].tolist() == [0, 2]
    builder.act(2)
    builder.stage(obs(2))
    builder.cut()
    chunk = taken(builder, 1, 1)
    assert chunk.columns["obs"].tolist() == [[1, -1], [2, -2]]
    assert chunk.meta.episodes[0].cut


def test_a_missing_final_observation_is_padded_within_the_space():
    spec = game_spec(
        "my-game", obs={"n": Discrete(3, 5), "b": Box((2,), DTYPES["I16"], 1, 9)}, actions=2
    )
    builder = new_builder(spec)
    builder.begin(NOTE)
    builder.decide({"n": 6, "b": [1, 9]}, 1)
    builder.finish(None, terminated=True)
    chunk = taken(builder)
    assert chunk.columns["row"].tolist() == [0, 1]
    for name, space in spec.obs_columns.items():
        assert space.contains(chunk.columns[name]).all()


def test_optional_columns_are_present_if_a_step_used_them():
    builder = new_builder()
    builder.begin(NOTE)
    builder.decide(
        obs(0), 1, extras=Extras(logp=-0.5, value=2.0, priority=0.1, version=7, raw_action=1.5)
    )
    builder.decide(obs(1), 2)
    builder.decide(obs(2), 2)
    chunk = taken(builder)
    assert chunk.columns["version"].tolist() == [7, 0, 0]
    assert chunk.columns["logp"].tolist() == [-0.5, 0, 0]
    assert chunk.columns["raw_action"].tolist() == [1.5, 0, 0]
    builder.decide(obs(3), 0)
    assert "version" not in taken(builder, 1, 2).columns


def test_every_observation_has_an_action_mask():
    builder = new_builder(game_spec("my-game", obs=2, actions=3, has_action_mask=True))
    builder.begin(NOTE)
    builder.decide(obs(0), 1, action_mask=[False, True, False])
    builder.decide(obs(1), 2)
    builder.finish(obs(2), terminated=True, action_mask=np.zeros(3, np.bool_))
    assert taken(builder).columns["action_mask"].tolist() == [
        [False, True, False],
        [True] * 3,
        [False] * 3,
    ]


@pytest.mark.parametrize("named_after", range(4))
@pytest.mark.parametrize("taken_after", [1, 2, 3, None])
def test_a_model_is_named_from_its_first_decision_on_and_in_no_other_episode(
    named_after, taken_after
):
    builder = new_builder()
    found = []
    builder.begin(EpisodeNote(row=0, match="before"))
    builder.decide(obs(0), 0)
    builder.finish(obs(1), terminated=True)
    builder.begin(EpisodeNote(row=0, match="named"))
    for at in range(4):
        if at == named_after:
            builder.name_model("my-game/7")
            builder.name_model("my-game/7")
        builder.decide(obs(at), 0)
        if at + 1 == taken_after:
            found.append(taken(builder, 0, 0))
    builder.finish(obs(4), terminated=True)
    builder.begin(EpisodeNote(row=0, match="after"))
    builder.decide(obs(0), 0)
    builder.cut()
    found.append(taken(builder, len(found), 0))
    builder.name_model("outside of an episode")
    notes = [note for chunk in found for note in chunk.meta.episodes]
    assert {note.model for note in notes if note.match != "named"} == {None}
    models = [note.model for note in notes if note.match == "named"]
    assert models[-1] == "my-game/7"
    if len(models) == 2:
        # The first chunk was taken away after `taken_after` decisions; later ones cannot change it.
        assert (models[0] == "my-game/7") == (named_after < taken_after)


def test_a_change_of_consent_ends_the_chunk():
    builder = new_builder()
    builder.begin(NOTE, consent="granted")
    builder.decide(obs(0), 1)
    builder.finish(obs(1), terminated=True)
    block = builder.begin(NOTE, consent="denied")
    assert block is not None
    assert block.meta.consent == "granted"
    assert builder.consent == "denied"


def test_a_block_is_full_by_steps_rows_or_notes():
    builder = new_builder(max_steps=5)
    builder.begin(NOTE)
    assert [builder.decide(obs(at), 0) for at in range(6)] == [False] * 5 + [True]
    short = new_builder(max_steps=8)
    for _ in range(20):
        short.begin(NOTE)
        short.decide(obs(0), 0)
        if short.finish(obs(1), terminated=True):
            break
    assert taken(short).n_rows <= short.layout.n_rows
    wordy = new_builder()
    n = 0
    is_full = False
    while not is_full:
        wordy.begin(EpisodeNote(row=0, opponents=("x" * 100,) * 60))
        wordy.decide(obs(0), 0)
        is_full = wordy.finish(obs(1), terminated=True)
        n += 1
    assert n <= MAX_NOTE_BYTES // 6000 + 1
    taken(wordy)


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        (lambda builder: builder.decide(obs(0), 0), "bad_order"),
        (lambda builder: builder.add_reward(1.0), "early_reward"),
        (lambda builder: (builder.begin(NOTE), builder.act(0)), "bad_order"),
        (lambda builder: (builder.begin(NOTE), builder.begin(NOTE)), "bad_order"),
        (
            lambda builder: (builder.begin(NOTE), builder.finish(obs(0), terminated=True)),
            "bad_order",
        ),
        (
            lambda builder: (
                builder.begin(NOTE),
                builder.decide(obs(0), 0),
                builder.finish(obs(0), terminated=False),
            ),
            "bad_order",
        ),
        (
            lambda builder: (
                builder.begin(NOTE),
                builder.decide(obs(0), 0),
                builder.add_reward(1e39),
            ),
            "not_finite",
        ),
        (
            lambda builder: (
                builder.begin(NOTE),
                builder.decide(obs(0), 0, extras=Extras(logp=float("nan"))),
            ),
            "not_finite",
        ),
        (
            lambda builder: (
                builder.begin(NOTE),
                builder.decide(obs(0), 0, extras=Extras(version=-1)),
            ),
            "not_finite",
        ),
        (
            lambda builder: (
                builder.begin(NOTE),
                builder.decide(obs(0), 0, extras=Extras(version=HALF)),
            ),
            "bad_dtype",
        ),
        (lambda builder: (builder.begin(NOTE), builder.decide(obs(0), 0, frames=-1)), "bad_frames"),
        (lambda builder: builder.begin(NOTE, consent="perhaps"), "bad_metadata"),
        (
            lambda x: (x.begin(NOTE), x.decide(obs(0), 0), x.finish(terminated=True, result=LONG)),
            "bad_metadata",
        ),
    ],
)
def test_calls_out_of_order_and_impossible_numbers_are_refused(calls, reason):
    with pytest.raises(Refused) as raised:
        calls(new_builder())
    assert raised.value.reason == reason


def test_frames_beyond_the_column_are_capped():
    builder = new_builder()
    builder.begin(NOTE)
    builder.decide(obs(0), 0, frames=70_000)
    builder.finish(obs(1), terminated=True)
    assert taken(builder).columns["frames"].tolist() == [65535, 0]


def test_images_are_split_until_every_body_is_small_enough():
    rng = np.random.default_rng(0)
    spec = game_spec("pixels", obs=Box((64, 64), DTYPES["U8"]), actions=4)
    builder = new_builder(spec)
    builder.begin(NOTE)
    seen = rng.integers(0, 256, (400, 64, 64), np.uint8)
    for at in range(400):
        assert not builder.decide(seen[at], at % 4)
    builder.cut()
    block = builder.take()
    assert block is not None
    encoded = list(encode_block(block, chunk_no=3, first_step=100))
    assert len(encoded) > 1
    assert [part.chunk_no for part in encoded] == list(range(3, 3 + len(encoded)))
    chunks = [chunk_of(part.frame) for part in encoded if part.frame is not None]
    assert all(len(part.frame.body) <= CUT_BYTES for part in encoded if part.frame is not None)
    assert [chunk.meta.first_step for chunk in chunks] == list(
        np.cumsum([100, *(chunk.meta.n_steps for chunk in chunks)])[:-1]
    )
    steps = np.concatenate(
        [chunk.columns["obs"][chunk.columns["row"] == RowKind.STEP] for chunk in chunks]
    )
    assert np.array_equal(steps, seen[:399])
    after = np.concatenate([chunk.columns["obs"][1:] for chunk in chunks])
    assert np.array_equal(after, seen[1:400])


@pytest.mark.parametrize(
    ("obs_space", "rows"),
    [
        (2, MAX_STEPS + MAX_STEPS // 8 + 2),
        (10_000, 11),
        (Box((100_000,), DTYPES["U8"]), 16 * 1024 * 1024 // 100_000),
    ],
)
def test_capacity_follows_the_size_of_a_row(obs_space, rows):
    layout = RowLayout(game_spec("x", obs=obs_space, actions=2))
    assert 0 <= rows - layout.n_rows <= 1


def test_a_block_is_as_large_as_its_rows():
    builder = new_builder()
    builder.begin(NOTE)
    for n_steps in (1, 2, 40):
        for at in range(n_steps + 1):
            builder.decide(obs(at), 2, by=3, frames=9, t_ms=77, extras=Extras(value=1.0))
        block = builder.take()
        assert block is not None
        n_steps += n_steps > 1  # the decision that was open before
        assert len(block.rows) == n_steps + 1
        assert block.size_bytes < 2000 + 700 * n_steps


@pytest.mark.parametrize("frames", [1.5, "4", None])
def test_frames_that_are_no_whole_number_change_nothing(frames):
    builder = new_builder()
    builder.begin(NOTE)
    with pytest.raises(TypeError):
        builder.decide(obs(0), 0, frames=frames)
    frames = np.int64(4)
    builder.act(1, frames=frames)
    builder.finish(obs(1), terminated=True)
    assert taken(builder).columns["frames"].tolist() == [4, 0]


class Calls(RuleBasedStateMachine):
    """Any order of calls gives valid chunks whose steps are exactly the closed ones."""

    def __init__(self) -> None:
        super().__init__()
        self.builder = new_builder(max_steps=6)
        self.state = "idle"
        self.at = 0
        self.closed: list[tuple[float, float, float]] = []
        self.open: tuple[float, float] | None = None
        self.found: list[tuple[float, float, float]] = []
        self.chunk_no = self.first_step = 0

    def next_obs(self) -> float:
        self.at += 1
        return float(self.at)

    def after(self, is_full: bool) -> None:
        if is_full:
            self.take()

    @rule()
    def take(self) -> None:
        block = self.builder.take()
        if block is None:
            return
        for part in encode_block(block, chunk_no=self.chunk_no, first_step=self.first_step):
            assert part.frame is not None
            columns = chunk_of(part.frame).columns
            for row in np.flatnonzero(columns["row"] == RowKind.STEP):
                self.found.append(
                    (
                        float(columns["obs"][row, 0]),
                        float(columns["reward"][row]),
                        float(columns["obs"][row + 1, 0]),
                    )
                )
            self.chunk_no = self.chunk_no + 1
            self.first_step = self.first_step + part.n_steps

    @precondition(lambda self: self.state == "idle")
    @rule(consent=st.sampled_from(["granted", "denied"]))
    def begin(self, consent: str) -> None:
        if consent != self.builder.consent:
            self.take()
        assert self.builder.begin(NOTE, consent=consent) is None
        self.state = "begun"

    @precondition(lambda self: self.state != "idle")
    @rule(reward=st.integers(0, 9))
    def decide(self, reward: int) -> None:
        now = self.next_obs()
        is_full = self.builder.decide(obs(now), 1)
        if self.open is not None:
            self.closed.append((*self.open, now))
        self.builder.add_reward(reward)
        self.open = (now, float(reward))
        self.state = "open"
        self.after(is_full)

    @precondition(lambda self: self.state == "open")
    @rule(how=st.sampled_from(["terminated", "truncated", "lost", "cut"]))
    def finish(self, how: str) -> None:
        assert self.open is not None
        if how in ("terminated", "truncated"):
            now = self.next_obs()
            is_full = self.builder.finish(
                obs(now), terminated=how == "terminated", truncated=how == "truncated"
            )
            self.closed.append((*self.open, now))
        elif how == "lost":
            with pytest.raises(Refused, match="no_last_obs"):
                self.builder.finish(None, terminated=False, truncated=True)
            is_full = self.builder.cut()
        else:
            is_full = self.builder.cut()
        self.open = None
        self.state = "idle"
        self.after(is_full)

    @precondition(lambda self: self.state == "open")
    @rule()
    def bad_input_changes_nothing(self) -> None:
        with pytest.raises(Refused):
            self.builder.stage(np.array([np.inf, 0], np.float32))

    @invariant()
    def nothing_is_lost_or_made_up(self) -> None:
        assert self.found == self.closed[: len(self.found)]
        assert len(self.found) + self.builder.closed_steps == len(self.closed)


Calls.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCalls = Calls.TestCase


@settings(max_examples=60, deadline=None)
@given(reward=st.floats(allow_nan=True, allow_infinity=True))
def test_a_reward_is_stored_as_float32_or_refused(reward):
    builder = new_builder()
    builder.begin(NOTE)
    builder.decide(obs(0), 0)
    try:
        builder.add_reward(reward)
    except Refused:
        assert not abs(reward) <= float(np.float32(MAX_NUMBER))
        return
    builder.decide(obs(1), 0)
    assert taken(builder).columns["reward"][0] == np.float32(reward)
