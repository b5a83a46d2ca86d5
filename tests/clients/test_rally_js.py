"""rally.js equals rally.py bit for bit: every frame, view, random draw and opponent."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.clients.nodes import needs_node, run_script
from understudy.games import rally
from understudy.games.rally import Court, Ints, Skill

VECTORS = Path(__file__).parent / "rally.json"
"""Whole serves between scripted opponents, to check implementations in other languages."""

pytestmark = needs_node


def random_courts(rng: np.random.Generator, count: int) -> list[Court]:
    """Courts that occur in a match, and many that do not: near walls, paddles and edges."""
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
    output = run_script("rally.mjs", {"frames": frames})["frames"]
    assert output == [
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
    output = run_script("rally.mjs", {"steps": steps})["steps"]
    assert output == [
        [*after, point] for after, point in (rally.step(Ints, *arguments) for arguments in steps)
    ]


def test_the_views_of_both_seats_are_equal_bit_for_bit():
    views = [
        (court, at % 2) for at, court in enumerate(random_courts(np.random.default_rng(3), 2_000))
    ]
    output = run_script("rally.mjs", {"views": views})
    assert output["views"] == [list(rally.seat_view(court, seat)) for court, seat in views]
    assert output["observations"] == [
        rally.observation(court, seat).tobytes().hex() for court, seat in views
    ]


def test_serves_and_draws_are_equal_for_small_large_and_negative_seeds():
    seeds = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32 + 5, 2**53 - 1, -1, -77, *range(1_000, 1_500)]
    decisions = [(seed, decision) for seed in seeds[:40] for decision in (0, 1, 77, 599)]
    output = run_script("rally.mjs", {"seeds": seeds, "decisions": decisions})
    assert output["serves"] == [list(rally.serve(seed)) for seed in seeds]
    assert output["mixed"] == [rally.hash32(seed) for seed in seeds]
    assert output["drawn"] == [rally.random_bits(seed, decision) for seed, decision in decisions]


def test_scripted_opponents_choose_the_same_actions_at_every_skill():
    rng = np.random.default_rng(4)
    requests = [
        (rally.seat_view(court, at % 2), skill, int(rng.integers(2**32)))
        for skill in rally.SKILLS
        for at, court in enumerate(random_courts(rng, 500))
    ]
    output = run_script("rally.mjs", {"scripted": requests})["scripted"]
    assert output == [
        rally.scripted(Ints, view, rally.SKILLS[skill], drawn) for view, skill, drawn in requests
    ]
    assert set(output) == {0, 1, 2}


def test_both_languages_reproduce_the_shared_vectors():
    vectors = json.loads(VECTORS.read_text())
    serves = [{"seed": vector["seed"], "skills": vector["skills"]} for vector in vectors]
    results = [
        {name: vector[name] for name in ("court", "point", "decisions")} for vector in vectors
    ]
    assert [played(**serve) for serve in serves] == results
    assert run_script("rally.mjs", {"matches": serves})["matches"] == results


def test_constants_and_skills_have_the_same_names_and_values():
    output = run_script("rally.mjs", {})["constants"]
    skills = {name: skill._asdict() for name, skill in rally.SKILLS.items()}
    assert output.pop("SKILLS") == skills
    assert output.pop("SCALES") == rally.SCALES.tolist()
    assert output.pop("GAME") == "rally"
    assert {name: getattr(rally, name) for name in output} == {
        name: tuple(value) if isinstance(value, list) else value for name, value in output.items()
    }
