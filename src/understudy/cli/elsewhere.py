"""Commands on a store that lies on other machines."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import click

from understudy.app.backends import check_backends, open_store
from understudy.app.data import DataFolder
from understudy.app.deployment import open_deployment
from understudy.app.specs import RegistrySpecs
from understudy.cli.deployed import config_of
from understudy.cli.options import Command
from understudy.core.ports import FullStore, Specs


def store_option(command: Command) -> Command:
    """`--store URL`, else the deployment's own."""
    return click.option(
        "--store", "store_url", metavar="URL",
        help="cassandra://HOST:PORT/KEYSPACE, or local (default: the deployment's own).",
    )(command)  # fmt: skip


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
