"""Minari: exports complete episodes as an HDF5 dataset for `minari.load_dataset`, and imports them.

Minari's Arrow format is not supported: its reader truncates episodes that are longer than one batch
(Minari #351).
"""

import contextlib
import json
import re
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from understudy.core.errors import ConfigError, InvalidName, Refused, SpecError
from understudy.core.names import GameName, PlayerName, game_name, game_name_of_env
from understudy.core.tensors import Array
from understudy.core.wording import joined
from understudy.exchange.exporting import (
    ExportedChunks,
    OnSteps,
    Written,
    atomic_path,
    import_extra,
    one_line,
    optional_columns,
)
from understudy.exchange.incoming import (
    ImportedEpisode,
    chunks_of,
    content_session_id,
    random_part_of,
)
from understudy.experience.chunk import Chunk, ChunkMeta, EpisodeNote, RowKind
from understudy.experience.game import GameSpec, nested, spec_from_json
from understudy.experience.spaces import (
    Box,
    Discrete,
    MultiBinary,
    MultiDiscrete,
    Space,
    space_from_gymnasium,
)
from understudy.training.recorded_env import client_of_dataset

h5py, minari = (import_extra(name) for name in ("h5py", "minari"))
MinariStorage = import_extra("minari.dataset.minari_storage").MinariStorage
EpisodeBuffer = import_extra("minari.data_collector.episode_buffer").EpisodeBuffer

SPEC_KEY = "understudy_spec"
_NAME = re.compile(r"[-_\w]+-v\d+", re.ASCII)
_PLAIN = ("row", "is_first", "reward", "terminated", "truncated")


# --- Gymnasium spaces and arrays ------------------------------------------------------------------


def gym_space(leaves: Mapping[str, Space]) -> spaces.Space[Any]:
    """Return a game's spaces as one Gymnasium space: the single one, or a Dict nested by path."""
    for path in leaves:
        if any(other.startswith(f"{path}.") for other in leaves):
            raise ConfigError(
                f"{path!r} is both a space and the prefix of other spaces, which a Dict space "
                "cannot express; rename one"
            )
    return _gym_space(leaves[""] if leaves.keys() == {""} else nested(leaves))


def _gym_space(tree: Any) -> spaces.Space[Any]:
    match tree:
        case dict():
            return spaces.Dict({key: _gym_space(part) for key, part in tree.items()})
        case Discrete(n=n, start=start):
            return spaces.Discrete(n, start=start)
        case MultiDiscrete(counts=counts, shape=shape) if shape:
            return spaces.MultiDiscrete(np.reshape(counts, shape), dtype=tree.dtype.type)
        case MultiBinary(shape=shape) if shape:
            return spaces.MultiBinary(shape)
    low, high = (tree if isinstance(tree, Box) else Box(tree.shape, tree.dtype)).ends()
    return spaces.Box(low, high, shape=tree.shape, dtype=low.dtype.type)


def unflattened(columns: Mapping[str, Array], head: str) -> Any:
    """Return columns `head.a.b` as nested dictionaries; a single column `head` as it is."""
    return (
        columns[head]
        if head in columns
        else nested({name.partition(".")[2]: rows for name, rows in columns.items()})
    )


def flattened(value: Any, head: str) -> dict[str, Array]:
    """Return the arrays of nested dicts and tuples as one flat dict, by dotted name."""
    if not isinstance(value, Mapping | tuple):
        return {head: np.asarray(value)}
    parts = value.items() if isinstance(value, Mapping) else enumerate(value)
    return {
        name: rows for key, part in parts for name, rows in flattened(part, f"{head}.{key}").items()
    }


# --- export ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WrittenDataset:
    """An exported dataset, its id, and how many episodes were left out."""

    written: Written
    dataset_id: str
    omitted: Mapping[str, int]
    """`cut`: the end was not recorded; `unfinished`: the rest is not stored yet; `gaps`: chunks
    are missing."""


