"""StoreStats counts each complete episode of a model once, and no others."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.simulation.recordings import (
    GAME,
    Recording,
    balancing_policy,
    bot,
    chunks_of,
    episodes,
    person,
    recording,
)
from understudy.backends.data import DataFolder
from understudy.core.names import new_session
from understudy.experience.chunk import By, Chunk, split_chunk
from understudy.experience.game import game_spec
from understudy.experience.intake import deployment_key
from understudy.experience.session import tombstone_of
from understudy.experience.ticket import Ticket, TicketSeal
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
    stats = StoreStats(StoreFollower(made.data.store), seal_of(made))
    while stats.follow(max_items=3):
        pass
    return stats


def seal_of(made: Recording) -> TicketSeal:
    return TicketSeal(deployment_key(made.data.root))


def drawn(chunk: Chunk, ticket: str | None, **facts: Any) -> Chunk:
    """The same episode with a ticket in its note."""
    (note,) = chunk.meta.episodes
    note = replace(note, ticket=ticket, **facts)
    return replace(chunk, meta=replace(chunk.meta, episodes=(note,)))


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


def test_an_episode_has_the_draw_of_its_ticket_from_whichever_chunk_names_it(made: Recording):
    first, second = split_chunk(drawn(bot_chunk(40), made.ticket(MODEL, 0.2, entry=9)))
    made.store([drawn(named(first, None), None), second, bot_chunk(30, number=2)])
    stats = stats_of(made)
    resumed = StoreStats(StoreFollower(made.data.store))
    resumed.restore(json.loads(json.dumps(stats.state())))
    for known in (stats, resumed):
        draws = [(one.propensity, one.entry) for one in known.returns(MODEL, since_s=0.0)]
        assert draws == [(0.2, 9), (None, 0)]
        assert known.not_compared(GAME.game) == {}
        known.close()


OTHER_SPEC = game_spec("cart", obs=4, actions=["left", "right"])
CLAIMS: dict[str, tuple[str, Callable[[Recording], dict[str, Any]]]] = {
    "a bare probability": ("unsealed", lambda _: {"ticket": None, "propensity": 0.5}),
    "no ticket": ("malformed_ticket", lambda _: {"ticket": "t1:\0:"}),
    "other bytes": ("malformed_ticket", lambda _: {"ticket": "é" * 128}),
    "another probability": (
        "forged_ticket",
        lambda made: {"ticket": made.ticket(MODEL, 0.05).replace(":0.05", ":0.95")},
    ),
    "another model": (
        "forged_ticket",
        lambda made: {"ticket": made.ticket("cart/2", 0.5).replace(":2:", ":3:")},
    ),
    "another seal": (
        "forged_ticket",
        lambda made: {"ticket": made.ticket(MODEL, 0.5)[:-22] + "A" * 22},
    ),
    "another key": (
        "forged_ticket",
        lambda _: {
            "ticket": TicketSeal(bytes(32)).seal(
                Ticket(entry=1, model_no=3, propensity=0.5, expires_s=1 << 33, id="A" * 16),
                game=GAME.game,
                schema=GAME.schema,
            )
        },
    ),
    "a ticket of another schema": (
        "forged_ticket",
        lambda made: {"ticket": made.ticket(MODEL, 0.5, spec=OTHER_SPEC)},
    ),
    "a ticket for another model": (
        "other_model",
        lambda made: {"ticket": made.ticket("cart/2", 0.5)},
    ),
    "an expired ticket": (
        "expired",
        lambda made: {"ticket": made.ticket(MODEL, 0.5, expires_s=int(made.clock.now()) - 1)},
    ),
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_an_episode_whose_draw_no_gateway_sealed_is_not_compared_but_counts(
    made: Recording, claim: str
):
    reason, facts = CLAIMS[claim]
    made.store([drawn(bot_chunk(40), **facts(made))])
    stats = stats_of(made)
    (episode,) = stats.returns(MODEL, since_s=0.0)
    assert (episode.return_, episode.propensity, episode.entry) == (40.0, None, 0)
    assert stats.not_compared(GAME.game) == {reason: 1}
    stats.close()


def test_the_returns_that_are_shown_leave_out_episodes_with_an_invalid_draw(made: Recording):
    ada = b"p" * 16
    false = [
        drawn(bot_chunk(200, number=number), **facts(made))
        for number, (_, facts) in enumerate(CLAIMS.values(), 10)
    ]
    made.store(false, player=ada)
    stats = stats_of(made)
    assert stats.progress("cart", GAME.schema)["returns"] == {}
    made.store([bot_chunk(20), drawn(bot_chunk(40, number=2), made.ticket(MODEL, 0.5))])
    while stats.follow():
        pass
    shown = {MODEL: {"episodes": 2, "mean": 30.0}}
    assert stats.progress("cart", GAME.schema)["returns"] == shown
    resumed = StoreStats(StoreFollower(made.data.store), seal_of(made))
    resumed.restore(json.loads(json.dumps(stats.state())))
    stats.close()
    with made.open() as store:
        store.forget(ada)
    while resumed.follow():
        pass
    assert resumed.progress("cart", GAME.schema)["returns"] == shown
    resumed.close()


def test_a_model_without_a_kept_episode_of_a_valid_draw_shows_no_mean(
    made: Recording, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(store_stats, "_FIRST_EPISODES", 1)
    monkeypatch.setattr(store_stats, "_MAX_EPISODES", 2)
    _, forged = CLAIMS["another key"]
    false = [drawn(bot_chunk(200, number=number), **forged(made)) for number in (1, 3, 4)]
    made.store([false[0], bot_chunk(20, number=2), *false[1:]])
    stats = stats_of(made)
    assert stats.progress("cart", GAME.schema)["returns"] == {}
    stats.close()


def test_a_ticket_counts_once_also_after_a_restart(made: Recording):
    ticket = made.ticket(MODEL, 0.5)
    made.store([drawn(bot_chunk(10 * number, number=number), ticket) for number in (1, 2, 3)])
    stats = stats_of(made)
    assert [one.propensity for one in stats.returns(MODEL, since_s=0.0)] == [0.5, None, None]
    resumed = StoreStats(StoreFollower(made.data.store), seal_of(made))
    resumed.restore(json.loads(json.dumps(stats.state())))
    stats.close()
    fresh = made.ticket(MODEL, 0.5)
    made.store([drawn(bot_chunk(40, number=4), ticket), drawn(bot_chunk(50, number=5), fresh)])
    while resumed.follow():
        pass
    played = resumed.returns(MODEL, since_s=0.0)
    assert [one.return_ for one in played if one.propensity] == [10.0, 50.0]
    assert resumed.not_compared(GAME.game) == {"reused": 3}
    resumed.close()


def test_a_ticket_of_an_episode_that_does_not_count_is_not_used_up(made: Recording):
    ticket = made.ticket(MODEL, 0.5)
    cut, _ = split_chunk(drawn(bot_chunk(40), ticket))
    made.store([cut, drawn(bot_chunk(30, number=2), ticket)])
    stats = stats_of(made)
    assert [one.propensity for one in stats.returns(MODEL, since_s=0.0)] == [0.5]
    stats.close()


def test_an_episode_whose_ticket_changes_does_not_count(made: Recording):
    first, second = split_chunk(drawn(bot_chunk(40), made.ticket(MODEL, 0.5)))
    made.store([first, drawn(second, made.ticket(MODEL, 0.05))])
    assert returns(made) == []


def test_only_the_newest_used_tickets_are_remembered(
    made: Recording, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(store_stats, "_MAX_USED", 3)
    made.store(
        [drawn(bot_chunk(10, number=number), made.ticket(MODEL, 0.5)) for number in range(1, 9)]
    )
    stats = stats_of(made)
    (used,) = stats.state()["used_tickets"].values()
    assert used == [f"{number:016d}" for number in (6, 7, 8)]
    stats.close()


def test_what_clients_stated_to_an_earlier_version_is_not_compared(made: Recording):
    made.store(
        [drawn(bot_chunk(40), made.ticket(MODEL, 0.5)), *split_chunk(bot_chunk(30, number=2))[:1]]
    )
    stats = stats_of(made)
    state = json.loads(json.dumps(stats.state()))
    stats.close()
    del state["used_tickets"], state["not_compared"]
    state["played"] = {
        model: [each[:6] for each in played] for model, played in state["played"].items()
    }
    for episode in state["open"].values():
        episode[8:] = [0.5, *episode[9:14]]  # the probability, where the ticket is now
    upgraded = StoreStats(StoreFollower(made.data.store), seal_of(made))
    upgraded.restore(state)
    made.store(split_chunk(bot_chunk(30, number=2))[1:])
    while upgraded.follow():
        pass
    played = upgraded.returns(MODEL, since_s=0.0)
    assert [(one.return_, one.propensity) for one in played] == [(40.0, None), (30.0, None)]
    upgraded.close()


def test_episodes_are_settled_up_to_the_oldest_that_a_bot_still_plays(made: Recording):
    def settled_until_s() -> float:
        stats = stats_of(made)
        try:
            return stats.settled_until_s(GAME.schema)
        finally:
            stats.close()

    first, second = split_chunk(bot_chunk(40))
    made.store([bot_chunk(20, number=3)])
    assert settled_until_s() == math.inf
    began_s = made.clock.now()
    made.store([first])
    made.clock.advance(60)
    made.store([named(split_chunk(bot_chunk(30, number=2))[0], None)])  # perhaps a person
    assert settled_until_s() == pytest.approx(began_s, abs=1)
    made.clock.advance(700)
    later_s = made.clock.now()
    made.store([split_chunk(bot_chunk(30, number=4))[0]])
    assert settled_until_s() == pytest.approx(later_s, abs=1), "the first one has paused for long"
    made.store([second])
    assert settled_until_s() == pytest.approx(later_s, abs=1)


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


def test_returns_are_shown_for_people_on_average_and_at_best_and_for_each_model(made: Recording):
    made.play(person(), 2, max_steps=50)
    made.play(person(0.9), 2, player=b"b" * 16, max_steps=200)
    made.store([bot_chunk(40, number=9), bot_chunk(20, number=8)])
    stats = stats_of(made)
    means = [
        np.mean([one.return_ for one in stats.people(GAME.schema) if one.player == player])
        for player in {one.player for one in stats.people(GAME.schema)}
    ]
    shown = stats.progress("cart", GAME.schema)
    assert shown["people"] == {
        "players": 2,
        "left_out": 0,
        "episodes": 4,
        "mean": pytest.approx(np.mean(means)),
        "best": pytest.approx(max(means)),
    }
    assert shown["returns"] == {MODEL: {"episodes": 2, "mean": 30.0}}
    state = json.loads(json.dumps(stats.state()))
    stats.close()
    for saved in (state, {name: part for name, part in state.items() if name != "counts"}):
        after = StoreStats(StoreFollower(made.data.store))
        after.restore(saved)
        assert after.progress("cart", GAME.schema) == shown
        after.close()
    nobody = StoreStats(StoreFollower(made.data.store))
    assert nobody.progress("cart", GAME.schema)["people"]["mean"] is None
    nobody.close()


@pytest.mark.parametrize("size", [1e9, -1e12, 1e19])
def test_returns_of_one_player_that_are_far_from_all_others_are_left_out_of_what_is_shown(
    made: Recording, size: float
):
    for player in (b"a" * 16, b"b" * 16):
        made.play(person(), 2, player=player, max_steps=50)
        made.play(person(), 2, player=player, max_steps=50, model=MODEL)
    honest = stats_of(made)
    shown = honest.progress("cart", GAME.schema)
    honest.close()
    made.play(person(), 2, player=b"c" * 16, max_steps=50, reward=size)
    made.play(person(), 2, player=b"c" * 16, max_steps=50, reward=size, model=MODEL)
    stats = stats_of(made)
    people = stats.progress("cart", GAME.schema)["people"]
    returns = stats.progress("cart", GAME.schema)["returns"]
    stats.close()
    assert people == shown["people"] | {"players": 3, "left_out": 1, "episodes": 6}
    assert returns == {MODEL: {"episodes": 6, "mean": shown["returns"][MODEL]["mean"]}}


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
    assert stats.schema("cart", min_steps=unknown, learn_from=("unknown",)) == GAME.schema
    stats.close()


@pytest.mark.parametrize("is_denied", [True, False])
def test_steps_that_cannot_be_cloned_do_not_make_a_schema_the_current_one(
    made: Recording, is_denied: bool
):
    newer = game_spec("cart", obs=4, actions=["left", "right"])
    made.registry().register(newer)
    steps = made.play(person(), 1, max_steps=20)
    made.play(
        person() if is_denied else bot(balancing_policy()),
        5,
        spec=newer,
        consent="denied" if is_denied else "granted",
        model=None if is_denied else "cart/1",
        max_steps=40,
    )
    stats = stats_of(made)
    assert stats.schema("cart", min_steps=10) == GAME.schema
    assert stats.schemas["cart"][GAME.schema].people == {"granted": steps}
    state = json.loads(json.dumps(stats.state()))
    stats.close()
    after = StoreStats(StoreFollower(made.data.store))
    after.restore(state)
    assert after.schemas == stats.schemas
    after.close()


def at_skill(chunk: Chunk, **facts: Any) -> Chunk:
    (note,) = chunk.meta.episodes
    return replace(chunk, meta=replace(chunk.meta, episodes=(replace(note, **facts),)))


def test_episodes_at_a_skill_or_a_temperature_count_apart(made: Recording):
    made.store([bot_chunk(10)])
    made.store([at_skill(bot_chunk(20, number=2), skill="even", noise=0.3)])
    made.store([at_skill(bot_chunk(30, number=3), temperature=2.0)])
    made.store([at_skill(bot_chunk(35, number=4), noise=0.3)])
    assert returns(made) == [10.0]
    stats = stats_of(made)
    assert stats.progress("cart", GAME.schema)["returns"] == {MODEL: {"episodes": 1, "mean": 10.0}}
    n_skilled, (played,) = stats.skilled(MODEL)
    assert (n_skilled, played[:3]) == (1, ("even", 0.3, 20.0))
    restored = StoreStats(StoreFollower(made.data.store))
    restored.restore(json.loads(json.dumps(stats.state())))
    assert restored.state() == stats.state()
    assert restored.skilled(MODEL) == stats.skilled(MODEL)
    stats.close()
    restored.close()


def test_an_episode_whose_noise_changes_counts_for_nothing(made: Recording):
    left, right = split_chunk(at_skill(bot_chunk(20), skill="even", noise=0.3))
    made.store([left, at_skill(right, noise=0.4)])
    assert returns(made) == []
    stats = stats_of(made)
    assert stats.skilled(MODEL) == (0, ())
    stats.close()


def test_an_episode_at_a_skill_whose_bot_came_late_counts(made: Recording):
    left, right = split_chunk(at_skill(bot_chunk(20), skill="even", noise=0.3))
    made.store([at_skill(left, model=None, noise=None), right])
    stats = stats_of(made)
    n_skilled, (played,) = stats.skilled(MODEL)
    assert (n_skilled, played[:3]) == (1, ("even", 0.3, 20.0))
    stats.close()


def test_the_newest_people_are_kept_and_a_file_of_an_earlier_version_has_the_first_ones(
    made: Recording, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(store_stats, "_NEWEST_EPISODES", 3)
    for _ in range(5):
        made.play(person(0.5), 1)
    stats = stats_of(made)
    first = list(stats.people(GAME.schema))
    assert list(stats.newest_people(GAME.schema)) == first[-3:]
    state = json.loads(json.dumps(stats.state()))
    del state["newest_people"], state["skilled"]
    stats.restore(state)
    assert list(stats.newest_people(GAME.schema)) == first[-3:]
    stats.close()


def test_a_forget_concerns_the_schemas_that_the_player_has_played(made: Recording):
    other = game_spec("other", obs=2, actions=2)
    made.play(person(0.5), 2, player=b"p" * 16, max_steps=20)
    made.play(person(0.5), 2, max_steps=20)
    with made.open() as store:
        store.forget(b"q" * 16)
        before = store.next_arrival
    made.play(person(0.5), 2, player=b"r" * 16, max_steps=20)
    stats = stats_of(made)
    assert stats.forgotten("cart", GAME.schema) == {}
    resumed = StoreStats(StoreFollower(made.data.store))
    resumed.restore(json.loads(json.dumps(stats.state())))
    stats.close()
    with made.open() as store:
        store.forget(b"p" * 16)
    while resumed.follow():
        pass
    assert resumed.forgotten("cart", GAME.schema) == {resumed.read_no: 1}
    with made.open() as store:
        store.forget(b"r" * 16)
    while resumed.follow():
        pass
    assert resumed.forgotten("cart", GAME.schema)[resumed.read_no] == before
    state = resumed.state()
    fields = state["schemas"]["cart"][GAME.schema]
    # As an earlier version wrote them.
    fields[3] = hex(sum(1 << player for player in fields[3]))
    fields[4] = list(fields[4])
    resumed.restore(json.loads(json.dumps(state)))
    numbers = list(resumed.forgotten("cart", GAME.schema))
    assert resumed.forgotten("cart", GAME.schema) == dict.fromkeys(numbers, 0)
    assert len(numbers) == 2
    assert set(resumed.schemas["cart"][GAME.schema].players.values()) == {0}
    assert resumed.forgotten("other", other.schema) == {}
    resumed.close()


def test_steps_of_a_schema_are_those_that_are_left_after_a_forget(made: Recording):
    other = game_spec("cart", obs=["x", "v", "angle", "spin"], actions=2)
    made.registry().register(other)
    made.play(person(0.5), 2, player=b"p" * 16, max_steps=20)
    n_kept = made.play(person(0.5), 2, max_steps=20)
    made.play(person(0.5), 1, spec=other, player=b"p" * 16, max_steps=20)
    stats = stats_of(made)
    state = json.loads(json.dumps(stats.state()))
    with made.open() as store:
        store.forget(b"p" * 16)
    n_kept += made.play(person(0.5), 1, player=b"q" * 16, max_steps=20)
    while stats.follow():
        pass
    assert {name: stored.n_stored for name, stored in stats.schemas["cart"].items()} == {
        GAME.schema: n_kept,
        other.schema: 0,
    }
    resumed = StoreStats(StoreFollower(made.data.store))
    for saved in (state, json.loads(json.dumps(stats.state()))):
        resumed.restore(saved)
        while resumed.follow(max_items=3):
            pass
        assert resumed.schemas["cart"][GAME.schema].n_stored == n_kept
    resumed.close()
    stats.close()


def test_steps_of_a_schema_are_the_same_after_a_restart_although_some_expired(made: Recording):
    n_steps = made.play(person(0.5), 2, max_steps=20)
    stats = stats_of(made)
    with made.open() as store:
        assert store.expire(START_S + 1e6) == 2
    resumed = StoreStats(StoreFollower(made.data.store))
    resumed.restore(json.loads(json.dumps(stats.state())))
    for each in (stats, resumed):
        while each.follow():
            pass
        assert each.schemas["cart"][GAME.schema].n_stored == n_steps
        each.close()


def test_the_returns_of_a_forgotten_player_are_removed(made: Recording):
    ada = b"p" * 16
    open_chunk, _ = split_chunk(bot_chunk(30, number=25))
    for player, number in ((ada, 21), (b"q" * 16, 31)):
        made.play(person(), 2, player=player, max_steps=number)
        made.store([bot_chunk(number, number=number)], player=player)
        skilled = at_skill(bot_chunk(number, number=number + 1), skill="even", noise=0.3)
        made.store([skilled], player=player)
    made.store([named(bot_chunk(10, number=41), "cart/4")], player=ada)
    made.store([open_chunk], player=ada)
    stats = stats_of(made)
    assert stats.progress("cart", GAME.schema)["returns"][MODEL] == {"episodes": 2, "mean": 26.0}
    assert (stats.skilled(MODEL)[0], stats.settled_until_s(GAME.schema)) == (2, START_S)
    with made.open() as store:
        store.forget(ada)
    while stats.follow():
        pass
    shown = stats.progress("cart", GAME.schema)
    assert (shown["people"]["players"], shown["people"]["episodes"]) == (1, 2)
    assert shown["returns"] == {MODEL: {"episodes": 1, "mean": 31.0}}
    assert len(stats.newest_people(GAME.schema)) == 2
    assert [played.return_ for played in stats.skilled(MODEL)[1]] == [31.0]
    assert (stats.skilled(MODEL)[0], stats.settled_until_s(GAME.schema)) == (1, math.inf)
    assert tombstone_of(ada).hex()[:16] not in json.dumps(stats.state())
    stats.close()


def test_an_episode_that_an_earlier_version_left_open_has_its_player(made: Recording):
    first, second = split_chunk(bot_chunk(30, number=25))
    made.store([first], player=b"p" * 16)
    stats = stats_of(made)
    state = json.loads(json.dumps(stats.state()))
    stats.close()
    (session,) = state["open"]
    del state["open"][session][-1]
    resumed = StoreStats(StoreFollower(made.data.store))
    resumed.restore(state)
    made.store([second], player=b"p" * 16)
    while resumed.follow():
        pass
    (episode,) = resumed.returns(MODEL, since_s=0.0)
    assert episode.player == tombstone_of(b"p" * 16).hex()[:16]
    resumed.close()


def test_a_forget_after_an_upgrade_concerns_every_schema_that_was_played_before(made: Recording):
    made.play(person(0.5), 2, player=b"p" * 16, max_steps=20)
    stats = stats_of(made)
    state = json.loads(json.dumps(stats.state()))
    stats.close()
    state.pop("unread_players", None)
    state.pop("unread_forgotten", None)
    for schemas in state["schemas"].values():
        for fields in schemas.values():
            del fields[3:]
    with made.open() as store:
        store.forget(b"p" * 16)
    upgraded = StoreStats(StoreFollower(made.data.store))
    upgraded.restore(state)
    while upgraded.follow():
        pass
    assert upgraded.forgotten("cart", GAME.schema) == {upgraded.read_no: 0}
    upgraded.close()


@pytest.mark.parametrize("is_played_before", [True, False])
def test_a_forget_before_a_recount_concerns_every_schema(made: Recording, is_played_before: bool):
    """The player's steps are gone, so their schemas are not known, nor whether there were any."""
    if is_played_before:
        made.play(person(0.5), 2, max_steps=20)
    made.play(person(0.5), 2, player=b"p" * 16, max_steps=20)
    with made.open() as store:
        store.forget(b"p" * 16)
    counted = stats_of(made)
    forgotten_no = counted.read_no
    state = json.loads(json.dumps(counted.state()))
    counted.close()
    made.play(person(0.5), 2, max_steps=20)
    for saved in (None, state):
        recounted = StoreStats(StoreFollower(made.data.store))
        if saved is not None:
            recounted.restore(saved)
        while recounted.follow(max_items=3):
            pass
        assert recounted.forgotten("cart", GAME.schema) == {forgotten_no: 0}
        recounted.close()


