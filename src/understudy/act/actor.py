"""Actor: plays a policy in a vector env and returns the steps as chunks, one session per env.

What an actor plays depends only on its root seed, its incarnation, the round numbers and the
policies: episode seeds and noise are computed from them, never drawn from a stateful generator. So
an actor that is restored from a checkpoint can rebuild its unfinished episodes.
"""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from understudy.act.chance import EpisodeSeeds, RoundNoise, actor_session
from understudy.act.live import LiveEnvs
from understudy.act.tape import (
    UNKNOWN_SEED,
    EpisodeProgress,
    Tape,
    best_value,
    n_step_td,
    q_of,
    track_episodes,
)
from understudy.act.vector import Envs
from understudy.core.errors import ConfigError
from understudy.core.tensors import Array, arrays_under
from understudy.core.wording import pairs
from understudy.experience.chunk import Chunk, ChunkMeta
from understudy.experience.game import GameSpec
from understudy.nn.policy import Policy
from understudy.ports import Collected, PlayedEpisode

Flags = NDArray[np.bool_]


def epsilon_ladder(n: int, *, base: float = 0.4, alpha: float = 7.0) -> NDArray[np.float32]:
    """Return one epsilon per env, float32[n]: base^(1 + alpha * i / (n - 1)), or base if n is 1."""
    if n < 1 or not 0 < base <= 1 or alpha < 0:
        raise ConfigError(
            f"cannot build an exploration ladder for n={n}, base={base}, alpha={alpha}; use an n "
            "of at least 1, a base above 0 and up to 1, and an alpha of at least 0"
        )
    return np.array([base ** (1 + alpha * i / max(1, n - 1)) for i in range(n)], np.float32)


