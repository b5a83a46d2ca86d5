"""Simulated people: their rate, the records of a match against the bot, and its score."""

import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.client.fakes import MemoryLink, chunks
from understudy.act.vector import game_of, make_envs
from understudy.client.connect import ClientConfig, connect
from understudy.client.sender import SenderConfig
from understudy.core.errors import ConfigError
from understudy.experience.chunk import By, RowKind
from understudy.simulation.people import Match, Solo, play_rounds


def test_both_seats_are_recorded_with_opposite_rewards_and_one_match(tmp_path: Path):
    link = MemoryLink()
    spec = game_of(make_envs("rally", 1))
    config = ClientConfig(link=link, spool=tmp_path, sender=SenderConfig(linger_s=0.02))
    with connect(spec, consent="granted", config=config) as game:
        people = [Match(game, f"person-{at}", at, np.random.default_rng(at)) for at in range(4)]
        for _ in range(400):
            for person in people:
                person.step()
        scores = [person.view()["score"] for person in people]
        assert {person.view()["seat"] for person in people} == {0, 1}
        assert not any(person.points for person in people), "nobody has met a bot yet"
    steps = Counter[int]()
    won = Counter[tuple[str, int]]()
    results = Counter[str]()
    for frames in link.by_session().values():
        for chunk in chunks(frames):
            is_step = chunk.columns["row"] == RowKind.STEP
            (by,) = set(chunk.columns["by"][is_step].tolist())
            steps[by] += int(is_step.sum())
            (match,) = {note.match for note in chunk.meta.episodes}
            (seat,) = {note.seat for note in chunk.meta.episodes}
            other = "bot" if by == By.PERSON else "person"
            assert {note.opponents for note in chunk.meta.episodes} == {(other,)}, (
                "never a player's name"
            )
            won[match or "", seat] += int(chunk.columns["reward"][is_step].sum())
            results.update(str(note.result) for note in chunk.meta.episodes if note.result)
    assert steps[By.PERSON] == steps[By.SCRIPT] > 1_500
    assert len({match for match, _ in won}) == 4
    assert all(won[match, 0] == -won[match, 1] for match, _ in won)
    assert sum(sum(score) for score in scores) == results["win"] == results["loss"] > 10


def test_other_games_have_one_seat(tmp_path: Path):
    spec = game_of(make_envs("CartPole-v1", 1))
    with (
        connect(spec, config=ClientConfig(link=MemoryLink(), spool=tmp_path)) as game,
        pytest.raises(ConfigError, match="one seat"),
    ):
        Match(game, "person-0", 0, np.random.default_rng(0))


def test_a_person_decides_while_there_is_no_bot(tmp_path: Path):
    seen: list[float] = []
    link = MemoryLink()
    spec = game_of(make_envs("CartPole-v1", 1))
    config = ClientConfig(link=link, spool=tmp_path)
    with connect(spec, consent="granted", config=config) as game:

        def choose(obs: Any) -> int:
            seen.append(float(obs[2]))
            return int(obs[2] > 0)

        person = Solo(
            game, "ada", "CartPole-v1", np.random.default_rng(0), bot_share=1.0, choose=choose
        )
        for _ in range(60):
            person.step()
    assert len(seen) == 60


def test_rounds_keep_their_rate_and_duration():
    told = list[int]()
    began_s = time.monotonic()
    played = play_rounds(lambda: None, told.append, stop=threading.Event(), rate=100, seconds=0.5)
    assert 0.5 <= time.monotonic() - began_s < 5
    assert 1 <= played <= 51
    assert told[0] == 0
    assert len(told) >= 2
    assert told == sorted(told)


def test_rounds_end_when_stop_is_set():
    stop = threading.Event()
    seen = list[int]()

    def play() -> None:
        seen.append(1)
        if len(seen) == 5:
            stop.set()

    assert play_rounds(play, lambda _: None, stop=stop, rate=0) == 5


def test_no_round_is_played_if_stop_is_already_set():
    stop = threading.Event()
    stop.set()
    assert play_rounds(lambda: None, lambda _: None, stop=stop, rate=1) == 0
