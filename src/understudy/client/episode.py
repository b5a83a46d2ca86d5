"""Episode: what a game calls while somebody plays."""

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Literal

from understudy.client.bot import Bots
from understudy.client.deciding import Deciding
from understudy.client.session import Session, Sessions, Tolerance
from understudy.core.builder import Extras
from understudy.core.chunk import By
from understudy.core.errors import Refused
from understudy.core.meta import EpisodeNote

Decider = Literal["unknown", "person", "bot", "script"]
"""Who decided a step."""

BY: Mapping[str, int] = {by.name.lower(): int(by) for by in By}


def by_code(by: str) -> int:
    """The number a row keeps for whoever decided."""
    code = BY.get(by)
    if code is None:
        raise Refused("bad_by", f"by is {str(by)[:20]!r}; give one of {list(BY)}")
    return code


class Episode:
    """One episode of one player; a decision closes the transition before it. Leaving without `end` cuts it."""

    def __init__(
        self, sessions: Sessions, session: Session, *, note: EpisodeNote, consent: str, tolerance: Tolerance,
        bots: Bots,
    ) -> None:  # fmt: skip
        self._sessions, self._session, self._tolerance = sessions, session, tolerance
        self._deciding = Deciding(bots)
        self._over: str | None = None
        with session.lock:
            block = session.builder.begin(note, consent=consent)
            if block is not None:
                session.handoff.put(session, block)

    @property
    def model(self) -> str:
        """The bot that decides in this episode; empty while none has."""
        return self._deciding.model

    def act(self, obs: Any, *, legal: Any = None, deterministic: bool = False, otherwise: Any = None) -> Any:
        """What the bot does, recorded as its decision; never waits. Where actions have names, it is the number.

        While there is no bot: `otherwise`, which is an action or a function of the observation, else any legal action.
        """
        deciding, session = self._deciding, self._session
        own = deciding.own_choice(obs, otherwise)
        try:
            action, by, extras = deciding.choose(obs, own, legal=legal, deterministic=deterministic)
        except Exception as error:
            with session.lock:
                if self._over is not None or session.ended:
                    self._late("act")
                else:
                    self._spoil(error)
            return deciding.any_action(legal)
        with session.lock:
            if self._over is not None or session.ended:
                self._late("act")
                return action
            builder = session.builder
            try:
                if deciding.model:
                    builder.name_model(deciding.model)
                is_full = builder.decide(obs, action, legal=legal, by=by, t_ms=session.t_ms(), extras=extras)
            except Exception as error:
                self._spoil(error)
                return deciding.any_action(legal)
            self._tolerance.decided = True
            if is_full:
                session.hand_over()
        return action

    def acted(
        self, obs: Any, action: Any, *, legal: Any = None, by: Decider = "person", frames: int = 1,
        extras: Extras | None = None,
    ) -> None:  # fmt: skip
        """A person (or `by`) saw `obs` and chose `action`; ends the transition of the decision before."""
        session = self._session
        with session.lock:
            if self._over is not None or session.ended:
                return self._late("acted")
            try:
                is_full = session.builder.decide(
                    obs, action, legal=legal, by=BY.get(by) or by_code(by), frames=frames, t_ms=session.t_ms(),
                    extras=extras,
                )  # fmt: skip
            except Exception as error:
                return self._spoil(error)
            self._tolerance.decided = True
            if is_full:
                session.hand_over()
        return None

    def reward(self, x: float) -> None:
        """Add to the reward of the last decision."""
        session = self._session
        with session.lock:
            if self._over is not None or session.ended:
                return self._late("reward")
            try:
                session.builder.add_reward(x)
            except Exception as error:
                return self._spoil(error)
        return None

    def end(
        self, obs: Any = None, *, legal: Any = None, truncated: bool = False, result: str | float | None = None
    ) -> None:
        """The episode is over: the game ended it, or (`truncated`) only the watching stopped."""
        session = self._session
        with session.lock:
            if self._over is not None or session.ended:
                return self._late("end")
            builder = session.builder
            try:
                if not builder.has_decision:
                    is_full = builder.cut(result=result)
                else:
                    is_full = builder.finish(
                        obs, terminated=not truncated, truncated=truncated, legal=legal, result=result,
                        t_ms=session.t_ms(),
                    )  # fmt: skip
            except Exception as error:
                return self._spoil(error)
            if is_full:
                session.hand_over()
            self._leave("it has ended")
        return None

    def cut(self) -> None:
        """Stop recording here, without an end: the last decision is dropped. Does nothing after `end`."""
        session = self._session
        with session.lock:
            if self._over is None and not session.ended:
                session.cut()
                self._leave("it was cut")

    def __enter__(self) -> "Episode":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cut()

    def _leave(self, why: str) -> None:
        self._over = why
        self._sessions.release(self._session)

    def _spoil(self, error: Exception) -> None:
        refused = self._tolerance.judge(error)
        self._session.cut()
        self._leave("")
        self._tolerance.warn(refused)

    def _late(self, call: str) -> None:
        # A spoiled episode and a closed game stay quiet: the game goes on, only the recording does not.
        if self._over and not self._session.ended:
            late = Refused("bad_order", f"{call} was called on an episode, but {self._over}; start a new one")
            self._tolerance.warn(self._tolerance.judge(late))
            return
        self._tolerance.ignored_calls += 1
