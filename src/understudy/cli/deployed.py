"""The deployment that a command is about, and its store where that lies on other machines."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from understudy.backends.addresses import check_backends, open_store
from understudy.backends.data import DataFolder
from understudy.backends.deployment import Deployment, open_deployment, signing_key
from understudy.backends.specs import RegistrySpecs
from understudy.core.errors import ConfigError
from understudy.platform.config import Config, resolve
from understudy.ports import FullStore, Specs


def config_of(text: str | None, *, store_url: str | None = None) -> Config:
    """The config of a data folder, with `--store` where it was given."""
    return resolve({"data": text, "store.url": store_url}).config


def deployment(text: str | None, *, must_exist: bool = False) -> Deployment:
    """Keys and models of the data folder, as its config says; made where there are none, unless
    they must exist."""
    config = config_of(text)
    where = config.folder
    if must_exist and not signing_key(where).exists():
        raise ConfigError(
            f"{where.root} holds no deployment; start one with 'understudy up --data "
            f"{where.root}', or name another "
            "folder with --data"
        )
    return open_deployment(where, models=config.models.url)


def released_models(text: str | None, games: list[str]) -> list[str]:
    """The models of these games, as `rally/3`; none where there is no deployment."""
    config = config_of(text)
    if not signing_key(config.folder).exists():
        return []
    registry = open_deployment(config.folder, models=config.models.url).registry
    return [f"{game}/{number}" for game in games for number in registry.catalogue(game).models]


@dataclass(frozen=True, slots=True)
class OpenedStore:
    """A store on other machines, opened for one command."""

    data: DataFolder
    store: FullStore
    specs: Specs
    games: list[str]
    """Every game that is registered."""


@contextlib.contextmanager
def store_elsewhere(data_text: str | None, store_url: str | None) -> Iterator[OpenedStore | None]:
    """The store that a flag or the config names; None where it is in the data folder."""
    config = config_of(data_text, store_url=store_url)
    check_backends(stream="", store=config.store.url)
    if not config.store.url:
        yield None
        return
    registry = open_deployment(config.folder, models=config.models.url).registry
    specs = RegistrySpecs(registry)
    with contextlib.closing(open_store(config.store.url, specs=specs)) as store:
        yield OpenedStore(config.folder, store, specs, list(registry.games()))
