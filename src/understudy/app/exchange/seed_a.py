"""Import of the original pipeline's records, whose `state` is the one after the action.

The true transition of step t is (state[t-1], action[t], reward[t], state[t]) within one episode, and that of an
episode's first record cannot be recovered. Nothing is guessed: the caller says whether to repair that, or to keep the
records as they are, out of learners' reach.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from understudy.app.exchange.episode import Episode, chunks_of
from understudy.app.exchange.incoming import session_of
from understudy.app.exchange.seed_records import Records, read_records
from understudy.core.chunk import Chunk
from understudy.core.errors import ConfigError, InvalidName, SpecError
from understudy.core.game import GameSpec, game_spec, spec_from_gymnasium
from understudy.core.names import GameName, PlayerName, game_name
from understudy.core.tensors import Array

Mode = Literal["repair-shift", "as-is"]
MISALIGNED_CONSENT = "denied"
"""Records that are kept as they are go under this consent, which no learner reads and no setting lets in."""

_MOST_ACTIONS = 4096
"""More are believed only when they are asked for: each is an output of the network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedOptions:
    """How to read the records."""

    mode: Mode
    consent: str
    game: GameName | None = None
    game_id: str | None = None
    """Only records with this id."""
    limit: int | None = None
    """Steps after which the game stops by itself; what its spec says, where that is known."""
    actions: int | None = None
    """How many actions there are, where no spec says it."""


@dataclass(slots=True)
class _Counts:
    episodes: int = 0
    lost_first_steps: int = 0
    derived_truncations: int = 0
    episodes_without_end: int = 0
    gaps: int = 0
    refused: dict[str, str] = field(default_factory=dict)


class SeedA:
    """All records of some files, as sessions of an episode each."""

    def __init__(
        self, paths: Sequence[Path], options: SeedOptions, *, registered: Callable[[GameName], Sequence[GameSpec]]
    ) -> None:
        """`registered`: the specs of a game that a deployment knows; one that fits is taken."""
        self.name = ", ".join(map(str, paths[:3])) + (" …" if len(paths) > 3 else "")
        self._options = options
        self._records = read_records(list(paths), game_id=options.game_id)
        self._game_id = options.game_id if options.game_id is not None else next(iter(self._records.game_ids))
        game = options.game or _game(self._game_id)
        self.spec, self.spec_is_from = _spec(game, self._records, options, registered(game))
        self.limit = options.limit or self.spec.max_episode_steps
        self._counts = _Counts()

    @property
    def origins(self) -> Mapping[int, int]:
        return {}

    def chunks(self) -> Iterator[tuple[Chunk, PlayerName | None]]:
        self._counts = counts = _Counts()
        is_kept = self._options.mode == "as-is"
        consent = MISALIGNED_CONSENT if is_kept else self._options.consent
        client = "seed-a-import/1 misaligned" if is_kept else "seed-a-import/1"
        for number in sorted(self._records.episodes):
            rows = self._records.rows(number)
            if why := self._records.refused.get(number) or _after_end(rows):
                counts.refused[f"episode {number}"] = why
                continue
            counts.episodes += 1
            for episode in self._episodes(number, rows):
                for chunk in chunks_of(episode, self.spec, consent=consent, client=client):
                    yield chunk, None

    def _episodes(self, number: int, rows: Array) -> Iterator[Episode]:
        """The parts of an episode in which no record is missing."""
        counts = self._counts
        parts = np.split(rows, np.flatnonzero(np.diff(rows["step"]) != 1) + 1)
        counts.gaps += len(parts) - 1
        for part in parts:
            is_done, is_repaired = bool(part["done"][-1]), self._options.mode == "repair-shift"
            truncated = is_done and int(part["step"][-1]) + 1 == self.limit
            counts.derived_truncations += truncated
            counts.episodes_without_end += part is parts[-1] and not is_done
            counts.lost_first_steps += is_repaired
            # The state behind each action, from the first on; or the states as they stand, and what is behind the last.
            obs = part["state"] if is_repaired else np.concatenate([part["state"], part["next_state"][-1:]])
            taken = part[1:] if is_repaired else part
            if len(taken):
                yield self._episode(number, obs, taken, is_done and not truncated, truncated)

    def _episode(self, number: int, obs: Array, rows: Array, terminated: bool, truncated: bool) -> Episode:
        ((obs_name, space),), ((action_name, action_space),) = (
            self.spec.obs_columns.items(), self.spec.action_columns.items()
        )  # fmt: skip
        states = obs.astype(space.dtype).reshape(-1, *space.shape)
        actions, rewards = rows["action"].astype(action_space.dtype), rows["reward"].astype(np.float32)
        content = (states.tobytes(), actions.tobytes(), rewards.tobytes(), f"{terminated} {truncated}")
        place = f"{number} {rows['step'][0]}"
        return Episode(
            session=session_of("seed-a", self._options.mode, self.spec.game, place, *content), obs={obs_name: states},
            action={action_name: actions}, reward=rewards, terminated=terminated, truncated=truncated,
        )  # fmt: skip

    def report(self) -> Mapping[str, Any]:
        counts, records = self._counts, self._records
        return {
            "mode": self._options.mode, "game_id": self._game_id, "spec_is_from": self.spec_is_from,
            "limit": self.limit, "records": records.records, "duplicates": records.duplicates,
            "episodes": counts.episodes, "lost_first_steps": counts.lost_first_steps,
            "derived_truncations": counts.derived_truncations, "gaps": counts.gaps,
            "episodes_without_end": counts.episodes_without_end, "refused_episodes": dict(counts.refused),
            "looks_aligned": _looks_aligned(records),
        }  # fmt: skip


