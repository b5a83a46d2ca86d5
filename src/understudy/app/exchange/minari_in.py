"""Import of Minari datasets: each episode becomes a session of its own, known by its content."""

import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from understudy.app.exchange.episode import Episode, chunks_of
from understudy.app.exchange.extra import extra, one_line
from understudy.app.exchange.gym_spaces import flattened
from understudy.app.exchange.history import noise_of
from understudy.app.exchange.incoming import session_of
from understudy.app.exchange.minari_out import SPEC_KEY
from understudy.core.builder import raw_name
from understudy.core.chunk import OPTIONAL, Chunk, EpisodeNote
from understudy.core.errors import ConfigError, Refused, SpecError
from understudy.core.game import GameSpec, spec_from_json
from understudy.core.names import GameName, PlayerName, game_name
from understudy.core.spaces import Space, space_from_gymnasium
from understudy.core.tensors import Array
from understudy.core.writer import raw_space

CLIENT = "minari-import/1"


class MinariDataset:
    """One dataset: its folder, the `data` folder in it, or the HDF5 file in that."""

    def __init__(self, path: Path, *, game: GameName | None, consent: str) -> None:
        self.name, self._consent = str(path), consent
        self._storage, metadata = _opened(path)
        self.spec = _spec(path, self._storage, metadata, game)
        self._own: dict[int, int] = {}
        self._counts: dict[str, int] = {}

    @property
    def origins(self) -> Mapping[int, int]:
        return self._own

    def report(self) -> Mapping[str, Any]:
        return self._counts

    def chunks(self) -> Iterator[tuple[Chunk, PlayerName | None]]:
        seen: Counter[bytes] = Counter()
        episodes = cut = 0
        for episode, origin in self._episodes(seen):
            if origin is not None:
                self._own[noise_of(episode.session)] = origin
            for chunk in chunks_of(episode, self.spec, consent=self._consent, client=CLIENT):
                yield chunk, None
            episodes += 1
            cut += not (episode.terminated or episode.truncated)
        self._counts = {"episodes": episodes, "episodes_without_end": cut}

    def _episodes(self, seen: Counter[bytes]) -> Iterator[tuple[Episode, int | None]]:
        numbers = range(self._storage.total_episodes)
        number = -1
        try:
            facts = iter(self._storage.get_episode_metadata(numbers))
            for raw in self._storage.get_episodes(numbers):
                number += 1
                yield self._episode(raw, next(facts), seen)
        except (Refused, AssertionError, OSError, KeyError, ValueError, TypeError, IndexError, RuntimeError) as error:
            raise ConfigError(f"episode {max(0, number)} of {self.name} cannot be taken: {one_line(error)}") from None

    def _episode(
        self, raw: Mapping[str, Any], facts: Mapping[str, Any], seen: Counter[bytes]
    ) -> tuple[Episode, int | None]:
        spec, reward = self.spec, _numbers("rewards", raw["rewards"])
        n = len(reward)
        obs = _columns("observations", flattened(raw["observations"], "obs"), spec.obs_columns, n + 1)
        action = _columns("actions", flattened(raw["actions"], "action"), spec.action_columns, n)
        terminated, truncated = (np.asarray(raw[name], np.bool_) for name in ("terminations", "truncations"))
        if not n or terminated.shape != (n,) or truncated.shape != (n,):
            raise Refused(
                "bad_shape", f"it has {n} rewards, {terminated.shape} terminations, {truncated.shape} truncations"
            )
        if (terminated | truncated)[:-1].any():
            raise Refused("bad_rows", "it goes on after it was terminated or truncated")
        extras = _extras(raw.get("infos") or {}, spec, n)
        content = [*obs.values(), *action.values(), reward, terminated, truncated, *extras.values()]
        key = session_of("minari", spec.game, *(rows.tobytes() for rows in content)).bytes
        seen[key] += 1
        session = session_of("minari", spec.game, key, str(seen[key]))  # equal episodes are as many as there are
        seed, model, origin = facts.get("seed"), facts.get("model"), facts.get("session")
        note = EpisodeNote(row=0, seed=None if seed is None else int(seed), model=None if model is None else str(model))
        episode = Episode(
            session=session, obs=obs, action=action, reward=reward, terminated=bool(terminated[-1]),
            truncated=bool(truncated[-1]), extras=extras, note=note,
        )  # fmt: skip
        return episode, None if origin is None else noise_of(uuid.UUID(str(origin)))


