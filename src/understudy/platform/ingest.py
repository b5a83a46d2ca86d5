"""The ingest role: moves frames from a stream to a store, with the native engine or with Spark.

A store in the data folder has one writer, this process, which also answers requests for it. A
remote store may have many writers, each with partitions of its own. With Spark the work is done in
tasks, which this process schedules.

Run as `python -m understudy.platform.ingest DATA [CONFIG]`, where CONFIG is the file that `up`
wrote. It prints its status as JSON lines. When its standard input closes, it stores the rest of the
stream and exits.
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from functools import partial
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

import structlog

from understudy.backends.addresses import open_store, open_stream
from understudy.backends.data import DataFolder
from understudy.backends.deployment import open_deployment, spec_registry
from understudy.backends.local import (
    as_local_store,
    file_stream_folders,
    file_stream_state,
    open_file_stream,
    open_local_store,
    trim_file_stream,
)
from understudy.backends.specs import RegistrySpecs, registered_specs
from understudy.core.errors import ConfigError, StorageFull, Unreachable
from understudy.core.log import FileLock, make_folder
from understudy.core.watch import FolderWatch
from understudy.core.wording import shortened
from understudy.experience.intake import check_data_folder, deployment_key
from understudy.ingest.check import check
from understudy.ingest.service import (
    BatchMark,
    IngestConfig,
    IngestService,
    log_not_drained,
    log_undrained_on_stop,
)
from understudy.ingest.spark import (
    Opened,
    SparkJob,
    SparkTasks,
    check_master,
    open_spark,
    require_spark,
)
from understudy.ingest.specs import SpecFolder
from understudy.platform.children import (
    log_to_stderr,
    report,
    reporting,
    run_role,
    stop_with_parent,
)
from understudy.platform.config import RETENTION_S, Config, check_spark_store
from understudy.platform.requests import Handler, handle_requests, remove_stale_answers
from understudy.ports import Candidate, FullStore, Specs, Stream

if TYPE_CHECKING:
    from understudy.stores.local import LocalStore

_log = structlog.get_logger("understudy.ingest")
REQUEST_EVERY_S = 0.05
TRIM_EVERY_S = 20.0
EXPIRE_EVERY_S = 600.0
_IDLE_S = 0.004
_WATCH_S = 0.05
"""How long a folder is watched before it is compared anyway: not every disk reports changes."""
_LOOK_S = 0.5
"""How often all partitions are read while nothing arrives."""
_TROUBLE_S = 1.0
DRAIN_S = 15.0
"""How long `understudy ingest` may take to store the rest of the stream when it stops."""
ROLE_DRAIN_S = 100.0
"""The same for the role that `up` runs, so that frames acknowledged last are stored; less than the
supervisor's limit, after which the role is killed."""


def _pause(stop: Event) -> None:
    stop.wait(_IDLE_S)


def repeat(step: Callable[[], int], stop: Event, *, wait: Callable[[Event], None] = _pause) -> None:
    """Call `step` until `stop` is set, with `wait` when idle and a longer pause on errors."""
    while not stop.is_set():
        try:
            moved = step()
        except StorageFull as error:
            _log.warning(
                "store_full", error=str(error), next="free some space; nothing acknowledged is lost"
            )
            stop.wait(_TROUBLE_S)
            continue
        except Unreachable as error:
            if not error.retry_helps:
                raise
            _log.warning(
                "unreachable",
                error=str(error),
                next="none: ingest retries; nothing acknowledged is lost",
            )
            stop.wait(_TROUBLE_S)
            continue
        if not moved:
            wait(stop)


def drain(service: IngestService, *, within_s: float) -> None:
    """Store the rest of the stream; what cannot be stored in time is left to the next start."""
    with log_undrained_on_stop():
        if not service.drain(within_s=within_s):
            log_not_drained("the stream holds more than can be stored in time")


