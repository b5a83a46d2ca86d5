"""From a real recorder to a learner's batch: drawn rows equal the recorded steps, bit for bit.

    recorder ─► spool ─► link ─► stream ─► ingest ─► store
        ─► StoreView.tail ─► FromStore ─► replay ─► batch

Random games are recorded through the real client and cut into chunks at random. Some chunks are
lost on the way, some come twice or late, while a learner follows the store. Every observation
carries a unique number, its moment, by which a drawn transition finds its true step; what must be
drawn is worked out from lists of true steps alone.
"""

import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.faults.profiles import property_of
from tests.streams.memory import MemoryStream
from understudy.algorithm import Batch, Decision, Feedback, Transitions
from understudy.client.connect import ClientConfig, Game, connect
from understudy.client.episode import Recorder
from understudy.core.names import PlayerName
from understudy.core.tensors import DTYPES, Array
from understudy.experience.chunk import chunk_of
from understudy.experience.frame import Frame, FrameKind
from understudy.experience.game import GameSpec, game_spec
from understudy.experience.spaces import Box, Discrete
from understudy.ingest.service import IngestService
from understudy.learn.algorithms.bc import Bc, BcConfig, BcKnobs
from understudy.learn.learner import Learner, LearnerConfig
from understudy.learn.replay import HostReplay
from understudy.learn.replay_source import ReplaySource
from understudy.nn.policy import Policy
from understudy.ports import Ack, LiveModels, TicketBatch
from understudy.replay import ReplayConfig
from understudy.stores.local import LocalStore
from understudy.testing import ManualClock
from understudy.testing.samples import random_rows, random_space
from understudy.training.follower import StoreFollower
from understudy.training.from_store import IDLE_S, FromStore

DISCOUNT = 0.9


# --- playing --------------------------------------------------------------------------------------


@dataclass
class Seen:
    """What a player saw at one moment."""

    x: Any
    action_mask: Any


@dataclass
class Step:
    """A true step: what was done at a moment, and the moment it led to."""

    moment: int
    after: int
    action: Any
    reward: float
    episode: int
    terminated: bool
    truncated: bool
    chunk: int = -1

    @property
    def is_last(self) -> bool:
        return self.terminated or self.truncated


@dataclass
class Played:
    """What one player really did, and how much of it a learner has heard of."""

    session: uuid.UUID = field(default_factory=uuid.uuid4)
    steps: list[Step] = field(default_factory=list)
    firsts: set[int] = field(default_factory=set)
    """The first moment of each episode."""
    heard: set[int] = field(default_factory=set)
    """Numbers of frames that the learner read; a close has a number too."""
    joined: set[int] = field(default_factory=set)
    """Chunks that came right behind the one before, so that a window may run on into them."""
    newest: int | None = None
    """The chunk behind which more may come; None when nothing more is expected."""

    def hear(self, frame: Frame) -> None:
        """The learner reads a frame; one that it read before is not shown to it again."""
        number = frame.chunk_no
        if number in self.heard:
            return
        self.heard.add(number)
        if frame.kind is FrameKind.CLOSE:
            self.newest = None
            return
        if self.newest == number - 1:
            self.joined.add(number)
        self.newest = number if self.newest is None else max(self.newest, number)


class Collected:
    """A link that keeps what it is given."""

    recording_rate = 1.0

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.players: dict[uuid.UUID, PlayerName] = {}

    def register(self, spec: GameSpec) -> None: ...

    def send(
        self,
        frames: Sequence[Frame],
        players: Mapping[uuid.UUID, PlayerName],
        *,
        skipped_steps: int = 0,
    ) -> Sequence[Ack]:
        self.frames += frames
        self.players |= players
        return [Ack(True)] * len(frames)

    def bot(self, after: int, *, wait_s: float, schema: str | None = None) -> LiveModels | None:
        return None

    def tickets(self, n: int, *, schema: str, with_control: bool = True) -> TicketBatch:
        return TicketBatch(entry=0)

    def policy(self, model_no: int) -> bytes:
        raise KeyError(model_no)

    def close(self) -> None: ...


class KnownSpecs:
    def __init__(self, spec: GameSpec) -> None:
        self._spec = spec

    def spec(self, game: str, schema: str) -> GameSpec | None:
        return self._spec

    def has_game(self, game: str) -> bool:
        return True


def some_spec(rng: np.random.Generator) -> GameSpec:
    """Any observation and any single action; masks in most games whose action is discrete."""
    moment = Box((), DTYPES["I64"])
    actions = random_space(rng)
    has_action_mask = isinstance(actions, Discrete) and bool(rng.random() < 0.7)
    return game_spec(
        "sample",
        obs={"moment": moment, "x": random_space(rng)},
        actions=actions,
        has_action_mask=has_action_mask,
    )


