"""Training from a store: the same bits whenever it begins, also while sessions are open."""

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from tests.learn.sessions import session_id
from tests.learn.worlds import Move, chunk_of
from understudy.core.errors import ConfigError
from understudy.experience.chunk import By, Chunk
from understudy.experience.frame import CloseReport, close_frame
from understudy.experience.game import game_spec
from understudy.learn.algorithms.bc import Bc, BcConfig, BcKnobs
from understudy.learn.algorithms.dqn import Dqn, DqnConfig, DqnKnobs
from understudy.learn.learner import Learner, LearnerConfig
from understudy.learn.replay import HostReplay
from understudy.ports import Candidate, WriteBatch
from understudy.replay import ReplayConfig
from understudy.stores.view import StoreView
from understudy.testing.clock import ManualClock
from understudy.training.events import Event, Update
from understudy.training.follower import StoreFollower
from understudy.training.from_store import IDLE_S, FromStore, held_out_of, people_in
from understudy.training.run_store import RunStore

GAME = game_spec("line", obs=3, actions=2)
N = 12
PROGRAMS: dict[str, Any] = {}
NOW_S = int(ManualClock().now())


def played(number: int, *, env: int = 0) -> Chunk:
    """The chunk of a number, of an episode that goes on for ever."""
    steps = range(N * number, N * number + N)
    moves = [
        Move([at, env, 1], at % 2, float(at % 3), [at + 1, env, 1], None, at == 0) for at in steps
    ]
    made = chunk_of(GAME, moves, session=env, chunk_no=number, version=0)
    return replace(made, meta=replace(made.meta, first_step=N * number))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Two sessions that nobody has closed."""
    with contextlib.closing(RunStore(tmp_path / "store", GAME, clock=ManualClock())) as history:
        history.add([played(number, env=env) for number in range(3) for env in range(2)])
        history.flush()
    return tmp_path / "store"


def put(store: Path, *chunks: Chunk, player: bytes = bytes(16), closes: int | None = None) -> None:
    """Write chunks of a player into a store, and the frame that closes a session."""
    frames = [Candidate(chunk.frame().stamped(player, NOW_S), chunk) for chunk in chunks]
    if closes is not None:
        report = CloseReport(n_chunks=4, n_steps=4 * N)
        frames.append(
            Candidate(close_frame(session_id(closes), 4, report).stamped(player, NOW_S), None)
        )
    with contextlib.closing(RunStore(store, GAME, clock=ManualClock())) as history:
        receipt = history._store.write(WriteBatch("actors", history._claim.epoch, None, frames))
    assert set(receipt.fates) == {"new"}


def store_of(store: Path, numbers: range) -> Path:
    """A store of these chunks of one session."""
    with contextlib.closing(RunStore(store, GAME, clock=ManualClock())) as history:
        history.add([played(number) for number in numbers])
        history.flush()
    return store


def of_player(env: int, consent: str, number: int = 0) -> Chunk:
    chunk = played(number, env=env)
    return replace(chunk, meta=replace(chunk.meta, kind="player", consent=consent))


def engine(
    store: Path, *, later_s: float = 0.0, heard: list[Event] | None = None, **how: Any
) -> FromStore:
    clock = ManualClock()
    clock.advance(later_s)
    config = LearnerConfig(limiter=None, updates_per_call=4, replay=ReplayConfig(capacity=512))
    learner = Learner(
        Dqn(GAME, DqnConfig(widths=(8,), batch=16, n_step=3)),
        DqnKnobs(),
        root_seed=5,
        config=config,
    )
    learner._call = PROGRAMS.setdefault("dqn", learner._call)  # one compilation for all
    events = [] if heard is None else heard
    return FromStore(
        learner, StoreFollower(store), steps=64, clock=clock, on_event=events.append, **how
    )


def bits(one: FromStore) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(one.learner.state)]


def test_open_sessions_are_learned_from_to_their_last_step_whenever_the_training_begins(
    store: Path,
):
    ends = []
    for later_s in (0.0, IDLE_S - 1, IDLE_S + 1, 1e6):
        with contextlib.closing(engine(store, later_s=later_s)) as one:
            for _ in range(3):
                assert one.step()
            assert one._replay.n_sampleable == 2 * 3 * N
            ends.append(bits(one))
    assert ends[0] == ends[1] == ends[2] == ends[3]


def test_a_session_that_continues_after_the_start_is_followed_and_ends_when_idle(
    store: Path,
):
    with contextlib.closing(engine(store)) as one:
        one.follow()
        with contextlib.closing(RunStore(store, GAME, clock=ManualClock())) as history:
            history.add([played(3)])
            history.flush()
        one.follow()
        assert (
            one._replay.n_sampleable == 2 * 3 * N + N - 2
        )  # the last starts wait for the next chunk
        one._clock.advance(IDLE_S + 1)  # type: ignore[attr-defined]
        one.follow()
        assert one._replay.n_sampleable == 2 * 3 * N + N


def test_a_training_that_is_resumed_does_not_end_sessions_again(store: Path):
    with (
        contextlib.closing(engine(store)) as one,
        contextlib.closing(engine(store, later_s=IDLE_S / 2)) as other,
    ):
        one.step()
        with contextlib.closing(RunStore(store, GAME, clock=ManualClock())) as history:
            history.add([played(3)])
            history.flush()
        one.step()
        other.restore(*one.checkpoint())
        for each in (one, other):
            each.step()
        assert other._replay.n_sampleable == one._replay.n_sampleable == 2 * 3 * N + N - 2
        assert bits(one) == bits(other)


def test_a_replay_that_cannot_tell_players_apart_does_not_train_from_a_store(store: Path):
    learner = Learner(
        Dqn(GAME, DqnConfig(widths=(8,), batch=16)),
        DqnKnobs(),
        root_seed=5,
        config=LearnerConfig(limiter=None, replay_name="device"),
    )
    said = "a DeviceReplay cannot train from a store: it lacks .*limits.* or use replay='host'"
    with pytest.raises(ConfigError, match=said):
        FromStore(learner, StoreFollower(store), steps=64, clock=ManualClock(), on_event=print)


def test_every_call_publishes_a_version_and_sends_an_event(store: Path):
    heard: list[Event] = []
    with contextlib.closing(engine(store, heard=heard)) as one:
        for _ in range(3):
            assert one.step()
        assert [type(event).__name__ for event in heard] == [
            "Compiling",
            "Update",
            "Update",
            "Update",
        ]
        assert [event.version for event in heard if isinstance(event, Update)] == [2, 3, 4]
        assert one.policy.version == 4


def held(one: FromStore) -> set[Any]:
    return {session for session, _ in one._replay.chunk_ids()}


@pytest.mark.parametrize("learn_from", [("granted",), ("granted", "unknown")])
def test_only_players_with_consent_are_learned_from(store: Path, learn_from: tuple[str, ...]):
    consents = {2: "granted", 3: "denied", 4: "unknown", 5: "denied"}
    put(store, *(of_player(env, consent) for env, consent in consents.items()))
    wanted = {0, 1} | {
        env for env, consent in consents.items() if consent in learn_from
    }  # 0 and 1 are actors
    with contextlib.closing(engine(store, learn_from=learn_from)) as one:
        assert one.step()
        assert one.learner.counts.inserted_steps == (2 * 3 + len(wanted) - 2) * N
        assert held(one) == {session_id(env) for env in wanted}
        assert one.left_out_chunks == 6 - len(wanted)
        put(
            store, of_player(3, "denied", 1), of_player(2, "granted", 1), closes=3
        )  # also while it runs
        assert one.step()
        assert held(one) == {session_id(env) for env in wanted}
        assert one.left_out_chunks == 7 - len(wanted)


def test_a_store_without_consent_has_nothing_to_learn_from(tmp_path: Path):
    put(tmp_path / "store", of_player(0, "denied"), of_player(1, "unknown"))
    with (
        contextlib.closing(engine(tmp_path / "store")) as one,
        pytest.raises(ConfigError, match="0 usable steps, 2 chunks without consent"),
    ):
        one.step()


def test_a_session_that_is_closed_while_the_training_runs_is_learned_from_to_its_last_step(
    store: Path,
):
    with contextlib.closing(engine(store)) as one:
        one.follow()
        put(store, played(3))
        one.follow()
        assert one._replay.n_sampleable == 2 * 3 * N + N - 2
        put(store, closes=0)
        one.follow()
        assert one._replay.n_sampleable == 2 * 3 * N + N
        put(store, closes=7)  # of a session nobody has heard of
        one.follow()


def test_a_player_who_is_forgotten_while_the_training_runs_leaves_the_replay(store: Path):
    gone = b"g" * 16
    stays = b"s" * 16
    put(store, of_player(2, "granted"), of_player(3, "granted"), player=gone)
    put(store, of_player(4, "granted"), player=stays)
    with contextlib.closing(engine(store)) as one, contextlib.closing(engine(store)) as other:
        assert one.step()
        saved = one.checkpoint()
        assert held(one) == {session_id(env) for env in range(5)}
        with contextlib.closing(RunStore(store, GAME, clock=ManualClock())) as history:
            history._store.forget(gone)
        other.restore(*saved)  # from before: they are not read again either
        for each in (one, other):
            assert each.step()
            assert held(each) == {session_id(env) for env in (0, 1, 4)}
            assert each._replay.n_sampleable == 2 * 3 * N + N


def test_the_share_of_people_is_kept_by_a_resume_and_after_steps_were_erased(store: Path):
    gone = b"g" * 16
    put(store, of_player(2, "granted"), of_player(3, "granted"), player=gone)
    put(store, of_player(4, "granted"), player=b"s" * 16)

    def weights(one: FromStore) -> list[float]:
        drawn = one._source.weights.drawn
        assert drawn is not None
        return sorted(set(drawn.tolist()))

    with (
        contextlib.closing(engine(store, people_share=0.75)) as one,
        contextlib.closing(engine(store, people_share=0.75)) as other,
        contextlib.closing(engine(store)) as as_recorded,
    ):
        assert one.step()
        assert as_recorded.step()
        assert bits(one) != bits(as_recorded)
        # 72 steps of actors; people have 36, then 12.
        assert weights(one) == pytest.approx([36 / 3 / 72, 1.0])
        other.restore(*one.checkpoint())
        for each in (one, other):
            assert each.step()
        assert bits(other) == bits(one)
        assert weights(other) == weights(one)
        with contextlib.closing(RunStore(store, GAME, clock=ManualClock())) as history:
            history._store.forget(gone)
        for each in (one, other):
            assert each.step()
            # A step of people is drawn at most four times as often as one of 84.
            assert weights(each) == pytest.approx([(84 / 4 - 12) / 72, 1.0])
        assert bits(other) == bits(one)


def test_the_share_of_people_holds_while_steps_leave_a_full_replay(tmp_path: Path):
    store = tmp_path / "store"
    put(store, *(of_player(env, "granted") for env in range(2, 12)))
    with contextlib.closing(engine(store, people_share=0.75)) as one:
        assert one.step()
        assert one._source.weights.drawn is None
        for numbers in (range(10), range(10, 18), range(18, 80)):
            store_of(store, numbers)
            assert one.step()
            shares = people_and_bots(one)
            assert shares is None or shares[0] / sum(shares) == pytest.approx(0.75)
        assert held(one) == {session_id(0)}, "people's steps have left it"
        assert one._source.weights.drawn is None
        assert len(one._source._bot_rows) == len(one._replay.chunk_ids())


def people_and_bots(one: FromStore) -> tuple[float, float] | None:
    """How often steps of people (sessions from 2 on) and of actors are drawn; None: equally."""
    drawn = one._source.weights.drawn
    if drawn is None:
        return None
    replay = one._replay
    assert isinstance(replay, HostReplay)
    may_sample = replay._may_sample()
    shares = [0.0, 0.0]
    for (session, _), span in replay._ring.spans.items():
        rows = slice(span.start, span.start + span.n_rows)
        shares[session == session_id(0)] += float(drawn[rows][may_sample[rows]].sum())
    return shares[0], shares[1]


def test_with_a_share_of_1_only_people_are_learned_from(store: Path):
    put(store, of_player(2, "granted"))
    with contextlib.closing(engine(store, people_share=1.0)) as one:
        assert one.step()
        assert held(one) == {session_id(2)}


def test_a_chunk_that_is_quarantined_while_the_training_runs_leaves_the_replay(store: Path):
    with contextlib.closing(engine(store)) as one:
        one.follow()
        with contextlib.closing(RunStore(store, GAME, clock=ManualClock())) as history:
            history.quarantine([(session_id(1), 2)], reason="not_finite")
        one.follow()
        assert (session_id(1), 2) not in one._replay.chunk_ids()
        assert len(one._replay.chunk_ids()) == 5


def test_a_resume_reads_only_what_the_replay_still_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    store = tmp_path / "store"
    read = list[int]()
    tail = StoreView.tail

    def counted(view: StoreView, cursor: Any, **how: Any) -> Any:
        page = tail(view, cursor, **how)
        read.append(len(page.items))
        return page

    with (
        contextlib.closing(engine(store_of(store, range(80)))) as one,
        contextlib.closing(engine(store)) as other,
    ):
        assert one.step()
        assert len(one._replay.chunk_ids()) == 32
        monkeypatch.setattr(StoreView, "tail", counted)
        other.restore(*one.checkpoint())
        assert read == [
            33
        ]  # of 80: the 32 that are held, and the one that the oldest's lead-in repeats
        for each in (one, other):
            assert each.step()
        assert bits(other) == bits(one)


def mixed() -> Chunk:
    """Three episodes of one session: a person's, a bot's, and one more that a person has begun."""
    moves = [
        Move(
            [at, 0, 1],
            at % 2,
            1.0,
            [at + 1, 0, 1],
            "terminated" if at in (3, 7) else None,
            at in (0, 4, 8),
        )
        for at in range(N)
    ]
    made = chunk_of(GAME, moves)
    by = np.where(made.columns["row"] == 0, By.PERSON, 0).astype(np.uint8)
    first, second, third = made.meta.episodes
    by[second.row : second.row + 4] = By.BOT
    notes = (first, replace(second, model="line/1"), third)
    return Chunk(replace(made.meta, episodes=notes), {**made.columns, "by": by}).validate()


def test_of_a_chunk_in_which_people_and_bots_played_only_peoples_episodes_are_cloned():
    kept = people_in(mixed())
    assert kept is not None
    assert kept.validate().meta.n_steps == 8
    assert kept.columns["obs"][:, 0].tolist() == [0, 1, 2, 3, 4, 8, 9, 10, 11, 12]
    assert [note.row for note in kept.meta.episodes] == [0, 5]
    assert people_in(kept) is kept
    bots = replace(
        mixed().meta,
        episodes=tuple(replace(note, model="line/1") for note in mixed().meta.episodes),
    )
    assert people_in(replace(mixed(), meta=bots)) is None
    assert people_in(played(0)) is None  # an actor's


def test_skipped_episodes_of_a_chunk_stay_skipped_after_a_resume(tmp_path: Path):
    with contextlib.closing(RunStore(tmp_path / "store", GAME, clock=ManualClock())) as history:
        history.add([mixed()])
        history.flush()
    config = LearnerConfig(limiter=None, updates_per_call=4, replay=ReplayConfig(capacity=512))
    ones = []
    for _ in range(2):
        learner = Learner(
            Bc(GAME, BcConfig(widths=(8,), batch=16)), BcKnobs(), root_seed=5, config=config
        )
        learner._call = PROGRAMS.setdefault("bc", learner._call)
        ones.append(
            FromStore(
                learner,
                StoreFollower(tmp_path / "store"),
                steps=64,
                clock=ManualClock(),
                on_event=print,
                only_people=True,
            )
        )
    one, other = ones
    with contextlib.closing(one), contextlib.closing(other):
        one.step()
        other.restore(*one.checkpoint())
        assert one.n_usable == other.n_usable == 8
        for each in ones:
            each.step()
        assert bits(one) == bits(other)


# --- The best episodes ----------------------------------------------------------------------------


def whole_episode(env: int, reward: float, *, number: int = 0, n_steps: int = N) -> Chunk:
    moves = [
        Move([at, env, 1], at % 2, reward, [at + 1, env, 1], None, at == 0) for at in range(n_steps)
    ]
    moves[-1] = replace(moves[-1], end="terminated")
    made = chunk_of(GAME, moves, session=env, chunk_no=number)
    return replace(made, meta=replace(made.meta, first_step=n_steps * number))


def clone(store: Path, *, best_share: float) -> FromStore:
    config = LearnerConfig(limiter=None, updates_per_call=4, replay=ReplayConfig(capacity=512))
    algorithm = Bc(GAME, BcConfig(widths=(8,), batch=16, best_share=best_share, stack=2))
    return FromStore(
        Learner(algorithm, BcKnobs(), root_seed=5, config=config),
        StoreFollower(store),
        steps=64,
        clock=ManualClock(),
        on_event=lambda event: None,
        only_people=True,
    )


def learned_players(one: FromStore) -> set[int]:
    return {int(env) for env in one.learned_sample().obs["obs"][..., 1].ravel()}


def test_the_best_episodes_are_chosen_alike_after_a_resume_and_again_after_some_were_erased(
    tmp_path: Path,
):
    store = tmp_path / "store"
    for env in range(8):
        put(store, whole_episode(env, float(env)), player=bytes([env]) * 16)
    with (
        contextlib.closing(clone(store, best_share=0.25)) as one,
        contextlib.closing(clone(store, best_share=0.25)) as other,
    ):
        assert one.step()
        assert learned_players(one) == {6, 7}
        other.restore(*one.checkpoint())
        for each in (one, other):
            assert each.step()
        assert bits(other) == bits(one)
        with contextlib.closing(RunStore(store, GAME, clock=ManualClock())) as history:
            history._store.forget(bytes([7]) * 16)
        for each in (one, other):
            assert each.step()
            assert learned_players(each) == {5, 6}
        assert bits(other) == bits(one)
        put(store, whole_episode(9, 100.0), player=bytes([9]) * 16)
        assert one.step()
        assert learned_players(one) == {6, 9}


@pytest.mark.parametrize(("n_steps", "compared"), [(20, {3}), (12, {0, 1, 2, 3})])
def test_a_clone_of_the_best_is_compared_with_held_out_episodes_that_are_as_good_if_there_are_any(
    tmp_path: Path, n_steps: int, compared: set[int]
):
    store = tmp_path / "store"
    for env in range(20):
        episode = whole_episode(env, float(env % 4), n_steps=n_steps)
        put(store, episode, player=bytes([env]) * 16)
    with contextlib.closing(clone(store, best_share=0.25)) as one:
        one.follow()
        one.hold_out()
        assert one.step()
        held_out = held_out_players(one)
        assert {env % 4 for env in held_out} == compared
        assert {env % 4 for env in learned_players(one)} == {3}
        with contextlib.closing(clone(store, best_share=0.25)) as resumed:
            resumed.restore(*one.checkpoint())
            assert held_out_players(resumed) == held_out


def held_out_players(one: FromStore) -> set[int]:
    return {int(batch.obs["obs"][0, 0, 1]) for batch in one.held_out()}


def test_a_cut_episode_is_not_joined_with_a_later_one_that_a_bot_has_begun(tmp_path: Path):
    """The bot's steps are left out, and the next chunk has only those of a person."""
    moves = [Move([at, 0, 1], 0, 9.0, [at + 1, 0, 1], None, at in (0, 4)) for at in range(8)]
    moves[3] = replace(moves[3], end="cut")
    made = chunk_of(GAME, moves)
    by = np.where(made.columns["row"] == 0, By.PERSON, 0).astype(np.uint8)
    by[made.meta.episodes[1].row] = By.BOT
    begun = Chunk(made.meta, {**made.columns, "by": by}).validate()
    later = whole_episode(0, 9.0, number=1)
    later.columns["is_first"][0] = False
    later = replace(later, meta=replace(later.meta, first_step=8)).validate()
    people = people_in(begun)
    assert people is not None
    assert people.validate().meta.n_steps == 4
    assert not people.ends_open
    put(tmp_path, begun, later)
    for env in range(1, 4):
        put(tmp_path, whole_episode(env, float(env)), player=bytes([env]) * 16)
    with contextlib.closing(clone(tmp_path, best_share=0.5)) as one:
        assert one.step()
        assert learned_players(one) == {2, 3}
        obs = one._replay.draw(64, rng=np.random.default_rng(0)).batches.obs["obs"]
        is_first = obs[..., 1, 0] == 0
        assert (obs[is_first][:, 0, 0] == 0).all(), "no stack of two episodes"


