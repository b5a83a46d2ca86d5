"""The learner as a service: it turns a store into bots, without a game and without actors."""

import json
import math
import re
import shutil
import signal
import sys
import threading
import time
import tomllib
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog

from tests.learn.worlds import Move, chunk_of
from tests.simulation.recordings import (
    CONTINUOUS,
    GAME,
    SIGNER,
    Recording,
    balancing_policy,
    bot,
    chunks_of,
    episodes,
    person,
    recording,
    returns_of,
)
from understudy.backends.data import DataFolder
from understudy.core.errors import ConfigError, Corrupt, Fenced, Unreachable
from understudy.core.names import new_session
from understudy.experience.chunk import Chunk, split_chunk
from understudy.experience.game import GameSpec, game_spec
from understudy.experience.intake import key_file
from understudy.experience.spaces import Box
from understudy.learn import held_out
from understudy.learn.algorithms.bc import Bc
from understudy.learn.algorithms.iql import Iql
from understudy.learn.learner import Learner
from understudy.models.catalogue import Catalogue
from understudy.models.gate import Bounds
from understudy.models.manifest import Lineage, Manifest, make_manifest
from understudy.models.objects import FolderObjects
from understudy.models.registry import Registry
from understudy.nn.network import Centre
from understudy.nn.policy import Policy
from understudy.platform import learner_process
from understudy.platform.children import FENCED, Child
from understudy.platform.learner_process import LearnerRole
from understudy.ports import CANARY_BESIDE_CONTROL, Cursor
from understudy.release import game_learner, game_training
from understudy.release.forgets import schemas_learned
from understudy.release.game_training import LearnerServiceConfig
from understudy.release.gatekeeper import is_carried_over
from understudy.release.model_check import check_model
from understudy.release.schedule import LearningSchedule
from understudy.stores.view import StoreView
from understudy.testing.clock import START_S
from understudy.training.from_store import FromStore
from understudy.training.training_job import TrainingJob, decode_checkpoint

SCHEDULE = LearningSchedule(
    bc_updates=256,
    improve_with="dqn",
    improve_steps=1,
    ranking_updates=0,
    dqn_updates=64,
    dqn_steps=1_000,
    updates_per_step=0.05,
)
SMALL = {"widths": [16], "batch": 32, "updates_per_call": 32, "capacity": 32_768}
CONFIG = LearnerServiceConfig(
    schedule=SCHEDULE,
    bounds=Bounds(max_episodes=120),
    settings={"bc": SMALL, "dqn": SMALL},
    checkpoint_every_s=0.01,
)
ONLY_BC = replace(CONFIG, schedule=replace(SCHEDULE, improve_with="bc"))


PROGRAMS: dict[str, Any] = {}


