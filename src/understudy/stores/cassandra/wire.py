"""The way to the servers: prepared statements, many requests on their way at once, tried again while that may help."""

import re
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from understudy.core.errors import Closed, ConfigError, MissingExtra, StorageFailed, Unreachable
from understudy.stores.cassandra.options import Options

try:
    from cassandra import DependencyException
except ImportError as error:
    raise MissingExtra(f"cassandra:// needs the package {error.name}; pip install 'understudy[cassandra]'") from error
try:
    from cassandra import (
        AuthenticationFailed,
        ConsistencyLevel,
        DriverException,
        InvalidRequest,
        OperationTimedOut,
        ReadTimeout,
        Unauthorized,
        Unavailable,
        UnresolvableContactPoints,
        WriteTimeout,
    )
    from cassandra.auth import PlainTextAuthProvider
    from cassandra.cluster import EXEC_PROFILE_DEFAULT, Cluster, ExecutionProfile, NoHostAvailable, Session
    from cassandra.connection import ConnectionException, DefaultEndPoint
    from cassandra.policies import (
        DCAwareRoundRobinPolicy,
        ExponentialReconnectionPolicy,
        FallthroughRetryPolicy,
        TokenAwarePolicy,
    )
    from cassandra.protocol import ErrorMessage, IsBootstrappingErrorMessage, OverloadedErrorMessage, ServerError
    from cassandra.query import BatchStatement, BatchType
except DependencyException as error:
    raise MissingExtra(
        "cassandra-driver finds no event loop in this Python; pip install --force-reinstall cassandra-driver from a "
        "wheel, which brings libev"
    ) from error


Row = Any
"""A named tuple."""
Statement = Any
Done = Callable[[list[Row] | None, BaseException | None], None]
Send = Callable[[Statement, Done], None]
"""How a request leaves; tests put themselves in between."""

_LATER = (
    NoHostAvailable, OperationTimedOut, WriteTimeout, ReadTimeout, Unavailable, ConnectionException,
    OverloadedErrorMessage, IsBootstrappingErrorMessage, ServerError,
)  # fmt: skip
_TABLE = re.compile(r"\b(FROM|INTO|UPDATE|TABLE|TABLE IF NOT EXISTS|TRUNCATE) ([a-z]+)\b")
_ROWS_A_PAGE = 500
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 2.0
SETTLE_S = 2.0
"""How long a refused login is tried again: a new server opens its port before it knows its first user."""


class Unsure(Exception):
    """Nobody knows whether a compare-and-set happened."""