def test_a_store_without_a_whole_episode_has_none_of_the_best(store: Path):
    put(store, of_player(2, "granted"))
    with (
        contextlib.closing(clone(store, best_share=0.25)) as one,
        pytest.raises(ConfigError, match=r"no recorded episode is whole, so best_share=0\.25"),
    ):
        one.step()


def test_the_error_without_a_whole_episode_names_the_steps_that_are_held_out(tmp_path: Path):
    for number in range(5):  # the only whole episode is the last one of its player
        chunk = whole_episode(0, 1.0, number=number)
        chunk.columns["is_first"][0] = number in (0, 4)
        if number < 4:
            chunk = of_player(0, "granted", number)
        put(tmp_path, chunk)
    with contextlib.closing(clone(tmp_path, best_share=0.25)) as one:
        assert one.step()
        assert one._source.metrics == {"best_episodes": 1, "known_episodes": 1}
        one.hold_out()
        with pytest.raises(ConfigError, match=r"is whole, so best_share.*; 12 steps are held out"):
            one.step()


# --- Held-out steps -------------------------------------------------------------------------------


def test_the_last_fifth_of_what_each_player_has_played_is_held_out():
    steps = {(session_id(env), number): N for env in range(3) for number in range(10)}
    players = {key: key[0].bytes for key in steps}
    held_out = held_out_of(players, steps)
    assert sorted(held_out) == sorted(
        (session_id(env), number) for env in range(3) for number in (8, 9)
    )
    assert held_out_of({(session_id(1), 0): b"a"}, {(session_id(1), 0): 500}) == []


