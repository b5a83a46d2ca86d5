"""rally.js is rally.py: every frame, view, draw and opponent, bit for bit."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.clients.nodes import ask, needs_node
from understudy.games import rally
from understudy.games.rally import Court, Ints, Skill

VECTORS = Path(__file__).parent / "rally.json"
"""Whole serves between scripted opponents, for anybody who writes rally in another language."""

pytestmark = needs_node


def random_courts(rng: np.random.Generator, count: int) -> list[Court]:
    """Courts that a match comes to, and many that it does not: near walls, faces and edges."""
    speeds = rng.integers(rally.SERVE_SPEED, rally.MAX_SPEED + 1, count) * rng.choice(
        [-1, 1], count
    )
    xs = np.where(
        rng.random(count) < 0.5,
        rng.integers(-100, rally.WIDTH + 100, count),
        np.where(speeds < 0, rally.FACE + rally.BALL, rally.WIDTH - rally.FACE - rally.BALL)
        + rng.integers(-100, 101, count),
    )
    steep = rng.integers(-rally.MAX_STEEP, rally.MAX_STEEP + 1, count)
    ys = rng.integers(rally.BALL, rally.HEIGHT - rally.BALL + 1, count)
    lefts, rights = rng.integers(rally.PADDLE, rally.HEIGHT - rally.PADDLE + 1, (2, count))
    close = rng.random(count) < 0.5
    lefts = np.where(close, np.clip(ys + rng.integers(-400, 401, count), rally.PADDLE, 2752), lefts)
    return [
        Court(*(int(part) for part in parts))
        for parts in zip(xs, ys, speeds, steep, lefts, rights, strict=True)
    ]


def played(seed: int, skills: list[list[int]]) -> dict[str, Any]:
    court = rally.serve(seed)
    for decision in range(rally.MAX_DECISIONS):
        drawn = [rally.random_bits(seed, decision), rally.random_bits(seed + 7, decision)]
        chosen = [
            rally.scripted(Ints, rally.seat_view(court, seat), Skill(*skills[seat]), drawn[seat])
            for seat in (0, 1)
        ]
        court, point = rally.step(Ints, court, *chosen)
        if point:
            return {"court": list(court), "point": point, "decisions": decision + 1}
    return {"court": list(court), "point": 0, "decisions": rally.MAX_DECISIONS}


def test_ten_thousand_random_frames_are_equal_bit_for_bit():
    rng = np.random.default_rng(1)
    moves = rng.integers(-1, 2, (10_000, 2)).tolist()
    frames = [(court, *move) for court, move in zip(random_courts(rng, 10_000), moves, strict=True)]
    found = ask("rally.mjs", {"frames": frames})["frames"]
    assert found == [
        list(rally.play_frame(Ints, court, left, right)) for court, left, right in frames
    ]


def test_a_random_walk_of_ten_thousand_frames_ends_at_the_same_court():
    rng = np.random.default_rng(2)
    court = rally.serve(0)
    steps: list[tuple[Court, int, int]] = []
    for seed in range(2_500):
        steps.append((court, int(rng.integers(3)), int(rng.integers(3))))
        court, point = rally.step(Ints, *steps[-1])
        court = rally.serve(seed) if point else court
    found = ask("rally.mjs", {"steps": steps})["steps"]
    assert found == [[*after, point] for after, point in (rally.step(Ints, *one) for one in steps)]


def test_both_seats_see_the_same_bits():
    views = [
        (court, at % 2) for at, court in enumerate(random_courts(np.random.default_rng(3), 2_000))
    ]
    found = ask("rally.mjs", {"views": views})
    assert found["views"] == [list(rally.seat_view(court, seat)) for court, seat in views]
    assert found["observations"] == [
        rally.observation(court, seat).tobytes().hex() for court, seat in views
    ]


def test_serves_and_draws_are_equal_for_small_large_and_negative_seeds():
    seeds = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32 + 5, 2**53 - 1, -1, -77, *range(1_000, 1_500)]
    decisions = [(seed, decision) for seed in seeds[:40] for decision in (0, 1, 77, 599)]
    found = ask("rally.mjs", {"seeds": seeds, "decisions": decisions})
    assert found["serves"] == [list(rally.serve(seed)) for seed in seeds]
    assert found["mixed"] == [rally.hash32(seed) for seed in seeds]
    assert found["drawn"] == [rally.random_bits(seed, decision) for seed, decision in decisions]


def test_scripted_opponents_choose_alike_at_every_skill():
    rng = np.random.default_rng(4)
    asked = [
        (rally.seat_view(court, at % 2), skill, int(rng.integers(2**32)))
        for skill in rally.SKILLS
        for at, court in enumerate(random_courts(rng, 500))
    ]
    found = ask("rally.mjs", {"scripted": asked})["scripted"]
    assert found == [
        rally.scripted(Ints, view, rally.SKILLS[skill], drawn) for view, skill, drawn in asked
    ]
    assert set(found) == {0, 1, 2}


def test_the_shared_vectors_are_what_both_languages_play():
    vectors = json.loads(VECTORS.read_text())
    asked = [{"seed": one["seed"], "skills": one["skills"]} for one in vectors]
    wanted = [{name: one[name] for name in ("court", "point", "decisions")} for one in vectors]
    assert [played(**one) for one in asked] == wanted
    assert ask("rally.mjs", {"matches": asked})["matches"] == wanted


def test_constants_and_skills_have_the_same_names_and_values():
    found = ask("rally.mjs", {})["constants"]
    skills = {name: skill._asdict() for name, skill in rally.SKILLS.items()}
    assert found.pop("SKILLS") == skills
    assert found.pop("SCALES") == rally.SCALES.tolist()
    assert found.pop("GAME") == "rally"
    assert {name: getattr(rally, name) for name in found} == {
        name: tuple(value) if isinstance(value, list) else value for name, value in found.items()
    }
