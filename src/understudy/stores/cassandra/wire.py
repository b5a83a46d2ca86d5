"""The connection to Cassandra: addresses, cassandra-driver and its errors, prepared statements.

Addresses are `cassandra://HOST:PORT,HOST/KEYSPACE?option=value`. Many requests are in flight at
once, and transient errors are retried. An error of the driver is raised as one line: the driver's
message and the next step.
"""

import re
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any

from understudy.core.errors import (
    Closed,
    ConfigError,
    MissingExtra,
    StorageFailed,
    UnderstudyError,
    Unreachable,
)
from understudy.core.location import Credentials, Location, read_credentials

try:
    from cassandra import DependencyException
except ImportError as error:
    raise MissingExtra(
        f"cassandra:// needs the package {error.name}; pip install 'understudy[cassandra]'"
    ) from error
try:
    from cassandra import (
        AuthenticationFailed,
        ConsistencyLevel,
        DriverException,
        InvalidRequest,
        Unauthorized,
    )
    from cassandra.auth import PlainTextAuthProvider
    from cassandra.cluster import (
        EXEC_PROFILE_DEFAULT,
        Cluster,
        ExecutionProfile,
        NoHostAvailable,
        Session,
    )
    from cassandra.connection import ConnectionException, DefaultEndPoint
    from cassandra.policies import (
        DCAwareRoundRobinPolicy,
        ExponentialReconnectionPolicy,
        FallthroughRetryPolicy,
        TokenAwarePolicy,
    )
    from cassandra.protocol import ErrorMessage, RequestValidationException
    from cassandra.query import BatchStatement, BatchType
except DependencyException as error:
    raise MissingExtra(
        "cassandra-driver finds no event loop in this Python; pip install --force-reinstall "
        "cassandra-driver from a wheel, which includes libev"
    ) from error

Row = Any
"""A named tuple, as the driver returns it."""
Statement = Any
Done = Callable[[list[Row] | None, BaseException | None], None]
Send = Callable[[Statement, Done], None]
"""Sends a request and calls `Done` with its result; tests replace this function."""

_TABLE = re.compile(
    r"\b(FROM|INTO|UPDATE|TABLE|TABLE IF EXISTS|TABLE IF NOT EXISTS|TRUNCATE) ([a-z]+)\b"
)
_ROWS_A_PAGE = 500
_DEFINE_S = 120.0
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
FAILED = (DriverException, NoHostAvailable, ErrorMessage, ConnectionException)
"""The exceptions that the driver raises."""
REFUSED = (InvalidRequest, RequestValidationException)
"""The driver's exceptions for a request that the server rejected."""
_WRAPPED = re.compile(r'Error from server: code=\d+ \[[^\]]*\] message="(.*)"', re.DOTALL)
"""How the driver wraps a server's message."""
_LOGIN_RETRY_S = 2.0
"""How long a failed login is retried: a new server opens its port before it has its first user."""
PORT = 9042
_KNOWN = (
    "ca",
    "certificate",
    "check_hostname",
    "consistency",
    "credentials",
    "datacenter",
    "in_flight",
    "key",
    "protocol",
    "replication",
    "retry_s",
    "timeout_s",
    "tls",
    "ttl_s",
)
_CONSISTENCIES = ("ONE", "LOCAL_ONE", "QUORUM", "LOCAL_QUORUM", "EACH_QUORUM", "ALL")
_KEYSPACE = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,47}")


