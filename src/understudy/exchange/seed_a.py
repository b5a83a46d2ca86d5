"""Import of records of the original pipeline, a public design from which understudy grew.

A record is a JSON object, or an array of one object, for one step. Records are unordered and may be
duplicated: they are sorted by episode and step, equal ones count once, and an episode with two
different records of the same step is rejected and reported by number.

A record's `state` is the one after the action: the true transition of step t is (state[t-1],
action[t], reward[t], state[t]) within one episode, and that of an episode's first record cannot be
recovered. Nothing is guessed: the caller chooses whether to repair the shift, or to store the
records as they are, with a consent that no learner reads.
"""

import json
import re
import struct
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from understudy.core.errors import ConfigError, InvalidName, SpecError
from understudy.core.names import GameName, PlayerName, game_name
from understudy.core.tensors import Array
from understudy.exchange.incoming import ImportedEpisode, chunks_of, content_session_id
from understudy.experience.chunk import Chunk
from understudy.experience.game import GameSpec, game_spec, spec_from_gymnasium
from understudy.experience.spaces import MAX_NUMBER

KEYS = ("episode", "step", "state", "action", "reward", "next_state", "done", "game_id")
_ALSO = {"pk"}
"""Further keys of the original table, which are ignored."""
_MOST = 1 << 31
_SPACES = re.compile(r"\s*")

Mode = Literal["repair-shift", "as-is"]
MISALIGNED_CONSENT = "denied"
"""The consent of records stored as they are; no learner reads it, whatever its settings."""
_MOST_ACTIONS = 4096
"""More actions need --actions, since each of them is an output of the network."""


# --- records --------------------------------------------------------------------------------------


@dataclass(slots=True)
class Records:
    """The records of one game in some files, packed: half a million use about 100 MB of memory."""

    episodes: dict[int, dict[int, bytes]] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    """Why an episode is rejected, by its number."""
    game_ids: dict[str, int] = field(default_factory=dict)
    """Number of records of each game id, as written in the files."""
    size: int = 0
    """Length of a state."""
    records: int = 0
    duplicates: int = 0
    max_action: int = 0

    def rows(self, episode: int) -> Array:
        """Return an episode's records in the order of their steps, as a structured array."""
        steps = self.episodes[episode]
        numbers = sorted(steps)
        fields = [
            ("state", "<f8", (self.size,)),
            ("next_state", "<f8", (self.size,)),
            ("action", "<i8"),
            ("reward", "<f8"),
            ("done", "?"),
        ]
        packed = np.frombuffer(b"".join(steps[number] for number in numbers), np.dtype(fields))
        rows = np.empty(len(packed), np.dtype([("step", "<i8"), *fields]))
        rows["step"] = numbers
        for name, *_ in fields:
            rows[name] = packed[name]
        return rows

    def add(self, record: Any, game_id: str | None) -> None:
        """Add a record, unless it belongs to another game; ValueError states why it is invalid."""
        if isinstance(record, list):
            if len(record) != 1:
                raise ValueError(
                    f"an array of {len(record)} values; a record is an object, or an array of "
                    "exactly one object"
                )
            record = record[0]
        if not isinstance(record, dict):
            raise ValueError(
                f"{str(record)[:40]!r}; a record is an object, or an array of exactly one object"
            )
        if record.keys() - _ALSO != set(KEYS):
            raise ValueError(
                "missing or unknown keys: "
                f"{', '.join(sorted((record.keys() - _ALSO) ^ set(KEYS))[:6])}"
            )
        name = record["game_id"]
        if not isinstance(name, str):
            raise ValueError(f"game_id is {name!r}; expected a string")
        self.game_ids[name] = self.game_ids.get(name, 0) + 1
        if game_id is not None and name != game_id:
            return
        episode, step, action = (_integer(record, key) for key in ("episode", "step", "action"))
        state, next_state = (_floats(record[key], key) for key in ("state", "next_state"))
        (reward,) = _floats([record["reward"]], "reward")
        if type(record["done"]) is not bool:
            raise ValueError(f"done is {record['done']!r}; expected true or false")
        self.size = self.size or len(state)
        if len(state) != self.size or len(next_state) != self.size:
            raise ValueError(
                f"states of {len(state)} and {len(next_state)} numbers; expected {self.size} in "
                "all of them"
            )
        packed = struct.pack(
            f"<{2 * self.size}dqd?", *state, *next_state, action, reward, record["done"]
        )
        self.records += 1
        self.max_action = max(self.max_action, action)
        if (before := self.episodes.setdefault(episode, {}).setdefault(step, packed)) != packed:
            self.refused[episode] = f"step {step} has two different records"
        elif before is not packed:
            self.duplicates += 1


def _integer(record: Mapping[str, Any], name: str) -> int:
    number = record[name]
    if type(number) is not int or not 0 <= number < _MOST:
        raise ValueError(f"{name} is {str(number)[:40]!r}; expected an integer of at least 0")
    return number


