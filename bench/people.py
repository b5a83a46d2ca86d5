"""Scripted people for nine games: five skills each, from novice to expert, without learned weights.

A person is the game's scripted expert with human faults: lapses (random actions), slow reactions
(decisions on an earlier observation) and forgotten rules. Experts decide by what a player sees: the
observation and the action mask.

`play` plays one episode. With an `Episode` of the client, it also records it, as a game would:

    env = GAMES["vault"].make()
    person = Person(GAMES["vault"], GAMES["vault"].people[3])
    with understudy.connect(GAMES["vault"].spec(), consent="granted") as game:
        play(env, person, rng, episode=game.episode("person-3"))
"""

import functools
import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import gymnasium
import numpy as np
from numpy.typing import NDArray

from bench.people_games import (
    CALL,
    CHARGE,
    DELIVER,
    FOLD,
    MOVES,
    PICK_UP,
    RAISE,
    RANKS,
    STRENGTHS,
    TAKE,
    WAIT,
    Breakout,
    Cell,
    Courier,
    Lander,
    Poker,
    Vault,
    distances,
    win_chance,
)
from understudy.act.vector import make_env
from understudy.client.episode import Episode
from understudy.experience.game import GameSpec, random_action, spec_from_gymnasium
from understudy.games import rally

Env = gymnasium.Env[Any, Any]
Mask = NDArray[np.bool_]
Forgotten = frozenset[str]
Expert = Callable[[Any, Any, Forgotten], Any]
"""From observation, action mask (or None) and the names of forgotten rules to an action."""


# --- Experts --------------------------------------------------------------------------------------


def cartpole(obs: Any, _: Any, forgotten: Forgotten) -> int:
    """Push the cart under the pole, and the pole slightly towards the middle of the track."""
    place, speed, angle, spin = obs.tolist()
    lean = angle
    if "spin" not in forgotten:
        lean += 0.35 * spin
    if "track" not in forgotten:
        lean += 0.03 * place + 0.06 * speed
    return int(lean > 0)


def acrobot(obs: Any, _: Any, forgotten: Forgotten) -> int:
    """Push the lower arm against the swing of the upper one, which adds energy all the time."""
    spin_upper, spin_lower = obs[4:].tolist()
    if "lead" in forgotten:
        # Pushing with the swing of the lower arm takes longer.
        return 2 if spin_lower > 0 else 0
    return 0 if spin_upper > 0 else 2


def pendulum(obs: Any, _: Any, forgotten: Forgotten) -> NDArray[np.float32]:
    """Pump energy until the pendulum can reach the top, then balance it there."""
    cos, sin, spin = obs.tolist()
    energy = spin * spin / 6 + 5 * (cos - 1)  # 0 when it can just reach the top
    torque = -2.0 * energy * (1 if spin > 0 else -1)
    if cos > 0.85 and "balance" not in forgotten:
        torque = -12 * math.atan2(sin, cos) - 3 * spin
    return np.array([min(max(torque, -2.0), 2.0)], np.float32)


def lander(obs: Any, _: Any, forgotten: Forgotten) -> int:
    """Tilt against the drift away from the pad, and fall more slowly the lower the lander is."""
    x, y, speed_x, speed_y, angle, spin, left_leg, right_leg = obs.tolist()
    if left_leg or right_leg:
        return 2 if speed_y < -0.15 else 0
    tilt = 0.0
    if "drift" not in forgotten:
        tilt = min(max(0.5 * x + 0.6 * speed_x, -0.4), 0.4)
    turn = 2.0 * (tilt - angle)
    if "spin" not in forgotten:
        turn -= 1.5 * spin
    is_fast = speed_y < -0.1 - 0.35 * y
    if abs(turn) > 0.3 or (abs(turn) > 0.08 and not is_fast):
        return 3 if turn > 0 else 1
    return 2 if is_fast else 0


