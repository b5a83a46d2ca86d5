"""Episode: what a game calls while it is played; Recorder: the same for a loop in Gymnasium's
shape, whose every step brings the next observation."""

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from understudy.client.bot import Bots
from understudy.client.session import Session, Sessions, Tolerance
from understudy.core.errors import Closed, Refused
from understudy.core.tensors import Array
from understudy.experience.builder import Extras
from understudy.experience.chunk import By, EpisodeNote
from understudy.experience.game import random_action
from understudy.experience.writer import check_mask

if TYPE_CHECKING:
    from understudy.nn.policy import Player


Decider = Literal["unknown", "person", "bot", "script"]
"""Who decided a step."""

BY: Mapping[str, int] = {by.name.lower(): int(by) for by in By}


class Decided(NamedTuple):
    """An action as the game takes it, and who chose it."""

    action: Any
    by: int
    extras: Extras | None = None


class Deciding:
    """One episode's bot, the same to the episode's end; while there is none, the game's own
    choice or chance."""

    __slots__ = ("_bots", "_chance", "_player", "_version", "model")

    def __init__(self, bots: Bots) -> None:
        self._bots = bots
        self._player: Player | None = None
        self._chance: np.random.Generator | None = None
        self._version = 0
        self.model = ""
        """The bot's name, once it has decided."""

    def own_choice(self, obs: Any, otherwise: Any) -> Any:
        """What the game does without a bot: `otherwise`, or what that function says; None with a
        bot."""
        if self._player is None:
            bot = self._bots.cast()
            if bot is None:
                return otherwise(obs) if callable(otherwise) else otherwise
            self._player = bot.policy.player()
            self._version = bot.policy.version
            self.model = bot.manifest.name
        return None

    def choose(self, obs: Any, own: Any, *, action_mask: Any, deterministic: bool) -> Decided:
        """The decision; Refused when observation or mask cannot be used."""
        player = self._player
        if player is None:
            return Decided(
                self._random(action_mask) if own is None else self._checked(own, action_mask),
                By.SCRIPT,
            )
        rng = None if deterministic else self._rng()
        action, logp, raw = player.choose(
            obs, action_mask=action_mask, deterministic=deterministic, rng=rng
        )
        return Decided(action, By.BOT, Extras(logp=logp, version=self._version, raw_action=raw))

    def any_action(self, action_mask: Any) -> Any:
        """Something the game allows, whatever was wrong with what it gave."""
        try:
            return self._random(action_mask)
        except Exception:
            return self._random(None)

    def _random(self, action_mask: Any) -> Any:
        return random_action(self._bots.spec, self._rng(), action_mask=self._mask(action_mask))

    def _checked(self, action: Any, action_mask: Any) -> Any:
        """The game's own choice; a number also where it was named, since bots give numbers."""
        columns: list[list[Any]] = [[None] for _ in self._bots.spec.action_columns]
        self._bots.write_action(columns, 0, action)
        discrete = self._bots.spec.discrete
        mask = self._mask(action_mask)
        if discrete is None:
            return action
        number = columns[0][0]
        if mask is not None and not mask[number - discrete.start]:
            raise Refused(
                "invalid_action", f"otherwise gave {str(action)[:40]}, which is not legal"
            )
        return number

    def _mask(self, action_mask: Any) -> Array | None:
        if action_mask is None:
            return None
        spec = self._bots.spec
        if spec.discrete is None:
            raise Refused("bad_columns", f"{spec.game} has no discrete actions; leave out legal")
        mask = check_mask(action_mask, spec.discrete.n)
        if not mask.any():
            raise Refused(
                "invalid_action", "legal allows no action; give a mask with one, or end the episode"
            )
        return mask

    def _rng(self) -> np.random.Generator:
        if self._chance is None:
            self._chance = np.random.default_rng(self._bots.rng.getrandbits(64))
        return self._chance


def by_code(by: str) -> int:
    """The number a row keeps for whoever decided."""
    code = BY.get(by)
    if code is None:
        raise Refused("bad_by", f"by is {str(by)[:20]!r}; give one of {list(BY)}")
    return code


