"""Games that scripted people play in `bench/players.py`, besides those of Gymnasium and rally.

| game | observation | actions | an episode |
| --- | --- | --- | --- |
| `Lander` | 8 floats, as LunarLander's | 4, as LunarLander's | one landing |
| `Poker` | 23 floats; the opponent's card is hidden | 3, masked | 20 hands |
| `Vault` | dict: 7x7 grid in planes, 2 floats | 6, masked | up to 60 moves |
| `Courier` | dict: 6x9 map of codes, position, cargo, battery | 7, masked | up to 80 moves |
| `Breakout` | 10x10x4 planes, as MinAtar's | 3 | until the ball is lost |

All are Gymnasium envs. All chance comes from the seed of `reset`, a masked action raises, and
`info["action_mask"]` says which actions are valid. Scripted people of these games are in
`bench/people.py`.
"""

import functools
import math
from typing import Any, ClassVar, NamedTuple

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

Obs = dict[str, Any]
Reset = tuple[Any, dict[str, Any]]
Step = tuple[Any, float, bool, bool, dict[str, Any]]
Cell = tuple[int, int]
MOVES: tuple[Cell, ...] = ((-1, 0), (1, 0), (0, -1), (0, 1))
"""Row and column changes of the first four actions of a grid game: north, south, west, east."""


def check_action(action: Any, mask: NDArray[np.bool_]) -> int:
    """Return the action as a number; ValueError if it does not exist or is masked."""
    number = int(action)
    if not 0 <= number < len(mask) or not mask[number]:
        valid = ", ".join(str(choice) for choice in np.flatnonzero(mask))
        raise ValueError(f"action is {action}, which is not valid now; use one of {valid}")
    return number


def distances(free: NDArray[np.bool_], target: Cell) -> NDArray[np.int64]:
    """int64[rows, columns]: moves from each free cell to the target; -1 where there is no way.

    The result is cached and read-only.
    """
    return _distances(free.tobytes(), free.shape[0], free.shape[1], target)


@functools.lru_cache(maxsize=10_000)
def _distances(free: bytes, rows: int, columns: int, target: Cell) -> NDArray[np.int64]:
    near = _neighbours(rows, columns)
    found = [-1] * (rows * columns)
    queue = [target[0] * columns + target[1]]
    found[queue[0]] = 0
    for cell in queue:
        for neighbour in near[cell]:
            if found[neighbour] < 0 and free[neighbour]:
                found[neighbour] = found[cell] + 1
                queue.append(neighbour)
    away = np.array(found).reshape(rows, columns)
    away.flags.writeable = False
    return away


@functools.cache
def _neighbours(rows: int, columns: int) -> list[list[int]]:
    """For each cell, counted row by row, the cells next to it."""
    return [
        [
            (row + down) * columns + column + right
            for down, right in MOVES
            if 0 <= row + down < rows and 0 <= column + right < columns
        ]
        for row in range(rows)
        for column in range(columns)
    ]


# --- Lander ---------------------------------------------------------------------------------------


