"""Settings: frozen dataclasses whose fields say what they mean, read from one chain of sources for
every part.

    flag or argument > UNDERSTUDY_GATEWAY_PORT > UNDERSTUDY_GATEWAY_PORT_FILE > TOML file > default

The type of a setting is that of its default. A field whose default is another such dataclass is a
table of its own.
"""

import dataclasses
import difflib
import importlib
import json
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np

from understudy.core.errors import ConfigError

PREFIX = "UNDERSTUDY_"
_MAX_FILE_BYTES = 64 * 1024

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Schedule:
    """A number that moves in a straight line from `start` to `end` over the first `until` of a
    run, then stays."""

    start: float
    end: float
    until: float = 1.0

    def __post_init__(self) -> None:
        if (
            not all(math.isfinite(value) for value in (self.start, self.end))
            or not 0 < self.until <= 1
        ):
            raise ConfigError(
                f"a schedule {self}; give finite numbers, and an until above 0 and at most 1"
            )

    def at(self, progress: float) -> float:
        """Its value when this share of the run is done."""
        share = min(1.0, max(0.0, progress) / self.until)
        return self.start + (self.end - self.start) * share


@dataclass(frozen=True, slots=True)
class Range:
    """What a setting may be, for checks, help texts and searches."""

    low: float
    high: float
    says: str
    choices: tuple[str, ...] = ()
    """The texts it may be; empty: any."""


def setting(
    default: Any,
    low: float = -math.inf,
    high: float = math.inf,
    says: str = "",
    *,
    choices: Sequence[str] = (),
) -> Any:
    """A dataclass field with its range and its line of help."""
    return field(default=default, metadata={"range": Range(low, high, says, tuple(choices))})


@dataclass(frozen=True, slots=True)
class Leaf:
    """One value that can be set: `gateway.port`."""

    name: str
    default: Any
    range: Range | None
    prefix: str = PREFIX

    @property
    def variable(self) -> str:
        return self.prefix + self.name.replace(".", "_").upper()

    @property
    def help(self) -> str:
        return self.range.says if self.range else ""


def leaves(kind: Any, *, prefix: str = PREFIX, above: str = "") -> Iterator[Leaf]:
    """Every setting of a dataclass and of those inside it, in order."""
    for one in dataclasses.fields(kind):
        if dataclasses.is_dataclass(one.default) and not isinstance(one.default, Schedule):
            yield from leaves(type(one.default), prefix=prefix, above=f"{above}{one.name}.")
        else:
            yield Leaf(f"{above}{one.name}", one.default, one.metadata.get("range"), prefix)


# --- From sources to values -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Resolved(Generic[T]):
    """Settings, and for each value where it came from."""

    config: T
    origins: Mapping[str, str]

    def shown(self) -> dict[str, dict[str, Any]]:
        """Each value as it may be shown, with its origin."""
        tree = dataclasses.asdict(self.config)  # type: ignore[call-overload]
        return {
            name: {"value": hidden(_at(tree, name)), "origin": origin}
            for name, origin in self.origins.items()
        }


def resolve(
    kind: type[T],
    *,
    flags: Mapping[str, Any],
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
    instead: Callable[[str, Any], Any] = lambda name, value: value,
    kept: Callable[[str, Mapping[str, Any]], tuple[Any, str] | None] = lambda name, values: None,
) -> Resolved[T]:
    """Settings from flags, environment, file and defaults; a flag of None was not given.

    `instead` may replace a value before it is checked. `kept` is asked before a default is used,
    with what was found so far; it gives a value and its origin, or None.
    """
    environ = os.environ if environ is None else environ
    known = list(leaves(kind))
    tree = read_toml(file) if file else {}
    check_names(tree, known, where=str(file))
    _check_variables(environ, known)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for leaf in known:
        found = find(leaf, flags, environ)
        if found is None and (value := _at(tree, leaf.name)) is not None:
            found = value, str(file)
        found = found or kept(leaf.name, values)
        value, origins[leaf.name] = found or (leaf.default, "default")
        if found:
            value = parse_text(leaf, instead(leaf.name, value))
            value = check_value(leaf, value, origin=origins[leaf.name])
        values[leaf.name] = value
    return Resolved(_build(kind, values), origins)


