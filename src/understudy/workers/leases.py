"""Leases: the place of each worker in the team, and the check of everything that it sends."""

import secrets
import uuid
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from understudy.act.chance import actor_session
from understudy.act.team import LOST_ACTORS, TeamPlan, collected_of
from understudy.core import tensors
from understudy.core.clock import Clock
from understudy.core.errors import Refused
from understudy.experience.builder import raw_name
from understudy.experience.chunk import (
    CUT_BYTES,
    OPTIONAL,
    REQUIRED,
    Chunk,
    EpisodeNote,
    RowKind,
)
from understudy.experience.game import GameSpec
from understudy.experience.spaces import MAX_NUMBER
from understudy.ingest.check import check_against_spec
from understudy.ports import Collected
from understudy.workers.wire import Task

MAX_LEASES = 4096
"""Of a run at a time: more than its settings allow actors."""
_FIRST_MESSAGE_S = 10.0
"""How long a new lease lasts at least; a shorter one would end before a slow network delivers."""
_NOTE_BYTES = 64
"""Of a round's metadata, for each episode, which has at least one step."""


@dataclass(slots=True, eq=False)
class Lease:
    """A worker's place in the team, while it has one."""

    id: str
    index: int
    incarnation: int
    first_env: int
    sessions: list[uuid.UUID]
    """One per env."""
    version: int
    """The newest version when it joined."""
    seen_s: float
    next_round: int = 0
    next_chunk: list[int] = field(default_factory=list)
    """By env: the number of its next chunk."""
    next_step: list[int] = field(default_factory=list)
    task: Task = "train"
    seeds: list[int] = field(default_factory=list)
    """Of its evaluation, if that is its task."""
    evaluated: list[int] = field(default_factory=list)
    """The seeds of the last results that were answered."""
    may_evaluate: bool = True
    n_repeats: int = 0
    """Requests that sent its last round again and wait for the ack."""


class Leases:
    """The leases of a run; for the event loop of its server only."""

    def __init__(self, plan: TeamPlan, *, lease_s: float, clock: Clock) -> None:
        self._plan = plan
        self._envs_each = plan.num_envs // plan.num_actors
        self.lease_s = lease_s
        self._clock = clock
        self._leases: dict[str, Lease] = {}
        self._joins: Counter[int] = Counter()

    def join(self, version: int) -> Lease:
        """A new lease with the lowest free index; a later lease of it has other sessions."""
        if len(self._leases) >= MAX_LEASES:
            raise Refused("busy", f"the run has {MAX_LEASES} workers; join when one has left")
        taken = {lease.index for lease in self._leases.values()}
        index = next(number for number in range(len(taken) + 1) if number not in taken)
        incarnation = self._plan.incarnation * LOST_ACTORS + self._joins[index]
        self._joins[index] += 1
        first_env = index * self._envs_each
        lease = Lease(
            id=secrets.token_hex(16),
            index=index,
            incarnation=incarnation,
            first_env=first_env,
            sessions=[
                actor_session(
                    self._plan.created_ms,
                    root_seed=self._plan.root_seed,
                    env=env,
                    incarnation=incarnation,
                )
                for env in range(first_env, first_env + self._envs_each)
            ],
            version=version,
            # Its first message may be late: the policy must arrive, and a round be played.
            seen_s=self._clock.monotonic() + max(0.0, _FIRST_MESSAGE_S - self.lease_s),
            next_chunk=[0] * self._envs_each,
            next_step=[0] * self._envs_each,
        )
        self._leases[lease.id] = lease
        return lease

    def find(self, lease_id: str) -> Lease:
        """The lease with this id, which was seen just now; Refused if there is none."""
        lease = self._leases.get(lease_id)
        if lease is None:
            raise Refused("join_again", "this worker has no lease, or was silent; join again")
        lease.seen_s = self._clock.monotonic()
        return lease

    def end(self, lease: Lease) -> None:
        """Free the lease's index; may be called twice."""
        self._leases.pop(lease.id, None)

    def expire(self) -> list[Lease]:
        """End the leases of silent workers, and return them."""
        now_s = self._clock.monotonic()
        silent = [each for each in self._leases.values() if now_s - each.seen_s > self.lease_s]
        for lease in silent:
            self.end(lease)
        return silent

    def by_task(self) -> dict[str, int]:
        """The number of workers with each task."""
        tasks: dict[str, int] = {"train": 0, "evaluate": 0}
        for lease in self._leases.values():
            tasks[lease.task] += 1
        return tasks


# --- The check of a round -------------------------------------------------------------------------