class Lander(gymnasium.Env[NDArray[np.float32], np.int64]):
    """A small lander with the spaces of Gymnasium's LunarLander, but not its physics (Box2D).

    A rigid body with two springy legs falls towards a flat moon. Actions: 0 nothing, 1 left engine
    (turns clockwise), 2 main engine, 3 right engine (turns counter-clockwise). The rewards follow
    LunarLander's description: progress towards standing still and upright on the pad, -100 for a
    crash or leaving sideways, +100 for coming to rest, and a price for fuel.
    """

    observation_space = spaces.Box(
        np.array([-2.5, -2.5, -10, -10, -2 * np.pi, -10, 0, 0], np.float32),
        np.array([2.5, 2.5, 10, 10, 2 * np.pi, 10, 1, 1], np.float32),
    )
    action_space = spaces.Discrete(4)
    obs_names = ("x", "y", "speed x", "speed y", "angle", "spin", "left leg", "right leg")
    action_names = ("nothing", "left engine", "main engine", "right engine")

    MAX_STEPS = 400
    DT_S = 0.04
    SUBSTEPS = 8
    GRAVITY = 10.0
    MAIN = 17.0
    """Acceleration by the main engine, along the body's axis."""
    SIDE = 1.0
    TURN = 4.0
    """Angular acceleration by a side engine."""
    LEG: ClassVar[Cell] = (1, 1)
    """How far a leg's tip is to the side of the body's centre, and below it."""
    SPRING = 180.0
    DAMPING = 14.0
    FRICTION = 6.0
    CRASH_SPEED = 3.5
    CRASH_ANGLE = 0.7
    SCALES = (10.0, 6.7, 5.0, 7.5, 1.0, 2.5)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        super().reset(seed=seed)
        self._n_steps = 0
        self._n_resting = 0
        # x, y of the legs' level, speed x, speed y, angle (counter-clockwise), spin
        push = self.np_random.uniform((-4, -4, -0.6), (4, 1, 0.6))
        self._body = [0.0, 9.4, float(push[0]), float(push[1]), 0.0, float(push[2])]
        self._touches = [False, False]
        self._potential = self._value()
        return self._observe(), {}

    def step(self, action: Any) -> Step:
        engine = check_action(action, np.ones(4, np.bool_))
        is_crashed = False
        for _ in range(self.SUBSTEPS):
            is_crashed = is_crashed or self._move(engine, self.DT_S / self.SUBSTEPS)
        x, _, speed_x, speed_y, _, spin = self._body
        self._n_steps += 1
        is_still = all(self._touches) and max(abs(speed_x), abs(speed_y), abs(spin)) < 0.3
        self._n_resting = self._n_resting + 1 if is_still else 0
        before = self._potential
        self._potential = self._value()
        reward = self._potential - before - (0.0, 0.06, 0.6, 0.06)[engine]
        is_crashed = is_crashed or abs(x) > 10.0
        is_landed = self._n_resting >= 5 and not is_crashed
        reward += 100.0 * is_landed - 100.0 * is_crashed
        is_late = self._n_steps >= self.MAX_STEPS and not is_landed and not is_crashed
        return self._observe(), reward, is_landed or is_crashed, is_late, {}

    def _move(self, engine: int, dt_s: float) -> bool:
        """Move by a part of a step; return whether the lander crashed."""
        x, y, speed_x, speed_y, angle, spin = self._body
        cos = math.cos(angle)
        sin = math.sin(angle)
        turn = (engine == 3) - (engine == 1)
        push_x = -sin * self.MAIN * (engine == 2) - cos * self.SIDE * turn
        push_y = cos * self.MAIN * (engine == 2) - sin * self.SIDE * turn - self.GRAVITY
        torque = self.TURN * turn
        is_crashed = False
        for leg, side in enumerate((-1, 1)):
            arm_x = side * self.LEG[0] * cos + self.LEG[1] * sin
            arm_y = side * self.LEG[0] * sin - self.LEG[1] * cos
            depth = -(y + self.LEG[1] + arm_y)
            self._touches[leg] = depth > 0
            if depth > 0:
                is_crashed = is_crashed or speed_y < -self.CRASH_SPEED
                force_y = max(0.0, self.SPRING * depth - self.DAMPING * (speed_y + spin * arm_x))
                force_x = -self.FRICTION * (speed_x - spin * arm_y)
                push_x += force_x
                push_y += force_y
                torque += 0.5 * (arm_x * force_y - arm_y * force_x)
        is_crashed = is_crashed or (any(self._touches) and abs(angle) > self.CRASH_ANGLE)
        speed_x += push_x * dt_s
        speed_y += push_y * dt_s
        spin += torque * dt_s
        self._body = [
            x + speed_x * dt_s,
            y + speed_y * dt_s,
            speed_x,
            speed_y,
            angle + spin * dt_s,
            spin,
        ]
        return is_crashed

    def _value(self) -> float:
        """How close the lander is to standing on the pad; 20 when it does."""
        x, y, speed_x, speed_y, angle, _ = (
            value / scale for value, scale in zip(self._body, self.SCALES, strict=True)
        )
        off = math.hypot(x, y) + math.hypot(speed_x, speed_y) + abs(angle)
        return 10.0 * sum(self._touches) - 100.0 * off

    def _observe(self) -> NDArray[np.float32]:
        values = [*(np.array(self._body) / np.array(self.SCALES)), *self._touches]
        box = self.observation_space
        return np.clip(np.array(values, np.float32), box.low, box.high)


