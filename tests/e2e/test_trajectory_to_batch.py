"""From a real recorder to a sampled batch: what comes back is what happened, or nothing.

Random games are recorded through the real client, cut into chunks at random, lose some of them on the way, are
ingested, sealed at random, and sampled. Every observation carries a unique number, by which a row finds its true step.
"""

import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from understudy.stores.reader import SegmentReader, Window

from understudy.client.connect import Game, connect
from understudy.client.recorder import Recorder
from understudy.core.chunk import chunk_of
from understudy.core.frame import Frame, FrameKind
from understudy.core.game import GameSpec, game_spec
from understudy.core.names import PlayerName
from understudy.core.ports import Ack, Casting
from understudy.core.spaces import Box
from understudy.core.tensors import DTYPES
from understudy.ingest.service import IngestService
from understudy.stores.local import LocalStore
from understudy.streams.memory import MemoryStream
from understudy.testing import ManualClock
from understudy.testing.samples import random_rows, random_space

MOMENT = "obs.moment"


@dataclass
class Step:
    """A true step."""

    moment: int
    after: int
    action: Any
    reward: float
    obs: Any
    episode: int
    terminated: bool = False
    truncated: bool = False
    chunk: int = -1


@dataclass
class Played:
    """What one player really did."""

    session: uuid.UUID | None = None
    steps: list[Step] = field(default_factory=list)
    firsts: dict[int, int] = field(default_factory=dict)
    """First moment of each episode."""
    stored: set[int] = field(default_factory=set)
    closed: bool = True


class Collected:
    """A link that keeps what it is given."""

    keep_share = 1.0

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.players: dict[uuid.UUID, PlayerName] = {}

    def register(self, spec: GameSpec) -> None: ...

    def send(
        self, frames: Sequence[Frame], players: Mapping[uuid.UUID, PlayerName], *, skipped_steps: int = 0
    ) -> Sequence[Ack]:
        self.frames += frames
        self.players |= players
        return [Ack(True)] * len(frames)

    def bot(self, after: int, *, wait_s: float) -> Casting | None:
        return None

    def policy(self, model_no: int) -> bytes:
        raise KeyError(model_no)

    def close(self) -> None: ...


class KnownSpecs:
    def __init__(self, spec: GameSpec) -> None:
        self._spec = spec

    def spec(self, game: str, schema: str) -> GameSpec | None:
        return self._spec

    def knows(self, game: str) -> bool:
        return True


def some_spec(rng: np.random.Generator) -> GameSpec:
    moment = Box((), DTYPES["I64"])
    return game_spec("sample", obs={"moment": moment, "x": random_space(rng)}, actions=random_space(rng))


class Player:
    """Plays at random through a real recorder and writes down what happened."""

    def __init__(self, game: Game, name: str, spec: GameSpec, rng: np.random.Generator, moments: "Moments") -> None:
        self._recorder: Recorder = game.recorder(name)
        self._spec, self._rng, self._moments = spec, rng, moments
        self.name, self.played, self._episode = name, Played(), -1
        self._begin()

    def _begin(self) -> None:
        self._episode += 1
        self._moment, self._obs = self._observe()
        self.played.firsts[self._episode] = self._moment
        self._recorder.reset(self._obs)

    def _observe(self) -> tuple[int, Any]:
        moment = self._moments.next()
        return moment, {"moment": moment, "x": random_rows(self._spec.obs["x"], 1, self._rng)[0]}

    def step(self) -> None:
        action = random_rows(self._spec.action[""], 1, self._rng)[0]
        reward = float(np.float32(self._rng.normal()))
        end = self._rng.choice(["", "terminated", "truncated", "cut"], p=[0.8, 0.08, 0.07, 0.05])
        after, obs = self._observe()
        if end == "cut":
            # Nobody saw what came of the last decision: resetting early drops it.
            self._begin()
            return
        step = Step(
            self._moment, after, action, reward, self._obs, self._episode, end == "terminated", end == "truncated"
        )
        self.played.steps.append(step)
        self._recorder.step(action, reward, obs, step.terminated, step.truncated)
        self._moment, self._obs = after, obs
        if end:
            self._begin()


class Moments:
    def __init__(self) -> None:
        self._last = 0

    def next(self) -> int:
        self._last += 1
        return self._last


def play(spec: GameSpec, rng: np.random.Generator, clock: ManualClock) -> tuple[list[Played], Collected, list[str]]:
    """A few players take turns in one game; chunks are cut whenever the clock jumps."""
    link, moments = Collected(), Moments()
    with tempfile.TemporaryDirectory() as spool:
        game = connect(spec=spec, link=link, spool=spool, clock=clock, background=False, consent="granted")
        players = [Player(game, f"p{at}", spec, rng, moments) for at in range(rng.integers(1, 4))]
        for _ in range(rng.integers(3, 60)):
            players[rng.integers(len(players))].step()
            if rng.random() < 0.15:
                clock.advance(1.1)
                game.pump()
        game.close()
        game.pump()
    by_name = {name: session for session, name in link.players.items()}
    for player in players:
        player.played.session = by_name.get(PlayerName(player.name))
    return [player.played for player in players], link, [player.name for player in players]