def find(
    leaf: Leaf, flags: Mapping[str, Any], environ: Mapping[str, str]
) -> tuple[Any, str] | None:
    """A value from a flag, a variable or the file that a variable names, with its origin."""
    if flags.get(leaf.name) is not None:
        return flags[leaf.name], f"flag --{leaf.name.rpartition('.')[2].replace('_', '-')}"
    if leaf.variable in environ:
        return environ[leaf.variable], leaf.variable
    if path := environ.get(f"{leaf.variable}_FILE"):
        try:
            with Path(path).expanduser().open("rb") as file:
                return file.read(_MAX_FILE_BYTES).decode().strip(), f"{leaf.variable}_FILE ({path})"
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"{leaf.variable}_FILE names {path}, which cannot be read: {error}; give a small "
                "text file"
            ) from None
    return None


def from_tree(kind: type[T], tree: Mapping[str, Any], *, where: str) -> T:
    """Settings as a file of JSON or TOML holds them, checked; what it leaves out has its
    default."""
    known = list(leaves(kind))
    check_names(tree, known, where=where)
    values = {}
    for leaf in known:
        value = _at(tree, leaf.name)
        values[leaf.name] = (
            leaf.default if value is None else check_value(leaf, value, origin=where)
        )
    return _build(kind, values)


def read_toml(path: Path) -> dict[str, Any]:
    """A settings file; ConfigError says what is wrong with it."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; correct its name, or create it"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no TOML: {error}; correct it") from None


def parse_value(text: str) -> Any:
    """What a text on a command line means: a TOML value, or plain text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def parse_text(leaf: Leaf, value: Any) -> Any:
    """What a text from a variable or a file means for its setting: a number, a list, a switch;
    or the text itself."""
    default = leaf.default
    if not isinstance(value, str) or isinstance(default, str):
        return value
    if isinstance(default, bool):
        return {"true": True, "1": True, "false": False, "0": False}.get(
            value.strip().lower(), value
        )
    if isinstance(default, tuple) and not value.lstrip().startswith("["):
        parts = [part.strip() for part in value.split(",") if part.strip()]
        return (
            [parse_value(part) for part in parts]
            if default and isinstance(default[0], int)
            else parts
        )
    return parse_value(value.strip())


def _at(tree: Any, name: str) -> Any:
    for part in name.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return None
        tree = tree[part]
    return tree


def _build(kind: type[T], values: Mapping[str, Any], above: str = "") -> T:
    given = {}
    for one in dataclasses.fields(kind):  # type: ignore[arg-type]
        name = above + one.name
        given[one.name] = (
            values[name] if name in values else _build(type(one.default), values, f"{name}.")
        )
    return kind(**given)


# --- Checks ---------------------------------------------------------------------------------------


def check_names(tree: Mapping[str, Any], known: Sequence[Leaf], *, where: str) -> None:
    """ConfigError for a name that does not exist, so that a misspelt one is noticed."""
    names = [leaf.name for leaf in known]

    def inside(part: Mapping[str, Any], above: str) -> Iterator[str]:
        for key, value in part.items():
            name = above + key
            if (
                isinstance(value, dict)
                and name not in names
                and (value or any(n.startswith(f"{name}.") for n in names))
            ):
                yield from inside(value, f"{name}.")
            else:
                yield name

    for name in inside(tree, ""):
        if name not in names:
            raise ConfigError(f"{where} sets {name}, which does not exist; {nearest(name, names)}")


def _check_variables(environ: Mapping[str, str], known: Sequence[Leaf]) -> None:
    """A misspelt variable of a table is refused; others may belong to games, such as
    UNDERSTUDY_URL."""
    names = [leaf.variable for leaf in known]
    tables = tuple(
        {f"{leaf.prefix}{leaf.name.split('.')[0].upper()}_" for leaf in known if "." in leaf.name}
    )
    for name in environ:
        if name.startswith(tables) and name.removesuffix("_FILE") not in names:
            raise ConfigError(
                f"{name} is set in the environment and means nothing; {nearest(name, names)}"
            )