# --- Poker ----------------------------------------------------------------------------------------

RANKS = 8
FOLD = 0
CALL = 1
RAISE = 2


def win_chance(own: int, shared: int | None, weights: NDArray[np.float64]) -> float:
    """The chance to win a hand of `Poker`, a draw counting half, if no more is bet.

    `weights` is float64[8]: how likely the opponent plays on with each rank, 1 if nothing is known.
    """
    left = np.full(RANKS, 2.0)
    left[own] -= 1
    if shared is None:
        # The shared card is still in the deck.
        by_shared = [
            win_chance(own, rank, weights) * count for rank, count in enumerate(left.tolist())
        ]
        return float(sum(by_shared) / left.sum())
    left[shared] -= 1
    chances = np.maximum(left, 0) * weights
    ranks = np.arange(RANKS)
    if own == shared:
        won = np.ones(RANKS)
    else:
        won = (ranks < own) + 0.5 * (ranks == own)
        won[shared] = 0.0
    return float(won @ chances / chances.sum())


_EVEN = np.ones(RANKS)
STRENGTHS = np.array(
    [[win_chance(own, shared, _EVEN) for shared in (None, *range(RANKS))] for own in range(RANKS)]
)
"""float64[8, 9]: the chance to win by own rank and shared rank + 1 (0: not shown yet)."""