def read_round(raw: bytes | memoryview, *, game: GameSpec, max_steps: int) -> Collected:
    """The chunks and episodes of a round; Refused if the bytes are not such a round.

    The chunks are not checked themselves, except that together they have every row once. What is
    decoded is limited by the steps of a round, not only by its bytes: metadata needs many times its
    size in memory, and a slice of an empty column needs memory without having bytes.
    """
    max_header_bytes = tensors.MAX_HEADER_BYTES + _NOTE_BYTES * max_steps
    arrays, metadata = tensors.decode(raw, max_header_bytes=max_header_bytes)
    layout = {
        "rows": (np.int64, ()),
        "sessions": (np.uint8, (16,)),
        "numbers": (np.int64, (3,)),
        "returns": (np.float64, ()),
        "episodes": (np.int64, (3,)),
    }
    for name, (dtype, shape) in layout.items():
        array = arrays.get(name)
        if array is None or array.dtype != dtype or array.shape[1:] != shape or not array.ndim:
            raise Refused("bad_columns", f"{name!r} is missing, or is not {dtype.__name__}{shape}")
    rows = arrays["rows"]
    n_chunks = {len(arrays[name]) for name in ("rows", "sessions", "numbers")}
    columns = {name: array for name, array in arrays.items() if name.startswith("column.")}
    if len(n_chunks) > 1 or arrays.keys() - columns.keys() != layout.keys():
        raise Refused("bad_columns", "a round has columns of chunks, and five more; no others")
    if unknown := columns.keys() - _columns_of(game):
        raise Refused("bad_columns", f"{min(unknown)[:40]!r} is not known; leave it out")
    # A step has at most two rows: itself, and the observation after it.
    is_whole = len(rows) <= max_steps and (rows >= 2).all() and (rows <= 2 * max_steps).all()
    is_whole = is_whole and rows.sum() <= 2 * max_steps
    if not is_whole or any(
        array.ndim == 0 or len(array) != rows.sum() for array in columns.values()
    ):
        raise Refused(
            "bad_rows",
            f"the rows of all chunks do not add up to those of the columns, or {len(rows)} chunks "
            f"have more than {max_steps} steps",
        )
    if len(arrays["returns"]) != len(arrays["episodes"]) or "collected" not in metadata:
        raise Refused("bad_columns", "'returns' and 'episodes' differ, or the metadata is missing")
    try:
        return collected_of(arrays, metadata)
    except Refused:
        raise
    except (AttributeError, KeyError, TypeError, ValueError, OverflowError) as error:
        raise Refused("bad_metadata", f"the metadata is wrong: {str(error)[:120]}") from None


def _columns_of(game: GameSpec) -> set[str]:
    """The names of all columns that a round may have."""
    actions = game.action_columns
    named = (*REQUIRED, *OPTIONAL, "action_mask", *game.obs_columns, *actions)
    return {f"column.{name}" for name in (*named, *map(raw_name, actions))}


def check_round(collected: Collected, lease: Lease, game: GameSpec, *, newest: int) -> None:
    """Refused unless a round is valid: all of the game's spec, and of this lease in order.

    `newest`: the newest version. Nothing changes; `count_round` does that.
    """
    env_of = {session: env for env, session in enumerate(lease.sessions)}
    next_chunk = list(lease.next_chunk)
    next_step = list(lease.next_step)
    for chunk in collected.chunks:
        meta = chunk.meta
        env = env_of.get(meta.session)
        if env is None:
            raise Refused("wrong_session", f"session {meta.session} is not one of this lease")
        facts = (meta.schema, meta.kind, meta.consent, meta.client)
        if facts != (game.schema, "actor", "granted", ""):
            raise Refused("bad_metadata", "the chunk is of another schema, kind, consent or client")
        if (meta.chunk_no, meta.first_step) != (next_chunk[env], next_step[env]):
            raise Refused(
                "bad_metadata",
                f"chunk {meta.chunk_no} starts at step {meta.first_step}; expected chunk "
                f"{next_chunk[env]} at step {next_step[env]}",
            )
        next_chunk[env] += 1
        next_step[env] += meta.n_steps
        check_against_spec(chunk.validate(), game)
        if any(note != EpisodeNote(row=note.row, seed=note.seed) for note in meta.episodes):
            raise Refused("bad_metadata", "the notes of an actor's episodes have row and seed only")
        if chunk.size_bytes > CUT_BYTES:
            chunk.frame()  # the run's store must be able to keep it
        _check_version(chunk, oldest=lease.version, newest=newest)
    n_steps = sum(chunk.meta.n_steps for chunk in collected.chunks)
    if type(collected.env_steps) is not int or collected.env_steps != n_steps or not n_steps:
        raise Refused("bad_metadata", f"env_steps is {collected.env_steps}; expected {n_steps}")
    if len(collected.episodes) > n_steps:
        raise Refused(
            "bad_metadata", f"{len(collected.episodes)} episodes ended in {n_steps} steps"
        )
    for episode in collected.episodes:
        if not 0 <= episode.env - lease.first_env < len(lease.sessions):
            raise Refused("bad_metadata", f"an episode of env {episode.env} is not of this lease")
        played = next_step[episode.env - lease.first_env]
        if not 1 <= episode.length <= played:
            raise Refused(
                "bad_metadata",
                f"an episode has {episode.length} steps, but its env has played {played}",
            )
        if not abs(episode.return_) <= MAX_NUMBER:  # also for NaN
            raise Refused("bad_number", f"an episode returned {episode.return_}")


def _check_version(chunk: Chunk, *, oldest: int, newest: int) -> None:
    if "version" not in chunk.columns:
        raise Refused("bad_version", "the chunk does not name the version that played it")
    versions = chunk.columns["version"][chunk.columns["row"] == RowKind.STEP]
    low = int(versions.min())
    high = int(versions.max())
    if low < oldest or high > newest:
        raise Refused(
            "bad_version",
            f"the chunk names versions {low} to {high}, but this worker has received only "
            f"{oldest} to {newest}",
        )


def count_round(collected: Collected, lease: Lease) -> None:
    """Expect the chunks after those of this round."""
    env_of = {session: env for env, session in enumerate(lease.sessions)}
    for chunk in collected.chunks:
        env = env_of[chunk.meta.session]
        lease.next_chunk[env] += 1
        lease.next_step[env] += chunk.meta.n_steps