class Wire:
    """One keyspace of one cluster; many threads may use it at once."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._closing = threading.Event()
        self._cluster, self.session = _connected(options)
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

    def qualified(self, cql: str) -> str:
        """A statement with the keyspace before its table, so that it means the same on every connection."""
        return _TABLE.sub(rf"\1 {self.options.keyspace}.\2", cql, count=1)

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
                _raise_for(error)
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
        """The answer to a compare-and-set, asked once; Unsure when none came that says yes or no."""
        answers: list[list[Row]] = [[]]
        failed = self._round([statement], [0], answers)
        if failed:
            if isinstance(failed[0], (InvalidRequest, Unauthorized)):
                _raise_for(failed[0])
            raise Unsure(_short(failed[0]))
        return answers[0][0]

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
        failed: dict[int, BaseException] = {}
        latch = _Latch(len(wanted))

        def done(index: int, rows: list[Row] | None, error: BaseException | None) -> None:
            if error is None:
                answers[index] = rows or []
            else:
                failed[index] = error
            self._slots.release()
            latch.count_down()

        for index in wanted:
            self._slots.acquire()
            try:
                self.send(statements[index], partial(done, index))
            except _LATER as error:
                done(index, None, error)
            except BaseException:
                self._slots.release()
                raise
        latch.wait()
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
            except (DriverException, NoHostAvailable, ErrorMessage) as error:
                _raise_for(error)
                self._pause(error, deadline, pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _pause(self, error: BaseException, deadline: float, pause_s: float) -> None:
        if time.monotonic() + pause_s > deadline:
            raise Unreachable(
                f"Cassandra at {places(self.options)} did not answer for {self.options.patience_s:g} s "
                f"({_short(error)}); nothing that was written since counts, try again when it is back"
            ) from error
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


class _Latch:
    """Wakes a waiter when a number of things are done."""

    def __init__(self, count: int) -> None:
        self._left, self._lock, self._event = count, threading.Lock(), threading.Event()
        if not count:
            self._event.set()

    def count_down(self) -> None:
        with self._lock:
            self._left -= 1
            if not self._left:
                self._event.set()

    def wait(self) -> None:
        # Every request has a time limit of its own, so each is done at some time.
        self._event.wait()


def places(options: Options) -> str:
    """The hosts, as text."""
    return ",".join(f"{name}:{port}" for name, port in options.hosts)


def _short(error: BaseException) -> str:
    errors = getattr(error, "errors", None)
    first = next(iter(errors.values())) if isinstance(errors, dict) and errors else error
    return " ".join(f"{type(first).__name__}: {first}".split())[:200]


def _raise_for(error: BaseException) -> None:
    """Raise what no second try makes right."""
    if isinstance(error, Unauthorized):
        raise ConfigError(f"Cassandra allows this user not enough: {error}; grant it, or give other credentials")
    if isinstance(error, InvalidRequest):
        raise StorageFailed(
            f"Cassandra refused a request: {error}; with tables of another version, run `understudy store migrate`"
        ) from error
    if not isinstance(error, _LATER):
        raise StorageFailed(f"Cassandra failed: {_short(error)}") from error


def _cluster(options: Options) -> Cluster:
    level = ConsistencyLevel.name_to_value[options.consistency]
    policy = TokenAwarePolicy(DCAwareRoundRobinPolicy(local_dc=options.datacenter))
    profile = ExecutionProfile(
        load_balancing_policy=policy, retry_policy=FallthroughRetryPolicy(), consistency_level=level,
        serial_consistency_level=ConsistencyLevel.LOCAL_SERIAL, request_timeout=options.timeout_s,
    )  # fmt: skip
    credentials = options.credentials
    return Cluster(
        contact_points=[DefaultEndPoint(name, port) for name, port in options.hosts],
        auth_provider=PlainTextAuthProvider(credentials.username, credentials.password) if credentials else None,
        ssl_context=_tls(options) if options.tls else None,
        execution_profiles={EXEC_PROFILE_DEFAULT: profile},
        reconnection_policy=ExponentialReconnectionPolicy(0.25, 5.0),
        connect_timeout=options.timeout_s,
        control_connection_timeout=options.timeout_s,
        idle_heartbeat_interval=15,
        compression=False,
        protocol_version=options.protocol,
    )


def _tls(options: Options) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=options.ca or None)
        if options.certificate:
            context.load_cert_chain(options.certificate, options.key or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"a TLS file of cassandra:// cannot be read: {error}; check ca, certificate and key"
        ) from None
    # Nodes are met by address; that they are ours is what the CA says.
    context.check_hostname = False
    return context


def _connected(options: Options) -> tuple[Cluster, Session]:
    """A session without a keyspace; one line says why there is none."""
    start, pause_s = time.monotonic(), 0.1
    while True:
        cluster = _cluster(options)
        try:
            return cluster, cluster.connect()
        except UnresolvableContactPoints as error:
            raise ConfigError(f"no host of {places(options)} has an address; check the host names") from error
        except (DriverException, NoHostAvailable, OSError) as error:
            cluster.shutdown()
            trouble = _refusal(error, options)
            patience_s = SETTLE_S if isinstance(trouble, ConfigError) else options.patience_s
            if time.monotonic() - start + pause_s > min(patience_s, options.patience_s):
                raise trouble from error
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _refusal(error: BaseException, options: Options) -> Exception:
    causes = list(error.errors.values()) if isinstance(error, NoHostAvailable) else [error]
    if any(isinstance(cause, AuthenticationFailed) for cause in causes):
        wanted = "check the credentials file" if options.credentials else "name a file: ?credentials=FILE"
        return ConfigError(f"Cassandra at {places(options)} refused the login; {wanted}")
    return Unreachable(
        f"Cassandra at {places(options)} cannot be reached ({_short(error)}); check the address and that it runs"
    )