class Poker(gymnasium.Env[NDArray[np.float32], np.int64]):
    """Twenty hands of a small poker against a scripted opponent, whose card stays hidden.

    The deck has 8 ranks twice. Each seat pays 1 and gets a card; a bet is 2 chips before the shared
    card is shown and 4 after it, with at most two raises a round. A card that pairs the shared one
    wins, else the higher one. Actions: 0 fold (only against a raise), 1 check or call, 2 raise. The
    reward is the chips won or lost at the end of a hand. The opponent bets by its chance to win,
    sometimes bluffs, and folds weak cards to a raise.
    """

    observation_space = spaces.Box(0.0, 1.0, (2 * RANKS + 7,), np.float32)
    action_space = spaces.Discrete(3)
    action_names = ("fold", "call", "raise")
    HANDS = 20
    MAX_PAID = 13
    """The ante, two raises of 2 and two of 4."""

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        super().reset(seed=seed)
        self._hand = 0
        self._deal()
        self._continue()
        return self._observe(), {"action_mask": self._mask()}

    def step(self, action: Any) -> Step:
        number = check_action(action, self._mask())
        won = self._act(0, number)
        if not self._is_over:
            won = self._continue()
        if self._is_over and self._hand < self.HANDS:
            self._deal()
            self._continue()
        info = {"action_mask": self._mask()}
        return self._observe(), won, self._is_over, False, info

    def _deal(self) -> None:
        cards = self.np_random.permutation(2 * RANKS)[:3] // 2
        self._own, self._other, self._shared = cards.tolist()
        self._turn = self._hand % 2
        self._hand += 1
        self._paid = [1, 1]
        self._round = 0
        self._n_raises = 0
        self._n_acted = 0
        self._other_raises = 0
        self._is_over = False

    def _continue(self) -> float:
        """Let the opponent act until it is the player's turn or the hand is over."""
        won = 0.0
        while self._turn == 1 and not self._is_over:
            won = self._act(1, self._opponent())
        return won

    def _act(self, seat: int, action: int) -> float:
        """Play an action of a seat; return the chips that the player won, if the hand is over."""
        if action == FOLD:
            self._is_over = True
            return float(self._paid[1] if seat == 1 else -self._paid[0])
        self._paid[seat] = max(self._paid) + (2 + 2 * self._round) * (action == RAISE)
        self._n_raises += action == RAISE
        self._other_raises += seat == 1 and action == RAISE
        self._n_acted += 1
        self._turn = 1 - seat
        if action == RAISE or self._n_acted < 2:
            return 0.0
        if self._round == 0:
            self._round = 1
            self._n_raises = 0
            self._n_acted = 0
            self._turn = (self._hand - 1) % 2
            return 0.0
        self._is_over = True
        own = (self._own == self._shared, self._own)
        other = (self._other == self._shared, self._other)
        return float(self._paid[0] * ((own > other) - (own < other)))

    def _opponent(self) -> int:
        strength = STRENGTHS[self._other, self._shared + 1 if self._round else 0]
        chance = self.np_random.random()
        can_raise = self._n_raises < 2
        if self._paid[0] == self._paid[1]:
            return RAISE if strength > 0.6 or chance < 0.1 else CALL
        if can_raise and (strength > 0.8 or chance < 0.04):
            return RAISE
        return FOLD if strength < 0.4 and chance < 0.85 else CALL

    def _mask(self) -> NDArray[np.bool_]:
        return np.array([self._paid[0] < self._paid[1], True, self._n_raises < 2])

    def _observe(self) -> NDArray[np.float32]:
        obs = np.zeros(2 * RANKS + 7, np.float32)
        obs[self._own] = 1
        if self._round:
            obs[RANKS + self._shared] = 1
        obs[2 * RANKS :] = (
            self._round,
            self._paid[0] / self.MAX_PAID,
            self._paid[1] / self.MAX_PAID,
            self._n_raises / 2,
            self._hand % 2,  # whether the player is first in this hand
            self._other_raises / 4,
            self._hand / self.HANDS,
        )
        return obs


# --- Vault ----------------------------------------------------------------------------------------

TAKE = 4
WAIT = 5