# --- addresses ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to connect to a keyspace, and how to write and read there."""

    hosts: tuple[tuple[str, int], ...]
    keyspace: str
    credentials: Credentials | None = None
    datacenter: str = ""
    """The datacenter whose nodes are used; empty: the one of the first host that responds."""
    consistency: str = "LOCAL_QUORUM"
    replication: Mapping[str, int] | int = 3
    """Replication factor, or one per datacenter; used only by `init`."""
    ttl_s: int | None = None
    """How long chunks are kept (0: forever). None: as before, and forever in a new keyspace. Used
    only by `init` and `migrate`."""
    tls: bool = False
    ca: str = ""
    certificate: str = ""
    key: str = ""
    check_hostname: bool = True
    """Whether a node's certificate must match the node's name or address."""
    retry_s: float = 20.0
    """How long a call is retried while no server responds."""
    timeout_s: float = 10.0
    """Timeout of one request."""
    protocol: int = 5
    """The version of the native protocol; 4 for older servers."""
    in_flight: int = 64
    """Most requests in flight at once."""

    @property
    def address(self) -> str:
        """The hosts with their ports as text, for error messages."""
        return ",".join(f"{name}:{port}" for name, port in self.hosts)


def read_options(location: Location) -> Options:
    """Parse a `cassandra://` address; ConfigError for an invalid option."""
    location.check_options(_KNOWN)
    if not location.hosts:
        raise ConfigError("cassandra:// has no host; write cassandra://HOST:PORT,HOST2/KEYSPACE")
    for host, port in location.hosts:
        if port == 0:
            raise ConfigError(
                f"port 0 of {host}:0 is not valid; use the port of a node, such as {host}:{PORT}"
            )
    if not _KEYSPACE.fullmatch(location.path):
        raise ConfigError(
            f"{location.path[:80]!r} is not a valid keyspace name; use 1 to 48 letters, digits and "
            f"_, with a letter first, such as cassandra://{location.hosts[0][0]}/understudy"
        )
    if location.path.lower().partition("_")[0] == "system":
        raise ConfigError(
            f"keyspace {location.path} is a system keyspace of Cassandra; use another name, such "
            "as understudy"
        )
    if location.text("key") and not location.text("certificate"):
        raise ConfigError("cassandra:// has a key but no certificate; add certificate=FILE")
    consistency = location.text("consistency", "LOCAL_QUORUM").upper()
    if consistency not in _CONSISTENCIES:
        raise ConfigError(
            f"consistency {consistency!r} is unknown; use one of {', '.join(_CONSISTENCIES)}"
        )
    credentials = location.text("credentials")
    return Options(
        hosts=tuple((name, PORT if port is None else port) for name, port in location.hosts),
        keyspace=location.path.lower(),
        credentials=read_credentials(credentials) if credentials else None,
        datacenter=location.text("datacenter"),
        consistency=consistency,
        replication=_replication(location.text("replication", "3")),
        ttl_s=location.integer("ttl_s", 7_776_000, most=630_000_000)
        if "ttl_s" in location.options
        else None,
        tls=location.flag("tls", default=bool(location.text("ca") or location.text("certificate"))),
        ca=location.text("ca"),
        certificate=location.text("certificate"),
        key=location.text("key"),
        check_hostname=location.flag("check_hostname", default=True),
        retry_s=location.number("retry_s", 20.0, least=0.0, most=3600.0),
        timeout_s=location.number("timeout_s", 10.0, least=0.1, most=600.0),
        protocol=location.integer("protocol", 5, least=4, most=5),
        in_flight=location.integer("in_flight", 64, least=1, most=4096),
    )


def _replication(text: str) -> Mapping[str, int] | int:
    """Parse the option replication: `3`, or `dc1:3,dc2:2`."""
    try:
        if text.isdigit() and 0 < int(text) < 1000:
            return int(text)
        pairs = [part.split(":") for part in text.split(",")]
        copies = {name: int(count) for name, count in pairs}
        if len(copies) < len(pairs):
            raise ConfigError(f"replication {text[:80]!r} has a datacenter twice; list it once")
    except ValueError:
        copies = {}
    if not copies or any(
        not 0 < count < 1000 or not re.fullmatch(r"[A-Za-z0-9_.-]+", name)
        for name, count in copies.items()
    ):
        raise ConfigError(
            f"replication {text[:80]!r} is not valid; use a number of copies, such as 3, or "
            "dc1:3,dc2:2"
        )
    return copies