def rally_player(obs: Any, _: Any, forgotten: Forgotten) -> int:
    """Go where the ball will arrive, and hit it with the paddle's end, away from the opponent."""
    x, y, speed_x, speed_y, own, other = (obs * rally.SCALES).tolist()
    low = rally.BALL - rally.HEIGHT // 2
    high = -low
    goal = 0.0
    if speed_x < 0:
        frames = (x + rally.WIDTH // 2 - rally.FACE - rally.BALL) / -speed_x
        goal = y
        if "bounce" not in forgotten:
            # Where the ball arrives, after reflections by both walls.
            way = (y + speed_y * max(0.0, frames) - low) % (2 * (high - low))
            goal = low + (way if way <= high - low else 2 * (high - low) - way)
        if "aim" not in forgotten:
            # Above its centre, the paddle sends the ball up.
            goal += 160 if other > 0 else -160
    away = goal - own
    return 1 if abs(away) < 100 else 0 if away < 0 else 2


_AGAINST_A_RAISE = np.array(
    [
        [
            win_chance(own, shared, np.where(STRENGTHS[:, column] > 0.6, 1.0, 0.2))
            for column, shared in enumerate((None, *range(RANKS)))
        ]
        for own in range(RANKS)
    ]
)
"""float64[8, 9], as STRENGTHS, if the opponent raised: it seldom does with a weak card."""


def poker(obs: Any, mask: Any, forgotten: Forgotten) -> int:
    """Bet by the chance to win against the cards that the opponent would have bet on so far."""
    own = int(obs[:RANKS].argmax())
    is_shown = bool(obs[RANKS : 2 * RANKS].any())
    column = 1 + int(obs[RANKS : 2 * RANKS].argmax()) if is_shown else 0
    _, own_paid, other_paid, _, _, other_raises, _ = obs[2 * RANKS :].tolist()
    reads = other_raises > 0 and "reads" not in forgotten
    chance = float((_AGAINST_A_RAISE if reads else STRENGTHS)[own, column])
    if chance > 0.65 and mask[RAISE]:
        return RAISE
    if not mask[FOLD] or "odds" in forgotten:
        return CALL
    return CALL if chance * (own_paid + other_paid) > (1 - chance) * other_paid * 0.8 else FOLD


def vault(obs: Any, mask: Any, forgotten: Forgotten) -> int:
    """Fetch the nearest thing that can be taken, and step around the guard."""
    if mask[TAKE]:
        return TAKE
    grid = obs["grid"]
    has_key = bool(obs["status"][0])
    place = _cell(grid[:, :, Vault.PLAYER])
    free = grid[:, :, Vault.WALL] == 0
    goals = grid[:, :, Vault.GEM] > 0
    if "key" not in forgotten:
        goals = goals | (grid[:, :, Vault.CHEST if has_key else Vault.KEY] > 0)
    if not goals.any():
        return WAIT
    away = distances(free, place)
    goal = min(_cells(goals), key=lambda cell: int(away[cell]))
    costs = distances(free, goal).astype(np.float64)
    if "guard" not in forgotten:
        guard = _cell(grid[:, :, Vault.GUARD])
        to_guard = distances(free, guard)
        costs[to_guard == 1] += 4
        costs[to_guard == 0] += 9
    move = _best_move(place, mask, costs)
    return WAIT if costs[place] + 0.5 < costs[_moved(place, move)] else move


def courier(obs: Any, mask: Any, forgotten: Forgotten) -> int:
    """Fetch the parcel with the shortest way to its door, and charge before it is too late."""
    codes = obs["map"]
    row, column = obs["robot"]["place"].tolist()
    place: Cell = (row, column)
    cargo = int(obs["robot"]["cargo"])
    battery = round(float(obs["robot"]["battery"][0]) * Courier.CAPACITY)
    free = codes != Courier.SHELF
    away = distances(free, place)
    doors = {colour: _cell(codes == Courier.DOOR + colour) for colour in range(Courier.COLOURS)}
    chargers = _cells(codes == Courier.CHARGER)
    if cargo:
        goal = doors[cargo - 1]
        if "colour" in forgotten:
            goal = min(doors.values(), key=lambda cell: int(away[cell]))
    else:
        ways = {}
        for parcel in _cells((codes >= Courier.PARCEL) & (codes < Courier.DOOR)):
            door = doors[int(codes[parcel]) - Courier.PARCEL]
            ways[parcel] = int(away[parcel])
            if "door" not in forgotten:
                ways[parcel] += int(distances(free, door)[parcel])
        goal = min(ways, key=lambda cell: ways[cell])
    if "charger" not in forgotten:
        if mask[CHARGE] and battery <= Courier.CAPACITY - 10:
            return CHARGE
        back = min(int(distances(free, charger)[goal]) for charger in chargers)
        if away[goal] + back >= battery:
            goal = min(chargers, key=lambda cell: int(away[cell]))
    if goal == place:
        return CHARGE if mask[CHARGE] else DELIVER if cargo else PICK_UP
    return _best_move(place, mask, distances(free, goal))


def breakout(obs: Any, _: Any, forgotten: Forgotten) -> int:
    """Go to the column in which the ball will arrive."""
    paddle = int(obs[Breakout.SIDE - 1, :, Breakout.PADDLE].argmax())
    row, column = _cell(obs[:, :, Breakout.BALL])
    trail_row, trail_column = _cell(obs[:, :, Breakout.TRAIL])
    goal = column
    if "bounce" not in forgotten:
        last = Breakout.SIDE - 1
        # After a reflection the ball only moved sideways: up from the paddle, else down.
        down = row - trail_row or (-1 if row == last - 1 else 1)
        right = column - trail_column or (1 if column == 0 else -1)
        bricks = obs[:, :, Breakout.BRICK]
        for _ in range(4 * Breakout.SIDE):
            if row == last - 1 and down > 0:
                break
            if not 0 <= column + right <= last:
                right = -right
            if row + down < 0 or bricks[row + down, column + right]:
                down = -down
            else:
                row += down
            column += right
        goal = column + right if 0 <= column + right <= last else column - right
    return 0 if goal == paddle else 1 if goal < paddle else 2


def _cell(plane: Any) -> Cell:
    """The row and column of the only cell that is set."""
    row, column = divmod(int(plane.argmax()), plane.shape[1])
    return row, column


def _cells(plane: Any) -> list[Cell]:
    """The rows and columns of all cells that are set."""
    return [(row, column) for row, column in np.argwhere(plane).tolist()]


def _best_move(place: Cell, mask: Any, costs: Any) -> int:
    """The valid move to the neighbour with the lowest cost."""
    moves = [move for move in range(len(MOVES)) if mask[move]]
    return min(moves, key=lambda move: float(costs[_moved(place, move)]))


def _moved(place: Cell, move: int) -> Cell:
    return place[0] + MOVES[move][0], place[1] + MOVES[move][1]


# --- People ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Skill:
    """The faults of a person, compared with the scripted expert."""

    lapse: float = 0.0
    """The share of decisions that are random valid actions."""
    delay: int = 0
    """The person decides by the observation of this many decisions ago."""
    forgets: tuple[str, ...] = ()
    """Rules of the expert that the person does not know."""


RANDOM = Skill(lapse=1.0)
FAULTLESS = Skill()


@dataclass(frozen=True, slots=True, kw_only=True)
class PeopleGame:
    """A game, its scripted expert, and five people from novice to best."""

    name: str
    make: Callable[[], Env]
    expert: Expert
    people: tuple[Skill, Skill, Skill, Skill, Skill]
    has_action_mask: bool = False

    def spec(self) -> GameSpec:
        """The spec with which a client of the game connects."""
        env = self.make()
        try:
            return spec_from_gymnasium(env, game=self.name, has_action_mask=self.has_action_mask)
        finally:
            env.close()


def _gymnasium(env_id: str) -> Callable[[], Env]:
    return functools.partial(make_env, env_id)


GAMES: Mapping[str, PeopleGame] = {
    game.name: game
    for game in (
        PeopleGame(
            name="cartpole",
            make=_gymnasium("CartPole-v1"),
            expert=cartpole,
            people=(
                Skill(lapse=0.7, delay=2, forgets=("track",)),
                Skill(lapse=0.55, delay=1),
                Skill(lapse=0.42, forgets=("track",)),
                Skill(lapse=0.4),
                Skill(lapse=0.3),
            ),
        ),
        PeopleGame(
            name="acrobot",
            make=_gymnasium("Acrobot-v1"),
            expert=acrobot,
            people=(
                Skill(lapse=0.8, delay=2),
                Skill(lapse=0.67, delay=2),
                Skill(lapse=0.79),
                Skill(lapse=0.63, forgets=("lead",)),
                Skill(lapse=0.35),
            ),
        ),
        PeopleGame(
            name="lander",
            make=Lander,
            expert=lander,
            people=(
                Skill(lapse=0.6, delay=2, forgets=("spin",)),
                Skill(lapse=0.48, delay=2),
                Skill(lapse=0.25, delay=2),
                Skill(lapse=0.08, forgets=("drift",)),
                Skill(lapse=0.15),
            ),
        ),
        PeopleGame(
            name="rally",
            make=_gymnasium(rally.GAME_ID),
            expert=rally_player,
            people=(
                Skill(lapse=0.7, forgets=("aim", "bounce")),
                Skill(lapse=0.3, delay=2, forgets=("aim", "bounce")),
                Skill(lapse=0.2, delay=2),
                Skill(lapse=0.45),
                Skill(lapse=0.2),
            ),
        ),
        PeopleGame(
            name="poker",
            make=Poker,
            expert=poker,
            people=(
                Skill(lapse=0.68, forgets=("odds", "reads")),
                Skill(lapse=0.1, forgets=("odds",)),
                Skill(lapse=0.48, forgets=("reads",)),
                Skill(lapse=0.42),
                Skill(lapse=0.1),
            ),
            has_action_mask=True,
        ),
        PeopleGame(
            name="vault",
            make=Vault,
            expert=vault,
            people=(
                Skill(lapse=0.88, forgets=("key", "guard")),
                Skill(lapse=0.72, forgets=("key", "guard")),
                Skill(lapse=0.35, forgets=("key",)),
                Skill(lapse=0.42, forgets=("guard",)),
                Skill(lapse=0.2),
            ),
            has_action_mask=True,
        ),
        PeopleGame(
            name="courier",
            make=Courier,
            expert=courier,
            people=(
                Skill(lapse=0.5, forgets=("colour", "door")),
                Skill(lapse=0.45, forgets=("charger",)),
                Skill(lapse=0.08, forgets=("charger",)),
                Skill(lapse=0.2, forgets=("door",)),
                Skill(lapse=0.07),
            ),
            has_action_mask=True,
        ),
        PeopleGame(
            name="breakout",
            make=Breakout,
            expert=breakout,
            people=(
                Skill(lapse=0.2, forgets=("bounce",)),
                Skill(lapse=0.05, delay=1),
                Skill(lapse=0.17),
                Skill(lapse=0.11),
                Skill(lapse=0.07),
            ),
        ),
        PeopleGame(
            name="pendulum",
            make=_gymnasium("Pendulum-v1"),
            expert=pendulum,
            people=(
                Skill(lapse=0.95, delay=2),
                Skill(lapse=0.8, delay=2),
                Skill(lapse=0.1, forgets=("balance",)),
                Skill(lapse=0.42, delay=1),
                Skill(lapse=0.25, delay=1),
            ),
        ),
    )
}
"""The nine games by name; how far each skill is from random and best play was chosen with other
seeds than those of the result in bench/results."""


class Player(Protocol):
    """Decides in an episode: a person, or a bot outside the platform."""

    def reset(self) -> None:
        """Begin an episode."""
        ...

    def act(self, obs: Any, rng: np.random.Generator, *, action_mask: Any = None) -> Any: ...


class Person:
    """A scripted player of a game; with the same chances it plays the same."""

    def __init__(self, game: PeopleGame, skill: Skill) -> None:
        self._expert = game.expert
        self._spec = game.spec()
        self._skill = skill
        self._forgotten = frozenset(skill.forgets)
        self._seen = deque[Any](maxlen=skill.delay + 1)

    def reset(self) -> None:
        """Begin an episode."""
        self._seen.clear()

    def act(self, obs: Any, rng: np.random.Generator, *, action_mask: Any = None) -> Any:
        """Return the person's action, which is always valid."""
        self._seen.append(obs)
        if rng.random() >= self._skill.lapse:
            action = self._expert(self._seen[0], action_mask, self._forgotten)
            if action_mask is None or action_mask[action]:
                return action
        return random_action(self._spec, rng, action_mask=action_mask)


class Played(NamedTuple):
    """The outcome of an episode."""

    total: float
    """The sum of its rewards."""
    n_steps: int


def play(
    env: Env, person: Player | None, rng: np.random.Generator, *, episode: Episode | None = None
) -> Played:
    """Play one episode in `env`, to its end, and return its outcome; `rng` draws all chances.

    With `episode`, the episode is recorded as a game records it: each decision of the person, the
    rewards, the end, and the action masks of a game that has them. Without a person, the bot of
    `episode` decides; until the game has a bot, that is random play.
    """
    obs, info = env.reset(seed=int(rng.integers(1 << 31)))
    if person is not None:
        person.reset()
    total = 0.0
    n_steps = 0
    while True:
        action_mask = info.get("action_mask")
        if person is not None:
            action = person.act(obs, rng, action_mask=action_mask)
            if episode is not None:
                episode.acted(obs, action, action_mask=action_mask)
        else:
            assert episode is not None, "a bot plays in an episode; pass one, or a person"
            action = episode.act(obs, action_mask=action_mask)
        obs, reward, terminated, truncated, info = env.step(action)
        total += float(reward)
        n_steps += 1
        if episode is not None:
            episode.reward(float(reward))
        if terminated or truncated:
            break
    if episode is not None:
        episode.end(obs, action_mask=info.get("action_mask"), truncated=not terminated)
    return Played(total, n_steps)