class Vault(gymnasium.Env[Obs, np.int64]):
    """A 7x7 vault with three gems, a key, a chest and a guard that hunts whoever is near.

    Actions: north, south, west, east, take (a gem, the key, or the chest's content once the key is
    taken) and wait. Walls, the edge and an empty floor to take from are masked. A gem is worth 1,
    the chest 2; the guard costs 1 and carries the player to the entrance. The episode ends when
    nothing is left to take, and is truncated after 60 steps.
    """

    SIDE = 7
    MAX_STEPS = 60
    WALL, GEM, KEY, CHEST, GUARD, PLAYER = range(6)
    """Planes of the grid."""
    observation_space = spaces.Dict(
        {
            "grid": spaces.Box(0, 1, (SIDE, SIDE, 6), np.uint8),
            "status": spaces.Box(0.0, 1.0, (2,), np.float32),
        }
    )
    """`status`: whether the key is taken, and the share of the steps that is left."""
    action_space = spaces.Discrete(6)
    action_names = ("north", "south", "west", "east", "take", "wait")
    ENTRANCE = (0, 0)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        super().reset(seed=seed)
        self._n_steps = 0
        self._has_key = False
        while True:
            grid = np.zeros((self.SIDE, self.SIDE, 6), np.uint8)
            places = self.np_random.permutation(self.SIDE**2 - 1) + 1  # 0 is the entrance
            rows, columns = np.divmod(places, self.SIDE)
            grid[rows[:9], columns[:9], self.WALL] = 1
            reach = distances(grid[:, :, self.WALL] == 0, self.ENTRANCE)
            items = slice(9, 14)
            if (reach[rows[items], columns[items]] > 0).all():
                break
        kinds = (self.GEM, self.GEM, self.GEM, self.KEY, self.CHEST)
        grid[rows[items], columns[items], kinds] = 1
        self._grid = grid
        self._player = self.ENTRANCE
        # The guard starts on the floor that is farthest away.
        self._post = self._cell_of(int(reach.argmax()))
        self._guard = self._post
        return self._observe(), {"action_mask": self._mask()}

    def step(self, action: Any) -> Step:
        number = check_action(action, self._mask())
        reward = 0.0
        self._n_steps += 1
        if number < TAKE:
            self._player = self._moved(self._player, number)
        elif number == TAKE:
            reward += self._take()
        if self._guard != self._player:
            self._guard = self._hunt()
        if self._guard == self._player:
            reward -= 1.0
            self._player = self.ENTRANCE
            self._guard = self._post
        is_empty = not self._grid[:, :, (self.GEM, self.CHEST)].any()
        is_late = self._n_steps >= self.MAX_STEPS and not is_empty
        return self._observe(), reward, is_empty, is_late, {"action_mask": self._mask()}

    def _take(self) -> float:
        here = self._grid[self._player]
        if here[self.KEY]:
            here[self.KEY] = 0
            self._has_key = True
            return 0.0
        worth = 1.0 * here[self.GEM] + 2.0 * here[self.CHEST]
        here[[self.GEM, self.CHEST]] = 0
        return float(worth)

    def _hunt(self) -> Cell:
        """Return the guard's next cell: towards a player within 2 steps, else anywhere near."""
        free = self._grid[:, :, self.WALL] == 0
        steps = [self._moved(self._guard, move) for move in range(4)]
        ways = [cell for cell in steps if self._is_inside(cell) and free[cell]]
        chance = self.np_random.random()
        random_way = ways[int(self.np_random.integers(len(ways)))]
        if chance < 0.4:
            return self._guard
        away = distances(free, self._player)
        if chance < 0.6 or away[self._guard] > 2:
            return random_way
        return min(ways, key=lambda cell: int(away[cell]))

    def _mask(self) -> NDArray[np.bool_]:
        mask = np.ones(6, np.bool_)
        for move in range(4):
            cell = self._moved(self._player, move)
            mask[move] = self._is_inside(cell) and not self._grid[cell][self.WALL]
        here = self._grid[self._player]
        mask[TAKE] = here[self.GEM] or here[self.KEY] or (here[self.CHEST] and self._has_key)
        return mask

    def _observe(self) -> Obs:
        grid = self._grid.copy()
        grid[self._guard][self.GUARD] = 1
        grid[self._player][self.PLAYER] = 1
        left = 1 - self._n_steps / self.MAX_STEPS
        return {"grid": grid, "status": np.array([self._has_key, left], np.float32)}

    def _is_inside(self, cell: Cell) -> bool:
        return 0 <= cell[0] < self.SIDE and 0 <= cell[1] < self.SIDE

    def _moved(self, cell: Cell, move: int) -> Cell:
        return cell[0] + MOVES[move][0], cell[1] + MOVES[move][1]

    def _cell_of(self, index: int) -> Cell:
        return index // self.SIDE, index % self.SIDE


# --- Courier --------------------------------------------------------------------------------------

PICK_UP = 4
DELIVER = 5
CHARGE = 6