def write_minari(
    history: ExportedChunks, path: Path, *, on_steps: OnSteps | None = None
) -> WrittenDataset:
    """Write complete episodes as a Minari dataset to the folder `path`; ConfigError if none."""
    spec = history.spec
    dataset_id = dataset_name(path)
    counts: Counter[str] = Counter()
    facts: list[dict[str, Any]] = []
    with atomic_path(path) as temporary:
        temporary.mkdir()
        storage = MinariStorage.new(
            temporary / "data",
            observation_space=gym_space(spec.obs),
            action_space=gym_space(spec.action),
            data_format="hdf5",
            jpeg_encoding=False,
        )
        storage.update_episodes(_buffers(history, counts, facts, on_steps))
        n_steps = storage.total_steps
        n_episodes = storage.total_episodes
        omitted = {why: counts[why] for why in ("cut", "unfinished", "gaps")}
        if not n_episodes:
            reasons = ", ".join(f"{count} {why}" for why, count in omitted.items() if count)
            raise ConfigError(
                f"no episode is complete ({reasons}); export to Parquet, which includes parts of "
                "episodes"
                if reasons
                else history.why_empty()
            )
        storage.update_episode_metadata(facts)
        storage.update_metadata(
            {
                "dataset_id": dataset_id,
                "minari_version": minari.__version__,
                SPEC_KEY: spec.to_json().decode(),
                "description": f"Episodes of {spec.game}, exported by understudy.",
            }
        )
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return WrittenDataset(
        Written(path.absolute(), size, n_steps, n_episodes, counts["sessions"]), dataset_id, omitted
    )


def dataset_name(path: Path) -> str:
    """Return the folder's name as a valid Minari dataset id, changed only if needed."""
    name = path.name
    return name if _NAME.fullmatch(name) else f"{re.sub(r'[^-_A-Za-z0-9]', '-', name)}-v0"


def _buffers(
    history: ExportedChunks,
    counts: Counter[str],
    facts: list[dict[str, Any]],
    on_steps: OnSteps | None,
) -> Iterator[Any]:
    """Yield every complete episode as a Minari buffer, and append its metadata to `facts`."""
    spec = history.spec
    for meta, note, rows in _whole_episodes(history, counts, on_steps):
        n = len(rows["row"]) - 1
        infos = {
            name: column if name == "action_mask" else column[:n]
            for name, column in rows.items()
            if name not in {*spec.obs_columns, *spec.action_columns, *_PLAIN}
        }
        fact = {
            "session": str(meta.session),
            "consent": meta.consent,
            "kind": meta.kind,
            "model": note.model,
        }
        facts.append({name: value for name, value in fact.items() if value is not None})
        yield EpisodeBuffer(
            id=None,
            seed=note.seed,
            options=None,
            infos=infos,
            observations=unflattened({name: rows[name] for name in spec.obs_columns}, "obs"),
            actions=unflattened({name: rows[name][:n] for name in spec.action_columns}, "action"),
            rewards=rows["reward"][:n],
            terminations=rows["terminated"][:n],
            truncations=rows["truncated"][:n],
        )


def _whole_episodes(
    history: ExportedChunks, counts: Counter[str], on_steps: OnSteps | None
) -> Iterator[tuple[ChunkMeta, EpisodeNote, dict[str, Array]]]:
    """Yield the rows of each complete episode, with one episode in memory at a time.

    Adds the sessions, and the incomplete episodes by reason, to `counts`.
    """
    parts: list[dict[str, Array]] = []
    has_no_beginning = False  # whether the current episode's first steps are missing
    expected = (b"", -1)
    for chunk, _ in history.chunks(on_steps):
        meta = chunk.meta
        is_same = meta.session.bytes == expected[0]
        counts["sessions"] += not is_same
        if (meta.session.bytes, meta.chunk_no) != expected:
            counts["gaps" if is_same else "unfinished"] += bool(parts)
            parts = []
            has_no_beginning = False
        expected = (meta.session.bytes, meta.chunk_no + 1)
        bounds = pairwise([*(note.row for note in meta.episodes), chunk.n_rows])
        for note, (start, end) in zip(meta.episodes, bounds, strict=True):
            part = {name: rows[start:end] for name, rows in chunk.columns.items()}
            if part["is_first"][0]:
                # The previous chunk ended inside an episode that was never continued.
                counts["cut"] += bool(parts)
                parts = [part]
                has_no_beginning = False
            elif parts:
                parts.append(part)
            else:
                counts["gaps"] += not has_no_beginning
                has_no_beginning = True
            if end == chunk.n_rows and chunk.ends_open:
                continue
            if parts and part["row"][-1] == RowKind.FINAL:
                yield meta, note, _joined(parts)
            else:
                counts["cut"] += bool(parts)
            parts = []
            has_no_beginning = False
    counts["unfinished"] += bool(parts)