def test_of_long_chunks_no_more_than_a_fifth_and_a_chunk_is_held_out():
    """Such as one chunk for each long episode, of which each player has played one or two."""
    for n_chunks, held_out in ((1, 1), (2, 2)):
        steps = {(session_id(env), number): 200 for number in range(n_chunks) for env in range(5)}
        players = {key: key[0].bytes for key in steps}
        keys = held_out_of(players, steps)
        assert len(keys) == len({session for session, _ in keys}) == held_out
        assert {number for _, number in keys} == {n_chunks - 1}


def test_where_last_chunks_are_short_whole_players_are_held_out():
    steps = {(session_id(env), 0): 512 for env in range(6)}
    steps |= {(session_id(env), 1): 8 for env in range(3)}
    held_out = held_out_of({key: key[0].bytes for key in steps}, steps)
    assert 0.2 <= sum(steps[key] for key in held_out) / sum(steps.values()) <= 1 / 3
    assert all(key in held_out for key in steps if key[0] in {session for session, _ in held_out})


def test_of_many_players_a_fifth_is_held_out():
    steps = {(session_id(env), number): N for env in range(20) for number in range(3)}
    players = {key: key[0].bytes for key in steps}
    held_out = held_out_of(players, steps)
    assert len({session for session, _ in held_out}) == 4
    assert len(held_out) == 12


