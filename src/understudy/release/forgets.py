"""What models and trainings have learned from players who were forgotten since."""

import bisect
import contextlib
import re
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import structlog

from understudy.core.errors import Corrupt
from understudy.core.log import storage_error
from understudy.models.catalogue import Catalogue
from understudy.models.manifest import number_of
from understudy.release.schedule import ALGORITHMS
from understudy.release.store_stats import StoreStats
from understudy.training.training_job import Checkpoints

_log = structlog.get_logger("understudy.learner")
_FOLDER = re.compile(rf"({'|'.join(ALGORITHMS)})-[0-9a-f]{{12}}(\.before|\.unusable-[0-9a-f]+)?")
"""The name of a folder of checkpoints."""


class Forgets:
    """The `forget` events that concern the models and checkpoints of one game."""

    def __init__(self, game: str, stats: StoreStats) -> None:
        self._game = game
        self._stats = stats
        self._deleted_at: tuple[Any, ...] = ()
        """The newest event and the folders in use when checkpoints were last deleted."""

    def of(self, now: Catalogue, schema: str) -> Mapping[int, int]:
        """The events of players of a schema, as `StoreStats.forgotten` has them.

        Includes those of the schemas that its champion's first weights are from.
        """
        champion = now.model_of("champion", schema)
        return self.behind(now, champion) if champion else self._of_schemas([schema])

    def behind(self, now: Catalogue, model_no: int) -> Mapping[int, int]:
        """The events of players of any schema that a model may have learned from."""
        every = self._stats.schemas.get(self._game, {})
        return self._of_schemas(schemas_learned(now, model_no, every))

    def _of_schemas(self, schemas: Iterable[str]) -> Mapping[int, int]:
        first_nos: dict[int, int] = {}
        for schema in schemas:
            for number, first_no in self._stats.forgotten(self._game, schema).items():
                first_nos[number] = min(first_no, first_nos.get(number, first_no))
        return first_nos

    def delete_checkpoints(self, folder: Path, *, in_use: Sequence[Path]) -> None:
        """Delete what trainings that do not continue have learned from forgotten players."""
        schemas = self._stats.schemas.get(self._game, {})
        forgotten = {schema: self._stats.forgotten(self._game, schema) for schema in schemas}
        state = (max(chain(*forgotten.values()), default=0), *in_use)
        if state == self._deleted_at or not state[0]:
            return
        try:
            deleted = delete_forgotten(folder, forgotten, in_use=in_use)
        except OSError as error:
            raise storage_error(error, f"deleting checkpoints in {folder}") from error
        for path in deleted:
            _log.info("checkpoints_deleted", game=self._game, folder=path.name, why="a forget")
        self._deleted_at = state


def delete_forgotten(
    folder: Path, forgotten: Mapping[str, Collection[int]], *, in_use: Container[Path]
) -> list[Path]:
    """Delete the checkpoints of trainings that may have learned from a player forgotten since.

    `forgotten`: arrival numbers of the `forget` events, by schema. `in_use`: folders of trainings
    that continue, which are not touched. Returns the folders whose checkpoints were deleted.
    """
    deleted = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path in in_use or not _FOLDER.fullmatch(path.name):
            continue
        facts: Mapping[str, Any] = {}
        with contextlib.suppress(Corrupt):
            checkpoint = Checkpoints(path).latest()
            facts = checkpoint.facts if checkpoint is not None else {}
        # Checkpoints of earlier versions and damaged ones name no schema: every event counts.
        # So it does if the first weights are of another schema.
        schema = "" if facts.get("started_from") else facts.get("schema", "")
        events = forgotten.get(schema, tuple(chain(*forgotten.values())))
        if facts.get("marks", {}).get("read_no", 0) < max(events, default=0):
            Checkpoints(path).delete()
            deleted.append(path)
    return deleted


def learned_before(now: Catalogue, model_no: int, forgotten: Mapping[int, int]) -> int:
    """The newest `forget` event of a player from whom a model may have learned; 0: there is none.

    It came after the model's training began, and the player's first steps before it ended.
    `forgotten`: the arrival numbers of these steps, 0 if not known, by those of such events. A
    model that did not learn from the store has learned from no player.
    """
    lineage = now.models[model_no].lineage
    if not lineage.cursor_to:
        return 0
    read_to = int(lineage.cursor_to)
    read_no = _read_no(now, model_no)
    return max(
        (
            number
            for number, first_no in forgotten.items()
            if number > read_no and first_no <= read_to
        ),
        default=0,
    )


def schemas_learned(now: Catalogue, model_no: int, every: Iterable[str]) -> set[str]:
    """The schemas of a model and of those from which its first weights are.

    `every`: all schemas of the game, which are returned if one of these models is lost.
    """
    schemas = set()
    while model_no in now.models:
        manifest = now.models[model_no]
        schemas.add(manifest.schema)
        started_from = manifest.lineage.config.get("started_from")
        if not started_from:
            return schemas
        model_no = number_of(started_from)
    return schemas.union(every)


def is_replacement(now: Catalogue, model_no: int, forgotten: Mapping[int, int]) -> bool:
    """Whether a model is the first one of its schema that was trained after a `forget`.

    It is if the champion was trained before that, and may have learned from the player.
    """
    return model_no in replacements(now, now.models[model_no].schema, forgotten)


def replacements(now: Catalogue, schema: str, forgotten: Mapping[int, int]) -> list[int]:
    """All models of a schema that `is_replacement` accepts, in order of their numbers."""
    champion = now.model_of("champion", schema)
    if not champion:
        return []
    event_nos = sorted(
        number
        for number, first_no in forgotten.items()
        if learned_before(now, champion, {number: first_no})
    )
    model_nos = []
    highest_no = 0
    for model_no in sorted(now.models):
        if now.models[model_no].schema != schema:
            continue
        read_no = _read_no(now, model_no)
        n_known = bisect.bisect_right(event_nos, read_no)
        if n_known and event_nos[n_known - 1] > highest_no:
            model_nos.append(model_no)
        highest_no = max(highest_no, read_no)
    return model_nos


def _read_no(now: Catalogue, model_no: int) -> int:
    """The highest arrival number that was read when a model's training began."""
    return int(now.models[model_no].lineage.config.get("read_no", 0))
