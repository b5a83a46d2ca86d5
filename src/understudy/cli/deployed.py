"""The deployment that a command works on, and its store if that is a remote database."""

import contextlib
import json
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from understudy.backends.addresses import check_backends, open_store
from understudy.backends.data import DataFolder
from understudy.backends.deployment import (
    Deployment,
    has_deployment,
    open_deployment,
    signing_key,
    spec_registry,
)
from understudy.backends.specs import RegistrySpecs
from understudy.core.errors import ConfigError
from understudy.core.wording import joined
from understudy.experience.intake import check_data_folder
from understudy.models.registry import Registry
from understudy.platform.config import Config, resolve
from understudy.ports import FullStore, Specs


def config_of(text: str | None, *, store_url: str | None = None) -> Config:
    """The config of a data folder; `store_url` overrides its store."""
    return resolve({"data": text, "store.url": store_url}).config


def deployment(text: str | None, *, must_exist: bool = False) -> Deployment:
    """The deployment of a data folder; if there is none, it is created, or must_exist raises."""
    return _deployment_of(config_of(text), must_exist=must_exist)


def _deployment_of(config: Config, *, must_exist: bool) -> Deployment:
    folder = config.folder
    check_data_folder(folder.root)
    if must_exist and not has_deployment(folder, models=config.models.url):
        raise ConfigError(
            f"{folder.root} contains no deployment; create one with 'understudy up --data "
            f"{folder.root}', or choose another folder with --data"
        )
    return open_deployment(folder, models=config.models.url)


def readable_registry(config: Config) -> Registry:
    """The registry of a data folder; where `up` never ran, one of specs only."""
    folder = config.folder
    is_recorded = folder.games.exists() or folder.store.exists() or folder.stream.exists()
    if is_recorded and not has_deployment(folder, models=config.models.url):
        check_data_folder(folder.root)
        return spec_registry(folder, models=config.models.url)
    return _deployment_of(config, must_exist=True).registry


def models_that_learned_from(
    text: str | None,
    first_steps: Mapping[str, Mapping[str, int] | None],
    earlier: Mapping[str, Collection[int]],
) -> list[str]:
    """The names of the models that may have learned from a player, such as `rally/3`.

    `first_steps`: the arrival numbers of the player's first steps, by game and schema; None if they
    are not known for a game. `earlier`: arrival numbers of earlier `forget` events, by game, after
    which nobody knows what was erased. A model from a run on the store counts, whenever that was.
    """
    config = config_of(text)
    if not signing_key(config.folder).exists():
        return []
    # Imported here: it takes a second.
    from understudy.release.forgets import learned_before, schemas_learned

    registry = open_deployment(config.folder, models=config.models.url).registry
    names = []
    for game, first_nos in first_steps.items():
        now = registry.catalogue(game)
        for model_no, manifest in now.models.items():
            learned = [0]
            if first_nos is not None:
                schemas = schemas_learned(now, model_no, first_nos)
                learned = [first_nos[schema] for schema in schemas if schema in first_nos]
            events = dict.fromkeys(earlier.get(game, ()), 0)
            if learned:
                # A `forget` event of now comes after every training.
                events[sys.maxsize] = min(learned)
            is_of_run = bool(manifest.lineage.config.get("from_store"))
            if events and (is_of_run or learned_before(now, model_no, events)):
                names.append(f"{game}/{model_no}")
    return names


def unreplaced_models(text: str | None, forgets: Mapping[str, Collection[int]]) -> list[str]:
    """The champions that may have learned from a player before one of these `forget` events.

    `forgets`: arrival numbers of the events, by game. Those count that the learner has recorded for
    a schema that the champion learned from; all of them, if it has not read them yet.
    """
    config = config_of(text)
    if not any(forgets.values()) or not signing_key(config.folder).exists():
        return []
    # Imported here: it takes a second.
    from understudy.release.forgets import learned_before, schemas_learned
    from understudy.release.store_stats import concerning

    state = {}
    with contextlib.suppress(OSError, ValueError):
        state = json.loads((config.folder.root / "learner" / "store_stats.json").read_bytes())
    registry = open_deployment(config.folder, models=config.models.url).registry
    names = []
    for game, numbers in forgets.items():
        now = registry.catalogue(game)
        every = state.get("schemas", {}).get(game, {})
        for champion in now.live("champion"):
            schemas = schemas_learned(now, champion.model_no, every)
            forgotten = concerning(state, numbers, game=game, schemas=schemas)
            if learned_before(now, champion.model_no, forgotten):
                names.append(f"{game}/{champion.model_no}")
    return names


def waiting_for_spec(games: list[str]) -> tuple[str, str]:
    """That recorded frames cannot be stored without their game's spec, and the next step."""
    advice = (
        "start the game, which registers it, or understudy games add GAME, then understudy data "
        "quarantine replay"
    )
    return f"frames of {joined(games)} lack their spec, so they are not stored", advice


@dataclass(frozen=True, slots=True)
class OpenedStore:
    """A remote store, opened for one command."""

    data: DataFolder
    store: FullStore
    specs: Specs
    games: list[str]
    """Every registered game."""


@contextlib.contextmanager
def remote_store(data_text: str | None, store_url: str | None) -> Iterator[OpenedStore | None]:
    """Open the remote store that a flag or the config names; None if the store is in the folder."""
    config = config_of(data_text, store_url=store_url)
    check_backends(stream="", store=config.store.url)
    if not config.store.url:
        yield None
        return
    registry = open_deployment(config.folder, models=config.models.url).registry
    specs = RegistrySpecs(registry)
    with contextlib.closing(open_store(config.store.url, specs=specs)) as store:
        yield OpenedStore(config.folder, store, specs, list(registry.games()))
