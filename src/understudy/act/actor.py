"""Actor: plays a policy in a vector env and hands back what happened, as chunks of one session per env.

Everything an actor does is a function of its root seed, the rounds it was asked for and the policies it was given:
episode seeds and noise are computed, never drawn from a state. So open episodes can be rebuilt (see `rebuild.py`).
"""

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from understudy.act.chance import actor_session, episode_seeds, noise_rng
from understudy.act.live import LiveEnvs
from understudy.act.priorities import best_value, n_step_td, q_of
from understudy.act.rebuild import rebuild
from understudy.act.tape import Cut, Final, Tape
from understudy.act.vector import Envs
from understudy.core.chunk import Chunk
from understudy.core.errors import ConfigError
from understudy.core.game import GameSpec
from understudy.core.heads import Decision
from understudy.core.meta import ChunkMeta
from understudy.core.policy import Policy
from understudy.core.tensors import Array

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class EpisodeDone:
    """An episode that ended during a collect; `env` counts over all actors of a run."""

    env: int
    return_: float
    length: int
    seed: int


@dataclass(frozen=True, slots=True)
class Collected:
    """What one collect brought: chunks env by env, and the episodes that ended, in the order they did."""

    chunks: list[Chunk]
    episodes: list[EpisodeDone]
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
        self._n_episodes, self._seed = [0] * self.num_envs, [0] * self.num_envs
        self._return, self._length = np.zeros(self.num_envs), np.zeros(self.num_envs, np.int64)
        self._coming: list[list[int]] = [[] for _ in range(self.num_envs)]  # the next seeds, last first
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
        if not self._live.obs:
            self._live.reset(self._next_seeds(range(self.num_envs)))
        self._live.check_masks()
        self._live.keep_stacks(policy.stack)
        tape = self._fresh_tape(policy, steps)
        was_fresh = self._length == 0
        play = Play(policy, None if deterministic else self._noise(policy, steps, round_no), explore, deterministic)
        episodes = self._play(play, tape)
        ended = tape.ended
        priority = None if tape.q is None else _priority(policy, tape, ended, last=self._live)
        cuts = tape.rows(
            is_first=np.concatenate([was_fresh[None], ended[:-1]]), version=policy.version, priority=priority
        )
        chunks = [self._chunk(cut, number % (len(cuts) // self.num_envs)) for number, cut in enumerate(cuts)]
        self._first_step += steps
        self._chunk_no += len(cuts) // self.num_envs
        self._keep_open_actions(tape, ended)
        return Collected(chunks, episodes, steps * self.num_envs)

    # --- Playing ----------------------------------------------------------------------------------------------------

    def _play(self, play: "Play", tape: Tape) -> list[EpisodeDone]:
        live, episodes = self._live, list[EpisodeDone]()
        for t in range(tape.steps):
            _write(tape, t, live)
            decision = play.decide(live, tape, t)
            action = live.actions(decision.action)
            tape.action[t], tape.logp[t] = action, decision.logp
            if tape.raw_action is not None:
                tape.raw_action[t] = decision.raw_action.reshape(tape.raw_action.shape[1:])
            reward, terminated, truncated = live.step(action)
            tape.reward[t], tape.terminated[t], tape.truncated[t] = reward, terminated, truncated
            self._return += reward
            self._length += 1
            ended = terminated | truncated
            if ended.any():
                episodes += self._end(tape, t, ended)
            if tape.legal is not None:
                live.check_masks()
        _write(tape, tape.steps, live)
        return episodes

    def _end(self, tape: Tape, t: int, ended: Flags) -> list[EpisodeDone]:
        """Keep the last observations, and begin the next episodes."""
        envs = np.flatnonzero(ended)
        inputs = {} if tape.q is None else {name: rows[envs] for name, rows in self._live.inputs.items()}
        tape.finals.append(Final(t, envs, self._live.seen(envs), inputs))
        episodes = [
            EpisodeDone(self.env_index0 + env, float(self._return[env]), int(self._length[env]), self._seed[env])
            for env in envs.tolist()
        ]
        self._live.reset(self._next_seeds(envs.tolist()), ended)
        for env in envs.tolist():
            tape.begins[env].append((t + 1, self._seed[env]))
        return episodes

    def _next_seeds(self, envs: Iterable[int]) -> list[int | None]:
        seeds: list[int | None] = [None] * self.num_envs
        for env in envs:
            if not self._coming[env]:
                self._look_ahead()
            seeds[env] = self._seed[env] = self._coming[env].pop()
            self._n_episodes[env] += 1
            self._return[env], self._length[env] = 0.0, 0
        return seeds

    def _look_ahead(self) -> None:
        """Know the seeds of the next episodes, and tell the envs, where they can make use of it."""
        ahead = max(4, 256 // self.num_envs)
        seeds = [
            episode_seeds(self.root_seed, env=self.env_index0 + env, first=first, n=ahead)
            for env, first in enumerate(self._n_episodes)
        ]
        self._coming = [some.tolist()[::-1] for some in seeds]
        if (prepare := getattr(self._live.envs, "prepare", None)) is not None:
            prepare(np.concatenate(seeds))

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
        tape.finals = []
        tape.begins = [[(-length, seed)] for length, seed in zip(self._length.tolist(), self._seed, strict=True)]
        return tape

    def _chunk(self, cut: Cut, number: int) -> Chunk:
        meta = ChunkMeta(
            game=self.game.game, schema=self._schema, session=self.sessions[cut.env], chunk_no=self._chunk_no + number,
            first_step=self._first_step + cut.first, n_steps=cut.n_steps, kind="actor", consent="granted",
            client=self._client, episodes=cut.notes,
        )  # fmt: skip
        return Chunk(meta, cut.columns)

    def _keep_open_actions(self, tape: Tape, ended: Flags) -> None:
        begin = np.where(ended, np.arange(1, tape.steps + 1)[:, None], 0).max(0)  # 0: no episode ended here
        for env, first in enumerate(begin.tolist()):
            if first:
                self._open_actions[env].clear()
            if first < tape.steps:
                self._open_actions[env].append(tape.action[first:, env].copy())

    # --- Saving and going on ----------------------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """What `restore` needs, between two collects: arrays, and facts that JSON can hold."""
        arrays: dict[str, Array] = {
            "n_episodes": np.array(self._n_episodes, np.int64), "seed": np.array(self._seed, np.int64),
            "return": self._return.copy(), "length": self._length.copy(),
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
        self._n_episodes, self._seed = arrays["n_episodes"].tolist(), arrays["seed"].tolist()
        self._return, self._length = arrays["return"].copy(), arrays["length"].copy()
        split = np.split(arrays["actions"], np.cumsum(self._length)[:-1])
        self._coming = [[] for _ in range(self.num_envs)]
        self._open_actions = [[actions.copy()] if len(actions) else [] for actions in split]
        seen = {name.removeprefix("live."): rows for name, rows in arrays.items() if name.startswith("live.")}
        if seen:
            rebuild(self._live, seen, seeds=self._seed, actions=split)

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
    explore: Any
    deterministic: bool

    def decide(self, live: LiveEnvs, tape: Tape, t: int) -> Decision:
        """The decisions of one time step; keeps the action values where first priorities are wanted."""
        noise = None if self.noise is None else self.noise[t]
        how = {"explore": self.explore, "legal": live.legal, "deterministic": self.deterministic}
        if tape.q is None:
            return self.policy.decide(live.inputs, noise, **how)
        outputs = self.policy.outputs(live.inputs)
        tape.q[t] = q_of(outputs)
        return self.policy.head.sample(outputs, noise, **how)


def _write(tape: Tape, t: int, live: LiveEnvs) -> None:
    for name, column in live.obs.items():
        tape.obs[name][t] = column
    if tape.legal is not None:
        tape.legal[t] = live.legal


def _priority(policy: Policy, tape: Tape, ended: Flags, *, last: LiveEnvs) -> Array:
    assert tape.q is not None
    assert policy.priority is not None
    tape.q[-1] = q_of(policy.outputs(last.inputs))
    values = best_value(tape.q, tape.legal)
    after = values[1:].copy()
    if tape.finals:
        steps = np.concatenate([np.full(len(final.envs), final.step) for final in tape.finals])
        envs = np.concatenate([final.envs for final in tape.finals])
        inputs = {name: np.concatenate([final.inputs[name] for final in tape.finals]) for name in last.inputs}
        legal = None if tape.legal is None else np.concatenate([final.seen["legal"] for final in tape.finals])
        after[steps, envs] = best_value(q_of(policy.outputs(inputs)), legal)
    after[tape.terminated] = 0
    start = tape.game.discrete.start if tape.game.discrete else 0
    taken = np.take_along_axis(tape.q[:-1], (tape.action - start)[..., None], -1)[..., 0]
    return n_step_td(
        taken, after, reward=tape.reward, ended=ended, n_step=policy.priority.n_step, discount=policy.priority.discount
    )