class Courier(gymnasium.Env[Obs, np.int64]):
    """A robot on a 6x9 map brings parcels to the door of their colour before its battery is empty.

    Actions: north, south, west, east, pick up (empty-handed, on a parcel), deliver (with a parcel,
    at a door) and charge (on a charger). A parcel at its own door is worth 1, at another one -0.5;
    it is then gone, and a new one appears. Each move drains the battery; an empty one ends the
    episode and costs 1. The episode is truncated after 80 steps.
    """

    ROWS = 6
    COLUMNS = 9
    COLOURS = 3
    MAX_STEPS = 80
    CAPACITY = 30
    FLOOR, SHELF, CHARGER, PARCEL, DOOR = 0, 1, 2, 3, 6
    """Codes of the map; parcels and doors of colour c have PARCEL + c and DOOR + c."""
    observation_space = spaces.Dict(
        {
            "map": spaces.MultiDiscrete(np.full((ROWS, COLUMNS), 9)),
            "robot": spaces.Dict(
                {
                    "place": spaces.MultiDiscrete([ROWS, COLUMNS]),
                    "cargo": spaces.Discrete(1 + COLOURS),
                    "battery": spaces.Box(0.0, 1.0, (1,), np.float32),
                }
            ),
        }
    )
    """`cargo` is 0, or 1 + the colour of the parcel."""
    action_space = spaces.Discrete(7)
    action_names = ("north", "south", "west", "east", "pick up", "deliver", "charge")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        super().reset(seed=seed)
        self._n_steps = 0
        self._cargo = 0
        self._battery = self.CAPACITY
        size = self.ROWS * self.COLUMNS
        while True:
            codes = np.zeros(size, np.int64)
            places = self.np_random.permutation(size)
            codes[places[:10]] = self.SHELF
            codes[places[10:12]] = self.CHARGER
            codes[places[12:15]] = self.DOOR + np.arange(self.COLOURS)
            self._map = codes.reshape(self.ROWS, self.COLUMNS)
            start = int(places[15])
            self._place = (start // self.COLUMNS, start % self.COLUMNS)
            free = self._map != self.SHELF
            if ((distances(free, self._place) >= 0) == free).all():
                break
        for _ in range(3):
            self._add_parcel()
        return self._observe(), {"action_mask": self._mask()}

    def step(self, action: Any) -> Step:
        number = check_action(action, self._mask())
        reward = 0.0
        self._n_steps += 1
        code = int(self._map[self._place])
        if number < PICK_UP:
            self._place = (
                self._place[0] + MOVES[number][0],
                self._place[1] + MOVES[number][1],
            )
            self._battery -= 1
        elif number == PICK_UP:
            self._cargo = 1 + code - self.PARCEL
            self._map[self._place] = self.FLOOR
        elif number == DELIVER:
            reward = 1.0 if code - self.DOOR == self._cargo - 1 else -0.5
            self._cargo = 0
            self._add_parcel()
        else:
            self._battery = min(self.CAPACITY, self._battery + 10)
        is_empty = self._battery <= 0
        reward -= is_empty
        is_late = self._n_steps >= self.MAX_STEPS and not is_empty
        return self._observe(), reward, is_empty, is_late, {"action_mask": self._mask()}

    def _add_parcel(self) -> None:
        floor = np.argwhere(self._map == self.FLOOR)
        row, column = floor[self.np_random.integers(len(floor))]
        self._map[row, column] = self.PARCEL + self.np_random.integers(self.COLOURS)

    def _mask(self) -> NDArray[np.bool_]:
        mask = np.zeros(7, np.bool_)
        for move, (down, right) in enumerate(MOVES):
            row = self._place[0] + down
            column = self._place[1] + right
            is_inside = 0 <= row < self.ROWS and 0 <= column < self.COLUMNS
            mask[move] = is_inside and self._map[row, column] != self.SHELF
        code = int(self._map[self._place])
        mask[PICK_UP] = not self._cargo and self.PARCEL <= code < self.DOOR
        mask[DELIVER] = self._cargo and code >= self.DOOR
        mask[CHARGE] = code == self.CHARGER
        return mask

    def _observe(self) -> Obs:
        battery = np.array([max(0, self._battery) / self.CAPACITY], np.float32)
        place = np.array(self._place, np.int64)
        robot = {"place": place, "cargo": np.int64(self._cargo), "battery": battery}
        return {"map": self._map.copy(), "robot": robot}


# --- Breakout -------------------------------------------------------------------------------------


class Ball(NamedTuple):
    """Where the ball of `Breakout` is, and the change of row and column with each step."""

    row: int
    column: int
    down: int
    right: int


class Breakout(gymnasium.Env[NDArray[np.uint8], np.int64]):
    """MinAtar's Breakout, written from its published rules (Young and Tian, 2019).

    A ball flies diagonally over 10x10 cells, and is reflected by walls and bricks. A brick is worth
    1; when none is left, three new rows appear. The paddle returns the ball to the side it came
    from or to the other, depending on the side hit; without the paddle, the episode ends. As in
    MinAtar, an action is replaced by the previous one with a chance of 0.1. Actions: 0 stay,
    1 left, 2 right. An episode is truncated after 500 steps, which MinAtar does not do.
    """

    SIDE = 10
    MAX_STEPS = 500
    STICKY = 0.1
    PADDLE, BALL, TRAIL, BRICK = range(4)
    """Planes of the observation; the trail is where the ball was a step ago."""
    observation_space = spaces.Box(0, 1, (SIDE, SIDE, 4), np.uint8)
    action_space = spaces.Discrete(3)
    action_names = ("stay", "left", "right")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Reset:
        super().reset(seed=seed)
        is_left = bool(self.np_random.integers(2))
        self._ball = Ball(3, 0, 1, 1) if is_left else Ball(3, self.SIDE - 1, 1, -1)
        self._trail = (self._ball.row, self._ball.column)
        self._paddle = 4
        self._action = 0
        self._n_steps = 0
        self._was_brick = False
        self._bricks = np.zeros((self.SIDE, self.SIDE), np.bool_)
        self._bricks[1:4] = True
        return self._observe(), {}

    def step(self, action: Any) -> Step:
        number = check_action(action, np.ones(3, np.bool_))
        if self.np_random.random() >= self.STICKY:
            self._action = number
        change = (0, -1, 1)[self._action]
        self._paddle = min(max(self._paddle + change, 0), self.SIDE - 1)
        self._n_steps += 1
        reward, is_lost = self._fly()
        is_late = self._n_steps >= self.MAX_STEPS and not is_lost
        return self._observe(), reward, is_lost, is_late, {}

    def _fly(self) -> tuple[float, bool]:
        """Move the ball; return the reward and whether the ball is lost."""
        row, column, down, right = self._ball
        self._trail = (row, column)
        reward = 0.0
        if not 0 <= column + right < self.SIDE:
            right = -right
        next_column = column + right
        if row + down < 0:
            down = 1
        next_row = row + down
        is_brick = bool(self._bricks[next_row, next_column])
        is_lost = False
        if is_brick and not self._was_brick:
            self._bricks[next_row, next_column] = False
            reward = 1.0
            next_row = row
            down = -down
        elif next_row == self.SIDE - 1:
            if not self._bricks.any():
                self._bricks[1:4] = True
            if self._paddle == next_column:
                down = -1
                next_row = row
            elif self._paddle == column:
                down = -1
                right = -right
                next_row = row
            else:
                is_lost = True
        # A ball inside the bricks breaks one of two that it passes.
        self._was_brick = is_brick
        self._ball = Ball(next_row, next_column, down, right)
        return reward, is_lost

    def _observe(self) -> NDArray[np.uint8]:
        planes = np.zeros((self.SIDE, self.SIDE, 4), np.uint8)
        planes[self.SIDE - 1, self._paddle, self.PADDLE] = 1
        planes[self._ball.row, self._ball.column, self.BALL] = 1
        planes[*self._trail, self.TRAIL] = 1
        planes[:, :, self.BRICK] = self._bricks
        return planes