class Episode:
    """One episode of one player; a decision closes the transition before it. Leaving without
    `end` cuts it."""

    def __init__(
        self,
        sessions: Sessions,
        session: Session,
        *,
        note: EpisodeNote,
        consent: str,
        tolerance: Tolerance,
        bots: Bots,
    ) -> None:
        self._sessions = sessions
        self._session = session
        self._tolerance = tolerance
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

    def act(
        self,
        obs: Any,
        *,
        action_mask: Any = None,
        deterministic: bool = False,
        otherwise: Any = None,
    ) -> Any:
        """What the bot does, recorded as its decision; never waits. Where actions have names, it is
        the number.

        While there is no bot: `otherwise`, which is an action or a function of the observation,
        else any legal action.
        """
        deciding = self._deciding
        session = self._session
        own = deciding.own_choice(obs, otherwise)
        try:
            action, by, extras = deciding.choose(
                obs, own, action_mask=action_mask, deterministic=deterministic
            )
        except Exception as error:
            with session.lock:
                if self._over is not None or session.ended:
                    self._late("act")
                else:
                    self._spoil(error)
            return deciding.any_action(action_mask)
        with session.lock:
            if self._over is not None or session.ended:
                self._late("act")
                return action
            builder = session.builder
            try:
                if deciding.model:
                    builder.name_model(deciding.model)
                is_full = builder.decide(
                    obs, action, action_mask=action_mask, by=by, t_ms=session.t_ms(), extras=extras
                )
            except Exception as error:
                self._spoil(error)
                return deciding.any_action(action_mask)
            self._tolerance.decided = True
            if is_full:
                session.hand_over()
        return action

    def acted(
        self,
        obs: Any,
        action: Any,
        *,
        action_mask: Any = None,
        by: Decider = "person",
        frames: int = 1,
        extras: Extras | None = None,
    ) -> None:
        """A person (or `by`) saw `obs` and chose `action`; ends the transition of the decision
        before."""
        session = self._session
        with session.lock:
            if self._over is not None or session.ended:
                return self._late("acted")
            try:
                is_full = session.builder.decide(
                    obs,
                    action,
                    action_mask=action_mask,
                    by=BY.get(by) or by_code(by),
                    frames=frames,
                    t_ms=session.t_ms(),
                    extras=extras,
                )
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
        self,
        obs: Any = None,
        *,
        action_mask: Any = None,
        truncated: bool = False,
        result: str | float | None = None,
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
                        obs,
                        terminated=not truncated,
                        truncated=truncated,
                        action_mask=action_mask,
                        result=result,
                        t_ms=session.t_ms(),
                    )
            except Exception as error:
                return self._spoil(error)
            if is_full:
                session.hand_over()
            self._leave("it has ended")
        return None

    def cut(self) -> None:
        """Stop recording here, without an end: the last decision is dropped. Does nothing after
        `end`."""
        session = self._session
        with session.lock:
            if self._over is None and not session.ended:
                session.cut()
                self._leave("it was cut")

    def __enter__(self) -> "Episode":
        return self

    def __exit__(self, *_: object) -> None:
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
        # A spoiled episode and a closed game stay quiet: the game goes on, only the recording does
        # not.
        if self._over and not self._session.ended:
            late = Refused(
                "bad_order", f"{call} was called on an episode, but {self._over}; start a new one"
            )
            self._tolerance.warn(self._tolerance.judge(late))
            return
        self._tolerance.ignored_calls += 1


class Recorder:
    """Records one env's steps, episode after episode, in one session a day; observations are
    copied when given."""

    def __init__(
        self,
        sessions: Sessions,
        session: Session,
        *,
        note: EpisodeNote,
        consent: str,
        tolerance: Tolerance,
        bots: Bots,
    ) -> None:
        self._sessions = sessions
        self._session = session
        self._tolerance = tolerance
        self._bots = bots
        self._deciding = Deciding(bots)
        self._decided: Decided | None = None
        self._note = note
        self._consent = consent
        self._is_closed = False

    def reset(self, obs: Any, *, action_mask: Any = None, seed: int | None = None) -> None:
        """An episode begins with this observation; one that is still running is cut at its last
        observation."""
        session = self._session
        is_recorded = self._sessions.recording_rate.keeps()
        if not self._is_closed and (session.is_old or session.is_recorded != is_recorded):
            with session.lock:
                session.cut()
            # A game that was closed meanwhile has no new session; the old one says so.
            with contextlib.suppress(Closed):
                session = self._session = self._sessions.renew(session, is_recorded=is_recorded)
        self._deciding = Deciding(self._bots)
        self._decided = None
        with session.lock:
            if self._is_closed or session.ended:
                self._tolerance.ignored_calls += 1
                return
            session.cut()
            block = session.builder.begin(replace(self._note, seed=seed), consent=self._consent)
            if block is not None:
                session.handoff.put(session, block)
            try:
                session.builder.stage(obs, action_mask=action_mask, t_ms=session.t_ms())
            except Exception as error:
                self._spoil(error)

    def act(
        self,
        obs: Any,
        *,
        action_mask: Any = None,
        deterministic: bool = False,
        otherwise: Any = None,
    ) -> Any:
        """What the bot does, as in `Episode.act`; recorded by the `step` that gets this very
        action."""
        deciding = self._deciding
        own = deciding.own_choice(obs, otherwise)
        try:
            self._decided = deciding.choose(
                obs, own, action_mask=action_mask, deterministic=deterministic
            )
        except Exception as error:
            with self._session.lock:
                if not self._is_closed and not self._session.ended:
                    self._spoil(error)
            return deciding.any_action(action_mask)
        return self._decided.action

    def step(
        self,
        action: Any,
        reward: float,
        next_obs: Any,
        terminated: bool,
        truncated: bool,
        *,
        action_mask: Any = None,
        by: Decider = "unknown",
        frames: int = 1,
        extras: Extras | None = None,
    ) -> None:
        """One env step: the action taken at the last observation and what came of it; `legal` is
        `next_obs`'s."""
        session = self._session
        decided = self._decided
        self._decided = None
        with session.lock:
            builder = session.builder
            if self._is_closed or session.ended or not builder.in_episode:
                # Between an end (or bad input) and the next reset nothing can be recorded.
                self._tolerance.ignored_calls += 1
                return
            t_ms = session.t_ms()
            try:
                code = BY.get(by) or by_code(by)
                if decided is not None and (
                    decided.action is action or np.array_equal(decided.action, action)
                ):
                    code = decided.by
                    extras = decided.extras
                    if self._deciding.model:
                        builder.name_model(self._deciding.model)
                builder.act(action, code, frames, t_ms, extras)
                builder.add_reward(reward)
                if terminated or truncated:
                    is_full = builder.finish(
                        next_obs,
                        terminated=bool(terminated),
                        truncated=bool(truncated),
                        action_mask=action_mask,
                        t_ms=t_ms,
                    )
                else:
                    builder.stage(next_obs, action_mask, t_ms)
                    is_full = builder.is_full
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

    def __exit__(self, *_: object) -> None:
        self.close()

    def _spoil(self, error: Exception) -> None:
        # The env has moved on, so there is nothing to try again: what follows is another episode.
        self._session.cut()
        self._tolerance.warn(self._tolerance.judge(error))