class Player:
    """Plays at random through a real recorder and writes down what happened."""

    def __init__(
        self,
        game: Game,
        name: str,
        *,
        spec: GameSpec,
        rng: np.random.Generator,
        seen: dict[int, Seen],
    ) -> None:
        self._recorder: Recorder = game.recorder(name)
        self._spec = spec
        self._rng = rng
        self._seen = seen
        self._episode = -1
        self.name = name
        self.played = Played()
        self._begin()

    def _begin(self) -> None:
        self._episode += 1
        self._moment = self._look()
        self.played.firsts.add(self._moment)
        self._recorder.reset(
            self._obs(self._moment), action_mask=self._seen[self._moment].action_mask
        )

    def _look(self) -> int:
        """A new moment."""
        moment = len(self._seen) + 1
        action_mask = None
        if self._spec.has_action_mask and self._spec.discrete is not None:
            action_mask = self._rng.random(self._spec.discrete.n) < 0.5
            action_mask[self._rng.integers(len(action_mask))] = True
        self._seen[moment] = Seen(random_rows(self._spec.obs["x"], 1, self._rng)[0], action_mask)
        return moment

    def _obs(self, moment: int) -> dict[str, Any]:
        return {"moment": moment, "x": self._seen[moment].x}

    def step(self) -> None:
        end = self._rng.choice(["", "terminated", "truncated", "cut"], p=[0.8, 0.08, 0.07, 0.05])
        if end == "cut":
            # Nobody saw what came of the last decision: resetting early drops it.
            self._begin()
            return
        after = self._look()
        reward = float(np.float32(self._rng.normal()))
        step = Step(
            self._moment,
            after,
            self._action(),
            reward,
            self._episode,
            end == "terminated",
            end == "truncated",
        )
        self.played.steps.append(step)
        self._recorder.step(
            step.action,
            reward,
            self._obs(after),
            step.terminated,
            step.truncated,
            action_mask=self._seen[after].action_mask,
        )
        self._moment = after
        if end:
            self._begin()

    def _action(self) -> Any:
        space = self._spec.action[""]
        action_mask = self._seen[self._moment].action_mask
        if action_mask is None:
            return random_rows(space, 1, self._rng)[0]
        assert isinstance(space, Discrete)
        return space.dtype.type(space.start + self._rng.choice(np.flatnonzero(action_mask)))


def play(
    spec: GameSpec, rng: np.random.Generator, clock: ManualClock
) -> tuple[list[Played], dict[int, Seen], list[Frame]]:
    """A few players take turns in one game; chunks are cut whenever the clock jumps."""
    link = Collected()
    seen: dict[int, Seen] = {}
    with tempfile.TemporaryDirectory() as spool:
        config = ClientConfig(link=link, spool=spool, clock=clock, background=False)
        game = connect(spec, consent="granted", config=config)
        players = [
            Player(game, f"p{at}", spec=spec, rng=rng, seen=seen)
            for at in range(rng.integers(1, 4))
        ]
        for _ in range(rng.integers(3, 60)):
            players[rng.integers(len(players))].step()
            if rng.random() < 0.15:
                clock.advance(1.1)
                game.pump()
        game.close()
        game.pump()
    sessions = {name: session for session, name in link.players.items()}
    for player in players:
        player.played.session = sessions.get(PlayerName(player.name), player.played.session)
    played = [player.played for player in players]
    of_session = {one.session: one for one in played}
    for frame in link.frames:
        if frame.kind is FrameKind.DATA:
            meta = chunk_of(frame).meta
            for step in of_session[frame.session].steps[
                meta.first_step : meta.first_step + meta.n_steps
            ]:
                step.chunk = meta.chunk_no
    return played, seen, link.frames


# --- learning -------------------------------------------------------------------------------------


class Onlooker:
    """An algorithm that asks for any kind of transitions and learns nothing of them."""

    Config = BcConfig
    Knobs = BcKnobs

    def __init__(self, game: GameSpec, needs: Transitions) -> None:
        self.game = game
        self.needs = needs
        self._bc = Bc(game_spec("other", obs=2, actions=2), BcConfig(widths=()))

    def init(self, key: Any, start: Mapping[str, Any] | None = None) -> Any:
        return self._bc.init(key, start)

    def act(
        self, state: Any, obs: Mapping[str, Any], key: Any, explore: Any, action_mask: Any = None
    ) -> Decision:
        return self._bc.act(state, obs, key, explore, action_mask)

    def update(self, state: Any, batch: Any, knobs: Mapping[str, Any]) -> tuple[Any, Feedback]:
        raise NotImplementedError

    def policy(self, state: Any) -> Policy:
        return self._bc.policy(state)


