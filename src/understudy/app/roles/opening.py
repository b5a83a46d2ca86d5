"""Opening ingest where a config puts stream, store and games."""

from functools import partial

from understudy.app.backends import open_store, open_stream
from understudy.app.config import Config
from understudy.app.data import DataFolder
from understudy.app.deployment import open_deployment
from understudy.app.roles.ingest import RETENTION_S, IngestRole
from understudy.app.roles.remote_ingest import RemoteIngestRole
from understudy.app.specs import RegistrySpecs, registered_specs
from understudy.stores.local import LocalStore


def open_ingest(
    data: DataFolder, config: Config, *, retention_s: float = RETENTION_S, keep_s: float | None = None
) -> IngestRole | RemoteIngestRole:
    """The role between the stream and the store that a config names.

    `retention_s`: how long a stream in the data folder keeps what is stored; `keep_s`: how long a store in it does.
    """
    if not config.store.url:
        return open_own_ingest(data, config, retention_s=retention_s, keep_s=keep_s)
    specs = RegistrySpecs(open_deployment(data, models=config.models.url).registry)
    stream = partial(open_stream, config.stream.url, data)
    store = partial(open_store, config.store.url, specs=specs)
    return RemoteIngestRole(data, open_stream=stream, open_store=store, specs=specs, retention_s=retention_s)


def open_own_store(data: DataFolder, config: Config) -> LocalStore:
    """The data folder's own store, for whoever needs no stream: one elsewhere may not answer."""
    return LocalStore(data.store, specs=registered_specs(data, models=config.models.url))


def open_own_ingest(
    data: DataFolder, config: Config, *, retention_s: float = RETENTION_S, keep_s: float | None = None
) -> IngestRole:
    """The role into the data folder's own store, from wherever the config has the stream and the games."""
    specs = registered_specs(data, models=config.models.url)
    stream = partial(open_stream, config.stream.url, data)
    return IngestRole(data, specs=specs, open_stream=stream, retention_s=retention_s, keep_s=keep_s)