def _opened(path: Path) -> tuple[Any, Mapping[str, Any]]:
    """The dataset's storage and its metadata."""
    storage = extra("minari.dataset.minari_storage").MinariStorage
    extra("h5py")
    folder = path.parent if path.is_file() else path
    data = folder / "data" if (folder / "data" / "metadata.json").is_file() else folder
    if not (data / "metadata.json").is_file():
        raise ConfigError(f"{path} is no Minari dataset: there is no metadata.json in {data}; give a dataset's folder")
    try:
        metadata = storage.read_raw_metadata(data)
        if metadata["data_format"] != "hdf5":
            raise ConfigError(
                f"{path} is a Minari dataset in the {str(metadata['data_format'])[:20]} form, whose reader can cut "
                "long episodes (Minari #351); make it one in the hdf5 form"
            )
        found = storage.read(data)
        n_there = _count(data)
        if found.total_episodes != n_there:
            raise ConfigError(
                f"{path} is damaged: its metadata speak of {str(found.total_episodes)[:20]} episodes, and there are "
                f"{n_there}; make it again"
            )
        return found, metadata
    except (AssertionError, OSError, KeyError, ValueError, TypeError, NotImplementedError, RuntimeError) as error:
        raise ConfigError(f"{path} is no readable Minari dataset: {one_line(error)}") from None


def _count(data: Path) -> int:
    """Episodes in a dataset's file."""
    with extra("h5py").File(data / "main_data.hdf5") as file:
        return sum(name.startswith("episode_") for name in file)


def _spec(path: Path, storage: Any, metadata: Mapping[str, Any], game: GameName | None) -> GameSpec:
    """The spec that an export of ours left in the metadata, or that of the dataset's spaces."""
    own = metadata.get(SPEC_KEY)
    if isinstance(own, str):
        try:
            spec = spec_from_json(own)
        except SpecError as error:
            raise ConfigError(f"{path} has no readable game spec in its metadata: {one_line(error)}") from None
        return spec if game is None else replace(spec, game=game)
    if game is None:
        raise ConfigError(f"{path} does not say which game it is of; give --game NAME")
    return GameSpec(
        game=game_name(game), obs=space_from_gymnasium(storage.observation_space, is_action=False),
        action=space_from_gymnasium(storage.action_space, is_action=True),
    )  # fmt: skip


def _columns(what: str, found: Mapping[str, Array], spaces: Mapping[str, Space], n_rows: int) -> dict[str, Array]:
    if found.keys() != spaces.keys():
        raise Refused("bad_columns", f"its {what} have the parts {sorted(found)}, its spaces {sorted(spaces)}")
    return {name: _fitting(name, found[name], space, n_rows) for name, space in spaces.items()}


def _fitting(name: str, rows: Array, space: Space, n_rows: int) -> Array:
    wanted = (n_rows, *space.shape)
    if rows.dtype.kind not in "biuf" or rows.size != np.prod(wanted) or len(rows) != n_rows:
        raise Refused("bad_shape", f"{name} is {rows.dtype}{rows.shape}; wanted {space.dtype}{wanted}")
    with np.errstate(all="ignore"):
        made = rows.reshape(wanted).astype(space.dtype)
    may_round = space.dtype.kind == "f" and rows.dtype.kind == "f"
    if not may_round and not np.array_equal(made, rows.reshape(wanted)):
        raise Refused("bad_dtype", f"{name} of {rows.dtype} does not fit {space.dtype} exactly")
    return made


def _numbers(name: str, values: Any) -> Array:
    rows = np.asarray(values)
    if rows.ndim != 1 or rows.dtype.kind not in "biuf":
        raise Refused("bad_shape", f"{name} are {rows.dtype}{rows.shape}; wanted one number for each step")
    with np.errstate(all="ignore"):
        return rows.astype(np.float32)


def _extras(infos: Mapping[str, Any], spec: GameSpec, n: int) -> dict[str, Array]:
    """Optional columns that an export of ours put among the infos; what others keep there is left alone."""
    layout: dict[str, tuple[np.dtype[Any], tuple[int, ...]]] = {name: (dtype, (n,)) for name, dtype in OPTIONAL.items()}
    for action, space in spec.action_columns.items():
        layout[raw_name(action)] = (raw_space(space).dtype, (n, *space.shape))
    if spec.discrete is not None:
        layout["legal"] = (np.dtype(np.bool_), (n + 1, spec.discrete.n))
    found = {name: np.asarray(infos[name]) for name in layout if name in infos}
    return {name: rows for name, rows in found.items() if (rows.dtype, rows.shape) == layout[name]}