def deliver(
    played: list[Played],
    link: Collected,
    rng: np.random.Generator,
    store: LocalStore,
    spec: GameSpec,
    clock: ManualClock,
) -> None:
    """Some chunks never arrive, the rest comes in any order; note which steps were stored."""
    of_session = {one.session: one for one in played}
    stream, kept = MemoryStream(clock=clock), []
    for frame in link.frames:
        one = of_session[frame.session]
        lost = rng.random() < 0.15
        if frame.kind is FrameKind.DATA:
            meta = chunk_of(frame).meta
            for step in one.steps[meta.first_step : meta.first_step + meta.n_steps]:
                step.chunk = meta.chunk_no
            if not lost:
                one.stored.add(meta.chunk_no)
        elif frame.kind is FrameKind.CLOSE:
            one.closed = not lost
        if not lost:
            kept.append(frame.stamped(frame.session.bytes, int(clock.now())))
    rng.shuffle(kept)
    service = IngestService(stream, store, KnownSpecs(spec), owner="test", clock=clock)
    for at in range(0, len(kept), 3):
        stream.append(kept[at : at + 3])
        service.drain()
        if rng.random() < 0.2:
            store.freeze(wait=True)
    assert service.stats.fates.keys() <= {"new"}, service.stats


def window_of(one: Played, at: int, n: int) -> tuple[list[Step], bool]:
    """The steps of an n-step window from a start, the naive way, and whether it is still waiting for more."""
    steps, waiting = [one.steps[at]], False
    while len(steps) < n:
        last = steps[-1]
        if last.terminated or last.truncated:
            break
        following = one.steps[at + len(steps)] if at + len(steps) < len(one.steps) else None
        if following is None or following.episode != last.episode or following.chunk not in one.stored:
            is_last_step_of_chunk = following is None or following.chunk != last.chunk
            newest = last.chunk == max(one.stored)
            waiting = is_last_step_of_chunk and newest and not one.closed
            break
        if following.chunk not in (last.chunk, last.chunk + 1):
            break
        steps.append(following)
    return steps, waiting


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(seed=st.integers(0, 2**32 - 1), n=st.integers(1, 5), stack=st.integers(1, 4))
def test_sampled_windows_are_the_true_ones(seed: int, n: int, stack: int) -> None:
    rng = np.random.default_rng(seed)
    clock, spec = ManualClock(), some_spec(rng)
    played, link, _ = play(spec, rng, clock)
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalStore(Path(folder), specs=KnownSpecs(spec), clock=clock) as store,
    ):
        deliver(played, link, rng, store, spec, clock)
        truth = {step.moment: (one, at) for one in played for at, step in enumerate(one.steps)}
        expected = {
            moment
            for moment, (one, at) in truth.items()
            if one.steps[at].chunk in one.stored and is_sampleable(one, at, n, stack)
        }
        if not expected:
            return
        with SegmentReader(Path(folder), clock=clock) as reader:
            window = Window(n_step=n, discount=0.9, stack=stack)
            batch = reader.sample(40 * len(expected) + 200, rng=rng, window=window)
            for row in range(len(batch)):
                check_row(batch, row, truth, spec, n, stack)
            seen = np.asarray(batch.obs[MOMENT]).reshape(len(batch), -1)[:, -1].tolist()
            assert set(seen) == expected


def is_sampleable(one: Played, at: int, n: int, stack: int) -> bool:
    _, waiting = window_of(one, at, n)
    return not (n > 1 and waiting) and frames_of(one, at, stack) is not None


def frames_of(one: Played, at: int, stack: int) -> list[int] | None:
    """Moments of the last observations up to a step, or None when some were lost on the way."""
    moments, step = [one.steps[at].moment], one.steps[at]
    while len(moments) < stack:
        if moments[0] == one.firsts[step.episode]:
            moments.insert(0, moments[0])
            continue
        before = one.steps[at - len(moments)] if at >= len(moments) else None
        if before is None or before.episode != step.episode or before.chunk not in one.stored:
            return None
        moments.insert(0, before.moment)
    return moments


def check_row(batch: Any, row: int, truth: dict[int, tuple[Played, int]], spec: GameSpec, n: int, stack: int) -> None:
    moment = int(np.asarray(batch.obs[MOMENT][row]).ravel()[-1])
    one, at = truth[moment]
    start = one.steps[at]
    steps, waiting = window_of(one, at, n)
    assert n == 1 or not waiting
    last = steps[-1]
    reward = np.float32(sum(0.9**k * float(np.float32(step.reward)) for k, step in enumerate(steps)))
    np.testing.assert_allclose(batch.reward[row], reward, rtol=1e-5, atol=1e-6)
    assert batch.factor[row] == (0 if last.terminated else np.float32(0.9 ** len(steps)))
    assert (bool(batch.terminated[row]), bool(batch.truncated[row])) == (last.terminated, last.truncated)
    np.testing.assert_array_equal(batch.action["action"][row], start.action)
    assert batch.action["action"].dtype == spec.action[""].dtype
    frames = np.asarray(batch.obs[MOMENT][row]).ravel().tolist()
    assert frames == frames_of(one, at, stack)
    following = np.asarray(batch.next_obs[MOMENT][row]).ravel().tolist()
    assert following[-1] == last.after
    x = batch.obs["obs.x"][row] if stack == 1 else batch.obs["obs.x"][row][-1]
    np.testing.assert_array_equal(x, start.obs["x"])