class Followed:
    """A store that frames come into by ingest, and a learner that follows it now and then."""

    def __init__(
        self, folder: Path, spec: GameSpec, needs: Transitions, *, clock: ManualClock
    ) -> None:
        self._folder = folder
        self._specs = KnownSpecs(spec)
        self._clock = clock
        self._stream = MemoryStream(clock=clock)
        self._unread: list[tuple[Played, Frame]] = []
        self._open()
        config = LearnerConfig(
            limiter=None, updates_per_call=1, replay=ReplayConfig(capacity=4_096)
        )
        self._learner = Learner(Onlooker(spec, needs), BcKnobs(), root_seed=0, config=config)
        self._engine = FromStore(
            self._learner, StoreFollower(folder), steps=1, clock=clock, on_event=self._refuse
        )
        self._is_first = True

    def _refuse(self, event: object) -> None:
        raise AssertionError(event)

    def _open(self) -> None:
        self.store = LocalStore(
            self._folder, specs=self._specs, clock=self._clock, synchronous="OFF"
        )
        self._service = IngestService(
            self._stream, self.store, self._specs, owner="test", clock=self._clock
        )

    def reopen(self) -> None:
        self.store.close()
        self._open()

    @property
    def replay(self) -> HostReplay:
        assert isinstance(self._learner.source, ReplaySource)
        assert isinstance(self._learner.source.replay, HostReplay)
        return self._learner.source.replay

    def deliver(self, frames: Sequence[tuple[Played, Frame]]) -> None:
        """Bring frames into the store; a frame that is there already changes nothing."""
        self._stream.append(
            [frame.stamped(frame.session.bytes, int(self._clock.now())) for _, frame in frames]
        )
        self._service.drain()
        assert self._service.stats.fates.keys() <= {"new", "duplicate"}, self._service.stats
        self._unread += frames

    def follow(self, played: Sequence[Played]) -> None:
        """The learner reads on; what it heard is noted."""
        self._engine.follow()
        for one, frame in self._unread:
            one.hear(frame)
        self._unread.clear()
        if self._is_first:
            # What a store holds at the first look is taken as all there is.
            for one in played:
                one.newest = None
        self._is_first = False

    def close(self) -> None:
        self._engine.close()
        self.store.close()


# --- what must be drawn ---------------------------------------------------------------------------


def goes_on(one: Played, at: int) -> bool:
    """Whether the learner knows that step `at + 1` follows step `at`."""
    if at < 0 or at + 1 >= len(one.steps):
        return False
    step = one.steps[at]
    following = one.steps[at + 1]
    if step.is_last or following.episode != step.episode or following.chunk not in one.heard:
        return False
    return following.chunk == step.chunk or (
        following.chunk == step.chunk + 1 and following.chunk in one.joined
    )


def window_of(one: Played, at: int, n: int) -> list[Step] | None:
    """The steps of the n-step window that starts at a step; None while more of it may come."""
    steps = [one.steps[at]]
    while len(steps) < n and goes_on(one, at + len(steps) - 1):
        steps.append(one.steps[at + len(steps)])
    last = steps[-1]
    if len(steps) == n or last.is_last or last.chunk != one.newest:
        return steps
    is_end_of_chunk = last is [step for step in one.steps if step.chunk == last.chunk][-1]
    return None if is_end_of_chunk else steps


def stack_of(one: Played, at: int, ahead: int, k: int) -> list[int] | None:
    """The last k moments up to `ahead` steps after step `at`; None if some were lost."""
    moments = [one.steps[at].moment, *(step.after for step in one.steps[at : at + ahead])]
    while goes_on(one, at - 1):
        at -= 1
        moments.insert(0, one.steps[at].moment)
    while len(moments) < k and moments[0] in one.firsts:
        moments.insert(0, moments[0])
    return moments[-k:] if len(moments) >= k else None