def nearest(name: str, known: Sequence[str]) -> str:
    """The next step after a name that does not exist."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    # A key in the wrong table is near by its last part.
    near = near or [one for one in known if one.rpartition(".")[2] == name.rpartition(".")[2]]
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"


def check_value(leaf: Leaf, value: Any, *, origin: str = "", may_move: bool = False) -> Any:
    """A value as its setting wants it; ConfigError says what was given, where, and what is wanted.

    Only where it `may_move` it may be a schedule.
    """
    name = leaf.name
    default = leaf.default
    limits = leaf.range
    value = (
        value.item()
        if isinstance(value, np.generic)
        else tuple(value)
        if isinstance(value, list)
        else value
    )
    by = f" ({origin})" if origin else ""
    if may_move and isinstance(value, Mapping):
        try:
            value = Schedule(**{key: float(number) for key, number in value.items()})
        except (TypeError, ValueError):
            raise ConfigError(
                f"{name} is {dict(value)}{by}; a schedule has start, end and until"
            ) from None
    if isinstance(value, Schedule) and not may_move:
        raise ConfigError(f"{name} is a schedule{by}; it is fixed for a run, so give one value")
    about = f": {limits.says}" if limits and limits.says else ""
    if wanted := _wanted(value, default, may_move=may_move):
        raise ConfigError(f"{name} is {hidden(value)!r}{by}; give {wanted}{about}")
    if limits is not None and limits.choices and value not in limits.choices:
        raise ConfigError(
            f"{name} is {value!r}{by}; give one of {', '.join(limits.choices)}{about}"
        )
    if limits is not None and isinstance(value, int | float | Schedule):
        for number in (value.start, value.end) if isinstance(value, Schedule) else (value,):
            if not limits.low <= number <= limits.high:
                raise ConfigError(
                    f"{name} is {number}{by}; give {limits.low:g} to {limits.high:g}{about}"
                )
    return float(value) if isinstance(default, float) and isinstance(value, int) else value


def _wanted(value: Any, default: Any, *, may_move: bool) -> str:
    """What to give instead of a value that is not of its default's kind; empty where it is."""
    match default:
        case bool():
            return "" if isinstance(value, bool) else "true or false"
        case int():
            return (
                "" if isinstance(value, int) and not isinstance(value, bool) else "a whole number"
            )
        case float() | Schedule():
            if isinstance(value, int | float | Schedule) and not isinstance(value, bool):
                return ""
            return "a number, or a schedule {start=, end=, until=}" if may_move else "a number"
        case (int(), *_):
            is_sizes = isinstance(value, tuple) and all(
                isinstance(one, int) and one > 0 for one in value
            )
            return "" if is_sizes else "a list, such as [64, 64]"
        case tuple():
            is_texts = isinstance(value, tuple) and all(isinstance(one, str) for one in value)
            return "" if is_texts else 'a list, such as ["a", "b"]'
        case str():
            return "" if isinstance(value, str) else "a text"
    return ""


# --- As text --------------------------------------------------------------------------------------


def hidden(value: Any) -> Any:
    """A value as it may be shown: names and passwords inside a URL are stars."""
    if not isinstance(value, str) or "://" not in value:
        return value
    return re.sub(r"\?.*", "?***", re.sub(r"://[^/@]*@", "://***@", value))


def toml_text(value: Any) -> str:
    """A value as TOML has it."""
    if isinstance(value, Schedule):
        return f"{{ start = {value.start!r}, end = {value.end!r}, until = {value.until!r} }}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(toml_text(one) for one in value)}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, bool | str) else repr(value)


def load(path: str, *, what: str, known: Iterable[str] = ()) -> Any:
    """What an import path stands for; ConfigError names the nearest of the known short names."""
    module, _, attribute = path.partition(":")
    if not attribute:
        names = sorted(known)
        near = difflib.get_close_matches(path, names, n=1)
        hint = (
            f"; did you mean {near[0]!r}?"
            if near
            else f"; known are {', '.join(names)}"
            if names
            else ""
        )
        raise ConfigError(f"there is no {what} {path!r}{hint} (or name your own as module:Class)")
    try:
        return getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f"{what} {path!r} cannot be imported: {error}; give module:Class on the Python path"
        ) from None