def _joined(parts: list[dict[str, Array]]) -> dict[str, Array]:
    columns = {}
    for name in sorted(set.intersection(*(set(part) for part in parts))):
        # The bootstrap row of a part repeats the first row of the next one.
        rows = [part[name][:-1] for part in parts[:-1]]
        columns[name] = np.concatenate([*rows, parts[-1][name]])
    return columns


# --- import ---------------------------------------------------------------------------------------


class MinariDataset:
    """A dataset, given as its folder, the `data` folder in it, or the HDF5 file in that.

    Each episode becomes a session of its own, whose id is derived from its content.
    """

    def __init__(self, path: Path, *, game: GameName | None, consent: str) -> None:
        self.name = str(path)
        self._consent = consent
        self.origins: dict[int, int] = {}
        self._counts: dict[str, int] = {}
        self._env_kwargs: dict[str, Any] = {}
        folder = path.parent if path.is_file() else path
        data = folder / "data" if (folder / "data" / "metadata.json").is_file() else folder
        if not (data / "metadata.json").is_file():
            raise ConfigError(
                f"{path} is not a Minari dataset: there is no metadata.json in {data}; pass the "
                "folder of a dataset"
            )
        try:
            metadata = MinariStorage.read_raw_metadata(data)
            if metadata["data_format"] != "hdf5":
                raise ConfigError(
                    f"{path} is a Minari dataset in {str(metadata['data_format'])[:20]} format, "
                    "whose reader can truncate long episodes (Minari #351); convert it to hdf5"
                )
            self._storage = MinariStorage.read(data)
            with h5py.File(data / "main_data.hdf5") as file:
                n_episodes = sum(name.startswith("episode_") for name in file)
            if self._storage.total_episodes != n_episodes:
                raise ConfigError(
                    f"{path} is damaged: its metadata lists "
                    f"{str(self._storage.total_episodes)[:20]} episodes, but it holds "
                    f"{n_episodes}; create it again"
                )
        except (
            AssertionError,
            OSError,
            KeyError,
            ValueError,
            TypeError,
            NotImplementedError,
            RuntimeError,
        ) as error:
            raise ConfigError(
                f"{path} is not a readable Minari dataset: {one_line(error)}; pass one in Minari's "
                "HDF5 format"
            ) from None
        self.spec = self._spec(metadata, game)

    def _spec(self, metadata: Mapping[str, Any], game: GameName | None) -> GameSpec:
        """Return the spec that our export wrote to the metadata, or one created from the spaces.

        Name and step limit of the latter are those of the Gymnasium env that was recorded. The
        arguments of an env of that name are noted in each chunk.
        """
        own = metadata.get(SPEC_KEY)
        if isinstance(own, str):
            try:
                spec = spec_from_json(own)
            except SpecError as error:
                raise ConfigError(
                    f"{self.name} has no readable game spec in its metadata: {one_line(error)}; "
                    "export it again"
                ) from None
            return spec if game is None else replace(spec, game=game)
        env = None
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            env = json.loads(metadata.get("env_spec", ""))
        env = env if isinstance(env, dict) else {}
        env_id = env.get("id")
        limit = env.get("max_episode_steps")
        env_name = None
        with contextlib.suppress(InvalidName):
            env_name = game_name_of_env(env_id if isinstance(env_id, str) else "")
        game = game or env_name
        if game is None:
            raise ConfigError(f"{self.name} does not name its game; pass --game NAME")
        kwargs = env.get("kwargs")
        if game == env_name and isinstance(kwargs, dict):
            self._env_kwargs = {key: kwargs[key] for key in kwargs if key != "render_mode"}
        return GameSpec(
            game=game_name(game),
            obs=space_from_gymnasium(self._storage.observation_space, is_action=False),
            action=space_from_gymnasium(self._storage.action_space, is_action=True),
            max_episode_steps=limit if type(limit) is int and limit > 0 else None,
        )

    def report(self) -> Mapping[str, Any]:
        env = {"env_kwargs": self._env_kwargs} if self._env_kwargs else {}
        return {**self._counts, **env}

    def chunks(self) -> Iterator[tuple[Chunk, PlayerName | None]]:
        key_counts: Counter[bytes] = Counter()
        numbers = range(self._storage.total_episodes)
        n_episodes = n_cut = 0
        client = client_of_dataset(self._env_kwargs)
        try:
            facts = iter(self._storage.get_episode_metadata(numbers))
            for raw in self._storage.get_episodes(numbers):
                episode = self._episode(raw, next(facts), key_counts)
                for chunk in chunks_of(episode, self.spec, consent=self._consent, client=client):
                    yield chunk, None
                n_episodes += 1
                n_cut += not (episode.terminated or episode.truncated)
        except (
            Refused,
            AssertionError,
            OSError,
            KeyError,
            ValueError,
            TypeError,
            IndexError,
            RuntimeError,
        ) as error:
            raise ConfigError(
                f"episode {n_episodes} of {self.name} cannot be imported: {one_line(error)}; "
                "correct or remove it, then import again"
            ) from None
        self._counts = {"episodes": n_episodes, "episodes_without_end": n_cut}

    def _episode(
        self, raw: Mapping[str, Any], facts: Mapping[str, Any], key_counts: Counter[bytes]
    ) -> ImportedEpisode:
        spec = self.spec
        reward = np.asarray(raw["rewards"])
        if reward.ndim != 1 or reward.dtype.kind not in "biuf":
            raise Refused(
                "bad_shape",
                f"rewards are {reward.dtype}{list(reward.shape)}; expected one number per step",
            )
        with np.errstate(all="ignore"):
            reward = reward.astype(np.float32)
        n = len(reward)
        obs = _columns(
            "observations", flattened(raw["observations"], "obs"), spec.obs_columns, n + 1
        )
        action = _columns("actions", flattened(raw["actions"], "action"), spec.action_columns, n)
        terminated, truncated = (
            np.asarray(raw[name], np.bool_) for name in ("terminations", "truncations")
        )
        if not n or terminated.shape != (n,) or truncated.shape != (n,):
            raise Refused(
                "bad_shape",
                f"it has {n} rewards, terminations{list(terminated.shape)} and "
                f"truncations{list(truncated.shape)}; expected one of each per step",
            )
        if (terminated | truncated)[:-1].any():
            raise Refused("bad_rows", "it has steps after it was terminated or truncated")
        # Optional columns that our export wrote to the infos. Do not change their order: the
        # session's id is a hash of all columns.
        extras = {}
        infos = raw.get("infos") or {}
        optional = optional_columns(spec)
        for name in sorted(
            optional, key=lambda name: (name == "action_mask", name.startswith("raw_"))
        ):
            dtype, shape = optional[name]
            rows = np.asarray(infos.get(name))
            if (rows.dtype, rows.shape) == (dtype, (n + (name == "action_mask"), *shape)):
                extras[name] = rows
        content = [*obs.values(), *action.values(), reward, terminated, truncated, *extras.values()]
        key = content_session_id("minari", spec.game, *(rows.tobytes() for rows in content)).bytes
        key_counts[key] += 1
        # Equal episodes get different ids, so that each of them is stored.
        session = content_session_id("minari", spec.game, key, str(key_counts[key]))
        seed = facts.get("seed")
        model = facts.get("model")
        origin = facts.get("session")
        if origin is not None:
            self.origins[random_part_of(session)] = random_part_of(uuid.UUID(str(origin)))
        note = EpisodeNote(
            row=0,
            seed=None if seed is None else int(seed),
            model=None if model is None else str(model),
        )
        return ImportedEpisode(
            session=session,
            obs=obs,
            action=action,
            reward=reward,
            terminated=bool(terminated[-1]),
            truncated=bool(truncated[-1]),
            extras=extras,
            note=note,
        )


def _columns(
    what: str, arrays: Mapping[str, Array], space_of: Mapping[str, Space], n_rows: int
) -> dict[str, Array]:
    """Return the arrays in the types of their spaces; Refused if they do not fit."""
    if arrays.keys() != space_of.keys():
        raise Refused(
            "bad_columns",
            f"its {what} have the parts {joined(arrays)}; expected {joined(space_of)}",
        )
    columns = {}
    for name, space in space_of.items():
        rows = arrays[name]
        shape = (n_rows, *space.shape)
        if rows.dtype.kind not in "biuf" or rows.size != np.prod(shape) or len(rows) != n_rows:
            raise Refused(
                "bad_shape",
                f"{name} is {rows.dtype}{list(rows.shape)}; expected {space.dtype}{list(shape)}",
            )
        with np.errstate(all="ignore"):
            columns[name] = rows.reshape(shape).astype(space.dtype)
        may_round = space.dtype.kind == "f" and rows.dtype.kind == "f"
        if not may_round and not np.array_equal(columns[name], rows.reshape(shape)):
            raise Refused("bad_dtype", f"{name} of {rows.dtype} does not fit {space.dtype} exactly")
    return columns
