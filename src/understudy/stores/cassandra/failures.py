"""What the driver's errors mean: which pass by themselves, and what is said of those that do not."""

import re
import socket
from collections.abc import Mapping

from understudy.core.errors import ConfigError, StorageFailed, UnderstudyError, Unreachable
from understudy.stores.cassandra.driver import (
    AuthenticationFailed,
    ConnectionException,
    DriverException,
    ErrorMessage,
    InvalidRequest,
    IsBootstrappingErrorMessage,
    NoHostAvailable,
    OperationTimedOut,
    OverloadedErrorMessage,
    ProtocolError,
    ReadFailure,
    ReadTimeout,
    RequestValidationException,
    ServerError,
    Unauthorized,
    Unavailable,
    WriteFailure,
    WriteTimeout,
)
from understudy.stores.cassandra.options import Options

FAILED = (DriverException, NoHostAvailable, ErrorMessage, ConnectionException)
"""Whatever the driver raises."""
REFUSED = (InvalidRequest, RequestValidationException)
"""The server understood and does not want it."""
_PASSING = (
    NoHostAvailable, OperationTimedOut, WriteTimeout, ReadTimeout, Unavailable, ConnectionException, ReadFailure,
    WriteFailure, OverloadedErrorMessage, IsBootstrappingErrorMessage, ServerError,
)  # fmt: skip
_CAS_UNKNOWN = 0x1700
"""Code of a compare-and-set whose end the server does not know; the driver has no name for it."""

_SAID = re.compile(r'Error from server: code=\d+ \[[^\]]*\] message="(.*)"', re.DOTALL)
"""The driver's way to wrap what a server said."""


def places(options: Options) -> str:
    """The hosts, as text."""
    return ",".join(f"{name}:{port}" for name, port in options.hosts)


def listed(nodes: Mapping[str, int]) -> str:
    """How many nodes each datacenter has, as text."""
    return ", ".join(f"{count} in {name}" for name, count in sorted(nodes.items()))


def no_datacenter(name: str, nodes: Mapping[str, int]) -> ConfigError:
    """What is raised for a datacenter that a cluster does not have."""
    return ConfigError(f"this cluster has no datacenter {name!r}, its nodes are {listed(nodes)}; name one of those")


def short(error: BaseException) -> str:
    """An error in one line of at most 200 characters; the first of those that several hosts gave."""
    errors = getattr(error, "errors", None)
    first = next(iter(errors.values())) if isinstance(errors, dict) and errors else error
    text = str(first).rpartition("Last error: ")[2]  # the driver's way to wrap what a socket said
    if said := _SAID.search(text):
        return " ".join(said[1].split())[:200]
    return " ".join(f"{type(first).__name__}: {text}".split())[:200]


def is_passing(error: BaseException) -> bool:
    """Whether a second try may help."""
    return isinstance(error, _PASSING) or getattr(error, "code", None) == _CAS_UNKNOWN


def is_unknown_table(error: BaseException | None) -> bool:
    """Whether a server does not know a table, or not yet: it lists a new one a moment before it serves it."""
    return isinstance(error, REFUSED) and "does not exist" in str(error)


def lasting(error: BaseException) -> UnderstudyError | None:
    """What is raised for an error that no second try makes right; None when one may."""
    if isinstance(error, Unauthorized):
        return ConfigError(
            f"Cassandra allows this user not enough: {short(error)}; grant it, or give other credentials"
        )
    if isinstance(error, REFUSED):
        return StorageFailed(
            f"Cassandra refused a request: {short(error)}; with tables of another version, run `understudy store "
            "migrate`"
        )
    return None if is_passing(error) else StorageFailed(f"Cassandra failed: {short(error)}; its log says more")


def too_long(error: BaseException, options: Options) -> Unreachable:
    """What is raised when an error did not pass in time."""
    waited = f"for {options.patience_s:g} s"
    what = f"did not answer {waited} ({short(error)})"
    if isinstance(error, Unavailable):
        what = (
            f"had {error.alive_replicas} of the {error.required_replicas} copies at hand {waited} that "
            f"{options.consistency} needs"
        )
    return Unreachable(
        f"Cassandra at {places(options)} {what}; nothing that was written since counts, try again when its nodes are "
        "back"
    )


def refusal(error: BaseException, options: Options, nodes: Mapping[str, int]) -> UnderstudyError:
    """Why there is no connection, and what to do; `nodes` are those that were seen before it failed."""
    if nodes and options.datacenter and options.datacenter not in nodes:
        return no_datacenter(options.datacenter, nodes)
    # The driver gives no reasons, but hosts, when it was told to use none of them.
    reasons = getattr(error, "errors", None)
    causes = list(reasons.values()) if isinstance(reasons, dict) else [error]
    where = f"Cassandra at {places(options)}"
    if any(isinstance(cause, AuthenticationFailed) for cause in causes):
        wanted = "check the credentials file" if options.credentials else "name a file: ?credentials=FILE"
        return ConfigError(f"{where} refused the login; {wanted}")
    # Of an error of TLS, the driver leaves the text alone.
    text = " ".join(str(cause) for cause in causes)
    if "mismatch, certificate is not valid for" in text:
        return ConfigError(
            f"the certificate of {where} is for another name ({short(error)}); address nodes by names that their "
            "certificates hold, or add check_hostname=false when ca= signs certificates of these nodes alone"
        )
    if "CERTIFICATE_VERIFY_FAILED" in text:
        named = f"ca={options.ca}" if options.ca else "an authority of the system"
        return ConfigError(
            f"the certificate of {where} was not signed by {named} ({short(error)}); name who signed it: ca=FILE"
        )
    hint = "check the address and that it runs"
    if any(isinstance(cause, socket.gaierror) for cause in causes):
        hint = "check the host names"
    elif any(isinstance(cause, (OperationTimedOut, ProtocolError)) for cause in causes):
        hint = "check the port: whatever listens there does not answer as a Cassandra does"
        hint += "" if options.tls else ", or wants TLS: add tls=true&ca=FILE"
    elif "WRONG_VERSION_NUMBER" in text:
        hint = "it speaks no TLS on that port: give another one, or leave out tls, ca and certificate"
    elif not options.tls:
        hint += "; if it wants TLS, add tls=true&ca=FILE"
    elif not options.certificate:
        hint += "; if it asks for a certificate of ours, add certificate=FILE&key=FILE"
    return Unreachable(f"{where} cannot be reached ({short(error)}); {hint}")
