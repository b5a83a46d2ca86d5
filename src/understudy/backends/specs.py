"""Where ingest reads game specs: the data folder, or a remote registry."""

from understudy.backends.data import DataFolder
from understudy.backends.deployment import open_deployment
from understudy.core.clock import Clock, SystemClock
from understudy.core.errors import InvalidName, SpecError
from understudy.experience.game import GameSpec
from understudy.ingest.specs import SpecFolder
from understudy.models.registry import Registry
from understudy.ports import Specs

MISS_S = 1.0
"""How long a failed lookup is cached: frames of an unknown schema cost one request a second."""
_MOST_MISSES = 4096


def registered_specs(data: DataFolder, *, models: str) -> Specs:
    """Return the specs of a deployment's games; `models` is the URL of its registry, if remote."""
    return (
        RegistrySpecs(open_deployment(data, models=models).registry)
        if models
        else SpecFolder(data.games)
    )


class RegistrySpecs:
    """Registered specs by game and schema; StorageFailed while the registry is unreachable.

    A spec is cached for good once it was read, since a schema never changes.
    """

    def __init__(self, registry: Registry, *, clock: Clock | None = None) -> None:
        self._registry = registry
        self._clock = clock or SystemClock()
        self._cache: dict[tuple[str, str], GameSpec] = {}
        self._games: frozenset[str] = frozenset()
        self._missed: dict[tuple[str, str], float] = {}
        """Time of the last failed lookup, by game and schema; schema "" is a lookup of the game."""

    def spec(self, game: str, schema: str) -> GameSpec | None:
        key = (game, schema)
        if key not in self._cache and not self._is_missing(key):
            # Read the clock before the registry: a spec registered meanwhile is visible after at
            # most a second.
            asked_s = self._clock.monotonic()
            if (spec := self._read(game, schema)) is None:
                self._miss(key, asked_s)
            else:
                self._cache[key] = spec
        return self._cache.get(key)

    def has_game(self, game: str) -> bool:
        key = (game, "")
        if game not in self._games and not self._is_missing(key):
            asked_s = self._clock.monotonic()
            self._games = frozenset(self._registry.games())
            if game not in self._games:
                self._miss(key, asked_s)
        return game in self._games

    def _read(self, game: str, schema: str) -> GameSpec | None:
        try:
            spec = self._registry.spec(game, schema)
        except (InvalidName, SpecError):
            return None
        return spec if spec is not None and (spec.game, spec.schema) == (game, schema) else None

    def _is_missing(self, key: tuple[str, str]) -> bool:
        return self._clock.monotonic() - self._missed.get(key, -MISS_S) < MISS_S

    def _miss(self, key: tuple[str, str], asked_s: float) -> None:
        if len(self._missed) >= _MOST_MISSES:
            self._missed.clear()
        self._missed[key] = asked_s
