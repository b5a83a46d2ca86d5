"""Episode records the decisions of a game as it is played; Recorder records a Gymnasium loop."""

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, SupportsFloat

import numpy as np

from understudy.client.bot import Bots
from understudy.client.session import LogEntry, Session, Sessions, Tolerance
from understudy.core.errors import Closed, Refused
from understudy.core.tensors import Array
from understudy.core.wording import joined
from understudy.experience.builder import Extras, check_frames
from understudy.experience.chunk import By, EpisodeNote
from understudy.experience.game import random_action
from understudy.experience.skill import BotSkill
from understudy.experience.writer import check_flag, check_mask

if TYPE_CHECKING:
    from understudy.nn.policy import Player


Decider = Literal["unknown", "person", "bot", "script"]
"""What decided a step."""

BY: Mapping[str, int] = {by.name.lower(): int(by) for by in By}

_NUMBERS = frozenset({float, int, np.float32, np.float64})
_LEAST = -1e6
_MOST = 1e6
"""Rewards of these types and sizes go to the log: no number of them in a log reaches MAX_NUMBER, or
moves a sum of that size beyond it in float32."""


class ChosenAction(NamedTuple):
    """An action in the game's format, and what chose it."""

    action: Any
    by: int
    extras: Extras | None = None


class ActionChooser:
    """Chooses an episode's actions.

    Once a bot is available, that bot chooses until the episode ends; before that, the fallback
    chooses, or else the action is random.
    """

    __slots__ = ("_bots", "_chance", "_player", "_skill", "_version", "model", "ticket")

    def __init__(self, bots: Bots, skill: BotSkill | None = None) -> None:
        self._bots = bots
        self._skill = skill
        """How the bot plays; None: as released."""
        self._player: Player | None = None
        self._chance: np.random.Generator | None = None
        self._version = 0
        self.model = ""
        """The bot's name, once it has decided."""
        self.ticket: str | None = None
        """The gateway's draw of the bot, if there were several."""

    @property
    def noise(self) -> float | None:
        """The noise with which the bot plays, once it has decided; None: as released."""
        return None if self._skill is None else self._skill.noise

    @property
    def temperature(self) -> float | None:
        """The temperature at which the bot plays; None: as released."""
        return None if self._skill is None else self._skill.temperature

    def fallback(self, obs: Any, otherwise: Any) -> Any:
        """Return `otherwise`, or the result of calling it, while there is no bot; else None."""
        if self._player is None:
            if self._skill is None:
                self._skill = self._bots.draw_exploring()
            if self._skill is None:
                bot, self.ticket = self._bots.draw()
            else:
                bot, self._skill = self._bots.draw_at(self._skill)
            if bot is None:
                return otherwise(obs) if callable(otherwise) else otherwise
            self._player = bot.policy.player()
            self._version = bot.policy.version
            self.model = bot.manifest.name
        return None

    def choose(
        self, obs: Any, fallback: Any, *, action_mask: Any, deterministic: bool
    ) -> ChosenAction:
        """Return the chosen action; raises if observation, mask or fallback is invalid."""
        player = self._player
        if player is None:
            return ChosenAction(
                self._random(action_mask)
                if fallback is None
                else self._checked(fallback, action_mask),
                By.SCRIPT,
            )
        rng = None if deterministic and self._skill is None else self._rng()
        action, logp, raw = player.choose(
            obs, action_mask=action_mask, deterministic=deterministic, rng=rng, skill=self._skill
        )
        return ChosenAction(
            action, By.BOT, Extras(logp=logp, version=self._version, raw_action=raw)
        )

    def any_action(self, action_mask: Any) -> Any:
        """Return a random action that the mask allows; an invalid mask is ignored."""
        try:
            return self._random(action_mask)
        except Exception:
            return self._random(None)

    def _random(self, action_mask: Any) -> Any:
        return random_action(self._bots.spec, self._rng(), action_mask=self._mask(action_mask))

    def _checked(self, action: Any, action_mask: Any) -> Any:
        """Return the game's fallback action; a named one as its number, since bots use numbers."""
        columns: list[list[Any]] = [[None] for _ in self._bots.spec.action_columns]
        self._bots.write_action(columns, 0, action)
        discrete = self._bots.spec.discrete
        mask = self._mask(action_mask)
        if discrete is None:
            return action
        number = columns[0][0]
        if mask is not None and not mask[number - discrete.start]:
            raise Refused(
                "invalid_action",
                f"`otherwise` is action {str(action)[:40]}, which action_mask forbids; give an "
                "allowed one",
            )
        return number

    def _mask(self, action_mask: Any) -> Array | None:
        if action_mask is None:
            return None
        spec = self._bots.spec
        if spec.discrete is None:
            raise Refused("bad_columns", f"{spec.game} has no discrete actions; omit action_mask")
        mask = check_mask(action_mask, spec.discrete.n)
        if not mask.any():
            raise Refused(
                "invalid_action", "action_mask allows no action; allow one, or end the episode"
            )
        return mask

    def _rng(self) -> np.random.Generator:
        if self._chance is None:
            self._chance = np.random.default_rng(self._bots.rng.getrandbits(64))
        return self._chance


