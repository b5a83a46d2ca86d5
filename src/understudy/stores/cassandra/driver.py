"""cassandra-driver, imported in one place: a missing one is told with the command that installs it."""

from understudy.core.errors import MissingExtra

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
        ReadFailure,
        ReadTimeout,
        Unauthorized,
        Unavailable,
        UnresolvableContactPoints,
        WriteFailure,
        WriteTimeout,
    )
    from cassandra.auth import PlainTextAuthProvider
    from cassandra.cluster import EXEC_PROFILE_DEFAULT, Cluster, ExecutionProfile, NoHostAvailable, Session
    from cassandra.connection import ConnectionException, DefaultEndPoint, ProtocolError
    from cassandra.policies import (
        DCAwareRoundRobinPolicy,
        ExponentialReconnectionPolicy,
        FallthroughRetryPolicy,
        TokenAwarePolicy,
    )
    from cassandra.protocol import (
        ErrorMessage,
        IsBootstrappingErrorMessage,
        OverloadedErrorMessage,
        RequestValidationException,
        ServerError,
    )
    from cassandra.query import BatchStatement, BatchType
except DependencyException as error:
    raise MissingExtra(
        "cassandra-driver finds no event loop in this Python; pip install --force-reinstall cassandra-driver from a "
        "wheel, which brings libev"
    ) from error

__all__ = [
    "EXEC_PROFILE_DEFAULT", "AuthenticationFailed", "BatchStatement", "BatchType", "Cluster", "ConnectionException",
    "ConsistencyLevel", "DCAwareRoundRobinPolicy", "DefaultEndPoint", "DriverException", "ErrorMessage",
    "ExecutionProfile", "ExponentialReconnectionPolicy", "FallthroughRetryPolicy", "InvalidRequest",
    "IsBootstrappingErrorMessage", "NoHostAvailable", "OperationTimedOut", "OverloadedErrorMessage",
    "PlainTextAuthProvider", "ProtocolError", "ReadFailure", "ReadTimeout", "RequestValidationException", "ServerError",
    "Session", "TokenAwarePolicy", "Unauthorized", "Unavailable", "UnresolvableContactPoints", "WriteFailure",
    "WriteTimeout",
]  # fmt: skip
