"""Where ingest finds game specs when they do not lie on its own disk: in the registry."""

from understudy.core.errors import InvalidName, SpecError, UnderstudyError
from understudy.core.game import GameSpec
from understudy.models.registry import Registry


class RegistrySpecs:
    """Registered specs by game and schema; found ones are remembered, since a schema never changes."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._known: dict[tuple[str, str], GameSpec] = {}

    def spec(self, game: str, schema: str) -> GameSpec | None:
        if (game, schema) not in self._known:
            try:
                self._known.update({(game, spec.schema): spec for spec in self._registry.specs(game)})
            except (InvalidName, SpecError):
                return None
        return self._known.get((game, schema))

    def knows(self, game: str) -> bool:
        try:
            return any(name == game for name, _ in self._known) or bool(self._registry.specs(game))
        except UnderstudyError:
            return False