def by_code(by: str) -> int:
    """Return the number that a row stores for `by`; Refused if it is not a Decider."""
    code = BY.get(by)
    if code is None:
        raise Refused("bad_by", f"by is {repr(by)[:20]}; use one of {joined(BY)}")
    return code


class Episode:
    """Records one episode of one player.

    A step is complete when the next decision or `end` gives its next observation. Leaving the
    `with` block without `end` cuts the episode: the last, incomplete step is dropped.
    """

    __slots__ = (
        "__weakref__",
        "_chooser",
        "_layout",
        "_log",
        "_over",
        "_session",
        "_sessions",
        "_tolerance",
        "_use",
    )

    def __init__(
        self,
        sessions: Sessions,
        session: Session,
        *,
        note: EpisodeNote,
        consent: str,
        tolerance: Tolerance,
        bots: Bots,
        skill: BotSkill | None = None,
    ) -> None:
        self._sessions = sessions
        self._session = session
        self._use = session.n_uses
        self._tolerance = tolerance
        self._chooser = ActionChooser(bots, skill)
        self._layout = session.builder.layout
        self._log: list[LogEntry] = []
        """The session's log from the first decision to the end."""
        self._over: str | None = None
        with session.lock:
            block = session.builder.begin(note, consent=consent)
            if block is not None:
                session.handoff.put(session, block)

    @property
    def model(self) -> str:
        """The name of the bot that decides in this episode; empty until it has decided."""
        return self._chooser.model

    def act(
        self,
        obs: Any,
        *,
        action_mask: Any = None,
        deterministic: bool = False,
        otherwise: Any = None,
    ) -> Any:
        """The bot decides: record and return its action for `obs`; never waits.

        Without a bot, returns `otherwise` (an action, or a function of the observation), or else a
        random valid action. Named actions are returned as numbers. To record the decision of a
        person, use `acted`.
        """
        chooser = self._chooser
        session = self._session
        fallback = chooser.fallback(obs, otherwise)
        try:
            action, by, extras = chooser.choose(
                obs, fallback, action_mask=action_mask, deterministic=deterministic
            )
        except Exception as error:
            with session.lock:
                if self._over is not None or session.ended:
                    self._late("act")
                else:
                    self._reject(error)
            return chooser.any_action(action_mask)
        with session.lock:
            if self._over is not None or session.ended:
                self._late("act")
                return action
            builder = session.settle()
            try:
                if chooser.model:
                    builder.name_model(
                        chooser.model, chooser.ticket, chooser.noise, chooser.temperature
                    )
                is_full = builder.decide(
                    obs, action, action_mask=action_mask, by=by, t_ms=session.t_ms(), extras=extras
                )
            except Exception as error:
                self._reject(error)
                return chooser.any_action(action_mask)
            self._tolerance.decided = True
            session.log = self._log
            if is_full:
                session.submit()
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
        """A person (or `by`) decided: record that `action` was chosen for `obs`.

        Completes the previous step, whose next observation is `obs`. For a bot, use `act`.
        """
        # Most calls only copy the observation and append to the log, without the lock. They run
        # as little code as possible: after a pause of 16 ms, none of it is in the processor's
        # caches. Functions are called as locals, because Python finds attributes of a class faster.
        session = self._session
        log = self._log
        if session.log is log and action_mask is None and extras is None:
            layout = self._layout
            pack_obs = layout.pack_obs
            monotonic = session.monotonic
            try:
                if type(action) is int and layout.first_action <= action < layout.end_action:
                    chosen = action
                else:
                    chosen = layout.pack_action(action)
                if type(frames) is not int or frames != 1:
                    frames = check_frames(frames)
                log.append((pack_obs(obs), chosen, BY[by], frames, monotonic()))
            except Exception:
                pass  # refused below, under the lock
            else:
                if not session.is_due or len(log) >= layout.n_rows:
                    with session.lock:
                        session.settle()
                return None
        with session.lock:
            if self._over is not None or session.ended:
                return self._late("acted")
            builder = session.settle()
            try:
                is_full = builder.decide(
                    obs, action, action_mask, by_code(by), frames, session.t_ms(), extras
                )
            except Exception as error:
                return self._reject(error)
            self._tolerance.decided = True
            session.log = log
            if is_full:
                session.submit()
        return None

    def reward(self, x: SupportsFloat) -> None:
        """Add to the reward of the last decision."""
        session = self._session
        log = self._log
        if (
            session.log is log
            and (type(x) is float or type(x) in _NUMBERS)
            and _LEAST <= x <= _MOST  # type: ignore[operator]
            and len(log) < self._layout.n_rows
        ):
            return log.append(x)
        with session.lock:
            if self._over is not None or session.ended:
                return self._late("reward")
            builder = session.settle()
            try:
                builder.add_reward(x)
            except Exception as error:
                if builder.has_decision:
                    return self._reject(error)
                self._warn(self._tolerance.judge(error), "a reward was ignored")
        return None

    def end(
        self,
        obs: Any = None,
        *,
        action_mask: Any = None,
        truncated: bool = False,
        result: str | float | np.generic | None = None,
    ) -> None:
        """End the episode: the game is over, or only the recording stops (`truncated`).

        A truncated episode needs its last observation `obs`, or its last decision is dropped.
        """
        plain = result.item() if isinstance(result, np.generic) else result
        session = self._session
        with session.lock:
            if self._over is not None or session.ended:
                return self._late("end")
            builder = session.settle()
            problems: list[tuple[Refused, str]] = []
            try:
                builder.check_result(plain)
            except Exception as error:
                problems.append((self._tolerance.judge(error), "an episode's result was ignored"))
                plain = None
            is_truncated = True
            try:
                is_truncated = check_flag("truncated", truncated)
                if not builder.has_decision:
                    is_full = builder.cut(result=plain)
                else:
                    is_full = builder.finish(
                        obs,
                        terminated=not is_truncated,
                        truncated=is_truncated,
                        action_mask=action_mask,
                        result=plain,
                    )
            except Exception as error:
                refused = self._tolerance.judge(error)
                if is_truncated:
                    problems.append((refused, "an episode's last decision was dropped"))
                    is_full = builder.cut(result=plain)
                else:
                    # The observation after a terminated step is never used.
                    problems.append((refused, "an episode's last observation was ignored"))
                    is_full = builder.finish(terminated=True, result=plain)
            if is_full:
                session.submit()
            self._leave("has ended")
            for refused, cost in problems:
                self._warn(refused, cost)
        return None

    def cut(self) -> None:
        """Stop recording without an end and drop the last decision. Does nothing after `end`."""
        session = self._session
        with session.lock:
            if self._over is None and not session.ended:
                session.cut()
                self._leave("was cut")

    def __enter__(self) -> "Episode":
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()

    def __del__(self) -> None:
        # A game may drop its episode without ending it; the sender then cuts the episode.
        if self._over is None:
            self._sessions.abandoned.append((self._session, self._use))

    def _leave(self, reason: str) -> None:
        self._over = reason
        self._session.log = []  # what another thread appends to the old one came too late
        self._sessions.release(self._session)

    def _reject(self, error: Exception) -> None:
        # Even if the error is raised: an observation may be staged, for which a reward is early.
        self._session.detach()
        refused = self._tolerance.judge(error)
        self._session.cut()
        self._leave("")
        self._tolerance.warn(refused)

    def _warn(self, refused: Refused, cost: str) -> None:
        # A call level of its own, as in `_reject` and `_late`: the warning names the game's line.
        self._tolerance.warn(refused, cost)

    def _late(self, call: str) -> None:
        # After invalid input, or once the game is closed, calls are only counted: the game
        # continues without recording.
        if self._over and not self._session.ended:
            late = Refused(
                "bad_order",
                f"{call} was called on an episode that {self._over}; start a new episode",
            )
            self._tolerance.warn(self._tolerance.judge(late), "a call was ignored")
            return
        self._tolerance.ignored_calls += 1