class IngestRole:
    """A stream, a store and the service between them; a context manager."""

    def __init__(
        self,
        data: DataFolder,
        *,
        retention_s: float = RETENTION_S,
        keep_s: float | None = None,
        specs: Specs | None = None,
        open_stream: Callable[[], Stream] | None = None,
        open_store: Callable[[], FullStore] | None = None,
        spark: SparkTasks | None = None,
    ) -> None:
        """`retention_s`: how long a stream in the data folder keeps stored frames.

        `keep_s`: how long a store in the data folder keeps steps, or None for ever; `specs`: the
        registered games; `open_stream`, `open_store`: open backends outside the data folder;
        `spark`: runs the service's work as Spark tasks.
        """
        check_data_folder(data.root)
        self._data = data
        self._retention_s = retention_s
        self._keep_s = keep_s
        self._specs: Specs = specs or SpecFolder(data.games)
        self._is_embedded = open_store is None

        self._spark = spark
        with contextlib.ExitStack() as opened:
            if open_store is None:
                if not data.has_store():
                    # Created before the store: a folder with a store but no key is rejected.
                    deployment_key(data.root)
                # The store is opened first: its lock makes this process the only writer, so claims
                # can belong to the folder instead of a process.
                store = opened.enter_context(open_local_store(data.store, specs=self._specs))
                self._store: FullStore = store
                if isinstance(self._specs, SpecFolder):
                    _restore_specs(data, store, self._specs)
            else:
                make_folder(data.root)
                opened.callback(FileLock(data.root / "ingest.lock", what="ingest").close)
            stream = open_stream() if open_stream is not None else open_file_stream(data.stream)
            self._stream = opened.enter_context(contextlib.closing(stream))
            if open_store is not None:
                self._store = opened.enter_context(contextlib.closing(open_store()))
            owner = f"embedded@{socket.gethostname()}" if self._is_embedded else owner_of(data)
            mark = opened.enter_context(contextlib.closing(BatchMark(data.root / "ingest.batch")))
            self.service = IngestService(
                self._stream, self._store, self._specs, owner=owner, spread=spark, mark=mark
            )
            self._opened = opened.pop_all()
        self._next_requests_s = self._next_trim_s = self._next_expiry_s = 0.0
        self._watch = FolderWatch()
        self._opened.callback(self._watch.close)
        self._seen: Hashable | None = None
        """The state of the stream when the last step began."""

    @property
    def store(self) -> "LocalStore":
        """The data folder's own store."""
        return as_local_store(self._store)

    @property
    def is_running(self) -> bool:
        """Whether the engine has started; until then, an exit may be due to invalid settings."""
        return self._spark is None or self._spark.is_running

    def step(self) -> int:
        """Store new records, answer requests and trim the stream; return how many were moved."""
        now_s = time.monotonic()
        self._seen = self._state()
        if self._is_embedded:
            self._look_after_store(now_s)
        moved = self.service.step()
        if not self._is_embedded and now_s >= self._next_trim_s:
            self._next_trim_s = now_s + TRIM_EVERY_S
            trim_file_stream(self._stream, self.service.positions(), retention_s=self._retention_s)
        return moved

    def wait(self, stop: Event) -> None:
        """Wait until frames or requests have arrived since `step` began, or `stop` is set.

        Returns after `_LOOK_S` at the latest: a partition may have ended, or work may be due.
        """
        until_s = time.monotonic() + _LOOK_S
        if self._seen is None:
            _pause(stop)
        while self._seen is not None and not stop.is_set():
            # Watched before the state is compared, so that no change in between is missed.
            is_watched = self._watch.watch(self._folders())
            now_s = time.monotonic()
            if now_s >= until_s or self._state() != self._seen:
                return
            self.service.is_up_to_date(now_s)
            if is_watched:
                self._watch.wait(stop, _WATCH_S)
            else:
                _pause(stop)

    def _folders(self) -> Iterator[str]:
        """The folders that change when there is work."""
        yield from file_stream_folders(self._stream, without=self.service.ended)
        if self._is_embedded and self._data.requests.is_dir():
            yield str(self._data.requests)

    def _state(self) -> Hashable | None:
        """A value that changes when there is work; None if only `step` can tell."""
        state = None
        if self._spark is None:
            state = file_stream_state(self._stream, without=self.service.ended)
        if state is None or not self._is_embedded:
            return state
        with contextlib.suppress(FileNotFoundError):
            if any(name.endswith(".request") for name in os.listdir(self._data.requests)):
                return object()  # `step` answers it soon, but not in every call
        return state

    def _look_after_store(self, now_s: float) -> None:
        """Do the work that only the writer of a store in the data folder may do."""
        if now_s >= self._next_requests_s:
            self._next_requests_s = now_s + REQUEST_EVERY_S
            handle_requests(self._data.requests, self._handlers())
        if now_s >= self._next_trim_s:
            self._next_trim_s = now_s + TRIM_EVERY_S
            self.trim(self._retention_s)
            remove_stale_answers(self._data.requests, older_than_s=600.0)
            if self.store.is_erasing:
                self.store.erase()
        if self._keep_s is not None and now_s >= self._next_expiry_s:
            self._next_expiry_s = now_s + EXPIRE_EVERY_S
            expired = self.store.expire(time.time() - self._keep_s)
            _log.info("expired", chunks=expired)

    def run(self, stop: Event, *, drain_s: float = DRAIN_S) -> None:
        """Repeat `step` until `stop` is set, then store the rest within `drain_s`."""
        with log_undrained_on_stop(stop.is_set), self._running(stop):
            repeat(self.step, stop, wait=self.wait)
            drain(self.service, within_s=drain_s)

    def store_all(self) -> None:
        """Store everything that is in the stream now, and expire and trim once."""
        with self._running(Event()):
            self.service.drain()
            self.step()

    def _running(self, stop: Event) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._spark is None else self._spark.running(stop)

    def report(self) -> dict[str, Any]:
        """Return the role's figures for `status` and the metrics, as JSON fields."""
        stats = self.service.stats
        return {
            "stored": stats.steps,
            "lag_s": round(self.service.lag_s, 4),
            "fates": dict(stats.fates),
            "refusals": dict(stats.refusals),
            "storage_error": shortened(stats.error, 1000),
            **({} if self._spark is None else {"engine": "spark", **self.spark_figures()}),
        }

    def spark_figures(self) -> dict[str, Any]:
        """Return the URL of Spark's UI and figures of its last batch; empty without Spark."""
        return {} if self._spark is None else dict(self._spark.figures)

    def trim(self, retention_s: float) -> int:
        """Delete stored parts of a file stream older than `retention_s`; return the bytes freed."""
        freed = trim_file_stream(self._stream, self.store.positions(), retention_s=retention_s)
        if freed:  # partitions disappear only then
            self.store.mark()
            existing = {partition.id for partition in self._stream.partitions()}
            self.store.release([name for name in self.store.positions() if name not in existing])
        return freed

    def _handlers(self) -> Mapping[str, Handler]:
        """Return the handlers of requests that other processes send to the store's writer."""

        def barrier(_: Mapping[str, Any]) -> Mapping[str, Any]:
            self.service.drain()
            return {"arrival": self.store.next_arrival - 1, "pid": os.getpid()}

        def snapshot(request: Mapping[str, Any]) -> Mapping[str, Any]:
            self.snapshot(self._data.root / "snapshots" / Path(str(request["name"])).name)
            return {}

        def forget(request: Mapping[str, Any]) -> Mapping[str, Any]:
            return self.forget([bytes.fromhex(text) for text in request["players"]])

        return {
            "barrier": barrier,
            "forget": forget,
            "replay": lambda request: replay(self.store, self._specs, request.get("ids")),
            "snapshot": snapshot,
            "compact": lambda _: {"freed_bytes": self.store.compact(between=self.service.step)},
        }

    def snapshot(self, target: Path) -> None:
        """Copy the store after draining the stream; frames that arrive meanwhile are included."""
        self.service.drain()
        self.store.back_up(target, between=self.service.step)

    def forget(self, players: list[bytes]) -> dict[str, int | bool]:
        """Erase players by pseudonym; also deletes all stored frames from a file stream."""
        self.service.drain()
        chunks = sum(self.store.forget(player) for player in players)
        # Rejects frames of these players that arrived meanwhile, so that they are deleted too.
        self.service.drain()
        return {
            "chunks": chunks,
            "stream_bytes": self.trim(0.0),
            "is_erasing": self.store.is_erasing,
        }

    def close(self) -> None:
        self._opened.close()

    def __enter__(self) -> "IngestRole":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# --- opening the stream, the store and the games of a config --------------------------------------