@pytest.fixture(autouse=True)
def one_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Learners of the same algorithm and game share their compiled program."""

    def learner(algorithm: Any, *given: Any, **more: Any) -> Learner:
        made = Learner(algorithm, *given, **more)
        made._call = PROGRAMS.setdefault(f"{algorithm!r}", made._call)
        return made

    monkeypatch.setattr(game_training, "Learner", learner)


@pytest.fixture
def made(quick_path: Path) -> Recording:
    return recording(DataFolder(quick_path))


def role_of(made: Recording, config: LearnerServiceConfig = CONFIG) -> LearnerRole:
    return LearnerRole(
        made.data, made.registry(), config=config, clock=made.clock, check=check_model
    )


def until_idle(role: LearnerRole, game: GameSpec = GAME) -> dict[str, Any]:
    for _ in range(2_000):
        if not role.step():
            return role.status()["games"][game.game]  # type: ignore[no-any-return]
    raise AssertionError(f"it never comes to rest: {role.status()}")


def first_bot(made: Recording) -> dict[str, Any]:
    """The status once a clone of people is champion and the dqn training has started."""
    made.play(person(0.5), 12)
    with role_of(made) as role:
        return until_idle(role)


def in_turn(
    made: Recording,
    policies: dict[str, Policy],
    count: int,
    *,
    propensity: float | None = 0.5,
    spec: GameSpec = GAME,
) -> None:
    """Store episodes of two bots in the order in which they were drawn, which was in turn."""
    played = {name: episodes(bot(policy), count, seed=count) for name, policy in policies.items()}
    sessions = {
        name: chunks_of(
            played[name],
            new_session(START_S + count, name.encode().rjust(10)),
            spec=spec,
            model=name,
            ticket=partial(made.ticket, name, propensity, spec=spec) if propensity else None,
        )
        for name in policies
    }
    made.store([chunk for pair in zip(*sessions.values(), strict=True) for chunk in pair])


# --- from people to the first bot -----------------------------------------------------------------


def test_a_thousand_steps_with_consent_train_a_bot_that_plays_like_people(made: Recording):
    with role_of(made) as role:
        assert not role.step()  # there is no store yet
        while (steps := made.play(person(0.3), 4)) and not role.status()["games"]:
            role.step()
        assert until_idle(role)["champion"] == 0
        before = role.status()["games"]["cart"]
        assert before["why"].endswith(
            "of 1000 steps of people with consent, then a clone is trained"
        )
        made.play(person(0.9), 10)
        assert steps < 1_000
        status = until_idle(role)
    assert (status["champion"], status["phase"]) == (1, "dqn")
    why = made.registry().catalogue("cart").history[0].why
    assert re.fullmatch(
        r"the first bot of its schema: on \d+ held-out steps of 1 player, it chooses people's "
        r"actions with probability 0\.[6-9]\d*; a constant policy 0\.[45]\d*, uniform choice 0\.5; "
        "returns were not compared",
        why,
    ), why
    lineage = made.registry().catalogue("cart").models[1].lineage
    assert (lineage.algorithm, lineage.parent, lineage.seed) == ("bc", 0, 0)
    assert lineage.steps > 1_000
    assert int(lineage.cursor_to) > 10
    assert "widths = [16]" in lineage.config["settings"]
    assert "horizon = 256" in lineage.config["settings"], "its schedules are as long as the clone's"
    assert lineage.metrics["updates"] == 256.0
    assert returns_of(made.registry().policy("cart", 1), 50).mean() > 100


def test_a_first_bot_that_plays_unlike_held_out_people_is_rejected_until_there_are_more_steps(
    made: Recording,
):
    for seed in range(3):
        player = bytes([seed]) * 16
        made.play(person(0.9), 5, player=player, max_steps=100)
        made.play(against, 16, player=player)
    with role_of(made) as role:
        status = until_idle(role)
        assert (status["champion"], status["models"], status["doing"]) == (0, 1, "wait")
        assert re.match(
            r"not better than a constant: on \d+ held-out steps of 3 players, it chooses people's "
            r"actions with probability 0\.[0-4]\d*; a constant policy 0\.[45]\d*, uniform choice "
            r"0\.5; returns were not compared",
            status["decision"]["why"],
        )
        assert re.fullmatch(
            r"\d+ of \d+ steps of people with consent, then a clone is trained", status["why"]
        )
        for seed in range(3):
            made.play(person(0.9), 10, player=bytes([seed]) * 16)
        status = until_idle(role)
    assert status["champion"] == 2


def test_a_rejected_first_bot_is_trained_anew_after_a_forget(made: Recording):
    for seed in range(4):
        made.play(against, 16, player=bytes([seed]) * 16)
        made.play(person(0.9), 5, player=bytes([seed]) * 16, max_steps=100)
    with role_of(made) as role:
        assert until_idle(role)["models"] == 1
        with made.open() as store:
            store.forget(bytes(16))
        status = until_idle(role)
    assert (status["champion"], status["models"]) == (0, 2)
    checkpoints = list(made.data.root.glob("learner/**/*.safetensors"))
    assert checkpoints
    assert not any(bytes(16).hex().encode() in path.read_bytes() for path in checkpoints)


def against(obs: Any, _: np.random.Generator) -> Any:
    """Somebody who pushes the pole over."""
    return (obs[:, 2] + 0.4 * obs[:, 3] <= 0).astype(np.int32)


@pytest.mark.parametrize("game", [GAME, CONTINUOUS], ids=["discrete", "continuous"])
def test_false_observations_of_one_player_of_three_do_not_spoil_the_first_bot(
    quick_path: Path, game: GameSpec
):
    made = recording(DataFolder(quick_path), game)
    for player in (b"a" * 16, b"b" * 16):
        made.play(person(0.7), 9, player=player, spec=game)
    made.play(person(0.7), 9, player=b"c" * 16, spec=game, obs_scale=(1.0, 1.0, 1e6, 1e6))
    with role_of(made) as role:
        status = until_idle(role, game)
    assert status["champion"] == 1, status["decision"]
    if game is GAME:
        assert returns_of(made.registry().policy("cart", 1), 50).mean() > 100


def test_a_grid_is_shown_from_the_cell_that_the_player_moves_also_after_a_restart(
    quick_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(held_out, "_WIDTHS", (32,))
    made = recording(DataFolder(quick_path), WALK)
    made.store(walks(500))
    schedule = replace(SCHEDULE, improve_with="bc", bc_updates=512)
    config = replace(CONFIG, schedule=schedule, settings={"bc": SMALL | {"batch": 128}})
    with role_of(made, config) as role:
        whys = set()
        updates = 0
        while not updates:
            role.step()
            status = role.status()["games"]["walk"]
            whys.add(status["why"])
            updates = status["updates"]
        assert "trying whether mirror images of the steps help: clone 3 of 3" in whys
        assert updates < schedule.bc_updates
    with role_of(made, config) as role:
        role.step()
        assert role.status()["games"]["walk"]["updates"] > updates, "it was not resumed"
        status = until_idle(role, WALK)
    assert status["champion"] == 1, status["decision"]
    (training,) = (made.data.root / "learner" / "walk").iterdir()
    assert "unusable" not in training.name
    registry = made.registry()
    lineage = registry.catalogue("walk").models[1].lineage
    assert 'centre = "obs 1"' in lineage.config["settings"]
    # Its people walk rows first, so rows and columns are not alike.
    assert 'symmetry = "rows 1,0,2,3; columns 0,1,3,2"' in lineage.config["settings"]
    policy = registry.policy("walk", 1)
    assert any(isinstance(layer, Centre) for layer in policy.network.inputs["obs"].layers)
    goals = [(row, column) for row in range(5) for column in range(5) if (row, column) != (2, 2)]
    arrived = sum(walks_to(policy, goal) for goal in goals)
    assert arrived >= 20, f"{arrived} of 24 goals"


@pytest.mark.parametrize(
    ("centre", "symmetry", "used_centre", "used_symmetry"),
    [
        ("none", "none", "none", "none"),
        ("obs 0", "rows 1,0,2,3", "obs 0", "rows 1,0,2,3"),
        ("obs.map 0", "rows 1,0,2", "obs 1", ""),
    ],
    ids=["none", "its own", "those of another game"],
)
def test_a_configured_centre_and_symmetry_stay(
    quick_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    centre: str,
    symmetry: str,
    used_centre: str,
    used_symmetry: str,
):
    monkeypatch.setattr(game_training.GameTraining, "step", lambda training: None)
    made = recording(DataFolder(quick_path), WALK)
    made.store(walks(300))
    settings = {"bc": SMALL | {"centre": centre, "symmetry": symmetry}}
    with role_of(made, replace(ONLY_BC, settings=settings)) as role:
        while (game := role._games.get("walk")) is None or (training := game._training) is None:
            role.step()
        while not (training._is_prepared or training._choice):
            role.step()
        config = training.settings.config
        used = (config.centre, config.symmetry)
        if training._choice is not None:  # the symmetry is chosen later, by clones
            used = (training._choice[0], "")
    assert used == (used_centre, used_symmetry)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("centre", "symmetry", "used_centre", "used_symmetry"),
    [
        ("none", "none", "none", "none"),
        ("obs 0", "rows 1,0,2,3", "obs 0", "rows 1,0,2,3"),
        ("obs.map 0", "rows 1,0,2", "obs 1", "rows 1,0,2,3; columns"),
    ],
    ids=["none", "its own", "those of another game"],
)
def test_a_released_model_names_its_centre_and_symmetry(
    quick_path: Path, centre: str, symmetry: str, used_centre: str, used_symmetry: str
):
    made = recording(DataFolder(quick_path), WALK)
    made.store(walks(300))
    settings = {"bc": SMALL | {"centre": centre, "symmetry": symmetry}}
    with role_of(made, replace(ONLY_BC, settings=settings)) as role:
        until_idle(role, WALK)
    lineage = made.registry().catalogue("walk").models[1].lineage
    assert f'centre = "{used_centre}"' in lineage.config["settings"]
    assert f'symmetry = "{used_symmetry}' in lineage.config["settings"]


def test_a_clone_of_the_best_episodes_is_released(quick_path: Path):
    made = recording(DataFolder(quick_path), WALK)
    made.store(walks(300))
    config = replace(ONLY_BC, settings={"bc": SMALL | {"centre": "none", "best_share": 0.5}})
    with role_of(made, config) as role:
        status = until_idle(role, WALK)
    assert not status["error"]
    lineage = made.registry().catalogue("walk").models[1].lineage
    assert "best_share = 0.5" in lineage.config["settings"]
    n_best, n_known = (lineage.metrics[f"{name}_episodes"] for name in ("best", "known"))
    assert (status["best_episodes"], status["known_episodes"]) == (n_best, n_known)
    assert n_known / 2 <= n_best <= n_known <= 300


@pytest.mark.parametrize("centre", ["obs 9", "obs obs.x,obs.y"])
def test_a_configured_centre_that_the_game_does_not_have_is_named(quick_path: Path, centre: str):
    made = recording(DataFolder(quick_path), WALK)
    made.store(walks(300))
    with role_of(made, replace(CONFIG, settings={"bc": SMALL | {"centre": centre}})) as role:
        status = until_idle(role, WALK)
    assert status["error"].startswith("learner.settings of bc do not fit walk: ")
    assert centre in status["error"]
    assert (status["doing"], status["missing_steps"]) == ("wait", None)
    assert status["why"] == "the last attempt failed; it is repeated every 30 s"


def test_a_checkpoint_with_an_unknown_centre_is_set_aside(
    quick_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made = recording(DataFolder(quick_path), WALK)
    made.store(walks(300))
    config = replace(ONLY_BC, settings={"bc": SMALL | {"symmetry": "none"}})
    with monkeypatch.context() as patch, role_of(made, config) as role:
        patch.setattr(game_training, "find_centre", lambda *_: "")
        save = TrainingJob.save
        patch.setattr(
            TrainingJob, "save", lambda job, facts: save(job, facts=facts | {"centre": "nothing 1"})
        )
        role.step()
    with role_of(made, config) as role:
        status = until_idle(role, WALK)
    assert status["models"] == 1
    folders = sorted(path.name for path in (made.data.root / "learner" / "walk").iterdir())
    assert [("unusable" in name) for name in folders] == [False, True]


WALK = game_spec("walk", obs=Box((5, 5, 2), np.dtype(np.uint8), 0, 1), actions=4)
"""A player, channel 1, walks to a goal, channel 0: north, south, west or east."""
WAYS = ((-1, 0), (1, 0), (0, -1), (0, 1))
Cell = tuple[int, int]


def seen(place: Cell, goal: Cell) -> Any:
    grid = np.zeros((5, 5, 2), np.uint8)
    grid[*goal, 0] = 1
    grid[*place, 1] = 1
    return grid


def walked(place: Cell, action: int) -> Cell:
    row, column = (min(4, max(0, at + by)) for at, by in zip(place, WAYS[action], strict=True))
    return row, column


def walks(count: int) -> list[Chunk]:
    """Episodes of somebody who mostly goes to the goal, rows first, and sometimes anywhere."""
    rng = np.random.default_rng(0)
    chunks = []
    for number in range(count):
        place: Cell
        goal: Cell
        place, goal = map(tuple, rng.integers(5, size=(2, 2)).tolist())
        moves: list[Move] = []
        while place != goal or not moves:
            down, right = (there - here for there, here in zip(goal, place, strict=True))
            action = int(down > 0) if down else 2 + int(right > 0)
            if rng.random() < 0.2:
                action = int(rng.integers(4))
            there = walked(place, action)
            end = "terminated" if there == goal else None
            moves.append(
                Move(
                    seen(place, goal),
                    action,
                    float(there == goal),
                    seen(there, goal),
                    end,
                    not moves,
                )
            )
            place = there
        chunk = chunk_of(WALK, moves, session=number, version=0)
        chunks.append(replace(chunk, meta=replace(chunk.meta, kind="player", consent="granted")))
    return chunks


def walks_to(policy: Policy, goal: Cell) -> bool:
    place = (2, 2)
    for _ in range(8):
        place = walked(place, int(policy.act(seen(place, goal))))
        if place == goal:
            return True
    return False


def test_steps_without_consent_or_by_bots_train_no_first_bot(made: Recording):
    unknown = made.play(person(0.5), 20, consent="unknown")
    denied = made.play(person(0.5), 20, consent="denied")
    by_bots = made.play(bot(balancing_policy(spin=0.3)), 10, model="cart/9")
    with role_of(made) as role:
        status = until_idle(role)
        assert role.status()["read_steps"] == unknown + denied + by_bots
    assert (status["champion"], status["usable_steps"]) == (0, 0)
    assert status["consent_unknown_steps"] == unknown
    advice = f"{unknown} steps are not learned from: consent unknown; next: "
    assert status["next"].startswith(advice)
    with role_of(made, replace(CONFIG, learn_from=("granted", "unknown"))) as role:
        status = until_idle(role)
    assert (status["champion"], status["next"]) == (1, "")


def test_a_learner_that_has_just_started_says_so(made: Recording, monkeypatch: pytest.MonkeyPatch):
    made.play(person(0.5), 2)
    seen = []
    with role_of(made) as role:
        step = game_learner.GameLearner.step

        def watched(learner: game_learner.GameLearner, **more: bool) -> bool:
            seen.append(role.status()["games"].get("cart", {}).get("why"))
            return step(learner, **more)

        monkeypatch.setattr(game_learner.GameLearner, "step", watched)
        role.step()
        assert "of 1000 steps of people" in role.status()["games"]["cart"]["why"]
    assert seen == ["the learner has just found this game and reads what is recorded"]


def test_steps_of_an_erased_player_are_no_longer_used(made: Recording):
    theirs = made.play(person(0.5), 2, player=b"p" * 16, max_steps=60)
    others = made.play(person(0.5), 2, max_steps=60)
    with role_of(made) as role:
        assert until_idle(role)["usable_steps"] == theirs + others
        with made.open() as store:
            store.forget(b"p" * 16)
        assert until_idle(role)["usable_steps"] == others


CLONES = replace(
    CONFIG, bounds=Bounds(min_episodes=5), schedule=replace(SCHEDULE, improve_with="bc")
)


@pytest.mark.parametrize("is_good", [True, False])
def test_after_a_forget_a_replacement_is_trained_at_once_and_passes_if_it_is_not_worse(
    made: Recording, is_good: bool
):
    """A champion that learned from the player is replaced by one that is as good, not better."""
    made.play(person(0.5), 12, player=b"p" * 16)
    made.play(person(0.5), 12)
    with role_of(made, CLONES) as role:
        status = until_idle(role)
        assert (status["champion"], status["models"], status["forgotten"]) == (1, 1, "")
        with made.open() as store:
            store.forget(b"unknown".ljust(16))
        status = until_idle(role)
        assert (status["models"], status["forgotten"]) == (1, "")
        made.play(person(0.5), 1, player=b"q" * 16, max_steps=60)
        until_idle(role)
        with made.open() as store:
            store.forget(b"q" * 16)
        status = until_idle(role)
        assert (status["models"], status["forgotten"]) == (1, ""), "it played after the training"
        with made.open() as store:
            store.forget(b"p" * 16)
    with role_of(made, CLONES) as role:  # another one, which was not running when it happened
        status = until_idle(role)
        assert (status["champion"], status["canary"], status["models"]) == (1, 2, 2)
        assert status["canary_margin"] == 0.1
        assert status["forgotten"] == (
            "cart/1 may contain what it learned from players who were forgotten since; its "
            "replacement cart/2 is on trial"
        )
        made.clock.advance(10)
        policy = balancing_policy(spin=0.5) if is_good else balancing_policy(spin=0.01)
        in_turn(made, {"cart/1": balancing_policy(spin=0.5), "cart/2": policy}, 400)
        status = until_idle(role)
    assert (status["models"], status["canary"]) == (2, 0), "it passes once, and is trained once"
    assert status["champion"] == (2 if is_good else 1)
    assert status["decision"]["why"].startswith(
        ("not worse" if is_good else "worse")
        + " by more than 0.1 of the range, as a replacement: mean return "
    )
    assert status["forgotten"] == (
        ""
        if is_good
        else "cart/1 may contain what it learned from players who were forgotten since; its "
        "replacement cart/2 was not promoted, so it stays"
    )


def test_after_another_forget_the_next_replacement_is_trained_once_the_first_one_is_decided(
    made: Recording,
):
    for player in (b"p" * 16, b"q" * 16):
        made.play(person(0.5), 12, player=player)
    made.play(person(0.5), 12)
    with role_of(made, CLONES) as role:
        assert until_idle(role)["champion"] == 1
        with made.open() as store:
            store.forget(b"p" * 16)
        assert until_idle(role)["canary"] == 2
        with made.open() as store:
            store.forget(b"q" * 16)
        status = until_idle(role)
        assert (status["canary"], status["models"]) == (2, 2)
        assert status["forgotten"].endswith(
            "; its replacement cart/2 is on trial, and the next one is trained once that is decided"
        )
        made.registry().withdraw("cart", why="by hand")
        status = until_idle(role)
    assert status["canary"] == 3
    assert status["forgotten"].endswith("; its replacement cart/3 is on trial")


def test_after_a_forget_during_a_training_the_replacement_is_trained_after_it(made: Recording):
    made.play(person(0.5), 12, player=b"p" * 16)
    made.play(person(0.5), 12)
    with role_of(made, CLONES) as role:
        assert until_idle(role)["champion"] == 1
        made.play(person(0.5), 24)
        for _ in range(2_000):
            role.step()
            if role.status()["games"]["cart"]["updates"] == 64:
                break
        with made.open() as store:
            store.forget(b"p" * 16)
        role.step()
        assert role.status()["games"]["cart"]["forgotten"].endswith(
            "; a replacement is trained after the training that is under way"
        )
        status = until_idle(role)
    assert (status["canary"], status["models"]) == (3, 3)
    assert status["forgotten"].endswith("; its replacement cart/3 is on trial")


@pytest.mark.parametrize("config", [CLONES, CONFIG], ids=["bc", "dqn"])
def test_after_a_forget_that_leaves_too_few_steps_the_replacement_waits_for_more(
    made: Recording, config: LearnerServiceConfig
):
    made.play(person(0.5), 24, player=b"p" * 16)
    steps = made.play(person(0.5), 2, max_steps=60)
    with role_of(made, config) as role:
        status = until_idle(role)
        assert status["champion"] == 1
        with made.open() as store:
            store.forget(b"p" * 16)
        if status["canary"]:
            made.registry().withdraw("cart", why="dqn waits for the canary's decision")
        status = until_idle(role)
        assert status["forgotten"] == (
            "cart/1 may contain what it learned from players who were forgotten since; a "
            f"replacement waits for {1_000 - steps} more steps"
        )
        made.play(person(0.5), 12)
        assert "is on trial" in until_idle(role)["forgotten"]


@pytest.mark.parametrize("algorithm", ["iql", "dqn"])
def test_after_a_forget_a_later_algorithm_trains_the_replacement(made: Recording, algorithm: str):
    made.play(person(0.5), 40, player=b"p" * 16)
    made.play(person(0.5), 40)
    config = WITH_IQL if algorithm == "iql" else CONFIG
    with role_of(made, config) as role:
        status = until_idle(role)
        assert (status["champion"], status["canary"], status["phase"]) == (1, 2, algorithm)
        with made.open() as store:
            store.forget(b"p" * 16)
        made.registry().withdraw("cart", why="dqn waits for the canary's decision")
        status = until_idle(role)
    now = made.registry().catalogue("cart")
    assert (status["champion"], status["canary"]) == (1, 3)
    assert "its replacement cart/3 is on trial" in status["forgotten"]
    read_nos = [now.models[number].lineage.config["read_no"] for number in (1, 2, 3)]
    assert read_nos[0] <= read_nos[1] < read_nos[2]


def test_after_a_forget_other_trainings_that_read_the_player_lose_their_checkpoints(
    made: Recording,
):
    made.play(person(0.5), 12, player=b"p" * 16)
    made.play(person(0.5), 12)
    folder = made.data.root / "learner" / "cart"
    wider = replace(CLONES, settings={"bc": SMALL | {"widths": [32]}})
    for config in (wider, CLONES):
        with role_of(made, config) as role:
            assert until_idle(role)["champion"] == 1
    assert len(list(folder.iterdir())) == 2
    notes = folder / "notes"
    notes.mkdir()
    (notes / "000000000001.safetensors").write_text("not the learner's")
    names = (b"p" * 16).hex().encode()
    assert all(any(names in p.read_bytes() for p in f.iterdir()) for f in folder.glob("bc-*"))
    with made.open() as store:
        store.forget(b"p" * 16)
    with role_of(made, CLONES) as role:
        assert until_idle(role)["canary"], "a replacement"
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert not any(names in path.read_bytes() for path in files)
    assert len({path.parent for path in folder.glob("bc-*/*.safetensors")}) == 1
    assert (notes / "000000000001.safetensors").exists()
    with role_of(made, wider) as role:  # trained again, after the event
        until_idle(role)
    with role_of(made, CLONES) as role:
        until_idle(role)
    assert len({path.parent for path in folder.glob("bc-*/*.safetensors")}) == 2


def test_another_share_for_people_is_another_training_of_dqn_but_not_of_bc(made: Recording):
    def folders() -> set[str]:
        return {path.name for path in (made.data.root / "learner" / "cart").iterdir()}

    first_bot(made)
    people_steps = made.registry().catalogue("cart").models[1].lineage.steps
    made.play(bot(balancing_policy()), 12, model="cart/1")
    with role_of(made) as role:
        assert until_idle(role)["usable_steps"] > people_steps
    before = folders()
    only_people = replace(CONFIG, schedule=replace(SCHEDULE, people_share=1.0))
    with role_of(made, only_people) as role:
        assert until_idle(role)["usable_steps"] == people_steps
    (created,) = folders() - before
    assert created.startswith("dqn-")
    with role_of(made) as role:
        assert until_idle(role)["usable_steps"] > people_steps
    assert folders() == before | {created}


def test_a_continuous_game_stays_on_bc(quick_path: Path):
    made = recording(DataFolder(quick_path), CONTINUOUS)
    made.play(person(0.5), 12, spec=CONTINUOUS)
    with role_of(made) as role:
        status = until_idle(role, CONTINUOUS)
        assert (status["champion"], status["phase"], status["canary"]) == (1, "bc", 0)
        made.play(person(0.9), 20, spec=CONTINUOUS)
        status = until_idle(role, CONTINUOUS)
    assert (status["champion"], status["canary"]) == (1, 2)
    assert made.registry().catalogue("slide").models[2].lineage.parent == 1


def test_the_share_of_exploring_episodes_is_published_once_and_when_it_changes(made: Recording):
    made.play(person(0.5), 60)
    shares = []
    documents = set()
    for config in (
        CONFIG,
        CONFIG,
        replace(CONFIG, explore_share=0.1),
        replace(CONFIG, schedule=replace(SCHEDULE, improve_with="bc")),
    ):
        with role_of(made, config) as role:
            until_idle(role)
        noise = made.registry().catalogue("cart").noise
        shares.append([published.explore_share for published in noise.values()])
        documents |= {published.signed for published in noise.values()}
    assert shares == [[0.05], [0.05], [0.1], [0.0]]
    assert len(documents) == 3


def test_with_more_steps_candidates_are_trained_anew_and_replace_an_undecided_one(made: Recording):
    # Its fourth power is below 4: the canaries here play nothing, and keep their place until then.
    schedule = replace(
        SCHEDULE, growth=1.4, improve_with="iql", improve_steps=8_000, iql_updates=64
    )
    config = replace(CONFIG, schedule=schedule, settings={"bc": SMALL, "iql": SMALL})

    def play_to(steps: int) -> None:
        while made_steps[0] < steps:
            made_steps[0] += made.play(person(0.5), 4)

    made_steps = [0]
    play_to(1_000)
    with role_of(made, config) as role:
        assert until_idle(role)["champion"] == 1
        play_to(2 * made_steps[0])
        status = until_idle(role)
        assert (status["champion"], status["canary"], status["phase"]) == (1, 2, "bc")
        play_to(8_000)
        status = until_idle(role)
        assert (status["canary"], status["phase"], status["updates"]) == (3, "iql", 64)
    with role_of(made, config) as role:  # another one, which finds it released
        status = until_idle(role)
        assert (status["canary"], status["doing"], status["updates"]) == (3, "wait", 64)
        play_to(4 * made_steps[0])
        status = until_idle(role)
        assert (status["canary"], status["updates"]) == (4, 64)
    models = made.registry().catalogue("cart").models
    facts = [(one.lineage.algorithm, one.lineage.metrics["updates"]) for one in models.values()]
    assert facts == [("bc", 256), ("bc", 256), ("iql", 64), ("iql", 64)]
    assert models[4].lineage.parent == 3
    assert models[4].lineage.config["temperature"] == 0.25
    assert [models[number].lineage.config["people_share"] for number in (1, 4)] == [1.0, 0.75]
    assert models[4].lineage.steps >= 4 * models[3].lineage.steps
    assert [weight_of(models[number]) for number in (3, 4)] == [1.5, 0.5]


def weight_of(model: Manifest) -> float:
    settings = tomllib.loads(model.lineage.config["settings"])
    return float(settings["knobs"]["advantage_weight"])


RANKED = replace(
    CONFIG,
    schedule=replace(
        SCHEDULE, improve_with="iql", improve_steps=2_000, iql_updates=64, ranking_updates=128
    ),
    settings={"bc": SMALL, "iql": SMALL},
)


def test_candidates_of_bc_and_iql_are_ranked_and_the_best_is_released(made: Recording):
    made.play(person(0.5), 60)
    with role_of(made, RANKED) as role:
        status = until_idle(role)
    assert (status["champion"], status["canary"], status["phase"]) == (1, 2, "iql")
    registry = made.registry()
    lineage = registry.catalogue("cart").models[2].lineage
    ranking = lineage.config["ranking"]
    assert [(row["algorithm"], row["temperature"]) for row in ranking] == [
        (algorithm, temperature)
        for algorithm in ("bc", "iql")
        for temperature in (0.05, 0.25, 0.5, 1.0)
    ]
    best = max((row for row in ranking if row["support"] >= 0.9), key=lambda row: row["value"])
    assert lineage.algorithm == best["algorithm"]
    assert lineage.config["temperature"] == best["temperature"]
    assert lineage.metrics["updates"] == {"bc": 256, "iql": 64}[best["algorithm"]]


def test_a_ranking_that_was_killed_is_computed_again_with_the_same_result(
    made: Recording, tmp_path: Path
):
    made.play(person(0.5), 60)
    shutil.copytree(made.data.root, tmp_path / "copy")
    with role_of(made, RANKED) as role:
        until_idle(role)
    whole = made.registry().catalogue("cart").models[2]
    again = recording(DataFolder(tmp_path / "copy"))
    with role_of(again, RANKED) as role:
        while (game := role._games.get("cart")) is None or game._ranking is None:
            assert role.step()
        role._games.clear()  # as after kill -9: nothing is saved or closed
    with role_of(again, RANKED) as role:
        until_idle(role)
    resumed = again.registry().catalogue("cart").models[2]
    assert resumed.lineage.config == whole.lineage.config
    assert resumed.policy_sha256 == whole.policy_sha256


def test_a_ranking_waits_while_another_game_gets_its_first_bot(
    made: Recording, monkeypatch: pytest.MonkeyPatch
):
    made.registry().register(CONTINUOUS)
    made.play(person(0.5), 60)
    with role_of(made, RANKED) as role:
        while (cart := role._games.get("cart")) is None or cart._ranking is None:
            assert role.step()
        ranking = cart._ranking
        made.play(person(0.5), 12, spec=CONTINUOUS)
        made.clock.advance(1)
        with monkeypatch.context() as patched:
            patched.setattr(ranking, "step", lambda: pytest.fail("the other game has no bot"))
            while not role.status()["games"].get("slide", {}).get("champion"):
                assert role.step()
        paused = role.status()["games"]["cart"]
        assert paused["why"].startswith("paused while another game gets its first bot: ")
        assert cart._ranking is ranking
        assert until_idle(role)["canary"] == 2


def test_a_clone_that_cannot_be_trained_ends_the_ranking_and_is_not_a_failure_of_iql(
    made: Recording, monkeypatch: pytest.MonkeyPatch
):
    made.play(person(0.5), 60)
    step = FromStore.step

    def fails(engine: FromStore) -> bool:
        if isinstance(engine.learner.algorithm, Bc):
            raise ConfigError("no recorded episode is whole")
        return step(engine)

    with structlog.testing.capture_logs() as logs, role_of(made, RANKED) as role:
        while role.status()["games"].get("cart", {}).get("champion") != 1:
            assert role.step()
        monkeypatch.setattr(FromStore, "step", fails)
        status = until_idle(role)
    assert (status["canary"], status["phase"]) == (2, "iql")
    assert (status["error"], status["failing"]) == ("", "")
    assert status["gave_up"] == (
        "iql was released without a ranking: no clone was trained: no recorded episode is whole"
    )
    lineage = made.registry().catalogue("cart").models[2].lineage
    assert (lineage.algorithm, "ranking" in lineage.config) == ("iql", False)
    (why,) = (log["why"] for log in logs if log["event"] == "not_ranked")
    assert why == "no clone was trained: no recorded episode is whole"


def test_wrong_settings_of_bc_beside_iql_are_shown_in_the_status(made: Recording):
    made.play(person(0.5), 60)
    with role_of(made, RANKED) as role:
        while role.status()["games"].get("cart", {}).get("champion") != 1:
            assert role.step()
    settings = {**RANKED.settings, "bc": {**SMALL, "widths": [0]}}
    with role_of(made, replace(RANKED, settings=settings)) as role:
        status = until_idle(role)
    assert (status["canary"], status["phase"], status["error"]) == (2, "iql", "")
    assert status["gave_up"].startswith(
        "iql was released without a ranking: no clone was trained: learner.settings of bc do not "
        "fit cart: "
    ), status["gave_up"]


def test_the_weights_of_iqls_candidates_continue_in_turn_after_a_restart_of_the_process(
    made: Recording,
):
    config = replace(WITH_IQL, schedule=replace(WITH_IQL.schedule, growth=1.1, iql_updates=64))
    made.play(person(0.5), 60)
    for number in (2, 3, 4):
        with role_of(made, config) as role:  # trains a part of the candidate
            while (status := role.status()["games"].get("cart", {})).get("updates") != 32 or (
                status["phase"] != "iql"
            ):
                assert role.step()
            role._games.clear()  # as after kill -9: nothing is saved or closed
        with role_of(made, config) as role:
            assert until_idle(role)["canary"] == number
        made.play(person(0.5), 100)
    models = made.registry().catalogue("cart").models
    assert [weight_of(models[number]) for number in (2, 3, 4)] == [1.5, 0.5, 1.5]


@pytest.mark.parametrize("has_begun", [False, True])
def test_a_kill_during_a_restart_keeps_the_last_release(made: Recording, has_begun: bool):
    config = replace(CONFIG, schedule=replace(SCHEDULE, improve_with="bc"))
    made.play(person(0.5), 12)
    with role_of(made, config) as role:
        assert until_idle(role)["champion"] == 1
    (folder,) = (made.data.root / "learner" / "cart").iterdir()
    folder.rename(folder.with_name(f"{folder.name}.before"))
    if has_begun:
        folder.mkdir()  # the first checkpoint was not written
    with role_of(made, config) as role:
        status = until_idle(role)
        assert (status["models"], status["updates"], status["doing"]) == (1, 256, "wait")
    assert list((made.data.root / "learner" / "cart").iterdir()) == [folder]


def test_a_damaged_spec_of_an_earlier_schema_does_not_stop_the_training(made: Recording):
    earlier = game_spec("cart", obs=3, actions=2)
    made.registry().register(earlier)
    (made.data.games / "cart" / f"{earlier.schema}.json").write_bytes(b"x")
    made.play(person(0.5), 12)
    with role_of(made) as role:
        assert until_idle(role)["champion"] == 1


def test_a_release_that_was_not_judged_is_judged_by_the_next_learner(made: Recording):
    def unreachable(*_: Any) -> Any:
        raise Unreachable("nobody answers")

    made.play(person(0.5), 12)
    with LearnerRole(
        made.data, made.registry(), config=CONFIG, clock=made.clock, check=unreachable
    ) as role:
        while not made.registry().catalogue("cart").models:
            role.step()
        assert role.status()["games"]["cart"]["error"] == "nobody answers"
    with role_of(made) as role:
        assert until_idle(role)["champion"] == 1
    assert made.registry().catalogue("cart").models[1].lineage.algorithm == "bc"


def test_a_release_that_was_damaged_before_it_was_judged_is_rejected(
    made: Recording, monkeypatch: pytest.MonkeyPatch
):
    made.play(person(0.5), 12)
    with role_of(made) as role:
        with monkeypatch.context() as patched:
            patched.setattr(game_learner.GameLearner, "_admit", lambda *arguments: None)
            while not made.registry().catalogue("cart").models:
                role.step()
        role._games.clear()  # as after kill -9: nothing is saved or closed
    registry = made.registry()
    path = made.data.root / "models" / registry.policy_object(registry.manifest("cart", 1))
    path.unlink()
    with role_of(made) as role:
        status = until_idle(role)
    assert (status["champion"], status["error"]) == (0, "")
    assert "the policy of cart/1 is missing" in made.registry().catalogue("cart").verdicts[1]


def test_a_game_with_very_many_inputs_gets_a_smaller_network(made: Recording):
    made.play(person(0.5), 1)
    wide = game_spec("wide", obs=40_000, actions=2)
    with role_of(made, replace(CONFIG, settings={"bc": {"capacity": 1_024}})) as role:
        role.step()
        learner = role._games["cart"]
        assert learner._training_for(wide, "bc").settings.config.widths == (64, 64)
        assert learner._training_for(GAME, "bc").settings.config.widths == (256, 256)


# --- candidates and the gate ----------------------------------------------------------------------


def test_a_dqn_candidate_becomes_canary_and_live_play_promotes_or_rejects_it(made: Recording):
    status = first_bot(made)
    assert (status["champion"], status["canary"], status["models"]) == (1, 2, 2)
    assert made.registry().catalogue("cart").models[2].lineage.algorithm == "dqn"
    made.clock.advance(10)
    in_turn(made, {"cart/1": balancing_policy(spin=0.01), "cart/2": balancing_policy(spin=0.5)}, 9)
    # Neither episodes beside the control are compared, nor any that were not drawn at random.
    for count, propensity in ((11, CANARY_BESIDE_CONTROL), (12, None)):
        in_turn(made, {"cart/2": balancing_policy(spin=0.5)}, count, propensity=propensity)
    with role_of(made) as role:  # another one, which finds a canary that is half judged
        status = until_idle(role)
        assert (status["canary"], status["canary_episodes"]) == (2, 9)
        in_turn(
            made, {"cart/1": balancing_policy(spin=0.01), "cart/2": balancing_policy(spin=0.5)}, 31
        )
        role.step()
        status = role.status()["games"]["cart"]
        assert (status["champion"], status["decision"]["decision"]) == (2, "promote")
        until_idle(role)
        made.play(person(0.5), 10)
        status = until_idle(role)
        assert (status["champion"], status["canary"]) == (2, 3)
        made.clock.advance(10)
        in_turn(made, {"cart/2": balancing_policy(spin=0.5), "cart/3": balancing_policy()}, 60)
        role.step()
        status = role.status()["games"]["cart"]
    assert (status["champion"], status["canary"]) == (2, 0)
    assert status["decision"]["decision"] == "reject"
    now = made.registry().catalogue("cart")
    assert [one.model_no for one in now.history] == [1, 2]
    assert now.history[-1].why.startswith("better: mean return 500 over ")
    assert (
        "players: 1, fewer than 10, so false returns are not guarded against" in now.history[-1].why
    )
    canary = now.pointer("canary")
    assert canary is not None
    assert canary.why.startswith("reject: worse: mean return ")
    assert now.models[3].lineage.parent == 2


def test_status_says_why_a_canary_of_an_endless_game_cannot_be_judged(made: Recording):
    def endless(name: str, *, model: str | None = None) -> list[Chunk]:
        """The first chunk of an episode, without its end."""
        (chunk,) = chunks_of(
            episodes(person(0.8), 1, seed=int(name)),
            new_session(START_S, name.encode().rjust(10)),
            model=model,
            ticket=partial(made.ticket, model, 0.5) if model else None,
        )
        return [split_chunk(chunk)[0]]

    for number in range(20):
        made.store(endless(f"{number}"))
    with role_of(made) as role:
        status = until_idle(role)
        assert (status["champion"], status["canary"]) == (1, 2)
        made.store([*endless("98", model="cart/1"), *endless("99", model="cart/2")])
        status = until_idle(role)
        assert status["canary_episodes"] == 0
        assert "no episode has ended so far; next: end episodes" in status["canary_waits"]
    with role_of(made) as role:  # after a restart
        assert until_idle(role)["canary_waits"] == status["canary_waits"]
        made.play(person(0.5), 1)
        assert until_idle(role)["canary_waits"] == ""


def test_forged_reused_and_unsealed_draws_decide_nothing_and_status_counts_them(made: Recording):
    assert first_bot(made)["canary"] == 2
    made.clock.advance(10)
    better = balancing_policy(spin=0.5)
    worse = balancing_policy(spin=0.01)
    reused = made.ticket("cart/2", 0.5)
    other = Recording(replace(made.data, root=made.data.root / "other"), made.clock)
    other.registry().register(GAME)
    claims: dict[str, dict[str, Any]] = {
        "unsealed": {"propensity": 0.5},
        "forged_ticket": {"ticket": partial(other.ticket, "cart/2", 0.5)},
        "malformed_ticket": {"ticket": lambda: "t1"},
        "other_model": {"ticket": partial(made.ticket, "cart/1", 0.5)},
        "reused": {"ticket": lambda: reused},
    }
    for number, claim in enumerate(claims.values()):
        session = new_session(START_S + number, b"liar".rjust(10))
        played = episodes(bot(better), 40, seed=number)
        made.store(list(chunks_of(played, session, model="cart/2", **claim)))
    session = new_session(START_S, b"honest".rjust(10))
    drawn = partial(made.ticket, "cart/1", 0.5)
    made.store(list(chunks_of(episodes(bot(worse), 40), session, model="cart/1", ticket=drawn)))
    with role_of(made) as role:
        status = until_idle(role)
    assert (status["champion"], status["canary"], status["canary_episodes"]) == (1, 2, 1)
    counts = dict.fromkeys(claims, 40) | {"reused": 39}
    assert status["not_compared"] == counts
    with role_of(made) as role:  # after a restart
        assert until_idle(role)["not_compared"] == counts


def test_chunks_that_break_updates_are_reported_and_the_others_are_used(made: Recording):
    made.play(person(0.5), 12)
    (episode,) = episodes(person(0.5), 1, max_steps=60)
    bad = list(
        chunks_of(
            [replace(episode, obs=episode.obs * np.float32(1e18))],
            new_session(START_S, b"a" * 10),
        )
    )
    made.store(bad)
    with role_of(made) as role:
        status = until_idle(role)
    assert (status["canary"], status["error"]) == (2, "")
    assert status["guarded_chunks"] == 1
    assert status["guarded"] == [f"{bad[0].meta.session}/0"]


WITH_IQL = replace(
    CONFIG,
    schedule=replace(SCHEDULE, improve_with="iql", improve_steps=2_000, iql_updates=512),
    settings={"bc": SMALL, "iql": SMALL},
)


@pytest.mark.parametrize(
    ("algorithm", "reward"),
    [
        ("iql", 1e9),
        ("dqn", -1e19),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("iql", 1e12), ("iql", -1e19), ("dqn", 1e9), ("dqn", 1e12))
        ),
    ],
)
def test_rewards_of_one_player_that_are_far_from_all_others_neither_stop_nor_distort_learning(
    made: Recording, algorithm: str, reward: float
):
    for player in (b"a" * 16, b"b" * 16):
        made.play(person(0.7), 20, player=player)
    made.play(person(0.0), 40, player=b"c" * 16, reward=reward)
    config = WITH_IQL if algorithm == "iql" else CONFIG
    with role_of(made, config) as role:
        status = until_idle(role)
        training = role._games["cart"]._training
        assert training is not None
        drawn = training.engine.learner.source.draw(0, importance_exponent=0.0).reward
    assert (status["phase"], status["error"], status["guarded_chunks"]) == (algorithm, "", 0)
    assert status["canary"] > 1
    assert np.abs(drawn).max() <= 4.0
    if algorithm == "iql":
        bots = made.registry()
        assert returns_of(bots.policy("cart", status["canary"]), 50).mean() > 150


@pytest.mark.parametrize("reward", [pytest.param(1e12, marks=pytest.mark.slow), 1e19])
def test_a_game_with_huge_rewards_is_improved(made: Recording, reward: float):
    made.play(person(0.5), 60, reward=reward)
    given = {"bc": SMALL, "iql": SMALL | {"advantage_weight": 2.0}}
    with role_of(made, replace(WITH_IQL, settings=given)) as role:
        status = until_idle(role)
    assert (status["phase"], status["error"], status["guarded_chunks"]) == ("iql", "", 0)
    assert status["canary"] == 2
    assert weight_of(made.registry().manifest("cart", 2)) == 2.0


def test_an_algorithm_that_keeps_failing_is_given_up_once_and_clones_continue(
    made: Recording, monkeypatch: pytest.MonkeyPatch
):
    step = FromStore.step

    def fails(engine: FromStore) -> bool:
        if isinstance(engine.learner.algorithm, Iql):
            return False  # too many updates in a row were not finite
        return step(engine)

    monkeypatch.setattr(FromStore, "step", fails)
    steps = made.play(person(0.5), 60)
    with structlog.testing.capture_logs() as logs, role_of(made, WITH_IQL) as role:
        for _ in range(20):
            status = until_idle(role)
            made.clock.advance(31)
        assert (status["phase"], status["error"]) == ("bc", "")
        assert status["gave_up"].startswith(
            f"iql failed 3 times and is tried again from {math.ceil(1.5 * steps)} steps on; until "
            "then, bc "
            "trains the candidates: updates are still not finite after 3 restores"
        )
        assert [log["event"] for log in logs if log["log_level"] == "error"] == [
            "learning_failed",
            "algorithm_given_up",
        ]
        more = 0
        while more < steps:
            more += made.play(person(0.5), 20)
        monkeypatch.setattr(FromStore, "step", step)
        status = until_idle(role)
    assert (status["phase"], status["gave_up"], status["error"]) == ("iql", "", "")


def test_a_training_that_keeps_failing_is_reported_while_it_works_in_between(
    made: Recording, monkeypatch: pytest.MonkeyPatch
):
    step = FromStore.step
    n_calls = 0

    def fails_every_second_time(engine: FromStore) -> bool:
        nonlocal n_calls
        n_calls += 1
        return n_calls % 2 == 1 and step(engine)

    monkeypatch.setattr(FromStore, "step", fails_every_second_time)
    made.play(person(0.5), 12)
    seen = []
    with role_of(made) as role:
        for _ in range(3):
            until_idle(role)
            made.clock.advance(31)
            role.step()
            seen.append(role.status()["games"]["cart"])
    assert [game["error"] for game in seen] == ["", "", ""]
    assert [game["failing"][:25] for game in seen] == ["", *["updates are still not fin"] * 2]


# --- one learner at a time, killed at any moment --------------------------------------------------


def test_a_learner_that_was_paused_stops_when_another_took_over(made: Recording):
    made.play(person(0.5), 12)
    with role_of(made) as old:
        while old.step() and not old.status()["games"]["cart"]["updates"]:
            pass
        with role_of(made) as new:
            new.step()
            with pytest.raises(Fenced, match="has taken over cart"):
                old.step()
            assert until_idle(new)["champion"] == 1
    now = made.registry().catalogue("cart")
    assert now.epoch == 2
    assert sorted(now.models) == [1, 2]


def test_another_store_is_counted_from_its_start_and_the_first_one_resumes(
    made: Recording,
):
    first = made.play(person(0.5), 4)
    with role_of(made) as role:
        assert until_idle(role)["usable_steps"] == first
    away = made.data.root / "first"
    made.data.store.rename(away)
    second = made.play(person(0.5), 3)
    with role_of(made) as role:
        assert until_idle(role)["usable_steps"] == second
    shutil.rmtree(made.data.store)
    away.rename(made.data.store)
    third = made.play(person(0.5), 2)
    with role_of(made) as role:
        assert role.step()
        assert role._stats is not None
        assert role._stats.schemas["cart"][GAME.schema].steps["granted"] == first + third
        assert until_idle(role)["usable_steps"] == first + third


def test_what_was_set_aside_is_found_again_after_a_kill_between_two_renames(made: Recording):
    first = made.play(person(0.5), 4)
    with role_of(made) as role:
        until_idle(role)
    learner = made.data.root / "learner"
    store_id = str(StoreView(made.data.store).identity)
    learner.rename(learner.with_name(f"learner-{store_id}"))
    with role_of(made) as role:
        assert until_idle(role)["usable_steps"] == first
    assert not learner.with_name(f"learner-{store_id}").exists()
    (learner.with_name("learner-another") / "kept").mkdir(parents=True)
    (learner / "store.txt").write_text("another")
    with role_of(made) as role:
        assert until_idle(role)["usable_steps"] == first
    assert sorted(path.name for path in made.data.root.glob("learner-*")) == [
        "learner-another",
        "learner-another-2",
    ]


class AwayObjects(FolderObjects):
    """Objects that cannot be reached for a while."""

    is_away = False

    def get(self, name: str) -> bytes | None:
        if self.is_away:
            raise Unreachable("nobody answers")
        return super().get(name)


def test_unreachable_models_are_reported_and_retried(made: Recording):
    objects = AwayObjects(made.data.root / "models")
    stop = threading.Event()
    models = Registry(
        objects, trusted={SIGNER.key_id: SIGNER.public}, signer=SIGNER, clock=made.clock
    )
    made.play(person(0.5), 4)
    with LearnerRole(made.data, models, config=CONFIG, clock=made.clock, check=check_model) as role:
        before = until_idle(role)
        objects.is_away = True
        thread = threading.Thread(target=role.run, args=(stop,))
        thread.start()
        try:
            until(lambda: role.status()["storage_error"] == "nobody answers")
            assert role.status()["games"]["cart"] == before
            objects.is_away = False
            until(lambda: role.status()["storage_error"] == "")
            assert thread.is_alive()
        finally:
            stop.set()
            thread.join()


def until(condition: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up_s
        time.sleep(0.02)


def test_a_training_with_damaged_checkpoints_restarts(made: Recording):
    assert first_bot(made)["canary"] == 2
    for path in made.data.root.glob("learner/cart/dqn-*/*.safetensors"):
        path.write_bytes(b"")
    with role_of(made) as role:
        status = until_idle(role)
    assert (status["champion"], status["canary"], status["error"]) == (1, 2, "")
    assert status["updates"] > 64
    (aside,) = made.data.root.glob("learner/cart/dqn-*.unusable-*")
    (folder,) = set(made.data.root.glob("learner/cart/dqn-*")) - {aside}
    assert all(path.stat().st_size for path in folder.iterdir())
    assert [path.stat().st_size for path in aside.iterdir()] == [0, 0]


def test_a_training_with_checkpoints_of_another_build_restarts(made: Recording):
    first_bot(made)
    (folder,) = made.data.root.glob("learner/cart/dqn-*")
    for path in folder.iterdir():
        saved = decode_checkpoint(path.read_bytes())
        arrays = {name: array for name, array in saved.arrays.items() if name != "state.leaf0000"}
        path.write_bytes(replace(saved, arrays=arrays).encode())
    with role_of(made) as role:
        status = until_idle(role)
    assert (status["canary"], status["error"]) == (2, "")
    assert status["updates"] > 64


def test_a_damaged_store_does_not_discard_a_trainings_checkpoints(
    made: Recording, monkeypatch: pytest.MonkeyPatch
):
    first_bot(made)
    kept = {
        path: path.read_bytes() for path in made.data.root.glob("learner/cart/dqn-*/*.safetensors")
    }

    def damaged(_: StoreView, chunks: object) -> Cursor:
        raise Corrupt("a page of the store is damaged")

    monkeypatch.setattr(StoreView, "cursor_before", damaged)
    with role_of(made) as role:
        assert "a page of the store is damaged" in until_idle(role)["error"]
    assert {
        path: path.read_bytes() for path in made.data.root.glob("learner/cart/dqn-*/*.safetensors")
    } == kept


CHILD = """
import sys
for name in ("gymnasium", "understudy.games", "understudy.act"):
    sys.modules[name] = None
