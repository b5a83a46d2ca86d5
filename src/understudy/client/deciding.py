"""Deciding: whoever acts when an episode asks for it, and what is recorded of that."""

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from understudy.client.bot import Bots
from understudy.core.builder import Extras
from understudy.core.chunk import By
from understudy.core.errors import Refused
from understudy.core.random_action import random_action
from understudy.core.tensors import Array
from understudy.core.writer import check_mask

if TYPE_CHECKING:
    from understudy.core.policy import Player


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
            return Decided(self._random(legal) if own is None else self._checked(own, legal), By.SCRIPT)
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
        return random_action(self._bots.spec, self._rng(), legal=self._mask(legal))

    def _checked(self, action: Any, legal: Any) -> Any:
        """The game's own choice; a number also where it was named, since bots give numbers."""
        columns: list[list[Any]] = [[None] for _ in self._bots.spec.action_columns]
        self._bots.write_action(columns, 0, action)
        discrete, mask = self._bots.spec.discrete, self._mask(legal)
        if discrete is None:
            return action
        number = columns[0][0]
        if mask is not None and not mask[number - discrete.start]:
            raise Refused("illegal_action", f"otherwise gave {str(action)[:40]}, which is not legal")
        return number

    def _mask(self, legal: Any) -> Array | None:
        if legal is None:
            return None
        spec = self._bots.spec
        if spec.discrete is None:
            raise Refused("bad_columns", f"{spec.game} has no discrete actions; leave out legal")
        mask = check_mask(legal, spec.discrete.n)
        if not mask.any():
            raise Refused("illegal_action", "legal allows no action; give a mask with one, or end the episode")
        return mask

    def _rng(self) -> np.random.Generator:
        if self._chance is None:
            self._chance = np.random.default_rng(self._bots.rng.getrandbits(64))
        return self._chance