def open_ingest(data: DataFolder, config: Config) -> IngestRole:
    """Open the role for the stream, the store and the engine that a config names."""
    spark = _spark_tasks(data, config) if config.ingest.engine == "spark" else None
    if not config.store.url:
        return open_own_ingest(data, config)
    specs = RegistrySpecs(open_deployment(data, models=config.models.url).registry)
    return IngestRole(
        data,
        specs=specs,
        open_stream=partial(open_stream, config.stream.url, data),
        open_store=partial(open_store, config.store.url, specs=specs),
        retention_s=config.ingest.retention_s,
        spark=spark,
    )


def open_own_ingest(data: DataFolder, config: Config) -> IngestRole:
    """Open ingest into the data folder's own store, with the config's stream and games."""
    specs = registered_specs(data, models=config.models.url)
    return IngestRole(
        data,
        specs=specs,
        open_stream=partial(open_stream, config.stream.url, data),
        retention_s=config.ingest.retention_s,
        keep_s=config.ingest.keep_days * 86_400 or None,
    )


def open_own_store(data: DataFolder, config: Config) -> "LocalStore":
    """Open the data folder's own store without the stream, which may be remote and unreachable."""
    check_data_folder(data.root)
    return open_local_store(data.store, specs=registered_specs(data, models=config.models.url))