def expected(
    played: Sequence[Played], seen: Mapping[int, Seen], spec: GameSpec, needs: Transitions
) -> list[Any]:
    """Every transition that may be drawn, as (moment, one entry for each array of a batch)."""
    found: list[Any] = []
    for one in played:
        for at, step in enumerate(one.steps):
            window = window_of(one, at, needs.n_step) if step.chunk in one.heard else None
            stack = stack_of(one, at, 0, needs.stack)
            if window is None or stack is None:
                continue
            following = stack_of(one, at, len(window), needs.stack)
            assert following is not None
            total = sum(DISCOUNT**ahead * each.reward for ahead, each in enumerate(window))
            discrete = spec.discrete
            entry: dict[str, Any] = {
                "obs.moment": np.array(stack, np.int64),
                "obs.x": np.array([seen[moment].x for moment in stack]),
                "next.moment": np.array(following, np.int64),
                "next.x": np.array([seen[moment].x for moment in following]),
                "action": np.float32(step.action).ravel()
                if discrete is None
                else np.int32(step.action - discrete.start),
                "reward": np.float32(total),
                "discount": np.float32(0.0 if window[-1].terminated else DISCOUNT ** len(window)),
                "weight": np.float32(1.0),
            }
            if spec.has_action_mask:
                entry["action_mask"] = seen[stack[-1]].action_mask
                entry["next_action_mask"] = seen[following[-1]].action_mask
            if needs.stack == 1:
                entry |= {
                    name: entry[name][0]
                    for name in ("obs.moment", "obs.x", "next.moment", "next.x")
                }
            found.append((step.moment, entry))
    return sorted(found, key=lambda pair: pair[0])


def as_drawn(batch: Batch) -> dict[str, Array]:
    """A batch's arrays under the names that `expected` uses."""
    drawn = {
        "action": batch.action,
        "reward": batch.reward,
        "discount": batch.discount,
        "weight": batch.weight,
    }
    drawn |= {name: batch.obs[name] for name in ("obs.moment", "obs.x")}
    drawn |= {name.replace("obs", "next"): batch.next_obs[name] for name in ("obs.moment", "obs.x")}
    if batch.action_mask is not None:
        drawn |= {"action_mask": batch.action_mask, "next_action_mask": batch.next_action_mask}
    return {name: np.asarray(array)[0] for name, array in drawn.items()}


def check(
    replay: HostReplay, wanted: Sequence[Any], rng: np.random.Generator, needs: Transitions
) -> None:
    """Every start that may be drawn is there once, and whatever is drawn is the true transition."""
    assert replay.n_sampleable == len(wanted)
    if not wanted:
        return
    drawn = as_drawn(replay.draw(1, rng=rng, batch=40 * len(wanted) + 200).batches)
    moments = np.array([moment for moment, _ in wanted])
    newest = drawn["obs.moment"] if needs.stack == 1 else drawn["obs.moment"][:, -1]
    assert set(newest.tolist()) == set(moments.tolist())
    at = np.searchsorted(moments, newest)
    assert drawn.keys() == wanted[0][1].keys()
    for name, array in drawn.items():
        truth = np.array([entry[name] for _, entry in wanted])
        assert array.dtype == truth.dtype, name
        np.testing.assert_array_equal(array, truth[at], err_msg=name)


@property_of(
    short=15,
    full=100,
    seed=st.integers(0, 2**32 - 1),
    n_step=st.integers(1, 5),
    stack=st.integers(1, 4),
    prioritised=st.booleans(),
    order=st.sampled_from(["as sent", "swapped", "shuffled"]),
)
def test_drawn_transitions_match_the_recorded_ones(
    seed: int, n_step: int, stack: int, prioritised: bool, order: str
) -> None:
    rng = np.random.default_rng(seed)
    clock = ManualClock()
    spec = some_spec(rng)
    needs = Transitions(
        batch=8, n_step=n_step, discount=DISCOUNT, stack=stack, prioritised=prioritised
    )
    played, seen, frames = play(spec, rng, clock)
    of_session = {one.session: one for one in played}
    sent = [(of_session[frame.session], frame) for frame in frames if rng.random() > 0.15]
    if order == "shuffled":
        rng.shuffle(sent)
    elif order == "swapped":
        for at in range(0, len(sent) - 1, 3):
            sent[at : at + 2] = sent[at : at + 2][::-1]
    with tempfile.TemporaryDirectory() as folder:
        followed = Followed(Path(folder), spec, needs, clock=clock)

        def look() -> None:
            followed.follow(played)
            check(followed.replay, expected(played, seen, spec, needs), rng, needs)

        for at in range(0, len(sent), 3):
            again = [sent[rng.integers(at)]] if at and rng.random() < 0.3 else []
            followed.deliver([*sent[at : at + 3], *again])
            if rng.random() < 0.2:
                followed.reopen()
            if rng.random() < 0.3:
                look()
        look()
        # Sessions that fell silent are taken as ended, and what waited for more of them waits no
        # longer.
        clock.advance(IDLE_S + 2.0)
        for one in played:
            one.newest = None
        look()
        followed.store.forget(played[0].session.bytes)
        played[0].heard.clear()
        look()
        followed.close()
