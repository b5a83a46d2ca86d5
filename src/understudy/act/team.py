"""Teams of actors: how envs are divided among them, and how their results and states are joined."""

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from understudy.act.actor import Actor
from understudy.act.vector import Envs
from understudy.core import tensors
from understudy.core.canonical import canonical_json, strict_json
from understudy.core.errors import ConfigError
from understudy.core.tensors import Array, arrays_under
from understudy.experience.chunk import Chunk, ChunkMeta, read_note
from understudy.experience.game import GameSpec
from understudy.nn.policy import Policy
from understudy.ports import Collected, PlayedEpisode

LOST_ACTORS = 1 << 20
"""More than the actors that any start of a run loses."""
_NO_SEED = -1
_SHARED = ("game", "schema", "kind", "consent", "client")
"""Metadata that all chunks of an actor share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeamPlan:
    """What the actors of a team are created from, in any process."""

    make_envs: Callable[[int], Envs]
    game: GameSpec
    root_seed: int
    created_ms: int
    """The start of the run; session ids are computed from it."""
    num_envs: int
    """The envs of all actors."""
    num_actors: int = 1
    incarnation: int = 0
    """How often the run restarted with new episodes."""
    owns_envs: bool = True
    """Whether the envs are closed with the team; those of a caller are not."""

    def __post_init__(self) -> None:
        if self.num_actors < 1 or self.num_envs % self.num_actors:
            raise ConfigError(
                f"{self.num_envs} envs cannot be divided among {self.num_actors} actors; give a "
                f"number of actors that divides {self.num_envs}, or another number of envs"
            )

    def envs_of(self, actor: int) -> slice:
        """The envs of an actor among those of the team."""
        n = self.num_envs // self.num_actors
        return slice(actor * n, (actor + 1) * n)

    def make_actor(self, actor: int, *, n_restarts: int = 0) -> Actor:
        """Create an actor; after each loss without a restore, it begins new sessions."""
        envs = self.envs_of(actor)
        return Actor(
            self.make_envs(envs.stop - envs.start),
            self.game,
            root_seed=self.root_seed,
            created_ms=self.created_ms,
            env_index0=envs.start,
            incarnation=self.incarnation * LOST_ACTORS + n_restarts,
        )


class LocalTeam:
    """Actors in this process, which play one after the other."""

    def __init__(self, plan: TeamPlan) -> None:
        self._plan = plan
        self._actors: list[Actor] = []
        try:
            for index in range(plan.num_actors):
                self._actors.append(plan.make_actor(index))
        except BaseException:
            self.close()
            raise

    @property
    def num_envs(self) -> int:
        return self._plan.num_envs

    def collect(
        self, policy: Policy, steps: int, *, round_no: int, explore: Any = None
    ) -> Collected:
        parts = explore_parts(explore, self._plan)
        return join_collected(
            [
                actor.collect(policy, steps, round_no=round_no, explore=part)
                for actor, part in zip(self._actors, parts, strict=True)
            ]
        )

    def state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        return join_states([actor.state() for actor in self._actors])

    def restore(self, arrays: Mapping[str, Array], facts: Mapping[str, Any]) -> None:
        states = split_state(arrays, facts, num_actors=self._plan.num_actors)
        for actor, state in zip(self._actors, states, strict=True):
            actor.restore(*state)

    def close(self) -> None:
        for actor in self._actors if self._plan.owns_envs else ():
            actor.close()


def explore_parts(explore: Any, plan: TeamPlan) -> list[Any]:
    """The `explore` of each actor: one number for all, or its part of one number per env."""
    if np.ndim(explore) == 0:
        return [explore] * plan.num_actors
    return [explore[plan.envs_of(actor)] for actor in range(plan.num_actors)]


# --- Joining --------------------------------------------------------------------------------------


def join_collected(parts: Sequence[Collected]) -> Collected:
    """The results of several actors, in their order."""
    return Collected(
        [chunk for part in parts for chunk in part.chunks],
        [episode for part in parts for episode in part.episodes],
        sum(part.env_steps for part in parts),
    )


State = tuple[Mapping[str, Array], Mapping[str, Any]]


def join_states(states: Sequence[State]) -> tuple[dict[str, Array], dict[str, Any]]:
    """The state of a team; that of a single actor stays as it is."""
    if len(states) == 1:
        arrays, facts = states[0]
        return dict(arrays), dict(facts)
    return (
        {
            f"actor{index}.{name}": array
            for index, (arrays, _) in enumerate(states)
            for name, array in arrays.items()
        },
        {"actors": [facts for _, facts in states]},
    )


def split_state(
    arrays: Mapping[str, Array], facts: Mapping[str, Any], *, num_actors: int
) -> list[State]:
    """The inverse of `join_states`; ConfigError if another number of actors saved the state."""
    all_facts = facts.get("actors", [facts])
    if len(all_facts) != num_actors:
        raise ConfigError(
            f"the state was saved by {len(all_facts)} actors, but this team has {num_actors}; "
            f"restore it with actors={len(all_facts)}"
        )
    if num_actors == 1:
        return [(arrays, facts)]
    return [
        (arrays_under(arrays, f"actor{index}"), actor_facts)
        for index, actor_facts in enumerate(all_facts)
    ]


# --- Collected as bytes: uncompressed, one array per column of all chunks -------------------------


def encode_collected(collected: Collected) -> bytes:
    """The bytes of an actor's result; its chunks have the same game, kind and columns."""
    chunks = collected.chunks
    columns: dict[str, Array] = {}
    shared: dict[str, str] = {}
    if chunks:
        shared = {name: getattr(chunks[0].meta, name) for name in _SHARED}
        for name in chunks[0].columns:
            columns[f"column.{name}"] = np.concatenate([chunk.columns[name] for chunk in chunks])
    metas = [chunk.meta for chunk in chunks]
    columns["rows"] = np.array([chunk.n_rows for chunk in chunks], np.int64)
    columns["sessions"] = np.frombuffer(
        b"".join(meta.session.bytes for meta in metas), np.uint8
    ).reshape(-1, 16)
    columns["numbers"] = np.array(
        [(meta.chunk_no, meta.first_step, meta.n_steps) for meta in metas], np.int64
    ).reshape(-1, 3)
    episodes = collected.episodes
    columns["returns"] = np.array([episode.return_ for episode in episodes], np.float64)
    columns["episodes"] = np.array(
        [
            (episode.env, episode.length, _NO_SEED if episode.seed is None else episode.seed)
            for episode in episodes
        ],
        np.int64,
    ).reshape(-1, 3)
    facts = {
        "shared": shared,
        "notes": [[note.to_json() for note in meta.episodes] for meta in metas],
        "env_steps": collected.env_steps,
    }
    return tensors.encode(columns, {"collected": canonical_json(facts).decode()})


