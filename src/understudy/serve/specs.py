"""Specs of games, as the routes need them: from memory while they are fresh, else from the registry."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import structlog

from understudy.core.clock import Clock
from understudy.core.errors import Corrupt, Refused, SpecError, UnderstudyError
from understudy.core.game import GameSpec
from understudy.models.registry import Registry

T = TypeVar("T")
_log = structlog.get_logger("understudy.gateway")

_FRESH_S = 5.0
"""After this the registry is asked again, since another gateway may have registered another schema."""

_HOW = (
    "the development key or an admin's may send its spec (PUT /v1/games/GAME), as our clients do by themselves; "
    "or run 'understudy games add'"
)


@dataclass(frozen=True, slots=True)
class _Known:
    specs: dict[str, GameSpec]
    at_s: float
    is_failing: bool = False
    """Whether the last look came to nothing, which is said once."""


class Specs:
    """Every registered game's specs by schema; for the event loop, with the disk in a thread."""

    def __init__(self, registry: Registry, executor: Executor, clock: Clock) -> None:
        self._registry, self._executor, self._clock = registry, executor, clock
        self._known: dict[str, _Known] = {}

    async def of(self, game: str) -> dict[str, GameSpec]:
        """A game's specs; Refused when it has none."""
        known, now_s = self._known.get(game), self._clock.monotonic()
        if known is not None and now_s - known.at_s <= _FRESH_S:
            return known.specs
        if known is not None:
            # Whoever comes meanwhile goes on with the old ones; one look is enough.
            self._known[game] = replace(known, at_s=now_s)
        try:
            specs = await self._run(self._read, game)
        except (UnderstudyError, OSError) as error:
            if known is None:
                raise
            if not known.is_failing:
                _log.warning(
                    "specs_not_readable", game=game, error=str(error)[:300], next="the known ones stay in force"
                )
            self._known[game] = replace(known, at_s=now_s, is_failing=True)
            return known.specs
        if not specs:
            raise Refused("not_registered", f"{game} is not registered; {_HOW}")
        self._known[game] = _Known(specs, now_s)
        return specs

    async def register(self, spec: GameSpec, *, may_add: bool) -> None:
        """Keep a spec; Refused when it is new and the caller may not add any."""
        if spec.schema in await self._run(self._read, spec.game):
            return
        if not may_add:
            raise Refused("not_registered", f"{spec.game} is not registered with this schema; {_HOW}")
        await self._run(self._registry.register, spec)
        self._known.pop(spec.game, None)

    def _read(self, game: str) -> dict[str, GameSpec]:
        try:
            return {spec.schema: spec for spec in self._registry.specs(game)}
        except SpecError as error:
            raise Corrupt(f"a spec of {game} in the registry is not readable: {error}; restore it") from None

    async def _run(self, work: Callable[..., T], *arguments: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work, *arguments)
