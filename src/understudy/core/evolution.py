"""How a game's description may change while its old rows stay readable.

A column may be added (old rows read zeros), dropped (ignored) or widened (every old value stays the same number);
any other change gives the old rows another meaning, and needs a new game name.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from understudy.core.errors import SpecError
from understudy.core.game import GameSpec
from understudy.core.spaces import Box, Discrete, MultiDiscrete, Space, type_ends
from understudy.core.tensors import DTYPE_NAMES, Array

Kind = Literal["same", "added", "dropped", "widened", "incompatible"]


@dataclass(frozen=True, slots=True)
class Change:
    """What became of one column between two specs; `detail` says why, where it is not `same`."""

    column: str
    kind: Kind
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Evolution:
    """Every column's change from an old spec to a new one of the same game."""

    old: GameSpec
    new: GameSpec
    changes: tuple[Change, ...]

    @property
    def readable(self) -> bool:
        """Whether old rows can be given the new spec's shape."""
        return all(change.kind != "incompatible" for change in self.changes)

    def require_readable(self) -> None:
        """SpecError that names each column that cannot be read."""
        if not self.readable:
            wrong = "; ".join(f"{c.column}: {c.detail}" for c in self.changes if c.kind == "incompatible")
            raise SpecError(
                f"rows of {self.old.game} in schema {self.old.schema[:12]} cannot be read as {self.new.schema[:12]}: "
                f"{wrong}. Columns may be added, dropped or widened; undo the change, or give the game a new name"
            )


def compare(old: GameSpec, new: GameSpec) -> Evolution:
    """What changed between two specs of one game, column by column; SpecError when the games differ."""
    if old.game != new.game:
        raise SpecError(f"specs of {old.game!r} and {new.game!r} were compared; give two specs of the same game")
    changes = [
        *_changes("observation", old.obs_columns, new.obs_columns),
        *_changes("action", old.action_columns, new.action_columns),
        *_legal(old, new),
    ]
    renamed = {"obs": _names(old.obs_names, new.obs_names), "action": _names(old.action_names, new.action_names)}
    return Evolution(old, new, tuple(_unless_renamed(change, renamed.get(change.column, "")) for change in changes))


def _changes(what: str, old: Mapping[str, Space], new: Mapping[str, Space]) -> Iterator[Change]:
    for column in sorted(old.keys() | new.keys()):
        if column not in new:
            yield Change(column, "dropped", "the new spec has no such column; its values are ignored")
        elif column in old:
            yield _change(column, old[column], new[column])
        elif not old.keys() & new.keys():
            yield Change(column, "incompatible", f"no {what} column of the old spec is left, which had {sorted(old)}")
        elif not new[column].holds(np.zeros((1, *new[column].shape), new[column].dtype))[0]:
            yield Change(column, "incompatible", "it is new, and the zeros of old rows would lie outside its space")
        else:
            yield Change(column, "added", "old rows read zeros")


def _change(column: str, old: Space, new: Space) -> Change:
    if old == new:
        return Change(column, "same")
    if type(old) is not type(new) or old.shape != new.shape:
        return Change(column, "incompatible", f"it was {_words(old)} and is {_words(new)}; kind and shape must stay")
    if not _holds_dtype(old.dtype, new.dtype):
        names = DTYPE_NAMES[old.dtype], DTYPE_NAMES[new.dtype]
        return Change(column, "incompatible", f"{names[0]} became {names[1]}; only a wider type of the same sort fits")
    if reason := _narrowed(old, new):
        return Change(column, "incompatible", reason)
    return Change(column, "widened", f"{_words(old)} became {_words(new)}")


def _holds_dtype(old: np.dtype[np.generic], new: np.dtype[np.generic]) -> bool:
    # np.can_cast calls int64 to float64 safe although it rounds, so numbers also stay of their sort.
    sorts = {"i": "whole", "u": "whole", "f": "float", "b": "flag"}
    return sorts[old.kind] == sorts[new.kind] and np.can_cast(old, new, "safe")


