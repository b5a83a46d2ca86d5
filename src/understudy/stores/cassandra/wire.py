"""The way to the servers: prepared statements, many requests on their way at once, tried again while that may help."""

import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

from understudy.core.errors import Closed, ConfigError, StorageFailed
from understudy.stores.cassandra.driver import (
    FAILED,
    REFUSED,
    BatchStatement,
    BatchType,
    ConsistencyLevel,
    Unauthorized,
    connect,
    lasting,
    nodes_of,
    short,
    too_long,
)
from understudy.stores.cassandra.options import Options

Row = Any
"""A named tuple."""
Statement = Any
Done = Callable[[list[Row] | None, BaseException | None], None]
Send = Callable[[Statement, Done], None]
"""How a request leaves; tests put themselves in between."""

_TABLE = re.compile(r"\b(FROM|INTO|UPDATE|TABLE|TABLE IF EXISTS|TABLE IF NOT EXISTS|TRUNCATE) ([a-z]+)\b")
_ROWS_A_PAGE = 500
_DEFINE_S = 120.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0


class OutcomeUnknown(Exception):
    """Whether a compare-and-set happened is not known."""


class Wire:
    """One keyspace of one cluster; many threads may use it at once."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._closing = threading.Event()
        self._cluster, self.session = connect(options)
        self._slots = threading.BoundedSemaphore(options.in_flight)
        self._prepared: dict[str, Any] = {}
        self._lock = threading.Lock()
        self.send: Send = self._send

    # --- statements ---------------------------------------------------------------------------------------------

    def bind(self, cql: str, *values: object) -> Statement:
        """A statement with its values; each text is prepared once."""
        prepared = self._prepared.get(cql)
        if prepared is None:
            with self._lock:
                prepared = self._prepared.get(cql) or self._patient(lambda: self.session.prepare(self.qualified(cql)))
                self._prepared[cql] = prepared
        return prepared.bind(values)

    def insert(
        self, table: str, columns: Mapping[str, object], *, at: int | None = None, ttl_s: int | None = None
    ) -> Statement:
        """A row, with the timestamp and the time to live (0: for ever) that are given."""
        options = {"TIMESTAMP ?": at, "TTL ?": ttl_s}
        using = [name for name, value in options.items() if value is not None]
        cql = f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
        if using:
            cql += f" USING {' AND '.join(using)}"
        return self.bind(cql, *columns.values(), *(options[name] for name in using))

    def qualified(self, cql: str) -> str:
        """A statement with the keyspace before its table, so that it means the same on every connection.

        It is quoted, since it may be a word of CQL.
        """
        return _TABLE.sub(rf'\1 "{self.options.keyspace}".\2', cql, count=1)

    def serial(self, cql: str, *values: object) -> Statement:
        """A read that sees every compare-and-set that has ended, and ends one that was left half way."""
        bound = self.bind(cql, *values)
        bound.consistency_level = ConsistencyLevel.LOCAL_SERIAL
        return bound

    def together(self, statements: Sequence[Statement]) -> Statement:
        """Statements of one Cassandra partition as one write, all or none."""
        if len(statements) == 1:
            return statements[0]
        batch = BatchStatement(batch_type=BatchType.UNLOGGED)
        for statement in statements:
            batch.add(statement)
        return batch

    # --- running them ---------------------------------------------------------------------------------------------

    def one(self, statement: Statement) -> Row | None:
        rows = self.all([statement])[0]
        return rows[0] if rows else None

    def all(self, statements: Sequence[Statement]) -> list[list[Row]]:
        """The rows of each, a few thousand at most; `scan` is for more.

        All of them may be repeated without harm. Unreachable when that did not help in time.
        """
        answers: list[list[Row]] = [[] for _ in statements]
        left = list(range(len(statements)))
        deadline, pause_s = time.monotonic() + self.options.patience_s, _FIRST_PAUSE_S
        while left:
            failed = self._round(statements, left, answers)
            left = list(failed)
            for error in failed.values():
                self._raise_lasting(error)
            if left:
                self._pause(next(iter(failed.values())), deadline, pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return answers

    def scan(self, statement: Statement) -> Iterator[Row]:
        """Every row, page by page."""
        state: bytes | None = None
        statement.fetch_size = _ROWS_A_PAGE
        while True:
            page = self._patient(partial(self.session.execute, statement, paging_state=state))
            yield from page.current_rows
            state = page.paging_state
            if state is None:
                return

    def change(self, statement: Statement) -> Row:
        """The answer to a compare-and-set, asked once; OutcomeUnknown when none came that says yes or no."""
        answers: list[list[Row]] = [[]]
        failed = self._round([statement], [0], answers)
        if failed:
            if isinstance(failed[0], (Unauthorized, *REFUSED)):
                self._raise_lasting(failed[0])
            raise OutcomeUnknown(short(failed[0]))
        return answers[0][0]

    def define(self, cql: str) -> None:
        """Change keyspace or tables, by a statement that may be repeated."""
        try:
            self._patient(lambda: self.session.execute(self.qualified(cql), timeout=_DEFINE_S))
        except StorageFailed as error:
            if not isinstance(error.__cause__, REFUSED):
                raise
            raise ConfigError(
                f"Cassandra took no definition of keyspace {self.options.keyspace} ({short(error.__cause__)}); check "
                "replication, datacenter and ttl_s of the address, and that the server is Cassandra 5.0 or newer"
            ) from error.__cause__

    def nodes(self) -> Mapping[str, int]:
        """How many nodes each datacenter has, up or down."""
        return nodes_of(self._cluster)

    def post(self, statement: Statement) -> None:
        """Send one whose loss does no harm, and do not wait for it."""
        self._slots.acquire()
        try:
            self.send(statement, lambda rows, error: self._slots.release())
        except BaseException:
            self._slots.release()
            raise

    def _round(
        self, statements: Sequence[Statement], wanted: Sequence[int], answers: list[list[Row]]
    ) -> dict[int, BaseException]:
        """Send those that are wanted, as many at once as may be; what failed."""
        if self._closing.is_set():
            raise Closed("the store was closed")
        done: SimpleQueue[tuple[int, list[Row] | None, BaseException | None]] = SimpleQueue()

        def answered(index: int, rows: list[Row] | None, error: BaseException | None) -> None:
            self._slots.release()
            done.put((index, rows, error))

        for index in wanted:
            self._slots.acquire()
            try:
                self.send(statements[index], partial(answered, index))
            except FAILED as error:
                answered(index, None, error)
            except BaseException:
                self._slots.release()
                raise
        failed: dict[int, BaseException] = {}
        for _ in wanted:
            index, rows, trouble = done.get()  # each request has a time limit of its own
            if trouble is None:
                answers[index] = rows or []
            else:
                failed[index] = trouble
        return failed

    def _send(self, statement: Statement, done: Done) -> None:
        future = self.session.execute_async(statement)
        future.add_callbacks(lambda rows: done(rows, None), lambda error: done(None, error))

    def _patient(self, call: Callable[[], Any]) -> Any:
        deadline, pause_s = time.monotonic() + self.options.patience_s, _FIRST_PAUSE_S
        while True:
            if self._closing.is_set():
                raise Closed("the store was closed")
            try:
                return call()
            except FAILED as error:
                self._raise_lasting(error)
                self._pause(error, deadline, pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _raise_lasting(self, error: BaseException) -> None:
        """Raise for what no second try makes right."""
        if self._closing.is_set():
            raise Closed("the store was closed") from error
        if (trouble := lasting(error)) is not None:
            raise trouble from error

    def _pause(self, error: BaseException, deadline: float, pause_s: float) -> None:
        if time.monotonic() + pause_s > deadline:
            raise too_long(error, self.options) from error
        if self._closing.wait(pause_s):
            raise Closed("the store was closed")

    def wait(self, pause_s: float) -> None:
        """Let some time pass; Closed when the store is closed meanwhile."""
        if self._closing.wait(pause_s):
            raise Closed("the store was closed")

    @property
    def is_closed(self) -> bool:
        return self._closing.is_set()

    def close(self) -> None:
        self._closing.set()
        self._cluster.shutdown()

    def __enter__(self) -> "Wire":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
