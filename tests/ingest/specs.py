"""Specs in memory, for tests of ingest."""

from understudy.experience.game import GameSpec


class KnownSpecs:
    """The specs registered so far."""

    def __init__(self, *specs: GameSpec) -> None:
        self._specs = list(specs)

    def register(self, spec: GameSpec) -> None:
        self._specs.append(spec)

    def spec(self, game: str, schema: str) -> GameSpec | None:
        return next((one for one in self._specs if (one.game, one.schema) == (game, schema)), None)

    def has_game(self, game: str) -> bool:
        return any(one.game == game for one in self._specs)
