"""StoreStats counts each complete episode of a model once, and no others."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.simulation.recordings import GAME, Recording, chunks_of, episodes, person, recording
from understudy.backends.data import DataFolder
from understudy.core.names import new_session
from understudy.experience.chunk import By, Chunk, split_chunk
from understudy.experience.game import game_spec
from understudy.release import store_stats
from understudy.release.store_stats import StoreStats
from understudy.testing.clock import START_S
from understudy.training.follower import StoreFollower

MODEL = "cart/3"


@pytest.fixture
def made(quick_path: Path) -> Recording:
    return recording(DataFolder(quick_path))


def session(number: int = 1):
    return new_session(START_S, number.to_bytes(10, "big"))


def bot_chunk(length: int = 40, *, number: int = 1) -> Chunk:
    played = episodes(lambda obs, _: obs[:, 2] + 0.4 * obs[:, 3] > 0, 1, max_steps=length)
    return next(chunks_of(played, session(number), model=MODEL))


def stats_of(made: Recording) -> StoreStats:
    stats = StoreStats(StoreFollower(made.data.store))
    while stats.follow(max_items=3):
        pass
    return stats


def returns(made: Recording, since_s: float = 0.0) -> list[float]:
    stats = stats_of(made)
    try:
        return [one.return_ for one in stats.returns(MODEL, since_s=since_s)]
    finally:
        stats.close()


def named(chunk: Chunk, model: str | None) -> Chunk:
    (note,) = chunk.meta.episodes
    return replace(chunk, meta=replace(chunk.meta, episodes=(replace(note, model=model),)))


def test_an_episode_counts_once_however_many_chunks_it_came_in(made: Recording):
    made.store([*split_chunk(bot_chunk(40)), bot_chunk(30, number=2)])
    assert returns(made) == [40.0, 30.0]


def test_a_model_that_is_named_from_the_second_chunk_on_counts(made: Recording):
    first, second = split_chunk(bot_chunk(40))
    made.store([named(first, None), second])
    assert returns(made) == [40.0]


def test_an_episode_of_two_models_counts_for_neither(made: Recording):
    first, second = split_chunk(bot_chunk(40))
    made.store([named(first, "cart/2"), second])
    assert returns(made) == []


def test_what_has_a_gap_or_did_not_end_does_not_count(made: Recording):
    first, rest = split_chunk(bot_chunk(40))
    second, third = split_chunk(replace(rest, meta=replace(rest.meta, chunk_no=1)))
    made.store([first, third])
    made.store([split_chunk(bot_chunk(30, number=2))[0]])
    assert returns(made) == []
    made.store([bot_chunk(20, number=3)])
    assert returns(made) == [20.0]
    assert second.meta.chunk_no == 1


def test_an_episode_in_which_a_person_decided_does_not_count(made: Recording):
    chunk = bot_chunk(40)
    by = chunk.columns["by"].copy()
    by[7] = By.PERSON
    made.store([replace(chunk, columns={**chunk.columns, "by": by})])
    assert returns(made) == []


def test_an_episode_that_a_person_began_before_the_model_was_named_does_not_count(made: Recording):
    first, second = split_chunk(bot_chunk(40))
    by = np.full_like(first.columns["by"], By.PERSON)
    made.store([named(replace(first, columns={**first.columns, "by": by}), None), second])
    assert returns(made) == []


def test_a_model_of_another_game_does_not_count(made: Recording):
    made.store([named(bot_chunk(40), "pong/3")])
    stats = stats_of(made)
    assert stats.returns("pong/3", since_s=0.0) == []
    stats.close()


def test_an_episode_is_known_by_its_player_and_its_place_in_the_chunk(made: Recording):
    made.store([bot_chunk(40)], player=b"a" * 16)
    made.store([bot_chunk(20, number=2)], player=b"b" * 16)
    made.store([bot_chunk(30, number=3)], player=b"a" * 16)
    stats = stats_of(made)
    players = [one.player for one in stats.returns(MODEL, since_s=0.0)]
    assert players[0] == players[2] != players[1]
    assert "61" * 8 not in json.dumps(stats.state()), "only a hash of the player is saved"
    stats.close()


def test_returns_of_people_are_known_by_schema(made: Recording):
    made.play(person(), 3, max_steps=50)
    made.store([bot_chunk(40, number=9)])
    stats = stats_of(made)
    assert [one.return_ <= 50 for one in stats.people(GAME.schema)] == [True] * 3
    assert stats.people("another") == ()
    stats.close()


def test_the_first_episodes_of_a_model_are_never_dropped(
    made: Recording, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(store_stats, "_MAX_EPISODES", 4)
    monkeypatch.setattr(store_stats, "_FIRST_EPISODES", 2)
    made.store([bot_chunk(10 + number, number=number) for number in range(1, 7)])
    assert returns(made) == [11.0, 12.0, 15.0, 16.0]


def test_only_episodes_that_began_since_then_are_compared(made: Recording):
    first, second = split_chunk(bot_chunk(40))
    made.store([first, bot_chunk(20, number=2)])
    made.clock.advance(100)
    made.store([second, bot_chunk(30, number=3)])
    assert returns(made) == [20.0, 40.0, 30.0]
    assert returns(made, since_s=START_S + 50.5) == [30.0]


def test_saved_stats_resume_in_the_middle_of_an_episode(made: Recording):
    first, second = split_chunk(bot_chunk(40))
    made.store([first, bot_chunk(20, number=2)])
    before = stats_of(made)
    state = json.loads(json.dumps(before.state()))
    before.close()
    made.store([second])
    after = StoreStats(StoreFollower(made.data.store))
    after.restore(state)
    while after.follow():
        pass
    assert [one.return_ for one in after.returns(MODEL, since_s=0.0)] == [20.0, 40.0]
    assert after.schemas["cart"][GAME.schema].steps == {"granted": 60}
    after.close()


def test_steps_are_counted_by_consent_and_the_newest_schema_that_is_played_wins(made: Recording):
    newer = game_spec("cart", obs=4, actions=["left", "right"])
    made.registry().register(newer)
    granted = made.play(person(), 3, max_steps=50)
    unknown = made.play(person(), 2, consent="unknown", max_steps=50)
    little = made.play(person(), 1, spec=newer, max_steps=20)
    stats = stats_of(made)
    assert stats.schemas["cart"][GAME.schema].steps == {"granted": granted, "unknown": unknown}
    assert (
        stats.schema("cart", min_steps=1_000) == GAME.schema
    )  # neither has many: the one that has most
    assert stats.schema("cart", min_steps=little) == newer.schema
    assert stats.schema("cart", min_steps=little + 1) == GAME.schema
    assert stats.schema("other", min_steps=1) is None
    stats.close()
