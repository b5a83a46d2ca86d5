"""Actor: plays a policy in a vector env and hands back what happened, as chunks of one session per env.

Everything an actor does is a function of its root seed, the rounds it was asked for and the policies it was given:
episode seeds and noise are computed, never drawn from a state. So open episodes can be rebuilt (see `rebuild.py`).
"""

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from understudy.act.chance import actor_session, noise_rng
from understudy.act.episodes import EpisodeEnded, Standing, count
from understudy.act.live import LiveEnvs
from understudy.act.priorities import best_value, n_step_td, q_of
from understudy.act.rebuild import rebuild
from understudy.act.seeds import EpisodeSeeds
from understudy.act.tape import Cut, Tape
from understudy.act.vector import Envs
from understudy.core.chunk import Chunk, ChunkMeta
from understudy.core.errors import ConfigError
from understudy.core.game import GameSpec
from understudy.core.heads import Decision
from understudy.core.policy import Policy
from understudy.core.tensors import Array, part

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Collected:
    """What one collect brought: chunks env by env, and the episodes that ended, in the order they did."""

    chunks: list[Chunk]
    episodes: list[EpisodeEnded]
    env_steps: int


class Actor:
    """Steps envs with a policy; not thread-safe."""

    def __init__(
        self, envs: Envs, game: GameSpec, *, root_seed: int, created_ms: int, env_index0: int = 0, incarnation: int = 0,
        client: str = "",
    ) -> None:  # fmt: skip
        """`created_ms` (when the run began), root seed, env and incarnation make the sessions' ids."""
        self.game, self.num_envs, self.root_seed, self.env_index0 = game, envs.num_envs, root_seed, env_index0
        self.sessions: list[uuid.UUID] = [
            actor_session(created_ms, root_seed=root_seed, env=env_index0 + env, incarnation=incarnation)
            for env in range(envs.num_envs)
        ]
        self._live, self._client = LiveEnvs(envs, game), client
        self._tape: Tape | None = None
        self._schema = game.schema
        self._chunk_no = self._first_step = 0
        self._seeds = EpisodeSeeds(
            root_seed,
            incarnation=incarnation,
            first_env=env_index0,
            num_envs=self.num_envs,
            prepare=getattr(envs, "prepare", None),
        )
        self._seed = np.zeros(self.num_envs, np.int64)  # of the open episodes
        self._standing = Standing(np.zeros(self.num_envs), np.zeros(self.num_envs, np.int64))
        self._open_actions: list[list[Array]] = [[] for _ in range(self.num_envs)]
        space = game.action_columns["action"]
        self._no_actions = np.empty((0, *space.shape), space.dtype)

    def collect(
        self, policy: Policy, steps: int, *, round_no: int, explore: Any = None, deterministic: bool = False
    ) -> Collected:
        """`steps` steps of every env; `explore` is epsilon, one or one for each env. Each round has its own number."""
        if steps < 1 or policy.game.schema != self.game.schema:
            raise ConfigError(
                f"{steps} steps of {policy.game.game}; give at least 1, and a policy for this actor's {self.game.game}"
            )
        # A game's odd numbers are the replay's to refuse; a warning at every step would only bury its answer.
        with np.errstate(all="ignore"):
            return self._collect(policy, steps, round_no, explore=explore, deterministic=deterministic)

    def _collect(
        self, policy: Policy, steps: int, round_no: int, *, explore: Any, deterministic: bool
    ) -> Collected:  # fmt: skip
        self._make_ready(policy)
        tape = self._fresh_tape(policy, steps)
        noise = None if deterministic else self._noise(policy, steps, round_no)
        how = {"explore": explore, "legal": self._live.legal, "deterministic": deterministic}
        self._play(Play(policy, noise, how), tape)
        is_first = np.concatenate([self._standing.length[None] == 0, tape.ended[:-1]])
        priority = None if tape.q is None else _priority(policy, tape, last=self._live)
        cuts = tape.rows(is_first=is_first, version=policy.version, priority=priority)
        n_chunks = len(cuts) // self.num_envs
        chunks = [self._chunk(cut, number % n_chunks) for number, cut in enumerate(cuts)]
        self._first_step += steps
        self._chunk_no += n_chunks
        self._keep_open_actions(tape)
        return Collected(chunks, self._episodes(tape), steps * self.num_envs)

    # --- Playing ----------------------------------------------------------------------------------------------------

    def _make_ready(self, policy: Policy) -> None:
        if not self._live.obs:
            self._seed = self._seeds.take(np.arange(self.num_envs))
            self._live.reset(self._seed.tolist())
        self._live.check_masks()
        self._live.keep_stacks(policy.stack)

    def _play(self, play: "Play", tape: Tape) -> None:
        live = self._live
        for t in range(tape.steps):
            _write(tape, t, live)
            decision = play.decide(live, tape, t)
            action = live.actions(decision.action)
            tape.action[t], tape.logp[t] = action, decision.logp
            if tape.raw_action is not None:
                tape.raw_action[t] = decision.raw_action.reshape(tape.raw_action.shape[1:])
            reward, terminated, truncated = live.step(action)
            tape.reward[t], tape.terminated[t], tape.truncated[t] = reward, terminated, truncated
            ended = terminated | truncated
            if np.count_nonzero(ended):  # a tenth of the cost of any()
                self._end(tape, ended)
            if tape.legal is not None:
                live.check_masks()
        _write(tape, tape.steps, live)
        tape.close()

    def _end(self, tape: Tape, ended: Flags) -> None:
        """Keep what was last seen of the episodes that ended, and begin the next ones."""
        live, envs = self._live, ended.nonzero()[0]
        inputs = {} if tape.q is None else {name: rows[envs] for name, rows in live.inputs.items()}
        seeds = self._seeds.take(envs)
        tape.ending.append((seeds, live.seen(envs), inputs))
        self._seed[envs] = seeds
        live.reset(self._seed.tolist(), ended)

    def _noise(self, policy: Policy, steps: int, round_no: int) -> Array | None:
        rng = noise_rng(self.root_seed, env=self.env_index0, round_no=round_no)
        noise = policy.head.noise(rng, steps * self.num_envs)
        return None if noise is None else noise.reshape(steps, self.num_envs, *noise.shape[1:])

    # --- Handing over -----------------------------------------------------------------------------------------------

    def _fresh_tape(self, policy: Policy, steps: int) -> Tape:
        has_raw, q_size = not policy.head.is_discrete, policy.head.size if policy.priority else 0
        tape = self._tape
        if tape is None or not tape.fits(steps, has_raw=has_raw, q_size=q_size):
            tape = self._tape = Tape(self.game, steps, self.num_envs, has_raw, q_size)
        tape.rewind(self._seed.tolist())
        return tape

    def _chunk(self, cut: Cut, number: int) -> Chunk:
        meta = ChunkMeta(
            game=self.game.game, schema=self._schema, session=self.sessions[cut.env], chunk_no=self._chunk_no + number,
            first_step=self._first_step + cut.first, n_steps=cut.n_steps, kind="actor", consent="granted",
            client=self._client, episodes=cut.notes,
        )  # fmt: skip
        return Chunk(meta, cut.columns)

    def _episodes(self, tape: Tape) -> list[EpisodeEnded]:
        self._standing, returns, lengths = count(tape.reward, tape.ended, self._standing)
        envs = (tape.ends.env + self.env_index0).tolist()
        return list(map(EpisodeEnded, envs, returns.tolist(), lengths.tolist(), tape.seeds_ended()))

    def _keep_open_actions(self, tape: Tape) -> None:
        begin = np.where(tape.ended, np.arange(1, tape.steps + 1)[:, None], 0).max(0)  # 0: no episode ended here
        for env, first in enumerate(begin.tolist()):
            if first:
                self._open_actions[env].clear()
            if first < tape.steps:
                self._open_actions[env].append(tape.action[first:, env].copy())

    # --- Saving and going on ----------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """What `restore` needs, between two collects: arrays, and facts that JSON can hold."""
        arrays: dict[str, Array] = {
            "n_episodes": self._seeds.n_begun, "seed": self._seed.copy(),
            "return": self._standing.return_.copy(), "length": self._standing.length.copy(),
            "actions": np.concatenate([self._no_actions, *(part for parts in self._open_actions for part in parts)]),
        }  # fmt: skip
        arrays |= {f"live.{name}": column.copy() for name, column in self._live.inputs.items()}
        return arrays, self._facts() | {"chunk_no": self._chunk_no, "first_step": self._first_step}

    def restore(self, arrays: Mapping[str, Array], facts: Mapping[str, Any]) -> None:
        """Go on where `state` was taken: rebuilds open episodes from their seeds and actions.

        ConfigError when an env shows something else than it did then, or the state is of another actor.
        """
        mine = self._facts()
        if any(facts.get(name) != value for name, value in mine.items()):
            raise ConfigError(
                f"an actor's state is of {dict(facts)}; this actor is {mine}: give the one it was saved by"
            )
        self._chunk_no, self._first_step = facts["chunk_no"], facts["first_step"]
        self._seeds.begin_at(arrays["n_episodes"])
        self._seed = arrays["seed"].copy()
        self._standing = Standing(arrays["return"].copy(), arrays["length"].copy())
        split = np.split(arrays["actions"], np.cumsum(self._standing.length)[:-1])
        self._open_actions = [[actions.copy()] if len(actions) else [] for actions in split]
        if seen := part(arrays, "live"):
            rebuild(self._live, seen, seeds=self._seed.tolist(), actions=split)

    def _facts(self) -> dict[str, Any]:
        return {
            "schema": self._schema, "num_envs": self.num_envs, "root_seed": self.root_seed,
            "env_index0": self.env_index0, "sessions": [str(session) for session in self.sessions],
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Play:
    """How the envs of one collect are played."""

    policy: Policy
    noise: Array | None  # [steps, envs, ...]
    how: dict[str, Any]
    """What a policy and its head are told beside."""

    def decide(self, live: LiveEnvs, tape: Tape, t: int) -> Decision:
        """The decisions of one time step; keeps the action values where first priorities are wanted."""
        noise = None if self.noise is None else self.noise[t]
        if tape.q is None:
            return self.policy.decide(live.inputs, noise, **self.how)
        outputs = self.policy.outputs(live.inputs)
        tape.q[t] = q_of(outputs)
        return self.policy.head.sample(outputs, noise, **self.how)


def _write(tape: Tape, t: int, live: LiveEnvs) -> None:
    for name, column in live.obs.items():
        tape.obs[name][t] = column
    if tape.legal is not None:
        tape.legal[t] = live.legal


def _priority(policy: Policy, tape: Tape, *, last: LiveEnvs) -> Array:
    assert tape.q is not None
    assert policy.priority is not None
    tape.q[-1] = q_of(policy.outputs(last.inputs))
    after = best_value(tape.q, tape.legal)[1:].copy()
    ends = tape.ends
    if len(ends.step):
        after[ends.step, ends.env] = best_value(q_of(policy.outputs(ends.inputs)), ends.seen.get("legal"))
    after[tape.terminated] = 0
    start = tape.game.discrete.start if tape.game.discrete else 0
    taken = np.take_along_axis(tape.q[:-1], (tape.action - start)[..., None], -1)[..., 0]
    how = policy.priority
    return n_step_td(
        taken, after, reward=tape.reward, ended=tape.ended, n_step=how.n_step, discount=how.discount
    )  # fmt: skip
