"""The messages between a learner and its workers: a JSON head, and bytes behind it where needed.

    worker ── GET  /v1/runs ────────────────► RunInfo: how the game's envs are created
           ── POST /v1/runs/RUN/join ───────► JoinAnswer + policy
           ── POST /v1/runs/RUN/chunks ─────► RoundAnswer, once the chunks are in the replay
           ── GET  /v1/runs/RUN/weights ────► WeightsHead + policy, or 204
           ── POST /v1/runs/RUN/results ────► RoundAnswer
           ── POST /v1/runs/RUN/leave

Nothing is pickled. Both sides import this file, so it needs only the base install.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from understudy.core.canonical import canonical_json, strict_json
from understudy.core.errors import ConfigError, Refused

PORT = 4444
PROTOCOL = 1
"""Changes whenever a message does; worker and learner must have the same."""
BINARY = "application/vnd.understudy.worker"
KEY_VARIABLE = "UNDERSTUDY_WORKER_KEY"
MAX_HEAD_BYTES = 256 * 1024
MAX_POLICY_BYTES = 1 << 30
ROUNDS_PER_JOIN = 1 << 24
"""A worker's round numbers start at this multiple of its incarnation: no noise is drawn twice."""
_ALIGNMENT = 64
T = TypeVar("T")

Task = Literal["train", "evaluate"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunInfo:
    """A run that workers may join, and how its envs are created."""

    run: str
    game: str | None
    """An id of Gymnasium; None if the learner's game is an object that has no name."""
    name: str
    env_kwargs: dict[str, Any] = field(default_factory=dict)
    wrappers: list[str] = field(default_factory=list)
    frame_skip: int = 1
    num_envs: int = 1
    """Envs of each worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinRequest:
    """What a worker is: its versions, its game's spec as JSON, and the names of its wrappers."""

    protocol: int
    understudy: str
    spec: str
    wrappers: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinAnswer:
    """A worker's lease: its place in the team, and what its actor is created from."""

    lease: str
    index: int
    incarnation: int
    """Differs between any two leases of the index, and so do sessions, seeds and noise."""
    first_env: int
    num_envs: int
    steps: int
    """Steps per env and round."""
    root_seed: int
    created_ms: int
    lease_s: float
    """A worker that is silent for longer loses its lease."""
    explore: list[float] | float | None
    version: int
    max_steps: int
    """Steps after which an evaluation cuts an episode of a game without a limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundHead:
    """The head of a round's chunks."""

    lease: str
    number: int
    """0 for the first round of the lease; the next one differs by 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundAnswer:
    """What a worker does next; as an ack of chunks: they are in the replay."""

    task: Task
    seeds: list[int]
    """Held-out seeds of the episodes to evaluate; empty for the task train."""
    explore: list[float] | float | None
    version: int
    """The newest version."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """The returns of a greedy policy on the seeds of its task."""

    lease: str
    version: int
    seeds: list[int]
    returns: list[float]
    """Empty: this worker cannot evaluate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leave:
    """A worker's last message."""

    lease: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsHead:
    """The head of a policy."""

    version: int


def pack(head: Any, body: bytes = b"") -> bytes:
    """The bytes of a head and a body, which starts at a multiple of 64."""
    text = canonical_json(asdict(head))
    text += b" " * (-(4 + len(text)) % _ALIGNMENT)
    return b"".join([len(text).to_bytes(4, "little"), text, body])


def unpack(raw: bytes) -> tuple[bytes, memoryview]:
    """The head as JSON text, and the body; Refused if they are cut."""
    length = int.from_bytes(raw[:4], "little")
    if length > min(MAX_HEAD_BYTES, len(raw) - 4):
        raise Refused(
            "bad_body",
            f"a head of {length} bytes in {len(raw)}; expected its length in 4 bytes, then it",
        )
    return raw[4 : 4 + length], memoryview(raw)[4 + length :]


def read_object(kind: type[T], text: bytes) -> T:
    """The object in an answer; Refused if it is not one of this kind.

    For the worker, which trusts its learner's types: the learner checks them with msgspec.
    """
    fields = strict_json(text)
    if not isinstance(fields, Mapping):
        raise Refused("bad_body", f"expected an object, got {str(fields)[:40]}")
    try:
        return kind(**fields)
    except TypeError as error:
        raise Refused("bad_body", f"not a {kind.__name__}: {error}") from None


def read_key(path: Path) -> str:
    """The key in a file; ConfigError if it cannot be read."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(
            f"the key file {path} cannot be read: {reason}; pass the file with the workers' key"
        ) from None
    if not text:
        raise ConfigError(f"the key file {path} is empty; pass the file with the workers' key")
    return text


def key_in(environ: Mapping[str, str]) -> tuple[str, str]:
    """The workers' key in the environment, and where it is; both empty without one."""
    if text := environ.get(KEY_VARIABLE, "").strip():
        return text, KEY_VARIABLE
    if file := environ.get(f"{KEY_VARIABLE}_FILE"):
        return read_key(Path(file)), file
    return "", ""


def worker_command(url: str, *, game: str | None, wrappers: Sequence[str]) -> str:
    """The command that joins a run.

    A worker imports only what its own command line names, so this names modules.
    """
    words = ["understudy", "worker", url]
    if game is None or ":" in game:
        words += ["--game", game or "MODULE:FUNCTION"]
    for wrapper in wrappers:
        words += ["--env-wrapper", wrapper]
    return shlex.join(words)