def _floats(values: Any, name: str) -> list[float]:
    if not isinstance(values, list) or not values:
        raise ValueError(f"{name} is {str(values)[:40]!r}; expected a list of numbers")
    for number in values:
        # The comparison is also False if the number is NaN.
        if type(number) not in (int, float) or not abs(number) <= MAX_NUMBER:
            raise ValueError(
                f"{name} holds {str(number)[:40]!r}; expected finite numbers up to {MAX_NUMBER:g}"
            )
    return values


def read_records(paths: Sequence[Path], *, game_id: str | None = None) -> Records:
    """Return the records of one game; ConfigError names the file and record of a problem."""
    records = Records()
    for path in paths:
        number = 0
        for number, value in enumerate(_texts(path), start=1):
            try:
                records.add(value, game_id)
            except (ValueError, TypeError, KeyError, OverflowError) as error:
                raise ConfigError(
                    f"record {number} of {path} is not a record of the original pipeline: {error}; "
                    "correct or remove it"
                ) from None
        if not number:
            raise ConfigError(
                f"{path} holds no records; pass JSON lines, or a file with one record"
            )
    ids = ", ".join(repr(name) for name in sorted(records.game_ids)[:6])
    if game_id is None and len(records.game_ids) > 1:
        raise ConfigError(f"the records hold several games ({ids}); choose one with --game-id")
    if not records.episodes:
        raise ConfigError(
            f"no record has the game id {game_id!r}; pass one of these with --game-id: {ids}"
        )
    return records


def _texts(path: Path) -> Iterator[Any]:
    """Yield every JSON value of a file, separated by newlines, spaces or nothing."""
    if not path.is_file():
        raise ConfigError(
            f"{path} is not a file; pass JSON lines of the original pipeline's records"
        )
    decoder = json.JSONDecoder(parse_constant=_no_constant, object_pairs_hook=_object)
    number = 0
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                number += 1
                text = line.strip().lstrip("\ufeff")
                at = 0
                while at < len(text):
                    value, at = decoder.raw_decode(text, at)
                    yield value
                    at += len(_SPACES.match(text, at).group())  # type: ignore[union-attr]
    except (ValueError, RecursionError) as error:
        invalid = ConfigError(
            f"line {max(1, number)} of {path} is not valid JSON: {str(error)[:100]}; correct or "
            "remove it"
        )
        if isinstance(error, UnicodeDecodeError) or number > 1:
            raise invalid from None
        try:
            value = decoder.decode(path.read_text(encoding="utf-8"))  # a value of several lines
        except (ValueError, RecursionError):
            raise invalid from None
        yield value


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is not a JSON number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ValueError("an object has a duplicate key")
    return fields


# --- the import -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class SeedOptions:
    """How to read the records."""

    mode: Mode
    consent: str
    game: GameName | None = None
    game_id: str | None = None
    """Import only records with this id."""
    limit: int | None = None
    """Steps after which the game truncates an episode; the default is that of its spec."""
    actions: int | None = None
    """Number of actions, if no spec is known."""


