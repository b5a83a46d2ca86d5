"""The ingest role as a Spark job into a store on other machines; one job reads a whole stream."""

import contextlib
import hashlib
import socket
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

from understudy.app.backends import open_store, open_stream
from understudy.app.config import Config, check_spark_store
from understudy.app.data import DataFolder
from understudy.app.deployment import open_deployment
from understudy.app.roles.ingest import RETENTION_S, TRIM_EVERY_S, trim_own
from understudy.app.roles.spark_stream import OPENER, name_of, text_of
from understudy.app.specs import RegistrySpecs
from understudy.core.clock import SystemClock
from understudy.core.errors import ConfigError
from understudy.core.lock import FileLock
from understudy.core.log import make_folder
from understudy.ingest.draining import DRAIN_S
from understudy.ingest.service import IngestConfig
from understudy.ingest.spark import SparkIngest, SparkJob
from understudy.ingest.spark_session import Spark, check_master, is_local, open_spark, require_spark
from understudy.ingest.writer import Writer


class SparkIngestRole:
    """A stream, a store and the job between them; a context manager that closes them."""

    def __init__(self, data: DataFolder, config: Config, *, checkpoint: str = "") -> None:
        """`checkpoint`: where Spark notes how far it read, when not in the data folder."""
        check_spark_store(config)
        require_spark()
        check_master(config.ingest.master)
        _refuse_own_stream(config, config.ingest.master)
        make_folder(data.root)
        folder = data.root / "spark"
        job = SparkJob(
            opener=OPENER, address=text_of(config.stream.url, data), stream=name_of(config.stream.url, data),
            checkpoint=checkpoint or f"file://{folder.resolve()}/checkpoint-{_pair(data, config)}",
        )  # fmt: skip
        specs = RegistrySpecs(open_deployment(data, models=config.models.url).registry)
        with contextlib.ExitStack() as opened:
            opened.callback(FileLock(data.root / "ingest.lock", what="ingest").close)
            self._stream = opened.enter_context(contextlib.closing(open_stream(config.stream.url, data)))
            store = opened.enter_context(contextlib.closing(open_store(config.store.url, specs=specs)))
            # The owner is the folder, which the lock makes ours alone: after a crash the next job needs no patience.
            self._writer = Writer(
                store, specs, owner=f"{data.root}@{socket.gethostname()}", claim_ttl_s=IngestConfig().claim_ttl_s,
                clock=SystemClock(),
            )  # fmt: skip
            self._opened = opened.pop_all()
        self.service = SparkIngest(partial(_open_spark, folder, config), self._stream, self._writer, job=job)
        self._next_trim_s = 0.0

    def figures(self) -> dict[str, Any]:
        """What Spark says of itself: its page and its last batch."""
        last = self.service.figures()
        batch = {} if last is None else {"batch": last.batch, "batch_rows": last.rows, "batch_s": last.duration_s}
        return {"spark_ui": self.service.ui, **batch}

    def run(self, stop: Event, *, drain_s: float = DRAIN_S) -> None:
        """Let the job follow the stream until told to stop, then store what is still in it, for at most this long."""
        self.service.run(stop, self._trim, drain_s=drain_s)

    def _trim(self) -> None:
        """Delete stored parts of a stream of our own that are old, every now and then."""
        if time.monotonic() >= self._next_trim_s:
            self._next_trim_s = time.monotonic() + TRIM_EVERY_S
            positions = {name: held.position for name, held in dict(self._writer.held).items()}
            trim_own(self._stream, positions, retention_s=RETENTION_S)

    def close(self) -> None:
        self._opened.close()

    def __enter__(self) -> "SparkIngestRole":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def _open_spark(folder: Path, config: Config, stop: Event) -> Iterator[Spark]:
    with open_spark(folder, master=config.ingest.master, stop=stop) as spark:
        _refuse_own_stream(config, spark.master)  # the one that spark-submit named, where it did
        yield spark


def _refuse_own_stream(config: Config, master: str) -> None:
    if not config.stream.url and not is_local(master):
        raise ConfigError(
            f"the stream is in the data folder, which workers of {master} have not; give --stream, such as "
            "kafka://HOST/TOPIC, or --master local[2]"
        )


def _pair(data: DataFolder, config: Config) -> str:
    """A short name for a stream and a store together: for another pair a checkpoint means nothing."""
    pair = f"{name_of(config.stream.url, data)} {name_of(config.store.url, data)}"
    return hashlib.sha256(pair.encode()).hexdigest()[:12]