def _after_end(rows: Array) -> str:
    ends, last = rows["step"][rows["done"]], rows["step"][-1]
    return f"step {last} comes after step {ends[0]}, which is done" if len(ends) and ends[0] < last else ""


def _looks_aligned(records: Records) -> bool:
    """Whether the records contradict the shift: most next_states are the following record's state, not their own."""
    own = following = 0
    for number in records.episodes:
        rows = records.rows(number)
        is_own = (rows["next_state"] == rows["state"]).all(axis=1)
        is_next = (rows["next_state"][:-1] == rows["state"][1:]).all(axis=1) & (np.diff(rows["step"]) == 1)
        own, following = own + int(is_own.sum()), following + int((is_next & ~is_own[:-1]).sum())
    return following > own


def _game(game_id: str) -> GameName:
    try:
        return game_name(game_id)
    except InvalidName:
        raise ConfigError(
            f"the records' game id {game_id[:60]!r} cannot be a game's name here; say with --game NAME what to call it"
        ) from None


def _spec(
    game: GameName, records: Records, options: SeedOptions, registered: Sequence[GameSpec]
) -> tuple[GameSpec, str]:
    """The game's spec and where it is from: what is registered here, what Gymnasium knows, or the records."""
    most = records.most_action
    for spec, where in [*((one, "registered") for one in registered), *((one, "gymnasium") for one in _of_env(game))]:
        if _fits(spec, records.size, most):
            return spec, where
    if registered:
        raise ConfigError(
            f"{game} is registered here with other spaces than these records have ({records.size} numbers, actions to "
            f"{most}); give another --game"
        )
    actions = options.actions or max(2, most + 1)
    if actions > _MOST_ACTIONS and options.actions is None:
        raise ConfigError(
            f"there is an action {most}, so the game would have {actions}; if that is right, say so with --actions"
        )
    if most >= actions:
        raise ConfigError(f"--actions is {actions}, and there is an action {most}; give at least {most + 1}")
    return game_spec(game, obs=records.size, actions=actions, max_episode_steps=options.limit), "records"


def _fits(spec: GameSpec, size: int, most: int) -> bool:
    space, discrete = spec.obs.get(""), spec.discrete
    if space is None or discrete is None or spec.has_legal or space.dtype.kind != "f":
        return False
    return bool(np.prod(space.shape) == size and discrete.start == 0 and most < discrete.n)


def _of_env(game: GameName) -> list[GameSpec]:
    """What Gymnasium says about the game, where it knows one of that name."""
    import gymnasium

    if game not in gymnasium.registry:
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of versions that have a successor
            env = gymnasium.make(game, disable_env_checker=True)
    except Exception:
        # Whatever it lacks here: a package, a display. Then the records say what they are of.
        return []
    try:
        return [spec_from_gymnasium(env, game=game)]
    except SpecError:
        return []
    finally:
        env.close()