class Actor:
    """Steps envs with a policy; not thread-safe."""

    def __init__(
        self,
        envs: Envs,
        game: GameSpec,
        *,
        root_seed: int,
        created_ms: int,
        env_index0: int = 0,
        incarnation: int = 0,
        client: str = "",
    ) -> None:
        """Session ids are computed from `created_ms`, root seed, env and incarnation.

        `created_ms` is the start of the run, and `env_index0` the number of this actor's first env
        among all actors of the run. `incarnation` counts how often the run restarted with new
        episodes, which then get new seeds and sessions.
        """
        self.game = game
        self.num_envs = envs.num_envs
        self.root_seed = root_seed
        self.env_index0 = env_index0
        self.sessions: list[uuid.UUID] = [
            actor_session(
                created_ms, root_seed=root_seed, env=env_index0 + env, incarnation=incarnation
            )
            for env in range(envs.num_envs)
        ]
        self._live = LiveEnvs(envs, game)
        self._client = client
        self._tape: Tape | None = None
        self._schema = game.schema
        self._chunk_no = np.zeros(self.num_envs, np.int64)
        self._first_step = np.zeros(self.num_envs, np.int64)
        self._seeds = EpisodeSeeds(
            root_seed,
            incarnation=incarnation,
            first_env=env_index0,
            num_envs=self.num_envs,
            prepare=getattr(envs, "prepare", None),
        )
        self._noise = RoundNoise(root_seed, first_env=env_index0, num_envs=self.num_envs)
        self._seed = np.zeros(self.num_envs, np.int64)  # of the open episodes
        self._progress = EpisodeProgress(np.zeros(self.num_envs), np.zeros(self.num_envs, np.int64))
        self._open_actions: list[list[Array]] = [[] for _ in range(self.num_envs)]

    # The replay rejects a game's NaN and infinity; a NumPy warning at every step would hide that
    # error.
    @np.errstate(all="ignore")
    def collect(
        self,
        policy: Policy,
        steps: int,
        *,
        round_no: int,
        explore: Any = None,
        deterministic: bool = False,
    ) -> Collected:
        """Play `steps` steps in every env; `explore` is epsilon, one number or one per env.

        Never use a `round_no` twice: the round's noise is computed from it.
        """
        if steps < 1 or policy.game.schema != self.game.schema:
            raise ConfigError(
                f"cannot collect {steps} steps with a policy for {policy.game.game}; use at least "
                f"1 step, and a policy with the spaces of this actor's game {self.game.game}"
            )
        live = self._live
        head = policy.head
        if not live.obs:
            self._seed = self._seeds.take(np.arange(self.num_envs))
            live.reset(self._seed.tolist())
            if live.resets_itself:
                self._seed[:] = UNKNOWN_SEED
        live.check_masks()
        live.keep_stacks(policy.stack)
        shape = (steps, not head.is_discrete, head.size if policy.priority else 0)
        tape = self._tape
        if tape is None or (tape.steps, tape.has_raw, tape.q_size) != shape:
            tape = self._tape = Tape(self.game, steps, self.num_envs, *shape[1:])
        tape.open_seeds = self._seed.tolist()
        tape.ending = []
        noise = None if deterministic else self._noise.draw(head, steps, round_no=round_no)
        self._play(
            policy,
            noise,
            tape,
            {"explore": explore, "action_mask": live.action_mask, "deterministic": deterministic},
        )
        return self._collected(policy, tape)

    def _play(
        self, policy: Policy, noise: Array | None, tape: Tape, options: dict[str, Any]
    ) -> None:
        """Play and record every step; `options` are passed to the policy and its head."""
        live = self._live
        for t in range(tape.steps):
            _write(tape, t, live)
            step_noise = None if noise is None else noise[t]
            if tape.q is None:
                decision = policy.decide(live.inputs, step_noise, **options)
            else:
                outputs = policy.outputs(live.inputs)
                tape.q[t] = q_of(outputs)
                decision = policy.head.sample(outputs, step_noise, **options)
            action = live.actions(decision.action)
            tape.action[t] = action
            tape.logp[t] = decision.logp
            if tape.raw_action is not None:
                tape.raw_action[t] = decision.raw_action.reshape(tape.raw_action.shape[1:])
            reward, terminated, truncated = live.step(action)
            tape.reward[t] = reward
            if live.raw_reward is not None:
                if tape.raw_reward is None:
                    tape.raw_reward = np.empty_like(tape.reward)
                tape.raw_reward[t] = live.raw_reward
            tape.terminated[t] = terminated
            tape.truncated[t] = truncated
            if live.skipped is not None:
                tape.skipped[t] = live.skipped
            ended = terminated | truncated
            if np.count_nonzero(ended):  # a tenth of the cost of any()
                # Store the final observations of ended episodes, then start the next episodes.
                envs = ended.nonzero()[0]
                inputs = {}
                if tape.q is not None:
                    inputs = {name: rows[envs] for name, rows in live.inputs.items()}
                seeds = self._seed[envs] if live.resets_itself else self._seeds.take(envs)
                tape.ending.append((seeds, live.obs_copies(envs), inputs))
                self._seed[envs] = seeds
                live.reset(self._seed.tolist(), ended)
            if tape.action_mask is not None:
                live.check_masks()
        _write(tape, tape.steps, live)
        tape.close()

    def _collected(self, policy: Policy, tape: Tape) -> Collected:
        priority = None if tape.q is None else _priority(policy, tape, last=self._live)
        chunks = []
        n_chunks = np.zeros(self.num_envs, np.int64)
        for env, number, first, n_steps, columns, notes in tape.cuts(
            is_open=self._progress.length > 0, version=policy.version, priority=priority
        ):
            n_chunks[env] += 1
            meta = ChunkMeta(
                game=self.game.game,
                schema=self._schema,
                session=self.sessions[env],
                chunk_no=int(self._chunk_no[env]) + number,
                first_step=int(self._first_step[env]) + first,
                n_steps=n_steps,
                kind="actor",
                consent="granted",
                client=self._client,
                episodes=notes,
            )
            chunks.append(Chunk(meta, columns))
        env_steps = tape.steps - tape.skipped.sum(0)  # int64[envs]
        self._first_step += env_steps
        self._chunk_no += n_chunks
        # The first step of each env's open episode on this tape; 0 if no episode ended on it.
        begin = np.where(tape.ended, np.arange(1, tape.steps + 1)[:, None], 0).max(0)
        for env, first in enumerate(begin.tolist()):
            if first:
                self._open_actions[env].clear()
            if first < tape.steps:
                self._open_actions[env].append(tape.action[first:, env].copy())
        reward = tape.reward if tape.raw_reward is None else tape.raw_reward
        self._progress, returns, lengths = track_episodes(
            reward, tape.ended, self._progress, skipped=tape.skipped
        )
        envs = (tape.ends.env + self.env_index0).tolist()
        episodes = list(
            map(PlayedEpisode, envs, returns.tolist(), lengths.tolist(), tape.seeds_ended())
        )
        return Collected(chunks, episodes, int(env_steps.sum()))

    # --- Saving and restoring ---------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        """Return the arrays and JSON facts that `restore` needs; call it between two collects.

        ConfigError if the vector env resets itself: its episodes have no known seeds.
        """
        self._live.check_resets("the state of an actor, which is rebuilt from seeds and actions")
        space = self.game.action_columns["action"]
        empty = np.empty((0, *space.shape), space.dtype)
        arrays: dict[str, Array] = {
            "n_episodes": self._seeds.n_begun,
            "seed": self._seed.copy(),
            "return": self._progress.return_.copy(),
            "length": self._progress.length.copy(),
            "actions": np.concatenate(
                [empty, *(part for parts in self._open_actions for part in parts)]
            ),
        }
        arrays |= {f"live.{name}": column.copy() for name, column in self._live.inputs.items()}
        numbers = {"chunk_no": int(self._chunk_no[0]), "first_step": int(self._first_step[0])}
        return arrays, self._facts() | numbers  # these are the same in every env

    def restore(self, arrays: Mapping[str, Array], facts: Mapping[str, Any]) -> None:
        """Resume from a `state`: open episodes are rebuilt from their seeds and actions.

        ConfigError if an env does not return the same observations as before, or if another actor
        saved the state.
        """
        own_facts = self._facts()
        if any(facts.get(name) != value for name, value in own_facts.items()):
            raise ConfigError(
                f"the state was saved by an actor with {pairs(facts)}, but this one has "
                f"{pairs(own_facts)}; restore it in the actor that saved it"
            )
        self._chunk_no[:] = facts["chunk_no"]
        self._first_step[:] = facts["first_step"]
        self._seeds.begin_at(arrays["n_episodes"])
        self._seed = arrays["seed"].copy()
        self._progress = EpisodeProgress(arrays["return"].copy(), arrays["length"].copy())
        split = np.split(arrays["actions"], np.cumsum(self._progress.length)[:-1])
        self._open_actions = [[actions.copy()] if len(actions) else [] for actions in split]
        if inputs := arrays_under(arrays, "live"):
            _rebuild(self._live, inputs, seeds=self._seed.tolist(), actions=split)

    def close(self) -> None:
        self._live.envs.close()

    def _facts(self) -> dict[str, Any]:
        return {
            "schema": self._schema,
            "num_envs": self.num_envs,
            "root_seed": self.root_seed,
            "env_index0": self.env_index0,
            "sessions": [str(session) for session in self.sessions],
        }


def _write(tape: Tape, t: int, live: LiveEnvs) -> None:
    for name, column in live.obs.items():
        tape.obs[name][t] = column
    if tape.action_mask is not None:
        tape.action_mask[t] = live.action_mask


def _priority(policy: Policy, tape: Tape, *, last: LiveEnvs) -> Array:
    assert tape.q is not None
    assert policy.priority is not None
    tape.q[-1] = q_of(policy.outputs(last.inputs))
    after = best_value(tape.q, tape.action_mask)[1:].copy()
    ends = tape.ends
    if len(ends.step):
        after[ends.step, ends.env] = best_value(
            q_of(policy.outputs(ends.inputs)), ends.final_obs.get("action_mask")
        )
    after[tape.terminated] = 0
    start = tape.game.discrete.start if tape.game.discrete else 0
    q_taken = np.take_along_axis(tape.q[:-1], (tape.action - start)[..., None], -1)[..., 0]
    return n_step_td(
        q_taken,
        after,
        reward=tape.reward,
        ended=tape.ended,
        n_step=policy.priority.n_step,
        discount=policy.priority.discount,
    )


def _rebuild(
    live: LiveEnvs, inputs: Mapping[str, Array], *, seeds: Sequence[int], actions: Sequence[Array]
) -> None:
    """Rebuild open episodes; ConfigError unless `live.inputs` then equals the saved `inputs`.

    Each env is reset with its seed and repeats its actions. All envs step together, so an env with
    a shorter episode has spare steps: it first plays only the beginning of its episode, then is
    reset and plays the whole episode, once or more. So every action is repeated at its own step.
    """
    lengths = np.array([len(env_actions) for env_actions in actions])
    longest = int(lengths.max())
    head = longest % np.maximum(lengths, 1)  # steps played before the first complete episode
    name, rows = next(iter(inputs.items()))
    has_stacks = rows.ndim == len(live.game.obs_columns[name].shape) + 2
    live.reset(seeds)
    live.keep_stacks(rows.shape[1] if has_stacks else 1)
    has_spare = longest > 0 and not lengths.all()
    if has_spare:
        # An env without actions to repeat plays any valid action and is reset at the end.
        spare = _first_valid_actions(live)
    for step in range(longest):
        place = np.where(step < head, step, (step - head) % np.maximum(lengths, 1))
        if step and (place == 0).any():
            live.reset(seeds, place == 0)
        step_actions = [
            env_actions[place[env]] if len(env_actions) else spare[env]
            for env, env_actions in enumerate(actions)
        ]
        _, terminated, truncated = live.step(np.array(step_actions))
        if (over := (terminated | truncated) & (lengths > 0)).any():
            raise _not_reproducible(
                live, int(np.flatnonzero(over)[0]), "its episode ended earlier than before"
            )
    if has_spare:
        live.reset(seeds, lengths == 0)
    for name, before in inputs.items():
        now = live.inputs[name]
        for env in range(live.num_envs):
            if now[env].astype(before.dtype).tobytes() != before[env].tobytes():
                raise _not_reproducible(
                    live, env, f"{name!r} is {str(now[env])[:60]}, was {str(before[env])[:60]}"
                )


def _first_valid_actions(live: LiveEnvs) -> Array:
    """Return an action for each env that is valid in its current state."""
    space = live.game.action_columns["action"]
    if live.game.discrete is None:
        zeros = np.zeros((live.num_envs, *space.shape), space.dtype)
        return np.clip(zeros, live.envs.action_space.low, live.envs.action_space.high)  # type: ignore[attr-defined]
    first = np.zeros(live.num_envs, np.int32)
    if live.action_mask is not None:
        first = live.action_mask.argmax(1).astype(np.int32)
    return first + np.int32(live.game.discrete.start)


def _not_reproducible(live: LiveEnvs, env: int, what: str) -> ConfigError:
    return ConfigError(
        f"env {env} of {live.game.game} cannot be rebuilt from its seed and actions: {what}; make "
        "the env draw all its randomness from reset(seed=...), or train with "
        "asynchronous=true, which continues with new episodes instead"
    )