class Recorder:
    """Records one env, episode after episode, in a new session each day; copies observations.

    Once `Game.end_session` has ended its session, the next `reset` starts a new one.
    """

    def __init__(
        self,
        sessions: Sessions,
        session: Session,
        *,
        note: EpisodeNote,
        consent: str,
        tolerance: Tolerance,
        bots: Bots,
        skill: BotSkill | None = None,
    ) -> None:
        self._sessions = sessions
        self._session = session
        self._use = session.n_uses
        self._tolerance = tolerance
        self._bots = bots
        self._skill = skill
        self._chooser = ActionChooser(bots, skill)
        self._decided: ChosenAction | None = None
        self._note = note
        self._consent = consent
        self._is_closed = False

    def reset(self, obs: Any, *, action_mask: Any = None, seed: int | None = None) -> None:
        """Start an episode with this observation; a running episode is cut."""
        session = self._session
        is_recorded = self._sessions.recording_rate.draw()
        if not self._is_closed and (
            session.ended or session.is_old or session.is_recorded != is_recorded
        ):
            with session.lock:
                session.cut()
            # If the game was closed meanwhile there is no new session, and the old one has ended.
            with contextlib.suppress(Closed):
                session = self._session = self._sessions.renew(session, is_recorded=is_recorded)
                self._use = session.n_uses
        self._chooser = ActionChooser(self._bots, self._skill)
        self._decided = None
        with session.lock:
            if self._is_closed or session.ended:
                self._tolerance.ignored_calls += 1
                return
            session.cut()
            try:
                block = session.builder.begin(replace(self._note, seed=seed), consent=self._consent)
                if block is not None:
                    session.handoff.put(session, block)
                session.builder.stage(obs, action_mask=action_mask)
            except Exception as error:
                self._reject(error)

    def act(
        self,
        obs: Any,
        *,
        action_mask: Any = None,
        deterministic: bool = False,
        otherwise: Any = None,
    ) -> Any:
        """Return the bot's action, as `Episode.act` does; pass it to `step`, which records it."""
        chooser = self._chooser
        fallback = chooser.fallback(obs, otherwise)
        try:
            self._decided = chooser.choose(
                obs, fallback, action_mask=action_mask, deterministic=deterministic
            )
        except Exception as error:
            with self._session.lock:
                if not self._is_closed and not self._session.ended:
                    self._reject(error)
            return chooser.any_action(action_mask)
        return self._decided.action

    def step(
        self,
        action: Any,
        reward: SupportsFloat,
        next_obs: Any,
        terminated: bool,
        truncated: bool,
        *,
        action_mask: Any = None,
        by: Decider = "unknown",
        frames: int = 1,
        extras: Extras | None = None,
    ) -> None:
        """Record one env step from the last observation; `action_mask` is that of `next_obs`."""
        session = self._session
        decided = self._decided
        self._decided = None
        with session.lock:
            builder = session.builder
            if self._is_closed or session.ended or not builder.in_episode:
                # Between an end (or invalid input) and the next reset nothing can be recorded.
                self._tolerance.ignored_calls += 1
                return
            t_ms = session.t_ms()
            try:
                terminated = check_flag("terminated", terminated)
                truncated = check_flag("truncated", truncated)
                code = BY[by] if by in BY else by_code(by)
                if decided is not None and (
                    decided.action is action or np.array_equal(decided.action, action)
                ):
                    code = decided.by
                    extras = decided.extras
                    if self._chooser.model:
                        chooser = self._chooser
                        builder.name_model(
                            chooser.model, chooser.ticket, chooser.noise, chooser.temperature
                        )
                builder.act(action, code, frames, t_ms, extras)
                builder.add_reward(reward)
                if terminated or truncated:
                    is_full = builder.finish(
                        next_obs,
                        terminated=terminated,
                        truncated=truncated,
                        action_mask=action_mask,
                    )
                else:
                    builder.stage(next_obs, action_mask)
                    is_full = builder.is_full
            except Exception as error:
                self._reject(error)
                return
            self._tolerance.decided = True
            if is_full:
                session.submit()

    def close(self) -> None:
        """Cut a running episode and release the session; may be called twice."""
        with self._session.lock:
            if not self._is_closed and not self._session.ended:
                self._session.cut()
            self._is_closed = True
        self._sessions.release(self._session)

    def __enter__(self) -> "Recorder":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._is_closed:
            self._sessions.abandoned.append((self._session, self._use))

    def _reject(self, error: Exception) -> None:
        # The env has already stepped, so the call cannot be repeated: recording resumes with the
        # next episode.
        self._session.cut()
        self._tolerance.warn(self._tolerance.judge(error))
