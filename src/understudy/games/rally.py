"""Rally: two paddles and a ball in integers, bit-identical on every machine and in every language.

    x 0 ┬ left paddle ............ ball ............ right paddle ┬ 4096
        └ seat 0                                           seat 1 ┘          y 0 above, 3072 below

A serve is an episode: it ends when the ball leaves on one side, which is a point for the other
side. All values fit into 32 bits and change only by +, -, * and shifts. `step` and `play_frame` are
pure and have the array module as an argument: NumPy, jax.numpy, or `Ints` for one court in plain
Python.
`rally.js` is the same game for web pages, tested with the same vectors.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from understudy.core.errors import ConfigError
from understudy.core.tensors import Array

GAME_ID = "rally"
OPPONENT = "good"
"""The default opponent of an env and of an evaluation."""
WIDTH = 4096
HEIGHT = 3072
BALL = 48
"""Half the size of the ball; a paddle hits the ball up to this far beyond its own ends."""
PADDLE = 320
"""Half the height of a paddle."""
FACE = 160
"""The distance of a paddle's face from its side of the court."""
PADDLE_SPEED = 44
SERVE_SPEED = 40
MAX_SPEED = 96
FASTER = 4
"""The horizontal speed that a hit adds to the ball."""
STEEPER = 6
"""After a hit, the vertical speed is STEEPER/32 of the ball's distance from the paddle's centre."""
MAX_STEEP = 72
FRAMES = 4
"""Frames per decision."""
MAX_DECISIONS = 600
"""A serve is truncated after this many decisions, if neither side misses."""
OBS_NAMES = ("ball x", "ball y", "ball speed x", "ball speed y", "own paddle", "other paddle")
ACTION_NAMES = ("up", "stay", "down")
_HASHED = (0x7FEB352D, 0x846CA68B)
_GOLDEN = 0x9E3779B9
_ALL_BITS = 0xFFFFFFFF


class Court(NamedTuple):
    """Everything that moves, as integers, or as integer arrays for many courts."""

    x: Any
    y: Any
    speed_x: Any
    speed_y: Any
    left: Any
    """The centre of seat 0's paddle."""
    right: Any
    """The centre of seat 1's paddle."""


class Ints:
    """The functions of an array module that Rally uses, for one court in plain Python."""

    @staticmethod
    def where(is_so: bool, this: int, other: int) -> int:
        return this if is_so else other

    minimum = min
    maximum = max
    abs = abs


def serve(seed: Any) -> Court:
    """The court at the first frame of a serve, from its seed or from an int64 array of seeds."""
    drawn = hash32(seed)
    middle = drawn * 0
    return Court(
        middle + WIDTH // 2,
        HEIGHT // 2 + (drawn >> 1 & 1023) - 512,
        ((drawn & 1) * 2 - 1) * SERVE_SPEED,
        (drawn >> 11 & 63) - 32,
        middle + HEIGHT // 2,
        middle + HEIGHT // 2,
    )


def hash32(number: Any) -> Any:
    """Hash a whole number, or an int64 array of them, to 32 pseudo-random bits."""
    number = number & _ALL_BITS
    for factor, shift in zip(_HASHED, (16, 15), strict=True):
        number = (number ^ number >> shift) * factor & _ALL_BITS
    return number ^ number >> 16


def random_bits(seed: Any, decision: Any) -> Any:
    """The 32 pseudo-random bits of a decision, from the serve's seed and the decision's number."""
    return hash32(hash32(seed) + (decision + 1) * _GOLDEN)


def step(xp: Any, court: Court, left: Any, right: Any) -> tuple[Court, Any]:
    """Play one decision of both seats (0 up, 1 stay, 2 down); return the court and the point.

    The point is 1 for seat 0, -1 for seat 1, and 0 while the ball is in play. Once the ball has
    left, nothing moves any more.
    """
    for _ in range(FRAMES):
        court = play_frame(xp, court, left - 1, right - 1)
    return court, point(xp, court)


def point(xp: Any, court: Court) -> Any:
    """1 when the ball has left on the right, -1 on the left, else 0."""
    return xp.where(court.x > WIDTH, 1, xp.where(court.x < 0, -1, 0))


def play_frame(xp: Any, court: Court, left_move: Any, right_move: Any) -> Court:
    """Play one frame; a move is -1 (up), 0 (stay) or 1 (down)."""
    is_out = (court.x > WIDTH) | (court.x < 0)
    left = _moved(xp, court.left, left_move)
    right = _moved(xp, court.right, right_move)
    x = court.x + court.speed_x
    y = court.y + court.speed_y
    # Bounce off the upper and lower wall.
    is_above = y < BALL
    is_below = y > HEIGHT - BALL
    speed_y = xp.where(is_above | is_below, -court.speed_y, court.speed_y)
    y = xp.where(is_above, 2 * BALL - y, xp.where(is_below, 2 * (HEIGHT - BALL) - y, y))
    # Bounce off a paddle in the frame in which the ball passes its face.
    near = FACE + BALL
    far = WIDTH - FACE - BALL
    is_hit_left = (court.x >= near) & (x < near) & (xp.abs(y - left) <= PADDLE + BALL)
    is_hit_right = (court.x <= far) & (x > far) & (xp.abs(y - right) <= PADDLE + BALL)
    speed = xp.minimum(xp.abs(court.speed_x) + FASTER, MAX_SPEED)
    speed_x = xp.where(is_hit_left, speed, xp.where(is_hit_right, -speed, court.speed_x))
    steep = (y - xp.where(is_hit_left, left, right)) * STEEPER >> 5
    steep = xp.maximum(xp.minimum(steep, MAX_STEEP), -MAX_STEEP)
    speed_y = xp.where(is_hit_left | is_hit_right, steep, speed_y)
    x = xp.where(is_hit_left, 2 * near - x, xp.where(is_hit_right, 2 * far - x, x))
    after = Court(x, y, speed_x, speed_y, left, right)
    return Court(*(xp.where(is_out, was, now) for was, now in zip(court, after, strict=True)))


