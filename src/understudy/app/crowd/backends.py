"""Backends for a demonstration: real servers on this machine, and a place of its own on each."""

import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from understudy.app.backends import create_stream, init_store, open_store, open_stream
from understudy.app.config import Config, GatewaySection, IngestSection, ModelsSection, StoreSection, StreamSection
from understudy.app.data import DataFolder
from understudy.core.errors import ConfigError
from understudy.core.game import GameSpec
from understudy.dev.recipes import BUCKET
from understudy.dev.servers import Server, default_folder, look, on_aws, on_host, start

STREAMS = {"file": "", "kinesis": "kinesalite", "kafka": "kafka"}
"""What stands behind each word; kinesalite bears more than kinesis-local and reshards less, which no demo does."""
STORES = {"local": "", "cassandra": "cassandra"}
MODELS = {"folder": "", "s3": "s3"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Backends:
    """What the loop runs on, by the words of `STREAMS`, `STORES` and `MODELS`, or by address."""

    stream: str = "file"
    store: str = "local"
    models: str = "folder"
    ingest: str = "native"

    def __post_init__(self) -> None:
        for name, known in (("stream", STREAMS), ("store", STORES), ("models", MODELS)):
            value = getattr(self, name)
            if value not in known and "://" not in value:
                raise ConfigError(f"--{name} is {value!r}; give one of {', '.join(known)}, or an address")
        if self.ingest == "spark" and self.store == "local":
            raise ConfigError(
                "--ingest spark writes with many processes, and a local store has one writer; give --store cassandra"
            )

    @property
    def servers(self) -> list[str]:
        """The servers that these words ask for."""
        wanted = [STREAMS.get(self.stream, ""), STORES.get(self.store, ""), MODELS.get(self.models, "")]
        return [name for name in wanted if name]


@contextmanager
def standing(backends: Backends, data: Path, scratch: Path, tell: Callable[[str], None]) -> Iterator[Config]:
    """The config of a platform on these backends; servers that were started for it end with it.

    On servers that ran already a stream, a keyspace and a folder stay, each named demo and a random mark. What cannot
    be opened is refused before anything is in the data folder.
    """
    if backends.ingest == "spark":
        from understudy.ingest.spark import require_spark  # late: seldom asked for

        require_spark()
    with ExitStack() as opened:
        servers = {name: _server(name, scratch, opened, tell) for name in backends.servers}
        mark = secrets.token_hex(4)
        stream, store = _stream(backends.stream, servers, mark), _store(backends.store, servers, mark)
        config = Config(
            data=str(data),
            gateway=GatewaySection(port=0, canary_share=0.5),
            stream=StreamSection(url=stream),
            store=StoreSection(url=store),
            models=ModelsSection(url=_models(backends.models, servers, mark)),
            ingest=IngestSection(engine="spark" if backends.ingest == "spark" else "native"),
        )
        _try(config)
        yield config


def _try(config: Config) -> None:
    """Open and close what lies elsewhere."""
    if config.stream.url:
        open_stream(config.stream.url, DataFolder(Path(config.data))).close()
    if config.store.url:
        open_store(config.store.url, specs=_NoSpecs()).close()


class _NoSpecs:
    """For a store to which nothing is written."""

    def spec(self, game: str, schema: str) -> GameSpec | None:
        return None

    def knows(self, game: str) -> bool:
        return False


def _server(name: str, scratch: Path, opened: ExitStack, tell: Callable[[str], None]) -> Server:
    """One that runs already, or a new one that ends with the loop."""
    found = look(name, default_folder())
    if found.state == "running" and found.server is not None:
        tell(f"{name} runs at {found.server.address}")
        return found.server
    tell(f"starting {name}")
    server = opened.enter_context(start(name, scratch / name))
    tell(f"{name} runs at {server.address} (process {server.pid})")
    return server


def _stream(word: str, servers: dict[str, Server], mark: str) -> str:
    if word == "kinesis":
        url = on_aws(servers["kinesalite"], "kinesis", f"demo-{mark}").url
    elif word == "kafka":
        url = on_host(servers["kafka"], "kafka", f"demo-{mark}").url
    else:
        return STREAMS.get(word, word)
    create_stream(url, partitions=2)
    return url


def _store(word: str, servers: dict[str, Server], mark: str) -> str:
    if word != "cassandra":
        return STORES.get(word, word)
    url = on_host(servers["cassandra"], "cassandra", f"demo_{mark}", replication="1").url
    init_store(url)
    return url


def _models(word: str, servers: dict[str, Server], mark: str) -> str:
    if word != "s3":
        return MODELS.get(word, word)
    return on_aws(servers["s3"], "s3", BUCKET, f"demo-{mark}").url
