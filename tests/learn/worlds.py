"""Small worlds whose values are known, and chunks of what was played in them, written out move
by move."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tests.experience.chunks import chunk_with
from tests.learn.sessions import session_id
from understudy.experience.chunk import Chunk
from understudy.experience.game import GameSpec, game_spec
from understudy.experience.spaces import Discrete


@dataclass(frozen=True)
class Move:
    """One step: what was seen and done, what it brought, and what was seen then."""

    obs: Any
    action: Any
    reward: float
    after: Any
    end: str | None = None
    is_first: bool = False


def chunk_of(
    game: GameSpec,
    moves: Sequence[Move],
    *,
    session: int = 0,
    chunk_no: int = 0,
    version: int | None = None,
    **more: Any,
) -> Chunk:
    """A valid chunk of these moves; `more` are columns with one entry per move, `version` makes
    it an actor's."""
    rows: list[tuple[int, int]] = []  # (move, kind of row)
    for number, move in enumerate(moves):
        rows.append((number, 0))
        if move.end is not None or number + 1 == len(moves):
            rows.append((number, 1 if move.end in ("terminated", "truncated") else 2))
    at, kind = np.array(rows).T
    is_step = kind == 0

    def column(values: Sequence[Any], dtype: Any) -> Any:
        found = np.asarray(values, dtype)[at]
        found[~is_step] = 0
        return found

    seen = [moves[i].obs if step else moves[i].after for i, step in zip(at, is_step, strict=True)]
    columns: dict[str, Any] = {
        "obs": np.array(seen, game.obs_columns["obs"].dtype),
        "action": column([move.action for move in moves], game.action_columns["action"].dtype),
        "reward": column([move.reward for move in moves], np.float32),
        "is_first": column([move.is_first for move in moves], np.bool_),
        "terminated": column([move.end == "terminated" for move in moves], np.bool_),
        "truncated": column([move.end == "truncated" for move in moves], np.bool_),
        "row": kind.astype(np.uint8),
    }
    columns |= {
        name: column(values, np.float32) for name, values in more.items() if name != "action_mask"
    }
    if "action_mask" in more:
        columns["action_mask"] = np.asarray(more["action_mask"], np.bool_)[at]
    if version is not None:
        columns["version"] = np.full(len(kind), version, np.uint32)
    facts = {
        "kind": "player" if version is None else "actor",
        "consent": "granted",
        "session": session_id(session),
    }
    made = chunk_with(columns, chunk_no=chunk_no, schema=game.schema, game=game.game, **facts)
    return replace(made, meta=replace(made.meta, first_step=1_000 * chunk_no)).validate()


def episode(
    states: Sequence[Any], actions: Sequence[Any], rewards: Sequence[float], end: str | None
) -> list[Move]:
    """The moves from a reset on; `states` has one entry more than `actions`."""
    last = len(actions) - 1
    return [
        Move(states[t], action, rewards[t], states[t + 1], end if t == last else None, t == 0)
        for t, action in enumerate(actions)
    ]


# --- One state, reward 1, truncated at 10 ---------------------------------------------------------

ONE_STATE = game_spec("one-state", obs=1, actions=2)


def one_state(end: str = "truncated") -> list[Move]:
    """An episode of ten rewards of 1 in the only state there is; at discount 0.9 it is worth 10,
    for ever."""
    return episode([[1.0]] * 11, [t % 2 for t in range(10)], [1.0] * 10, end)


# --- Five states in a row -------------------------------------------------------------------------

CHAIN = game_spec("chain", obs=Discrete(6), actions=2)
"""States 0 to 4; action 1 goes right, 0 left; going right from 4 ends the game (5 is what is
seen then)."""


def chain_step(state: int, action: int) -> tuple[int, float, bool]:
    """Where an action leads, what it brings, and whether the game ends."""
    if action == 0:
        return max(0, state - 1), -0.1 * state, False
    return state + 1, 1.0 if state == 4 else 0.0, state == 4


def chain_values(discount: float) -> Any:
    """float64[5, 2]: the exact worth of each action, when the best ones follow."""
    q = np.zeros((5, 2))
    for _ in range(500):
        for state in range(5):
            for action in range(2):
                after, reward, is_over = chain_step(state, action)
                q[state, action] = reward + (0.0 if is_over else discount * q[after].max())
    return q


def chain_episodes(discount: float) -> list[list[Move]]:
    """From every state with either action, then the best ones: so that n-step returns are exact
    for every n."""
    best = chain_values(discount).argmax(axis=1)
    episodes = []
    for state in range(5):
        for first in range(2):
            states = [state]
            is_over = False
            actions: list[int] = []
            rewards: list[float] = []
            while not is_over:
                actions.append(int(best[states[-1]]) if actions else first)
                after, reward, is_over = chain_step(states[-1], actions[-1])
                states.append(after)
                rewards.append(reward)
            episodes.append(episode(states, actions, rewards, "terminated"))
    return episodes