def owner_of(data: DataFolder) -> str:
    """Return the owner of claims in a remote store: the folder, which one ingest at a time locks.

    After a crash, the next process has the same owner, so it need not wait until the claims expire.
    """
    return f"{data.root}@{socket.gethostname()}"


def _spark_tasks(data: DataFolder, config: Config) -> SparkTasks:
    check_spark_store(config)
    require_spark()
    only_here = ""
    if not config.models.url:
        only_here = "games are registered in the data folder (models.url)"
    if not config.stream.url:
        only_here = "the stream is in the data folder (stream.url)"
    master = config.ingest.master
    check_master(master, only_here=only_here)
    urls = {"stream": config.stream.url, "store": config.store.url, "models": config.models.url}
    address = json.dumps({"data": str(data.root.absolute()), **urls})
    job = SparkJob(
        opener="understudy.platform.ingest:open_in_task", address=address, owner=owner_of(data)
    )
    return SparkTasks(
        job, partial(open_spark, data.root / "spark", master=master, only_here=only_here)
    )


def open_in_task(address: str) -> Opened:
    """Open stream, store and specs in a Spark worker; `address`: their URLs as JSON, no secrets."""
    log_to_stderr()
    urls = json.loads(address)
    data = DataFolder(Path(urls["data"]))
    # A worker on another machine has no keys, and needs none to read a spec.
    specs = RegistrySpecs(spec_registry(data, models=urls["models"]))
    return open_stream(urls["stream"], data), open_store(urls["store"], specs=specs), specs


def _restore_specs(data: DataFolder, store: "LocalStore", specs: SpecFolder) -> None:
    """Write the specs that were removed or damaged again, from the copies in the store."""
    registry = spec_registry(data)
    for spec in store.stored_specs():
        if specs.spec(spec.game, spec.schema) is None:
            registry.register(spec)
            _log.warning("spec_restored", game=spec.game, schema=spec.schema)


# --- replaying quarantined frames -----------------------------------------------------------------


def replay(store: FullStore, specs: Specs, ids: list[int] | None) -> dict[str, int]:
    """Check quarantined frames again, store those that pass, and return counts; `ids` None: all."""
    for number in ids or ():
        page = store.quarantined(after_id=number - 1, limit=1)
        if not page or page[0].id != number:
            raise ConfigError(
                f"there is no frame {number} in quarantine, so nothing was replayed; see "
                "'understudy data quarantine list' for the numbers"
            )
    counts = {"tried": 0, "stored": 0, "still_refused": 0, "duplicates": 0}
    passed: list[tuple[int, Candidate]] = []
    decoded_bytes = 0
    after = 0

    def store_passed() -> None:
        receipt = store.replay([id_ for id_, _ in passed], [candidate for _, candidate in passed])
        counts["stored"] += sum(fate == "new" for fate in receipt.fates)
        counts["duplicates"] += sum(fate == "duplicate" for fate in receipt.fates)
        counts["still_refused"] += sum(fate in ("refused", "conflict") for fate in receipt.fates)
        passed.clear()

    while page := store.quarantined(after_id=after, limit=256):
        after = page[-1].id
        for frame in page:
            if ids is not None and frame.id not in ids:
                continue
            counts["tried"] += 1
            checked = check(frame.raw, specs=specs, received_s=frame.received_s)
            if checked.candidate is None:
                counts["still_refused"] += 1
                continue
            passed.append((frame.id, checked.candidate))
            if checked.candidate.chunk is not None:
                decoded_bytes += checked.candidate.chunk.size_bytes
            if decoded_bytes >= IngestConfig().max_decoded_bytes:
                store_passed()
                decoded_bytes = 0
        store_passed()
    return counts


# --- the role as a process of its own -------------------------------------------------------------


def main(data: DataFolder, config: Config) -> None:
    """Store frames until the parent requests a stop."""
    stop = stop_with_parent()
    with open_ingest(data, config) as role:
        # Until the first report, the parent treats the role as starting, and exit code 2 as
        # invalid settings.
        with reporting(lambda: role.report() if role.is_running else {}):
            role.run(stop, drain_s=ROLE_DRAIN_S)
        report(role.report())


if __name__ == "__main__":
    raise SystemExit(run_role(main))