class SeedA:
    """All records of some files; each episode becomes a session.

    An episode with missing records becomes several sessions.
    """

    origins: Mapping[int, int] = {}

    def __init__(
        self,
        paths: Sequence[Path],
        options: SeedOptions,
        *,
        registered: Callable[[GameName], Sequence[GameSpec]],
    ) -> None:
        """`registered` returns a game's registered specs; the first one that fits is used."""
        self.name = ", ".join(map(str, paths[:3])) + (" …" if len(paths) > 3 else "")
        self._options = options
        self._records = read_records(paths, game_id=options.game_id)
        self._game_id = (
            options.game_id if options.game_id is not None else next(iter(self._records.game_ids))
        )
        try:
            game = options.game or game_name(self._game_id)
        except InvalidName:
            raise ConfigError(
                f"the records' game id {self._game_id[:60]!r} is not a valid game name; pass "
                "another name with --game NAME"
            ) from None
        self.spec, self.spec_is_from = _spec(game, self._records, options, registered(game))
        self.limit = options.limit or self.spec.max_episode_steps
        self._counts: Counter[str] = Counter()
        self._refused: dict[str, str] = {}

    def chunks(self) -> Iterator[tuple[Chunk, PlayerName | None]]:
        self._counts = Counter()
        self._refused = {}
        is_kept = self._options.mode == "as-is"
        consent = MISALIGNED_CONSENT if is_kept else self._options.consent
        client = "seed-a-import/1 misaligned" if is_kept else "seed-a-import/1"
        for number in sorted(self._records.episodes):
            rows = self._records.rows(number)
            why = self._records.refused.get(number, "")
            ends = rows["step"][rows["done"]]
            last = rows["step"][-1]
            if not why and len(ends) and ends[0] < last:
                why = f"step {last} follows step {ends[0]}, which is done"
            if why:
                self._refused[f"episode {number}"] = why
                continue
            self._counts["episodes"] += 1
            for episode in self._episodes(number, rows):
                for chunk in chunks_of(episode, self.spec, consent=consent, client=client):
                    yield chunk, None

    def _episodes(self, number: int, rows: Array) -> Iterator[ImportedEpisode]:
        """Yield an episode, split where records are missing."""
        counts = self._counts
        mode = self._options.mode
        ((obs_name, space),) = self.spec.obs_columns.items()
        ((action_name, action_space),) = self.spec.action_columns.items()
        parts = np.split(rows, np.flatnonzero(np.diff(rows["step"]) != 1) + 1)
        counts["gaps"] += len(parts) - 1
        for part in parts:
            is_done = bool(part["done"][-1])
            truncated = is_done and int(part["step"][-1]) + 1 == self.limit
            terminated = is_done and not truncated
            counts["derived_truncations"] += truncated
            counts["episodes_without_end"] += part is parts[-1] and not is_done
            # repair-shift: the states are those after each action, so the first action is lost.
            # as-is: the states are unchanged, followed by the last next_state.
            obs = part["state"]
            records = part[1:]
            if mode == "repair-shift":
                counts["lost_first_steps"] += 1
            else:
                obs = np.concatenate([obs, part["next_state"][-1:]])
                records = part
            if not len(records):
                continue
            states = obs.astype(space.dtype).reshape(-1, *space.shape)
            actions = records["action"].astype(action_space.dtype)
            rewards = records["reward"].astype(np.float32)
            content = (
                states.tobytes(),
                actions.tobytes(),
                rewards.tobytes(),
                f"{terminated} {truncated}",
            )
            place = f"{number} {records['step'][0]}"
            yield ImportedEpisode(
                session=content_session_id("seed-a", mode, self.spec.game, place, *content),
                obs={obs_name: states},
                action={action_name: actions},
                reward=rewards,
                terminated=terminated,
                truncated=truncated,
            )

    def report(self) -> Mapping[str, Any]:
        records = self._records
        counted = (
            "episodes",
            "lost_first_steps",
            "derived_truncations",
            "gaps",
            "episodes_without_end",
        )
        # The records contradict the shift if most next_states equal the following record's state
        # instead of their own.
        own = following = 0
        for number in records.episodes:
            rows = records.rows(number)
            is_own = (rows["next_state"] == rows["state"]).all(axis=1)
            is_next = (rows["next_state"][:-1] == rows["state"][1:]).all(axis=1) & (
                np.diff(rows["step"]) == 1
            )
            own += int(is_own.sum())
            following += int((is_next & ~is_own[:-1]).sum())
        return {
            "mode": self._options.mode,
            "game_id": self._game_id,
            "spec_is_from": self.spec_is_from,
            "limit": self.limit,
            "records": records.records,
            "duplicates": records.duplicates,
            **{name: self._counts[name] for name in counted},
            "refused_episodes": dict(self._refused),
            "looks_aligned": following > own,
        }


def _spec(
    game: GameName, records: Records, options: SeedOptions, registered: Sequence[GameSpec]
) -> tuple[GameSpec, str]:
    """Return the game's spec and its source: "registered", "gymnasium" or "records"."""
    most = records.max_action
    for spec, source in [
        *((spec, "registered") for spec in registered),
        *((spec, "gymnasium") for spec in _of_env(game)),
    ]:
        space = spec.obs.get("")
        discrete = spec.discrete
        if space is None or discrete is None or spec.has_action_mask or space.dtype.kind != "f":
            continue
        if np.prod(space.shape) == records.size and discrete.start == 0 and most < discrete.n:
            return spec, source
    if registered:
        raise ConfigError(
            f"{game} is registered with spaces that do not fit these records (states of "
            f"{records.size} numbers, actions up to {most}); pass another --game"
        )
    actions = options.actions or max(2, most + 1)
    if actions > _MOST_ACTIONS and options.actions is None:
        raise ConfigError(
            f"the highest action is {most}, so the game would have {actions} actions; if that is "
            f"right, pass --actions {actions}"
        )
    if most >= actions:
        raise ConfigError(
            f"--actions is {actions}, but the highest action is {most}; pass at least {most + 1}"
        )
    return game_spec(
        game, obs=records.size, actions=actions, max_episode_steps=options.limit
    ), "records"


def _of_env(game: GameName) -> list[GameSpec]:
    """Return the spec of the Gymnasium env with this id; empty if there is none or it fails."""
    import gymnasium

    if game not in gymnasium.registry:
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about outdated versions
            env = gymnasium.make(game, disable_env_checker=True)
    except Exception:
        # The game may lack a package or a display; the spec is then derived from the records.
        return []
    try:
        return [spec_from_gymnasium(env, game=game)]
    except SpecError:
        return []
    finally:
        env.close()
