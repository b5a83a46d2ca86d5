"""Where ingest reads game specs: the data folder, or a remote registry."""

import contextlib

from understudy.backends.data import DataFolder, stored_schemas
from understudy.backends.deployment import open_deployment
from understudy.backends.local import open_file_stream, open_view
from understudy.core.clock import Clock, SystemClock
from understudy.core.errors import InvalidName, Refused, SpecError, UnderstudyError
from understudy.experience.chunk import chunk_of
from understudy.experience.frame import decode_frame
from understudy.experience.game import GameSpec
from understudy.ingest.specs import SpecFolder
from understudy.models.registry import Registry
from understudy.ports import Specs

MISS_S = 1.0
"""How long a failed lookup is cached: frames of an unknown schema cost one request a second."""
_MOST_MISSES = 4096
_PAGE_BYTES = 65_536


def registered_specs(data: DataFolder, *, models: str) -> Specs:
    """Return the specs of a deployment's games; `models` is the URL of its registry, if remote."""
    return (
        RegistrySpecs(open_deployment(data, models=models).registry)
        if models
        else SpecFolder(data.games)
    )


def games_without_spec(data: DataFolder, specs: Specs) -> list[str]:
    """Return the games of frames in quarantine or stream that cannot be stored without their spec.

    Only the first frames are read: a page of the quarantine, and one of each partition.
    """
    raws: list[bytes] = []
    with contextlib.suppress(UnderstudyError, OSError):  # `doctor` reports what is damaged
        if data.has_store():
            with open_view(data.store) as view:
                raws += [frame.raw for frame in view.quarantined()]
    with (
        contextlib.suppress(UnderstudyError, OSError),
        contextlib.closing(open_file_stream(data.stream)) as stream,
    ):
        for partition in stream.partitions():
            page = stream.read(partition.id, None, max_bytes=_PAGE_BYTES, wait_s=0.0)
            raws += [record.raw for record in page.records]
    stored = stored_schemas(data)
    games: set[str] = set()
    for raw in raws:
        with contextlib.suppress(Refused):
            meta = chunk_of(decode_frame(raw)).meta
            is_stored = meta.schema in stored.get(meta.game, ())
            if not is_stored and specs.spec(meta.game, meta.schema) is None:
                games.add(meta.game)
    return sorted(games)


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