def test_a_forget_concerns_steps_that_were_erased_since_the_stats_were_saved(made: Recording):
    """A learner that was killed may have released a model with them."""
    made.play(person(0.5), 2, max_steps=20)
    saved = stats_of(made)
    state = json.loads(json.dumps(saved.state()))
    saved.close()
    made.play(person(0.5), 2, player=b"p" * 16, max_steps=20)
    with made.open() as store:
        store.forget(b"p" * 16)
    resumed = StoreStats(StoreFollower(made.data.store))
    resumed.restore(state)
    while resumed.follow():
        pass
    assert resumed.forgotten("cart", GAME.schema) == {resumed.read_no: 0}
    resumed.close()


def test_only_a_forget_of_their_player_concerns_steps_that_were_quarantined_before_a_recount(
    made: Recording,
):
    chunk = bot_chunk(20)
    made.store([chunk], player=b"p" * 16)
    made.store([bot_chunk(20, number=2)])
    with made.open() as store:
        store.quarantine([chunk.meta.id], reason="wrong")
        store.forget(b"q" * 16)
    stats = stats_of(made)
    assert stats.forgotten("cart", GAME.schema) == {}
    with made.open() as store:
        store.forget(b"p" * 16)
    while stats.follow():
        pass
    assert stats.forgotten("cart", GAME.schema) == {stats.read_no: 0}
    stats.close()