# --- the driver --------------------------------------------------------------------------------


def connect(options: Options) -> tuple[Cluster, Session]:
    """Connect without selecting a keyspace; retries for up to `retry_s`, then raises."""
    start_s = time.monotonic()
    pause_s = 0.05
    while True:
        cluster = _cluster(options)
        try:
            return cluster, cluster.connect()
        except (*FAILED, OSError) as error:
            cluster.shutdown()
            failure = connection_error(error, options, nodes_of(cluster))
            is_login = isinstance(failure, ConfigError)
            retry_s = min(_LOGIN_RETRY_S, options.retry_s) if is_login else options.retry_s
            if time.monotonic() - start_s + pause_s > retry_s:
                raise failure from error
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 2.0)


def nodes_of(cluster: Cluster) -> Mapping[str, int]:
    """Number of nodes per datacenter, up or down; empty before the first connection."""
    return Counter(host.datacenter for host in cluster.metadata.all_hosts() if host.datacenter)


def _cluster(options: Options) -> Cluster:
    level = ConsistencyLevel.name_to_value[options.consistency]
    policy = TokenAwarePolicy(DCAwareRoundRobinPolicy(local_dc=options.datacenter))
    profile = ExecutionProfile(
        load_balancing_policy=policy,
        retry_policy=FallthroughRetryPolicy(),
        consistency_level=level,
        serial_consistency_level=ConsistencyLevel.LOCAL_SERIAL,
        request_timeout=options.timeout_s,
    )
    credentials = options.credentials
    return Cluster(
        contact_points=[DefaultEndPoint(name, port) for name, port in options.hosts],
        auth_provider=PlainTextAuthProvider(credentials.username, credentials.password)
        if credentials
        else None,
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
            f"cannot read a TLS file of cassandra://: {error}; check ca, certificate and key"
        ) from None
    context.check_hostname = options.check_hostname
    return context


def short_message(error: BaseException) -> str:
    """The driver's message, for the first host if there are several, in at most 200 characters."""
    errors = getattr(error, "errors", None)
    first = next(iter(errors.values())) if isinstance(errors, dict) and errors else error
    text = str(first).rpartition("Last error: ")[2]
    wrapped = _WRAPPED.search(text)
    return " ".join((wrapped[1] if wrapped else f"{type(first).__name__}: {text}").split())[:200]


def permanent_error(error: BaseException) -> UnderstudyError | None:
    """The error to raise when a retry does not help; None when it may."""
    if isinstance(error, Unauthorized):
        return ConfigError(
            f"the Cassandra user lacks permission: {short_message(error)}; grant it, or use other "
            "credentials"
        )
    if isinstance(error, REFUSED):
        return StorageFailed(
            f"Cassandra rejected a request: {short_message(error)}; check that its tables are as "
            "`understudy store init` created them"
        )
    return None


def timeout_error(error: BaseException, options: Options) -> Unreachable:
    """The error to raise when retries did not help in time."""
    return Unreachable(
        f"Cassandra at {options.address} did not respond for {options.retry_s:g} s "
        f"({short_message(error)}); nothing was acknowledged in that time; try again when enough "
        "of its nodes are up"
    )


def connection_error(
    error: BaseException, options: Options, nodes: Mapping[str, int]
) -> UnderstudyError:
    """The error for a failed connection; `nodes` counts the nodes found so far, by datacenter."""
    if nodes and options.datacenter and options.datacenter not in nodes:
        return unknown_datacenter_error(options.datacenter, nodes)
    # The driver lists hosts instead of reasons when its policy allows none of them.
    reasons = getattr(error, "errors", None)
    causes = list(reasons.values()) if isinstance(reasons, dict) else [error]
    what = f"cannot connect to Cassandra at {options.address} ({short_message(error)})"
    if any(isinstance(cause, AuthenticationFailed) for cause in causes):
        return ConfigError(f"{what}; check credentials=FILE, its user and password")
    if any("CERTIFICATE_VERIFY_FAILED" in str(cause) for cause in causes):
        return ConfigError(
            f"{what}; untrusted certificate: check ca=FILE, and that the certificate has this "
            "host's name, or see check_hostname in docs/cassandra.md"
        )
    return Unreachable(
        f"{what}; check host and port, that the server is running, and the options tls, ca, "
        "certificate and key"
    )


