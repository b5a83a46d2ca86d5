"""Rally: the same match with plain integers, NumPy and JAX; and its rules."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from understudy.core.errors import ConfigError
from understudy.games import rally
from understudy.games.rally import Court, Ints

N = 64


def played(
    seed: int, decisions: int
) -> tuple[list[Court], np.ndarray[tuple[int, int, int], np.dtype[np.int64]]]:
    """The courts and actions of a random match in plain integers."""
    actions = np.random.default_rng(seed).integers(0, 3, (decisions, 2, 1))
    court = rally.serve(seed)
    moments = []
    for left, right in actions[:, :, 0].tolist():
        court, _ = rally.step(Ints, court, left, right)
        moments.append(court)
    return moments, actions


@pytest.mark.parametrize("module", [np, jnp], ids=["numpy", "jax"])
def test_integers_numpy_and_jax_play_the_same_match(module: object):
    xp = module
    singles = [played(seed, 60) for seed in range(N)]
    actions = np.concatenate([actions for _, actions in singles], axis=2)
    court = Court(*(xp.asarray(part, np.int32) for part in rally.serve(np.arange(N))))  # type: ignore[attr-defined]
    for at, (left, right) in enumerate(actions):
        court, _ = rally.step(xp, court, xp.asarray(left, np.int32), xp.asarray(right, np.int32))  # type: ignore[attr-defined]
        for name, part in zip(Court._fields, court, strict=True):
            assert np.asarray(part).tolist() == [
                getattr(moments[at], name) for moments, _ in singles
            ], name


def test_positions_stay_in_bounds_and_nothing_moves_after_the_ball_has_left():
    for seed in range(N):
        moments, _ = played(seed, 200)
        for court in moments:
            assert rally.BALL <= court.y <= rally.HEIGHT - rally.BALL
            assert all(
                rally.PADDLE <= paddle <= rally.HEIGHT - rally.PADDLE
                for paddle in (court.left, court.right)
            )
            assert abs(court.speed_x) <= rally.MAX_SPEED
            assert abs(court.speed_y) <= rally.MAX_STEEP
        is_out = [rally.point(Ints, court) != 0 for court in moments]
        assert is_out[-1], "random players miss soon"
        assert all(court == moments[-1] for court, out in zip(moments, is_out, strict=True) if out)


def test_seats_are_mirrored():
    """A seat has the same view and the same points on either side."""
    mirrored = Court(rally.WIDTH - 1800, 900, 52, -17, 700, 2000)
    court = Court(1800, 900, -52, -17, 2000, 700)
    for left, right in ((0, 2), (1, 1), (2, 0)) * 12:
        assert rally.seat_view(court, 0) == rally.seat_view(mirrored, 1)
        assert rally.observation(court, 1).tobytes() == rally.observation(mirrored, 0).tobytes()
        court, got = rally.step(Ints, court, left, right)
        mirrored, other = rally.step(Ints, mirrored, right, left)
        assert got == -other


def test_a_hit_speeds_the_ball_up_and_is_steeper_further_from_the_middle():
    near = rally.FACE + rally.BALL
    for off, speed_y in ((0, 0), (160, 30), (-160, -30), (320, 60), (-320, -60)):
        court = rally.play_frame(Ints, Court(near + 10, 1500 + off, -40, 0, 1500, 1500), 0, 0)
        assert (court.speed_x, court.speed_y) == (44, speed_y)
    missed = rally.play_frame(Ints, Court(near + 10, 1500 + 369, -40, 0, 1500, 1500), 0, 0)
    assert missed.speed_x == -40


def test_serves_differ_by_seed_and_go_to_both_sides():
    courts = {rally.serve(seed) for seed in range(200)}
    assert len(courts) > 190
    assert 70 < sum(court.speed_x > 0 for court in courts) < 130


def test_better_opponents_win_more_points():
    def share(ours: str, theirs: str) -> float:
        court = rally.serve(np.arange(400))
        seeds = np.arange(400)
        for at in range(rally.MAX_DECISIONS):
            drawn = [rally.random_bits(seeds + 1000 * seat, at) for seat in (0, 1)]
            both = [
                rally.scripted(np, rally.seat_view(court, seat), rally.skill_of(name), drawn[seat])
                for seat, name in enumerate((ours, theirs))
            ]
            court, got = rally.step(np, court, *both)
        return float((got > 0).mean())

    names = list(rally.SKILLS)
    assert abs(share("good", "good") - 0.5) < 0.1
    for worse, better in itertools.pairwise(names):
        assert share(better, worse) > 0.53
    assert share("strong", "beginner") > 0.75
    with pytest.raises(ConfigError, match="beginner, casual, good, strong"):
        rally.skill_of("godlike")


def test_the_court_is_drawn_as_text_and_as_a_picture():
    lines = rally.as_text(rally.serve(3)).splitlines()
    assert (len(lines), {len(line) for line in lines}) == (20, {64})
    assert sum(line.count("●") for line in lines) == 1
    picture = rally.render_image(rally.serve(3))
    assert picture.shape == (256, 341, 3)
    assert picture.dtype == np.uint8
    assert len(np.unique(picture.reshape(-1, 3), axis=0)) == 5