def decode_collected(raw: bytes | memoryview) -> Collected:
    """The inverse of `encode_collected`; the columns of chunks are views of the bytes."""
    return collected_of(*tensors.decode(raw, max_header_bytes=len(raw)))


def collected_of(arrays: Mapping[str, Array], metadata: Mapping[str, str]) -> Collected:
    """An actor's result from the arrays and the metadata of its bytes."""
    facts = strict_json(metadata["collected"])
    columns = arrays_under(arrays, "column")
    ends = np.cumsum(arrays["rows"]).tolist()
    chunks = [
        Chunk(
            ChunkMeta(
                session=uuid.UUID(bytes=session.tobytes()),
                chunk_no=chunk_no,
                first_step=first_step,
                n_steps=n_steps,
                episodes=tuple(map(read_note, notes)),
                **facts["shared"],
            ),
            {name: column[start:end] for name, column in columns.items()},
        )
        for session, (chunk_no, first_step, n_steps), notes, start, end in zip(
            arrays["sessions"],
            arrays["numbers"].tolist(),
            facts["notes"],
            [0, *ends][: len(ends)],
            ends,
            strict=True,
        )
    ]
    episodes = [
        PlayedEpisode(env, return_, length, None if seed == _NO_SEED else seed)
        for return_, (env, length, seed) in zip(
            arrays["returns"].tolist(), arrays["episodes"].tolist(), strict=True
        )
    ]
    return Collected(chunks, episodes, facts["env_steps"])
