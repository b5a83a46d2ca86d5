"""Game specs in a local folder, for ingest: FOLDER/<game>/<schema>.json."""

from pathlib import Path

from understudy.core.errors import InvalidName, SpecError
from understudy.core.names import game_name
from understudy.experience.game import GameSpec, spec_from_json


class SpecFolder:
    """Registered specs by game and schema; cached, since a schema never changes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._cache: dict[tuple[str, str], GameSpec] = {}

    def spec(self, game: str, schema: str) -> GameSpec | None:
        key = (game, schema)
        if key not in self._cache:
            try:
                path = self._folder / game_name(game) / f"{int(schema, 16):064x}.json"
                spec = spec_from_json(path.read_bytes())
            except (FileNotFoundError, InvalidName, SpecError, ValueError):
                return None
            if spec.schema != schema:
                return None
            self._cache[key] = spec
        return self._cache[key]

    def has_game(self, game: str) -> bool:
        try:
            return (self._folder / game_name(game)).is_dir()
        except InvalidName:
            return False
