"""The records of the original pipeline: JSON texts, each an object or an array with exactly one.

They arrive unordered and doubled, so nothing is read from their order: they are sorted by episode and step, equal ones
count once, and episodes with two different records of the same step are refused by name.
"""

import json
import math
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from understudy.core.errors import ConfigError
from understudy.core.tensors import Array

KEYS = ("episode", "step", "state", "action", "reward", "next_state", "done", "game_id")
_ALSO = {"pk"}
"""What the original table had besides."""

_MOST = 1 << 31
_SPACES = re.compile(r"\s*")


@dataclass(slots=True)
class Records:
    """All records of one game in some files, packed: half a million of them take about 100 MB."""

    episodes: dict[int, dict[int, bytes]] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    """Why an episode cannot be used, by its number."""
    game_ids: dict[str, int] = field(default_factory=dict)
    """Records of each game id, as it was written."""
    size: int = 0
    """Numbers in a state."""
    records: int = 0
    duplicates: int = 0
    most_action: int = 0

    def rows(self, episode: int) -> Array:
        """An episode's records in the order of their steps, as a structured array."""
        steps = self.episodes[episode]
        numbers = sorted(steps)
        fields = [("state", "<f8", (self.size,)), ("next_state", "<f8", (self.size,)), ("action", "<i8"),
                  ("reward", "<f8"), ("done", "?")]  # fmt: skip
        packed = np.frombuffer(b"".join(steps[one] for one in numbers), np.dtype(fields))
        rows = np.empty(len(packed), np.dtype([("step", "<i8"), *fields]))
        rows["step"] = numbers
        for name, *_ in fields:
            rows[name] = packed[name]
        return rows


def read_records(paths: list[Path], *, game_id: str | None = None) -> Records:
    """The records of one game; ConfigError names file and record where one is none, and games where they are mixed."""
    found = Records()
    for path in paths:
        number = 0
        for number, value in enumerate(_texts(path), start=1):
            try:
                _add(found, value, game_id)
            except (ValueError, TypeError, KeyError, OverflowError) as error:
                raise ConfigError(f"record {number} of {path} is none of the original pipeline's: {error}") from None
        if not number:
            raise ConfigError(f"{path} holds no records; give JSON lines, or a file with one record")
    if game_id is None and len(found.game_ids) > 1:
        ids = ", ".join(repr(one) for one in sorted(found.game_ids)[:6])
        raise ConfigError(f"the records are of several games ({ids}); choose one with --game-id")
    if not found.episodes:
        ids = ", ".join(repr(one) for one in sorted(found.game_ids)[:6])
        raise ConfigError(f"no record has the game id {game_id!r}; there are {ids}")
    return found


def _texts(path: Path) -> Iterator[Any]:
    """Every JSON value of a file, whatever stands between them: lines, spaces or nothing."""
    if not path.is_file():
        raise ConfigError(f"{path} is no file; give JSON lines of the original pipeline's records")
    decoder = json.JSONDecoder(parse_constant=_no_constant, object_pairs_hook=_object)
    number = 0
    try:
        with path.open(encoding="utf-8") as file:
            for line in file:
                number += 1
                text, at = line.strip().lstrip("\ufeff"), 0
                while at < len(text):
                    value, at = decoder.raw_decode(text, at)
                    yield value
                    at += len(_SPACES.match(text, at).group())  # type: ignore[union-attr]
    except (ValueError, RecursionError) as error:
        if isinstance(error, UnicodeDecodeError) or number > 1 or not (value := _as_one(path, decoder)):
            raise ConfigError(f"line {max(1, number)} of {path} is no JSON: {str(error)[:100]}") from None
        yield value[0]


def _as_one(path: Path, decoder: json.JSONDecoder) -> list[Any]:
    """The one value of a file that is written over several lines, or nothing."""
    try:
        return [decoder.decode(path.read_text(encoding="utf-8"))]
    except (ValueError, RecursionError):
        return []


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is no number of JSON")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("an object has a key twice")
    return made


def _add(found: Records, value: Any, game_id: str | None) -> None:
    if isinstance(value, list):
        if len(value) != 1:
            raise ValueError(f"an array of {len(value)} values; a record is an object, or an array with exactly one")
        value = value[0]
    if not isinstance(value, dict):
        raise ValueError(f"{str(value)[:40]!r}; a record is an object, or an array with exactly one")
    if value.keys() - _ALSO != set(KEYS):
        raise ValueError(f"its keys differ: {', '.join(sorted((value.keys() - _ALSO) ^ set(KEYS))[:6])}")
    name = value["game_id"]
    if not isinstance(name, str):
        raise ValueError(f"game_id is {name!r}; wanted a text")
    found.game_ids[name] = found.game_ids.get(name, 0) + 1
    if game_id is not None and name != game_id:
        return
    episode, step, action = (_whole(value, key) for key in ("episode", "step", "action"))
    state, next_state = _floats(value["state"], "state"), _floats(value["next_state"], "next_state")
    (reward,) = _floats([value["reward"]], "reward")
    if type(value["done"]) is not bool:
        raise ValueError(f"done is {value['done']!r}; wanted true or false")
    found.size = found.size or len(state)
    if len(state) != found.size or len(next_state) != found.size:
        raise ValueError(f"states of {len(state)} and {len(next_state)} numbers; wanted {found.size} in all of them")
    packed = struct.pack(f"<{2 * found.size}dqd?", *state, *next_state, action, reward, value["done"])
    found.records, found.most_action = found.records + 1, max(found.most_action, action)
    steps = found.episodes.setdefault(episode, {})
    if step not in steps:
        steps[step] = packed
    elif steps[step] == packed:
        found.duplicates += 1
    else:
        found.refused[episode] = f"step {step} comes with different contents"


def _whole(value: Mapping[str, Any], name: str) -> int:
    number = value[name]
    if type(number) is not int or not 0 <= number < _MOST:
        raise ValueError(f"{name} is {str(number)[:40]!r}; wanted a whole number from 0")
    return number


def _floats(values: Any, name: str) -> list[float]:
    if not isinstance(values, list) or not values:
        raise ValueError(f"{name} is {str(values)[:40]!r}; wanted a list of numbers")
    for number in values:
        if type(number) not in (int, float) or not math.isfinite(number) or abs(number) > 3.4e38:
            raise ValueError(f"{name} holds {str(number)[:40]!r}; wanted finite numbers")
    return values