def test_if_there_is_a_single_chunk_later_ones_are_held_out(tmp_path: Path):
    """Until a fifth of the steps at the start is held out; a chunk too long for it is not."""
    store = tmp_path / "store"
    put(store, episode(0, 10 * N))
    with contextlib.closing(engine(store)) as one, contextlib.closing(engine(store)) as other:
        one.follow()
        one.hold_out()
        assert one.held_out() == []
        other.restore(*one.checkpoint())
        put(store, *(episode(env, n * N) for env, n in enumerate((5, 1, 1, 1), start=1)))
        for each in (one, other):
            each.follow()
            assert [len(batch.action) for batch in each.held_out()] == [2 * N]
            kept = {session for session, _ in each._replay.chunk_ids()}
            assert kept == {session_id(env) for env in (0, 1, 4)}


def episode(env: int, n_steps: int) -> Chunk:
    """A session of a player: one episode, in one chunk."""
    moves = [
        Move([at, env, 1], at % 2, 0.0, [at + 1, env, 1], None, at == 0)
        for at in range(n_steps - 1)
    ]
    moves.append(Move([n_steps - 1, env, 1], 0, 1.0, [n_steps, env, 1], "terminated"))
    made = chunk_of(GAME, moves, session=env, version=0)
    return replace(made, meta=replace(made.meta, kind="player", consent="granted"))
