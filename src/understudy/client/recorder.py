"""Recorder: the Gymnasium-shaped layer, which is told the next observation with every step."""

import contextlib
from types import TracebackType
from typing import Any

import numpy as np

from understudy.client.bot import Bots
from understudy.client.episode import BY, Decided, Decider, Deciding, by_code
from understudy.client.session import Session, Sessions, Tolerance
from understudy.core.builder import Extras
from understudy.core.errors import Closed
from understudy.core.meta import EpisodeNote


class Recorder:
    """Records one env's steps, episode after episode, in one session a day; observations are copied when given."""

    def __init__(
        self, sessions: Sessions, session: Session, *, note: EpisodeNote, consent: str, tolerance: Tolerance,
        bots: Bots,
    ) -> None:  # fmt: skip
        self._sessions, self._session, self._tolerance = sessions, session, tolerance
        self._bots, self._deciding = bots, Deciding(bots)
        self._decided: Decided | None = None
        self._note, self._consent = note, consent
        self._is_closed = False

    def reset(self, obs: Any, *, legal: Any = None, seed: int | None = None) -> None:
        """An episode begins with this observation; one that is still running is cut at its last observation."""
        session = self._renewed()
        self._deciding, self._decided = Deciding(self._bots), None
        with session.lock:
            if self._is_closed or session.ended:
                self._tolerance.ignored_calls += 1
                return
            session.cut()
            note = self._note if seed is None else EpisodeNote(
                row=0, seat=self._note.seat, match=self._note.match, opponents=self._note.opponents,
                model=self._note.model, seed=seed,
            )  # fmt: skip
            block = session.builder.begin(note, consent=self._consent)
            if block is not None:
                session.handoff.put(session, block)
            try:
                session.builder.stage(obs, legal=legal, t_ms=session.t_ms())
            except Exception as error:
                self._spoil(error)

    def act(self, obs: Any, *, legal: Any = None, deterministic: bool = False, otherwise: Any = None) -> Any:
        """What the bot does, as in `Episode.act`; recorded by the `step` that is told this very action."""
        deciding = self._deciding
        own = deciding.own_choice(obs, otherwise)
        try:
            self._decided = deciding.choose(obs, own, legal=legal, deterministic=deterministic)
        except Exception as error:
            with self._session.lock:
                if not self._is_closed and not self._session.ended:
                    self._spoil(error)
            return deciding.any_action(legal)
        return self._decided.action

    def step(
        self, action: Any, reward: float, next_obs: Any, terminated: bool, truncated: bool, *, legal: Any = None,
        by: Decider = "unknown", frames: int = 1, extras: Extras | None = None,
    ) -> None:  # fmt: skip
        """One env step: the action taken at the last observation and what came of it; `legal` is `next_obs`'s."""
        session, decided, self._decided = self._session, self._decided, None
        with session.lock:
            builder = session.builder
            if self._is_closed or session.ended or not builder.in_episode:
                # Between an end (or bad input) and the next reset nothing can be recorded.
                self._tolerance.ignored_calls += 1
                return
            t_ms = session.t_ms()
            try:
                code = BY.get(by) or by_code(by)
                if decided is not None and _is_same(decided.action, action):
                    code, extras = decided.by, decided.extras
                    if self._deciding.model:
                        builder.name_model(self._deciding.model)
                builder.act(action, by=code, frames=frames, t_ms=t_ms, extras=extras)
                builder.add_reward(reward)
                if terminated or truncated:
                    is_full = builder.finish(
                        next_obs, terminated=bool(terminated), truncated=bool(truncated), legal=legal, t_ms=t_ms
                    )
                else:
                    is_full = builder.stage(next_obs, legal=legal, t_ms=t_ms)
            except Exception as error:
                self._spoil(error)
                return
            self._tolerance.decided = True
            if is_full:
                session.hand_over()

    def close(self) -> None:
        """Cut what is running and give the session back; may be called twice."""
        with self._session.lock:
            if not self._is_closed and not self._session.ended:
                self._session.cut()
            self._is_closed = True
        self._sessions.release(self._session)

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _renewed(self) -> Session:
        session, is_kept = self._session, self._sessions.keeping.keeps()
        if not self._is_closed and (session.is_old or session.is_kept != is_kept):
            with session.lock:
                session.cut()
            # A game that was closed meanwhile has no new session; the old one says so.
            with contextlib.suppress(Closed):
                self._session = self._sessions.renew(session, is_kept=is_kept)
        return self._session

    def _spoil(self, error: Exception) -> None:
        # The env has moved on, so there is nothing to try again: what follows is another episode.
        self._session.cut()
        self._tolerance.warn(self._tolerance.judge(error))


def _is_same(chosen: Any, action: Any) -> bool:
    return chosen is action or bool(np.array_equal(chosen, action))