from pathlib import Path
import msgspec
from understudy.platform import learner_process
from understudy.platform.children import log_to_stderr, stop_with_parent
from understudy.backends.data import DataFolder
from understudy.release.game_training import LearnerServiceConfig
from understudy.backends.deployment import open_deployment
if sys.argv[3:]:
    import os
    from understudy.training.from_store import FromStore
    step = FromStore.step
    def step_or_die(engine):
        if engine.steps >= int(sys.argv[3]):
            os.kill(os.getpid(), 9)
        return step(engine)
    FromStore.step = step_or_die
log_to_stderr()
config = msgspec.json.decode(sys.argv[2], type=LearnerServiceConfig)
data = DataFolder(Path(sys.argv[1]))
raise SystemExit(
    learner_process.learn(data, open_deployment(data).registry, config, stop_with_parent())
)
"""
"""The role's process, which can import neither gymnasium nor the games nor the actors.

It is killed after that many updates, if a third argument states their number.
"""


def learner_of(made: Recording, config: LearnerServiceConfig, *more: str) -> Child:
    (made.data.root / "signing.key").write_bytes(key_file(SIGNER._private))
    settings = json.dumps(asdict(config))
    return Child("learner", [sys.executable, "-c", CHILD, str(made.data.root), settings, *more])


def reported(process: Child, wanted: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """The first report of the game that is as wanted."""
    deadline_s = time.monotonic() + 200
    while time.monotonic() < deadline_s and process.exit_code is None:
        game: dict[str, Any] = process.latest.get("games", {}).get("cart", {})
        if game and wanted(game):
            return game
        time.sleep(0.01)
    raise AssertionError(f"{process.exit_code} {process.latest} {process.errors}")


def test_a_killed_learner_resumes_to_the_same_bits_without_gymnasium_or_a_game(
    quick_path: Path,
):
    whole, killed = (recording(DataFolder(quick_path / name)) for name in ("whole", "killed"))
    for made in (whole, killed):
        made.play(person(0.5), 12)
    with role_of(whole) as role:
        until_idle(role)
    process = learner_of(killed, CONFIG, "192")
    assert process.wait(200) == -signal.SIGKILL
    process = learner_of(killed, CONFIG)
    reported(process, lambda game: game["canary"])
    process.stop()
    assert process.wait(60) == 0
    resumed = re.search(r'"algorithm": "bc", "updates": (\d+)', process.errors)
    assert resumed is not None
    assert 0 < int(resumed[1]) <= 192, "not from the beginning"
    ours, theirs = (made.registry().catalogue("cart").models for made in (whole, killed))
    assert [one.policy_sha256 for one in ours.values()] == [
        one.policy_sha256 for one in theirs.values()
    ]
    assert theirs[2].lineage.algorithm == "dqn"


def test_a_fenced_role_reports_it_and_exits(
    made: Recording, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    made.play(person(0.3), 2)
    step = LearnerRole.step

    def step_before_takeover(role: LearnerRole, stop: threading.Event) -> bool:
        has_worked = step(role)
        made.registry().takeover("cart", owner="another learner")
        return has_worked

    monkeypatch.setattr(LearnerRole, "step", step_before_takeover)
    code = learner_process.learn(made.data, made.registry(), CONFIG, threading.Event())
    assert code == FENCED
    output = capsys.readouterr()
    (*_, report) = (json.loads(line) for line in output.out.splitlines() if line[:1] == "{")
    assert report["fenced"].startswith("another learner has taken over cart")
    assert "this learner stops" in output.err


@pytest.mark.parametrize(
    "wrong",
    [
        {"learn_from": ("denied",)},
        {"learn_from": ()},
        {"settings": {"ppo": {}}},
        {"checkpoint_every_s": 0},
    ],
)
def test_an_invalid_config_is_rejected(wrong: dict[str, Any]):
    with pytest.raises(ConfigError):
        LearnerServiceConfig(**wrong)


def test_a_game_that_cannot_be_learned_reports_why_and_the_others_continue(made: Recording):
    made.registry().register(CONTINUOUS)
    made.play(person(0.5), 12)
    made.play(person(0.5), 4, spec=CONTINUOUS)
    config = replace(CONFIG, settings={"bc": SMALL, "dqn": SMALL | {"n_step": 10**6}})
    with role_of(made, config) as role:
        until_idle(role)
        games = role.status()["games"]
    assert "n_step is 1000000" in games["cart"]["error"]
    assert (games["cart"]["champion"], games["slide"]["error"]) == (1, "")


def test_a_game_without_a_bot_goes_first_and_the_training_that_waits_loses_nothing(
    quick_path: Path,
):
    alone, shared = (recording(DataFolder(quick_path / name)) for name in ("alone", "shared"))
    for made in (alone, shared):
        made.play(person(0.5), 12)
    with role_of(alone) as role:
        until_idle(role)
    shared.registry().register(CONTINUOUS)
    with role_of(shared) as role:
        while not (role.status()["games"] and role.status()["games"]["cart"]["phase"] == "dqn"):
            role.step()
        before = role.status()["games"]["cart"]["updates"]
        shared.play(person(0.5), 12, spec=CONTINUOUS)
        shared.clock.advance(1)
        role.step()
        paused = role.status()["games"]["cart"]
        while not role.status()["games"]["slide"]["champion"]:
            assert role.step()
        games = role.status()["games"]
        assert games["cart"]["updates"] == before, "it trained while the other game had no bot"
        assert (paused["doing"], games["slide"]["models"]) == ("wait", 1)
        assert paused["why"].startswith("paused while another game gets its first bot: ")
        assert until_idle(role)["updates"] > before
    ours, theirs = (made.registry().catalogue("cart").models for made in (alone, shared))
    assert [model.policy_sha256 for model in ours.values()] == [
        model.policy_sha256 for model in theirs.values()
    ]


def test_a_stop_waits_for_the_work_of_one_game_only(
    made: Recording, monkeypatch: pytest.MonkeyPatch
):
    made.registry().register(CONTINUOUS)
    made.play(person(0.5), 1)
    made.play(person(0.5), 1, spec=CONTINUOUS)
    stop = threading.Event()
    worked = []

    def work(game: game_learner.GameLearner, **_: Any) -> bool:
        stop.set()
        worked.append(game.game)
        return True

    with role_of(made) as role:
        until_idle(role)
        monkeypatch.setattr(game_learner.GameLearner, "step", work)
        role.run(stop)
    assert len(worked) == 1


def test_games_with_bots_continue_while_another_has_too_few_steps_for_its_first(made: Recording):
    made.registry().register(CONTINUOUS)
    made.play(person(0.5), 12)
    made.play(person(0.3), 4, spec=CONTINUOUS)
    with role_of(made) as role:
        assert until_idle(role)["updates"] > 0
        assert role.status()["games"]["slide"]["champion"] == 0


# --- Schemas --------------------------------------------------------------------------------------


def named(names: list[str]) -> GameSpec:
    return game_spec("cart", obs=names, actions=2)


VERSIONS = [named(["x", "v", "angle", "spin"]), named(["x", "v", "angle", "push"])]
"""A game before and after an update."""
ONLY_CLONES = replace(CONFIG, schedule=replace(SCHEDULE, improve_with="bc"))


def test_the_first_bot_of_a_new_schema_starts_from_the_champion_of_the_last_one(
    quick_path: Path, monkeypatch: pytest.MonkeyPatch
):
    first_weights = []
    create = vars(game_training)["Learner"]

    def learner(*arguments: Any, **more: Any) -> Learner:
        made: Learner = create(*arguments, **more)
        first_weights.append(made.current().weights)
        return made

    monkeypatch.setattr(game_training, "Learner", learner)
    made = recording(DataFolder(quick_path), *VERSIONS)
    n_steps = {VERSIONS[0].schema: made.play(person(0.5), 12, spec=VERSIONS[0])}
    with role_of(made, ONLY_CLONES) as role:
        assert until_idle(role)["champion"] == 1
        n_steps[VERSIONS[1].schema] = made.play(person(0.5), 12, spec=VERSIONS[1])
        status = until_idle(role)
        assert (status["schema"], status["schema_steps"]) == (VERSIONS[1].schema, n_steps)
    old = made.registry().policy("cart", 1).at_temperature(1 / SCHEDULE.temperature).weights
    (_, started) = first_weights
    assert (started["trunk.0.kernel"][:3] == old["trunk.0.kernel"][:3]).all()
    assert (started["trunk.0.kernel"][3] == 0).all(), "a new number changes nothing at first"
    for name in ("trunk.0.bias", "heads.logits.0.kernel"):
        assert (started[name] == old[name]).all()
    models = made.registry().catalogue("cart").models
    assert "started_from" not in models[1].lineage.config
    assert models[2].lineage.config["started_from"] == "cart/1"
    assert made.registry().catalogue("cart").model_of("champion", VERSIONS[1].schema) == 2
    made.play(person(0.5), 24, spec=VERSIONS[1])
    with role_of(made, ONLY_CLONES) as role:
        assert until_idle(role)["canary"] == 3
    third = made.registry().catalogue("cart").models[3].lineage
    assert "started_from" not in third.config, "later clones train from new weights"


GROWN = [named(["x", "v", "angle"]), named(["x", "v", "angle", "spin"])]
"""A game before and after an update that adds a number to its observations."""


def carried_over(made: Recording) -> dict[str, Any]:
    """The status after an update of the game: its champion was carried over."""
    made.play(person(0.5), 12, spec=GROWN[0], player=b"p" * 16)
    with role_of(made, CLONES) as role:
        assert until_idle(role)["champion"] == 1
        made.play(person(0.5), 12, spec=GROWN[1])
        return until_idle(role)


def test_after_an_update_the_champion_is_carried_over_and_the_next_bot_passes_if_it_is_not_worse(
    quick_path: Path,
):
    made = recording(DataFolder(quick_path), *GROWN)
    status = carried_over(made)
    now = made.registry().catalogue("cart")
    assert [now.model_of("champion", spec.schema) for spec in GROWN] == [1, 2]
    old, new = (made.registry().policy("cart", number) for number in (1, 2))
    obs = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    np.testing.assert_allclose(
        new.outputs({"obs": obs})["logits"], old.outputs({"obs": obs[:, :3]})["logits"], atol=1e-3
    )
    first, second, third = (now.models[number].lineage for number in (1, 2, 3))
    assert (second.config["started_from"], second.parent, second.steps) == (
        "cart/1",
        1,
        first.steps,
    )
    assert second.config == {**first.config, "started_from": "cart/1", "carried_over": True}
    assert [is_carried_over(lineage) for lineage in (first, second, third)] == [False, True, False]
    assert "started_from" not in third.config
    assert now.verdicts[2].startswith("promoted: the first bot of its schema: on ")
    assert (status["champion"], status["canary"], status["canary_margin"]) == (2, 3, 0.1)
    with role_of(made, CLONES) as role:
        made.clock.advance(10)
        policy = balancing_policy(spin=0.5)
        in_turn(made, {"cart/2": policy, "cart/3": policy}, 400, spec=GROWN[1])
        status = until_idle(role)
        assert (status["champion"], status["canary"]) == (3, 0)
        assert status["decision"]["why"].startswith(
            "not worse by more than 0.1 of the range, as a replacement: mean return "
        )
        made.play(person(0.5), 40, spec=GROWN[1])
        status = until_idle(role)
        assert (status["canary"], status["canary_margin"]) == (4, 0.0), "passes once"


@pytest.fixture
def killed_after_carry_over(quick_path: Path) -> Recording:
    """A learner was killed after it carried over a champion, which learned from another player."""
    made = recording(DataFolder(quick_path), *GROWN)
    made.play(person(0.5), 12, spec=GROWN[0], player=b"p" * 16)
    with role_of(made, CLONES) as role:
        assert until_idle(role)["champion"] == 1
        made.play(person(0.5), 12, spec=GROWN[1])
        while not made.registry().catalogue("cart").model_of("champion", GROWN[1].schema):
            assert role.step()
        role._games.clear()  # as after kill -9: nothing is saved or closed
    return made


def test_a_champion_is_carried_over_once_also_after_a_kill(killed_after_carry_over: Recording):
    made = killed_after_carry_over
    with role_of(made, CLONES) as role:
        status = until_idle(role)
    assert (status["champion"], status["canary"], status["models"]) == (2, 3, 3)
    lineage = made.registry().catalogue("cart").models[3].lineage
    assert lineage.metrics["updates"] == 256
    assert "started_from" not in lineage.config, "later clones train from new weights"


def test_after_a_kill_and_a_forget_the_next_bot_does_not_descend_from_the_forgotten_player(
    killed_after_carry_over: Recording,
):
    made = killed_after_carry_over
    with made.open() as store:
        store.forget(b"p" * 16)
    with role_of(made, CLONES) as role:
        status = until_idle(role)
    assert "its replacement cart/3 is on trial" in status["forgotten"].splitlines()[0]
    models = made.registry().catalogue("cart").models
    assert "started_from" not in models[3].lineage.config
    read_nos = [models[number].lineage.config["read_no"] for number in (1, 2, 3)]
    assert read_nos[0] == read_nos[1] < read_nos[2]


def until_prepared(role: LearnerRole, schema: str) -> None:
    """Step until the training of a schema is prepared, just before its first update."""
    while True:
        training = role._games["cart"]._training
        if training is not None and training.spec.schema == schema and training._is_prepared:
            assert not training.updates
            return
        role.step()


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_forget_before_the_first_update_restarts_from_new_weights(
    quick_path: Path, monkeypatch: pytest.MonkeyPatch, is_killed: bool
):
    made = recording(DataFolder(quick_path), *VERSIONS)
    made.play(person(0.5), 12, spec=VERSIONS[0], player=b"p" * 16)
    with role_of(made, ONLY_CLONES) as role:
        assert until_idle(role)["champion"] == 1
        made.play(person(0.5), 12, spec=VERSIONS[1])
        with monkeypatch.context() as patched:
            patched.setattr(game_training.GameTraining, "step", lambda training: None)
            until_prepared(role, VERSIONS[1].schema)
        with made.open() as store:
            store.forget(b"p" * 16)
        if is_killed:
            role._games.clear()
        else:
            until_idle(role)
    with role_of(made, ONLY_CLONES) as role:
        until_idle(role)
    now = made.registry().catalogue("cart")
    assert now.model_of("champion", VERSIONS[1].schema) == 2
    assert "started_from" not in now.models[2].lineage.config


def test_a_forget_after_the_first_update_leads_to_a_replacement(quick_path: Path):
    made = recording(DataFolder(quick_path), *VERSIONS)
    made.play(person(0.5), 12, spec=VERSIONS[0], player=b"p" * 16)
    with role_of(made, CLONES) as role:
        assert until_idle(role)["champion"] == 1
        made.play(person(0.5), 12, spec=VERSIONS[1])
        while (training := role._games["cart"]._training) is None or (
            training.spec.schema != VERSIONS[1].schema or not training.updates
        ):
            role.step()
        with made.open() as store:
            store.forget(b"p" * 16)
        status = until_idle(role)
    models = made.registry().catalogue("cart").models
    assert models[2].lineage.config["started_from"] == "cart/1"
    assert models[2].lineage.config["read_no"] == models[1].lineage.config["read_no"]
    assert "its replacement cart/3 is on trial" in status["forgotten"].splitlines()[0]
    assert "started_from" not in models[3].lineage.config


def test_after_a_forget_the_champions_of_all_schemas_are_named(quick_path: Path):
    made = recording(DataFolder(quick_path), *VERSIONS)
    n_steps = {}
    with role_of(made, ONLY_CLONES) as role:
        for spec in VERSIONS:
            made.play(person(0.5), 12, spec=spec, player=b"p" * 16)
            n_steps[spec.schema] = made.play(person(0.5), 12, spec=spec)
            until_idle(role)
        with made.open() as store:
            store.forget(b"p" * 16)
        status = until_idle(role)
    contains = "may contain what it learned from players who were forgotten since"
    assert status["forgotten"].splitlines() == [
        f"cart/2 {contains}; its replacement cart/3 is on trial",
        f"cart/1 {contains}; it stays, since only the newest schema that is played is trained",
    ]
    assert status["schema_steps"] == n_steps


def test_after_a_forget_checkpoints_that_started_from_the_earlier_schema_are_deleted(
    quick_path: Path,
):
    made = recording(DataFolder(quick_path), *VERSIONS)
    made.play(person(0.5), 12, spec=VERSIONS[0], player=b"p" * 16)
    with role_of(made, ONLY_CLONES) as role:
        assert until_idle(role)["champion"] == 1
        made.play(person(0.5), 12, spec=VERSIONS[1])
        assert until_idle(role)["models"] == 2
    before = list(made.data.root.glob("learner/cart/bc-*"))
    assert len(before) == 2
    with made.open() as store:
        store.forget(b"p" * 16)
    with role_of(made, replace(ONLY_CLONES, seed=1)) as role:  # another training
        until_idle(role)
    assert not [path for folder in before for path in folder.glob("*.safetensors")]


def test_a_training_that_started_from_an_earlier_champion_does_not_carry_over_the_newest(
    quick_path: Path, monkeypatch: pytest.MonkeyPatch
):
    made = recording(DataFolder(quick_path), *GROWN)
    made.play(person(0.5), 12, spec=GROWN[0])
    with role_of(made, CLONES) as role:
        assert until_idle(role)["champion"] == 1
        made.play(person(0.5), 12, spec=GROWN[1])
        with monkeypatch.context() as patched:
            patched.setattr(game_learner.GameLearner, "_carry_over", lambda *arguments: None)
            until_prepared(role, GROWN[1].schema)
        role._games.clear()
    registry = made.registry()
    epoch = registry.catalogue("cart").epoch
    registry.release(registry.policy("cart", 1), registry.manifest("cart", 1).lineage, epoch=epoch)
    registry.set_alias("cart", "champion", 2, why="by hand", epoch=epoch)
    with role_of(made, CLONES) as role:
        until_idle(role)
    lineage = made.registry().catalogue("cart").models[3].lineage
    assert (lineage.config["started_from"], lineage.metrics["updates"]) == ("cart/1", 256)
    assert not is_carried_over(lineage)


def test_a_carried_over_champion_is_checked_at_the_temperature_at_which_it_is_released(
    quick_path: Path, monkeypatch: pytest.MonkeyPatch
):
    checked = []
    check = vars(game_training)["check_with_people"]

    def recorded(policy: Policy, **steps: Any) -> Any:
        checked.append(policy.weights["heads.logits.0.kernel"])
        return check(policy, **steps)

    made = recording(DataFolder(quick_path), *GROWN)
    made.play(person(0.5), 12, spec=GROWN[0])
    with role_of(made, CLONES) as role:
        assert until_idle(role)["champion"] == 1
    made.play(person(0.5), 12, spec=GROWN[1])
    monkeypatch.setattr(game_training, "check_with_people", recorded)
    schedule = replace(CLONES.schedule, temperature=1.0)
    with role_of(made, replace(CLONES, schedule=schedule)) as role:
        until_idle(role)
    registry = made.registry()
    assert registry.manifest("cart", 2).lineage.config["temperature"] == SCHEDULE.temperature
    (kernel,) = checked
    released = registry.policy("cart", 2).weights["heads.logits.0.kernel"]
    np.testing.assert_array_equal(kernel, released)


def test_a_model_that_is_lost_ends_the_lineage_and_every_schema_counts():
    lineage = Lineage(algorithm="bc", cursor_to="9", config={"started_from": "cart/1"})
    policy = balancing_policy()
    manifest = make_manifest(policy, policy.encode(), model_no=2, lineage=lineage)
    now = Catalogue("cart")
    now.models[2] = manifest
    assert schemas_learned(now, 2, ["a", "b"]) == {"a", "b", manifest.schema}
    now.models[1] = replace(manifest, model_no=1, schema="a", lineage=Lineage(algorithm="bc"))
    assert schemas_learned(now, 2, ["a", "b"]) == {"a", manifest.schema}


def test_a_champion_that_plays_unlike_people_after_the_update_is_not_carried_over(
    quick_path: Path,
):
    """The update has exchanged left and right."""
    made = recording(DataFolder(quick_path), *GROWN)
    made.play(person(0.5), 12, spec=GROWN[0])
    with role_of(made, CLONES) as role:
        assert until_idle(role)["champion"] == 1
        made.play(lambda obs, rng: 1 - person(0.8)(obs, rng), 200, spec=GROWN[1])
        until_idle(role)
    now = made.registry().catalogue("cart")
    assert now.verdicts[2].startswith("reject: not better than a constant: "), now.verdicts
    assert now.model_of("champion", GROWN[1].schema) == 3, "the trained one"
    assert "started_from" not in now.models[3].lineage.config, "it is trained from new weights"


def test_a_carried_over_champion_is_replaced_if_a_player_of_the_earlier_schema_is_forgotten(
    quick_path: Path,
):
    made = recording(DataFolder(quick_path), *GROWN)
    assert carried_over(made)["forgotten"] == ""
    with made.open() as store:
        store.forget(b"p" * 16)
    with role_of(made, CLONES) as role:
        status = until_idle(role)
    assert status["forgotten"].startswith("cart/2 may contain what it learned from players who")
    assert (status["canary"], status["canary_margin"]) == (4, 0.1)


def test_a_champion_that_learned_from_a_forgotten_player_is_not_carried_over(quick_path: Path):
    made = recording(DataFolder(quick_path), *GROWN)
    made.play(person(0.5), 12, spec=GROWN[0], player=b"p" * 16)
    with role_of(made, CLONES) as role:
        assert until_idle(role)["champion"] == 1
    with made.open() as store:
        store.forget(b"p" * 16)
    made.play(person(0.5), 12, spec=GROWN[1])
    with role_of(made, CLONES) as role:
        until_idle(role)
    models = made.registry().catalogue("cart").models
    assert [model.schema for model in models.values()] == [spec.schema for spec in GROWN]
    assert "started_from" not in models[2].lineage.config


def test_a_damaged_champion_of_the_last_schema_does_not_hinder_the_next(quick_path: Path):
    made = recording(DataFolder(quick_path), *VERSIONS)
    made.play(person(0.5), 12, spec=VERSIONS[0])
    with role_of(made, ONLY_CLONES) as role:
        assert until_idle(role)["champion"] == 1
    registry = made.registry()
    path = made.data.root / "models" / registry.policy_object(registry.manifest("cart", 1))
    path.write_bytes(b"damaged")
    made.play(person(0.5), 12, spec=VERSIONS[1])
    with role_of(made, ONLY_CLONES) as role:
        until_idle(role)
    now = made.registry().catalogue("cart")
    assert now.model_of("champion", VERSIONS[1].schema) == 2
    assert "started_from" not in now.models[2].lineage.config