def _moved(xp: Any, paddle: Any, move: Any) -> Any:
    return xp.maximum(xp.minimum(paddle + move * PADDLE_SPEED, HEIGHT - PADDLE), PADDLE)


def seat_view(court: Court, seat: int) -> tuple[Any, ...]:
    """A seat's view with its own paddle on the left; divide by `SCALES` for the observation."""
    side = 1 if seat == 0 else -1
    own, other = (court.left, court.right) if seat == 0 else (court.right, court.left)
    return (
        (court.x - WIDTH // 2) * side,
        court.y - HEIGHT // 2,
        court.speed_x * side,
        court.speed_y,
        own - HEIGHT // 2,
        other - HEIGHT // 2,
    )


SCALES = np.array([2048, 2048, 64, 64, 2048, 2048], np.float32)
"""Powers of two, so that observations have the same bits in every language."""


def observation(court: Court, seat: int) -> Array:
    """float32[..., 6]: the observation of a seat."""
    return (
        np.stack([np.asarray(part, np.float32) for part in seat_view(court, seat)], axis=-1)
        / SCALES
    )


def as_text(court: Court, *, columns: int = 64, rows: int = 20) -> str:
    """Draw the court as lines of text, for a terminal."""
    lines = [[" "] * columns for _ in range(rows)]

    def at(value: int, size: int, cells: int) -> int:
        return max(0, min(cells - 1, value * cells // size))

    for column, paddle in (
        (at(FACE, WIDTH, columns) - 1, court.left),
        (columns - at(FACE, WIDTH, columns), court.right),
    ):
        for row in range(
            at(paddle - PADDLE, HEIGHT, rows), at(paddle + PADDLE - 1, HEIGHT, rows) + 1
        ):
            lines[row][column] = "█"
    if 0 <= court.x <= WIDTH:
        lines[at(court.y, HEIGHT, rows)][at(court.x, WIDTH, columns)] = "●"
    return "\n".join("".join(line) for line in lines)


def render_image(court: Court, *, size: int = 12) -> NDArray[np.uint8]:
    """uint8[height, width, 3]: the court as an image, one pixel per `size` units."""
    image = np.full((HEIGHT // size, WIDTH // size, 3), 16, np.uint8)

    def fill(x: int, y: int, half_x: int, half_y: int, colour: tuple[int, int, int]) -> None:
        rows = slice(max(0, (y - half_y) // size), max(0, (y + half_y) // size))
        image[rows, max(0, (x - half_x) // size) : max(0, (x + half_x) // size)] = colour

    for y in range(0, HEIGHT, 256):
        fill(WIDTH // 2, y + 64, 8, 64, (64, 64, 72))
    fill(FACE - 40, court.left, 40, PADDLE, (86, 180, 233))
    fill(WIDTH - FACE + 40, court.right, 40, PADDLE, (230, 159, 0))
    fill(court.x, court.y, BALL, BALL, (240, 240, 240))
    return image


# --- Opponents ------------------------------------------------------------------------------------


class Skill(NamedTuple):
    """How well a scripted opponent plays."""

    lapse: int
    """How many of 256 decisions are random, on average."""
    aim: int
    """The largest error of its aim, in units of the court."""
    reach: int
    """The distance from its side within which it follows the ball; above the width: always."""
    slack: int
    """How far its paddle may be off target before it moves."""


SKILLS = {
    "beginner": Skill(lapse=64, aim=200, reach=700, slack=150),
    "casual": Skill(lapse=48, aim=160, reach=1000, slack=130),
    "good": Skill(lapse=24, aim=140, reach=1500, slack=100),
    "strong": Skill(lapse=8, aim=100, reach=5000, slack=60),
}


def skill_of(name: str) -> Skill:
    """Look up a skill by name; ConfigError lists all names."""
    if name not in SKILLS:
        raise ConfigError(f"skill {name!r} is not known; give one of {', '.join(SKILLS)}")
    return SKILLS[name]


def scripted(xp: Any, view: tuple[Any, ...], skill: Skill, drawn: Any) -> Any:
    """The action of a scripted opponent for its view; `drawn` is 32 random bits, unsigned."""
    x, y, speed_x, _, own, _ = view
    off = ((drawn >> 8 & 1023) - 512) * skill.aim >> 9
    is_followed = (speed_x < 0) & (x + WIDTH // 2 < skill.reach)
    away = xp.where(is_followed, y + off, 0) - own
    aimed = xp.where(away < -skill.slack, 0, xp.where(away > skill.slack, 2, 1))
    return xp.where((drawn & 255) < skill.lapse, (drawn >> 20) % 3, aimed)