def _narrowed(old: Space, new: Space) -> str:
    """Why a value of the old space might not lie in the new one, or nothing."""
    match old, new:
        case Discrete(), Discrete():
            if old.start != new.start:
                return f"it started at {old.start} and starts at {new.start}; the start must stay"
            return f"it had {old.n} choices and has {new.n}; choices may only be added" if new.n < old.n else ""
        case MultiDiscrete(), MultiDiscrete():
            fewer = any(after < before for before, after in zip(old.counts, new.counts, strict=True))
            return f"counts {old.counts} became {new.counts}; counts may only grow" if fewer else ""
        case Box(), Box():
            low, high = _limits(old), _limits(new)
            inside = all((high[0] <= low[0]).tolist()) and all((low[1] <= high[1]).tolist())
            return "" if inside else f"bounds {_bounds(old)} became {_bounds(new)}; bounds may only widen"
        case _:
            return ""


def _limits(box: Box) -> tuple[Array, Array]:
    """Lowest and highest value of each element, flattened; whole numbers end with their type."""
    # Object arrays hold whole numbers exactly, where float64 would round those above 2^53.
    size = math.prod(box.shape)
    low, high = (
        np.broadcast_to(np.asarray(end if bound is None else bound, object).ravel(), (size,))
        for bound, end in zip((box.low, box.high), type_ends(box.dtype), strict=True)
    )
    return low, high


def _bounds(box: Box) -> str:
    return f"{str(box.low)[:40]}..{str(box.high)[:40]}"


def _words(space: Space) -> str:
    return f"{type(space).__name__} {DTYPE_NAMES[space.dtype]}{list(space.shape)}"


def _names(old: tuple[str, ...], new: tuple[str, ...]) -> str:
    """Why names contradict each other, or nothing; names may be given later, and added at the end."""
    if old and new and new[: len(old)] != old:
        return f"names {list(old)[:8]} became {list(new)[:8]}; names keep their order, and new ones come last"
    return ""


def _unless_renamed(change: Change, reason: str) -> Change:
    return Change(change.column, "incompatible", reason) if reason and change.kind != "incompatible" else change


def _legal(old: GameSpec, new: GameSpec) -> Iterator[Change]:
    grown = old.discrete is not None and new.discrete is not None and new.discrete.n > old.discrete.n
    if old.has_legal and not new.has_legal:
        yield Change("legal", "dropped", "the new spec has no masks; every action reads as legal")
    elif new.has_legal and not old.has_legal:
        yield Change("legal", "added", "in old rows every action that existed reads as legal")
    elif new.has_legal:
        yield Change("legal", "widened", "new actions read as not legal") if grown else Change("legal", "same")


def project(columns: Mapping[str, Array], evolution: Evolution) -> dict[str, Array]:
    """Columns of the old spec in the new spec's shape; columns outside the spec (reward, flags) go through as they are.

    SpecError when the specs are not compatible.
    """
    evolution.require_readable()
    old, new = evolution.old, evolution.new
    gone = {change.column for change in evolution.changes if change.kind == "dropped"}
    added = {change.column for change in evolution.changes if change.kind == "added"}
    gone |= {f"raw_{column}" for column in gone if column.startswith("action")}
    projected = {name: column for name, column in columns.items() if name not in gone}
    n_rows = len(columns["row"])
    for name, space in {**new.obs_columns, **new.action_columns}.items():
        if name in added:
            projected[name] = np.zeros((n_rows, *space.shape), space.dtype)
        else:
            projected[name] = columns[name].astype(space.dtype, copy=False)
    if new.has_legal and old.discrete and new.discrete:
        legal = np.zeros((n_rows, new.discrete.n), np.bool_)
        legal[:, : old.discrete.n] = columns.get("legal", True)
        projected["legal"] = legal
    return projected