def unknown_datacenter_error(name: str, nodes: Mapping[str, int]) -> ConfigError:
    """The error for an unknown datacenter."""
    counts = ", ".join(f"{count} in {datacenter}" for datacenter, count in sorted(nodes.items()))
    return ConfigError(
        f"this cluster has no datacenter {name!r}, its nodes are {counts}; use one of those "
        "datacenters"
    )


# --- statements --------------------------------------------------------------------------------


class OutcomeUnknown(Exception):
    """It is unknown whether a compare-and-set was applied."""


class Wire:
    """A connection to one keyspace of one cluster; thread-safe."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._closing = threading.Event()
        self._cluster, self.session = connect(options)
        self._slots = threading.BoundedSemaphore(options.in_flight)
        self._prepared: dict[str, Any] = {}
        self._lock = threading.Lock()
        self.send: Send = self._send

    # --- binding ----------------------------------------------------------------------------------

    def bind(self, cql: str, *values: object) -> Statement:
        """Bind values to a statement; each statement is prepared once."""
        prepared = self._prepared.get(cql)
        if prepared is None:
            with self._lock:
                prepared = self._prepared.get(cql) or self._with_retries(
                    lambda: self.session.prepare(self.qualified(cql))
                )
                self._prepared[cql] = prepared
        return prepared.bind(values)

    def insert(
        self,
        table: str,
        columns: Mapping[str, object],
        *,
        at: int | None = None,
        ttl_s: int | None = None,
    ) -> Statement:
        """An INSERT, with an optional timestamp and time to live (0: forever)."""
        options = {"TIMESTAMP ?": at, "TTL ?": ttl_s}
        using = [name for name, value in options.items() if value is not None]
        cql = f"INSERT INTO {table} ({', '.join(columns)}) VALUES ({', '.join('?' * len(columns))})"
        if using:
            cql += f" USING {' AND '.join(using)}"
        return self.bind(cql, *columns.values(), *(options[name] for name in using))

    def qualified(self, cql: str) -> str:
        """Add the keyspace to the table name, so that any connection can run the statement.

        The keyspace is quoted, since its name may be a keyword of CQL.
        """
        return _TABLE.sub(rf'\1 "{self.options.keyspace}".\2', cql, count=1)

    def serial(self, cql: str, *values: object) -> Statement:
        """A query that finishes a pending compare-and-set first and sees its result."""
        bound = self.bind(cql, *values)
        bound.consistency_level = ConsistencyLevel.LOCAL_SERIAL
        return bound

    def batched(self, statements: Sequence[Statement]) -> Statement:
        """Combine statements of one Cassandra partition into one atomic write."""
        if len(statements) == 1:
            return statements[0]
        batch = BatchStatement(batch_type=BatchType.UNLOGGED)
        for statement in statements:
            batch.add(statement)
        return batch

    # --- running them -----------------------------------------------------------------------------

    def one(self, statement: Statement) -> Row | None:
        rows = self.all([statement])[0]
        return rows[0] if rows else None

    def all(self, statements: Sequence[Statement]) -> list[list[Row]]:
        """The rows of each statement, a few thousand at most; use `scan` for more.

        The statements must be idempotent, since they are retried. Unreachable after `retry_s`.
        """
        answers: list[list[Row]] = [[] for _ in statements]
        pending = list(range(len(statements)))
        deadline = time.monotonic() + self.options.retry_s
        pause_s = _FIRST_PAUSE_S
        while pending:
            failed = self._round(statements, pending, answers)
            pending = list(failed)
            for error in failed.values():
                self._raise_lasting(error)
            if pending:
                self._pause(next(iter(failed.values())), deadline, pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return answers

    def scan(self, statement: Statement) -> Iterator[Row]:
        """Every row, page by page."""
        state: bytes | None = None
        statement.fetch_size = _ROWS_A_PAGE
        while True:
            page = self._with_retries(partial(self.session.execute, statement, paging_state=state))
            yield from page.current_rows
            state = page.paging_state
            if state is None:
                return

    def change(self, statement: Statement) -> Row:
        """Run a compare-and-set once and return its row; OutcomeUnknown if it got no result."""
        answers: list[list[Row]] = [[]]
        failed = self._round([statement], [0], answers)
        if failed:
            if isinstance(failed[0], (Unauthorized, *REFUSED)):
                self._raise_lasting(failed[0])
            raise OutcomeUnknown(short_message(failed[0]))
        return answers[0][0]

    def define(self, cql: str) -> None:
        """Create or alter a keyspace or table with an idempotent statement."""
        try:
            self._with_retries(lambda: self.session.execute(self.qualified(cql), timeout=_DEFINE_S))
        except StorageFailed as error:
            if not isinstance(error.__cause__, REFUSED):
                raise
            raise ConfigError(
                f"Cassandra rejected a definition in keyspace {self.options.keyspace} "
                f"({short_message(error.__cause__)}); check replication, datacenter and ttl_s of "
                "the address, and that the server is Cassandra 5.0 or newer"
            ) from error.__cause__

    def nodes(self) -> Mapping[str, int]:
        """Number of nodes per datacenter, up or down."""
        return nodes_of(self._cluster)

    def post(self, statement: Statement) -> None:
        """Send a statement without waiting for its result; it may be lost without harm."""
        self._slots.acquire()
        try:
            self.send(statement, lambda rows, error: self._slots.release())
        except FAILED:
            self._slots.release()
        except BaseException:
            self._slots.release()
            raise

    def _round(
        self, statements: Sequence[Statement], indexes: Sequence[int], answers: list[list[Row]]
    ) -> dict[int, BaseException]:
        """Send the statements at `indexes`, up to `in_flight` at once; return the failures."""
        if self._closing.is_set():
            raise Closed("the store was closed")
        done: SimpleQueue[tuple[int, list[Row] | None, BaseException | None]] = SimpleQueue()

        def answered(index: int, rows: list[Row] | None, error: BaseException | None) -> None:
            self._slots.release()
            done.put((index, rows, error))

        for index in indexes:
            self._slots.acquire()
            try:
                self.send(statements[index], partial(answered, index))
            except FAILED as error:
                answered(index, None, error)
            except BaseException:
                self._slots.release()
                raise
        failed: dict[int, BaseException] = {}
        for _ in indexes:
            index, rows, failure = done.get()  # each request has its own timeout
            if failure is None:
                answers[index] = rows or []
            else:
                failed[index] = failure
        return failed

    def _send(self, statement: Statement, done: Done) -> None:
        future = self.session.execute_async(statement)
        future.add_callbacks(lambda rows: done(rows, None), lambda error: done(None, error))

    def _with_retries(self, call: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + self.options.retry_s
        pause_s = _FIRST_PAUSE_S
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
        """Raise if a retry does not help, or Closed if the store was closed."""
        if self._closing.is_set():
            raise Closed("the store was closed") from error
        if (failure := permanent_error(error)) is not None:
            raise failure from error

    def _pause(self, error: BaseException, deadline: float, pause_s: float) -> None:
        if time.monotonic() + pause_s > deadline:
            raise timeout_error(error, self.options) from error
        if self._closing.wait(pause_s):
            raise Closed("the store was closed")

    def wait(self, pause_s: float) -> None:
        """Sleep; raises Closed if the store is closed in the meantime."""
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
