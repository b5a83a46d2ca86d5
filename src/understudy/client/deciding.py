"""Deciding: whoever acts when an episode asks for it, and what is recorded of that."""

from typing import Any, NamedTuple

import numpy as np

from understudy.client.bot import Bots
from understudy.core.builder import Extras
from understudy.core.chunk import By
from understudy.core.errors import Refused
from understudy.core.policy import Player
from understudy.core.random_action import random_action
from understudy.core.writer import check_mask


class Decided(NamedTuple):
    """An action as the game takes it, and who chose it."""

    action: Any
    by: int
    extras: Extras | None = None


class Deciding:
    """One episode's bot, the same to the episode's end; while there is none, the game's own choice or chance."""

    __slots__ = ("_bots", "_chance", "_player", "_version", "model")

    def __init__(self, bots: Bots) -> None:
        self._bots = bots
        self._player: Player | None = None
        self._chance: np.random.Generator | None = None
        self._version = 0
        self.model = ""
        """The bot's name, once it has decided."""

    def own_choice(self, obs: Any, otherwise: Any) -> Any:
        """What the game does without a bot: `otherwise`, or what that function says; None with a bot."""
        if self._player is None:
            bot = self._bots.cast()
            if bot is None:
                return otherwise(obs) if callable(otherwise) else otherwise
            self._player, self._version, self.model = bot.policy.player(), bot.policy.version, bot.name
        return None

    def choose(self, obs: Any, own: Any, *, legal: Any, deterministic: bool) -> Decided:
        """The decision; Refused when observation or mask cannot be used."""
        player = self._player
        if player is None:
            return Decided(self._number(own) if own is not None else self._random(legal), By.SCRIPT)
        rng = None if deterministic else self._rng()
        action, logp, raw = player.choose(obs, legal=legal, deterministic=deterministic, rng=rng)
        return Decided(action, By.BOT, Extras(logp=logp, version=self._version, raw_action=raw))

    def any_action(self, legal: Any) -> Any:
        """Something the game allows, whatever was wrong with what it gave."""
        try:
            return self._random(legal)
        except Exception:
            return self._random(None)

    def _random(self, legal: Any) -> Any:
        spec = self._bots.spec
        mask = None
        if legal is not None:
            if spec.discrete is None:
                raise Refused("bad_columns", f"{spec.game} has no discrete actions; leave out legal")
            mask = check_mask(legal, spec.discrete.n)
            if not mask.any():
                raise Refused("illegal_action", "legal allows no action; give a mask with one, or end the episode")
        return random_action(spec, self._rng(), legal=mask)

    def _rng(self) -> np.random.Generator:
        if self._chance is None:
            self._chance = np.random.default_rng(self._bots.rng.getrandbits(64))
        return self._chance

    def _number(self, action: Any) -> Any:
        """Games get numbers from bots, so they get one for a name as well."""
        spec = self._bots.spec
        if spec.discrete is not None and isinstance(action, str) and action in spec.action_names:
            return spec.action_names.index(action) + spec.discrete.start
        return action
