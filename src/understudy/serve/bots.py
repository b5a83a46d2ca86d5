"""Who plays now: every game's newest good bot, kept in memory and told to whoever waits for it."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace

import structlog

from understudy.core.errors import Corrupt, Refused, StorageFailed
from understudy.core.manifest import open_policy
from understudy.core.policy import Policy
from understudy.core.ports import Casting
from understudy.models.catalogue import Catalogue, Pointer, casting
from understudy.models.registry import Registry

_log = structlog.get_logger("understudy.gateway")
_UNREAD = -1
_IDLE_S = 600.0
"""A game nobody asked about for so long is no longer followed."""
_AGAIN_S = 5.0
"""How long after a bad model its file is looked at again: somebody may have restored it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnStage:
    """What a game's players get; replaced as a whole, never changed."""

    bot: Casting
    seen: int = _UNREAD
    """The newest entry of the journal that was looked at; above the bot's number while its model is bad."""
    policy: Policy | None = None
    """The champion, opened and checked."""
    model_no: int = 0
    raw: bytes = b""
    """The policy's own bytes, as they were signed."""
    canary_no: int = 0
    damage: str = ""
    """What is wrong with the champion that nobody gets for it."""
    again_s: float = float("inf")
    """When to look again although nothing new was written."""


@dataclass(slots=True)
class _Game:
    stage: OnStage = field(default_factory=lambda: OnStage(bot=Casting(number=0)))
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    looking: asyncio.Lock = field(default_factory=asyncio.Lock)
    asked_s: float = 0.0
    is_failing: bool = False


class Bots:
    """Follows the registry for every game that is asked about; a bad model never replaces a good one."""

    def __init__(
        self, registry: Registry, executor: Executor, *, trust: list[str], canary_share: float, follow_every_s: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._registry, self._executor, self._monotonic = registry, executor, monotonic
        self._trust, self._canary_share = trust, canary_share
        self.every_s = max(follow_every_s, registry.look_every_s)
        """How often the registry is looked at."""
        self._games: dict[str, _Game] = {}
        self._is_stopping = False

    async def now(self, game: str) -> OnStage:
        """The game's bot; read from the registry when it is asked for the first time."""
        known = self._games.get(game)
        if known is None:
            known = self._games[game] = _Game()
        known.asked_s = self._monotonic()
        if known.stage.seen == _UNREAD:
            await self._look(game, known)
        return known.stage

    def known_policy(self, game: str) -> Policy | None:
        """The champion as far as it is known by now."""
        known = self._games.get(game)
        return known.stage.policy if known else None

    async def newer(self, game: str, after: int, wait_s: float, *, with_policy: bool = False) -> OnStage | None:
        """The bot once its number is above `after` (and there is a champion, if that is asked); None: time ran out."""
        deadline_s = self._monotonic() + wait_s
        while True:
            stage = await self.now(game)
            if stage.bot.number > after and (stage.policy is not None or not with_policy):
                return stage
            left_s = deadline_s - self._monotonic()
            if left_s <= 0 or self._is_stopping:
                return None
            try:
                await asyncio.wait_for(self._games[game].changed.wait(), left_s)
            except TimeoutError:
                return None

    def stop_waiting(self) -> None:
        """Answer whoever waits, now and from now on: the gateway is stopping."""
        self._is_stopping = True
        for known in self._games.values():
            known.changed.set()

    async def follow(self) -> None:
        """Look for news for ever; cancelled when the gateway stops."""
        while True:
            await asyncio.sleep(self.every_s)
            for game, known in list(self._games.items()):
                if self._monotonic() - known.asked_s > _IDLE_S:
                    del self._games[game]
                    known.changed.set()
                else:
                    await self._look(game, known)

    async def _look(self, game: str, known: _Game) -> None:
        async with known.looking:
            try:
                stage = await asyncio.get_running_loop().run_in_executor(self._executor, self._read, game, known.stage)
            except Exception as error:
                # Said once, and tried again at the next look: the last good bot stays meanwhile.
                if not known.is_failing:
                    _log.warning("registry_not_readable", game=game, error=repr(error)[:300], next="the last bot stays")
                known.is_failing = True
                return
            known.is_failing = False
            if stage is not known.stage:
                known.stage = stage
                changed, known.changed = known.changed, asyncio.Event()
                changed.set()

    # --- In a thread ------------------------------------------------------------------------------------------------

    def _read(self, game: str, before: OnStage) -> OnStage:
        now = self._registry.catalogue(game)
        if now.number == before.seen and self._monotonic() < before.again_s:
            return before
        champion = now.aliases.get("champion")
        if champion is None or not champion.model_no:
            return OnStage(bot=self._bot(now, champion, None), seen=now.number)
        again_s = self._monotonic() + _AGAIN_S
        stage = self._staged(now, champion, before)
        if stage is not None:
            return stage
        if before.policy is not None:
            return replace(before, seen=now.number, again_s=again_s)
        # A gateway that starts while the champion is damaged goes back to the last one that is not.
        for earlier in reversed(now.history[:-1]):
            if earlier.model_no and (stage := self._staged(now, earlier, before)):
                return replace(stage, bot=replace(stage.bot, number=earlier.number), again_s=again_s)
        damage = f"{now.models[champion.model_no].name} is damaged, and no champion before it is whole"
        nobody = Casting(number=0, trust=tuple(self._trust))
        return OnStage(bot=nobody, seen=now.number, again_s=again_s, damage=damage)

    def _staged(self, now: Catalogue, champion: Pointer, before: OnStage) -> OnStage | None:
        """The stage with this champion; None when its model is bad. A bad canary is left out."""
        number, policy, raw = champion.model_no, before.policy, before.raw
        if number != before.model_no or policy is None:
            opened = self._opened(now, number, before)
            if opened is None:
                return None
            policy, raw = opened
        canary = now.aliases.get("canary")
        if canary is not None and canary.model_no != before.canary_no and not self._opened(
            now, canary.model_no, before
        ):  # fmt: skip
            canary = None
        return OnStage(
            bot=self._bot(now, champion, canary), seen=now.number, policy=policy, model_no=number, raw=raw,
            canary_no=canary.model_no if canary else 0,
        )  # fmt: skip

    def _opened(self, now: Catalogue, model_no: int, before: OnStage) -> tuple[Policy, bytes] | None:
        if model_no not in now.models:
            return None
        manifest = now.models[model_no]
        try:
            raw = self._registry.policy_bytes(manifest)
            return open_policy(manifest, raw), raw
        except (Corrupt, Refused, StorageFailed, OSError) as error:
            if now.number != before.seen:
                _log.error("bad_model", model=manifest.name, error=str(error)[:300], next="the last good bot stays")
            return None

    def _bot(self, now: Catalogue, champion: Pointer | None, canary: Pointer | None) -> Casting:
        return casting(now, champion, canary, trust=self._trust, canary_share=self._canary_share)
