"""Sessions of a made-up game and what a plain walk finds in them, without the code under test."""

import uuid
from collections import defaultdict
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from hypothesis import strategies as st

from tests.experience.chunks import chunk_with
from tests.experience.trajectories import Step, rows_of, trajectories
from understudy.algorithm import Transitions
from understudy.experience.chunk import Chunk
from understudy.experience.game import GameSpec, game_spec

DISCOUNT = 0.9
GAME = game_spec("rally", obs=2, actions=3)
FAR = 10_000
"""Moments of different sessions are this far apart, so that an observation names its session."""


def session_id(number: int) -> uuid.UUID:
    return uuid.UUID(int=0x01890A5DAC96774BBCCE000000000000 + number)


@dataclass(frozen=True)
class Piece:
    """One chunk's steps, as they truly were."""

    session: int
    chunk_no: int
    steps: tuple[Step, ...]

    def chunk(self, *, game: GameSpec = GAME, **more: Any) -> Chunk:
        """The chunk; its observations show the moment and its session."""
        columns = rows_of(list(self.steps))
        moment = columns["obs"]
        columns["obs"] = np.stack([moment, np.full(len(moment), self.session)], axis=1).astype(
            np.float32
        )
        columns["action"] = (moment % 3).astype(np.int32)
        columns |= {name: np.asarray(value) for name, value in more.items()}
        made = chunk_with(columns, chunk_no=self.chunk_no, schema=game.schema, game=game.game)
        return replace(made, meta=replace(made.meta, session=session_id(self.session)))


@dataclass(frozen=True)
class Window:
    """What a start teaches: moments for observations."""

    stack: tuple[int, ...]
    returns: float
    discount: float
    next_stack: (
        tuple[int, ...] | None
    )  # None where the game terminated, and nothing is bootstrapped


def pieces_of(steps: tuple[Step, ...], cuts: frozenset[int], session: int) -> list[Piece]:
    """The chunks of one session; moments are moved to where no other session has any."""
    moved = tuple(
        replace(step, moment=step.moment + session * FAR, after=step.after + session * FAR)
        for step in steps
    )
    pieces: list[list[Step]] = [[]]
    for number, step in enumerate(moved):
        pieces[-1].append(step)
        if number in cuts and number + 1 < len(moved):
            pieces.append([])
    return [Piece(session, number, tuple(piece)) for number, piece in enumerate(pieces)]


@st.composite
def deliveries(draw: st.DrawFn, *, n_sessions: int = 3) -> list[Piece]:
    """Chunks of several sessions, interleaved; some never come."""
    waiting = []
    for session in range(draw(st.integers(1, n_sessions))):
        trajectory = draw(trajectories())
        pieces = pieces_of(trajectory.steps, trajectory.cuts, session)
        lost = (
            draw(st.sets(st.integers(0, len(pieces)), max_size=2)) if draw(st.booleans()) else set()
        )
        waiting.append([piece for piece in pieces if piece.chunk_no not in lost] or pieces)
    order = []
    while waiting := [pieces for pieces in waiting if pieces]:
        order.append(draw(st.sampled_from(waiting)).pop(0))
    return order


def true_windows(delivered: list[Piece], needs: Transitions) -> dict[int, Window]:
    """By moment, every start that all these chunks together can teach, each session being at its
    end."""
    found: dict[int, Window] = {}
    for steps in _gapless(delivered):
        for at in range(len(steps)):
            stack = _stack(steps, steps[at].moment, needs.stack)
            if stack is not None:
                found[steps[at].moment] = _window(steps, at, stack, needs)
    return found


def _gapless(delivered: list[Piece]) -> list[list[Step]]:
    """Runs of steps between which nothing is missing and no episode was cut."""
    by_session: dict[int, list[Piece]] = defaultdict(list)
    for piece in delivered:
        by_session[piece.session].append(piece)
    runs: list[list[Step]] = []
    for pieces in by_session.values():
        before = None
        for piece in pieces:
            if before is None or before.chunk_no + 1 != piece.chunk_no:
                runs.append([])
            runs[-1].extend(piece.steps)
            before = piece
    return runs


def _stack(steps: list[Step], moment: int, k: int) -> tuple[int, ...] | None:
    before = {step.after: step for step in steps}
    is_first = {step.moment: step.is_first for step in steps}
    moments = [moment]
    while len(moments) < k:
        if is_first.get(moments[0]):
            moments.insert(0, moments[0])
        elif moments[0] in before:
            moments.insert(0, before[moments[0]].moment)
        else:
            return None
    return tuple(moments)


def _window(steps: list[Step], at: int, stack: tuple[int, ...], needs: Transitions) -> Window:
    returns = 0.0
    m = 0
    while True:
        step = steps[at + m]
        returns += DISCOUNT**m * step.reward
        m += 1
        if m == needs.n_step or step.end or at + m == len(steps):
            break
    terminated = step.end == "terminated"
    following = _stack(steps, step.after, needs.stack)
    return Window(
        stack, returns, 0.0 if terminated else DISCOUNT**m, None if terminated else following
    )
