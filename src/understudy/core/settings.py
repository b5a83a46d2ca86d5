"""Settings: frozen dataclasses with documented fields, read from one chain of sources.

    flag or argument > UNDERSTUDY_GATEWAY_PORT > UNDERSTUDY_GATEWAY_PORT_FILE > TOML file > default

A setting has the type of its default. A field whose default is another such dataclass is a table.
"""

import dataclasses
import difflib
import importlib
import json
import math
import os
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from understudy.core.errors import ConfigError
from understudy.core.wording import shortened

PREFIX = "UNDERSTUDY_"
_MAX_FILE_BYTES = 64 * 1024

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Schedule:
    """A number that moves linearly from `start` to `end` in the first share `until` of a horizon.

    The horizon of a run is its length, or longer (see the setting `horizon`).
    """

    start: float
    end: float
    until: float = 1.0

    def __post_init__(self) -> None:
        if (
            not all(math.isfinite(value) for value in (self.start, self.end))
            or not 0 < self.until <= 1
        ):
            raise ConfigError(
                f"{self} is not a schedule; give finite numbers, and an until above 0 and at most 1"
            )

    def at(self, progress: float) -> float:
        """The value at this share of the horizon, from 0 to 1."""
        share = min(1.0, max(0.0, progress) / self.until)
        return self.start + (self.end - self.start) * share


@dataclass(frozen=True, slots=True)
class Range:
    """The allowed values of a setting, for checks, help texts and searches."""

    low: float
    high: float
    description: str
    choices: tuple[str, ...] = ()
    """The allowed texts; empty if every text is allowed."""

    @property
    def allowed_text(self) -> str:
        """The allowed numbers in words."""
        if self.low == -math.inf:
            return "a number" if self.high == math.inf else f"{self.high:g} or less"
        return (
            f"{self.low:g} or more" if self.high == math.inf else f"{self.low:g} to {self.high:g}"
        )


def setting(
    default: Any,
    low: float = -math.inf,
    high: float = math.inf,
    description: str = "",
    *,
    choices: Sequence[str] = (),
) -> Any:
    """A dataclass field with its range and a line of help."""
    return field(default=default, metadata={"range": Range(low, high, description, tuple(choices))})


@dataclass(frozen=True, slots=True)
class Leaf:
    """One value that can be set, such as `gateway.port`."""

    name: str
    default: Any
    range: Range | None
    prefix: str = PREFIX

    @property
    def variable(self) -> str:
        return self.prefix + self.name.replace(".", "_").upper()

    @property
    def help(self) -> str:
        return self.range.description if self.range else ""


def leaves(kind: Any, *, prefix: str = PREFIX, above: str = "") -> Iterator[Leaf]:
    """Yield every setting of a dataclass and of the dataclasses nested in it, in order."""
    for entry in dataclasses.fields(kind):
        name = f"{above}{entry.name}"
        if dataclasses.is_dataclass(entry.default) and not isinstance(entry.default, Schedule):
            yield from leaves(type(entry.default), prefix=prefix, above=f"{name}.")
        else:
            yield Leaf(name, entry.default, entry.metadata.get("range"), prefix)


# --- From sources to values -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Resolved(Generic[T]):
    """Settings, and the origin of each value."""

    config: T
    origins: Mapping[str, str]

    def masked(self) -> dict[str, dict[str, Any]]:
        """Each value with its secrets hidden, and its origin."""
        tree = dataclasses.asdict(self.config)  # type: ignore[call-overload]
        return {
            name: {"value": mask_secrets(_at(tree, name)), "origin": origin}
            for name, origin in self.origins.items()
        }


def resolve(
    kind: type[T],
    *,
    flags: Mapping[str, Any],
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
    instead: Callable[[str, Any], Any] = lambda name, value: value,
    saved: Callable[[str, Mapping[str, Any]], tuple[Any, str] | None] = lambda name, values: None,
) -> Resolved[T]:
    """Read settings from flags, environment, file and defaults; a flag of None counts as absent.

    A ClassVar `REMOVED` of `kind` maps names of earlier versions to what replaced them.
    `instead` gets the name and value of a setting and returns the value to check. `saved` is called
    before a default is used, with the name and all values so far; it returns a value and its
    origin, or None.
    """
    environ = os.environ if environ is None else environ
    fields = list(leaves(kind))
    tree = read_toml(file) if file else {}
    removed: Mapping[str, str] = getattr(kind, "REMOVED", {})
    check_names(tree, fields, where=str(file), removed=removed)
    _check_variables(environ, fields, removed)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for leaf in fields:
        source = find_value(leaf, flags, environ)
        if source is None and (value := _at(tree, leaf.name)) is not None:
            source = value, str(file)
        source = source or saved(leaf.name, values)
        value, origins[leaf.name] = source or (leaf.default, "default")
        if source:
            value = parse_text(leaf, instead(leaf.name, value))
            value = check_value(leaf, value, origin=origins[leaf.name])
        values[leaf.name] = value
    return Resolved(_build(kind, values), origins)


def find_value(
    leaf: Leaf, flags: Mapping[str, Any], environ: Mapping[str, str]
) -> tuple[Any, str] | None:
    """A setting's value from a flag, a variable or the file it names, and the origin; else None."""
    if flags.get(leaf.name) is not None:
        name = leaf.name.rpartition(".")[2].removesuffix("_s").replace("_", "-")
        return flags[leaf.name], f"flag --{name}"
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
    """Validate the settings of a JSON or TOML file; missing settings have their default."""
    fields = list(leaves(kind))
    check_names(tree, fields, where=where, removed=getattr(kind, "REMOVED", {}))
    values = {}
    for leaf in fields:
        value = _at(tree, leaf.name)
        values[leaf.name] = (
            leaf.default if value is None else check_value(leaf, value, origin=where)
        )
    return _build(kind, values)


def read_toml(path: Path) -> dict[str, Any]:
    """Read a settings file; ConfigError states the problem."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; correct its name, or create it"
        ) from None
    except ValueError as error:  # also for numbers of too many digits
        raise ConfigError(f"{path} is not TOML: {error}; correct it") from None


def parse_value(text: str) -> Any:
    """Parse text from a command line as a TOML value, or return it as plain text."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except ValueError:  # also for numbers of too many digits
        return text


def parse_text(leaf: Leaf, value: Any) -> Any:
    """Parse text from a variable or file as the type of its setting, or return it unchanged."""
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
    arguments = {}
    for entry in dataclasses.fields(kind):  # type: ignore[arg-type]
        name = above + entry.name
        arguments[entry.name] = (
            values[name] if name in values else _build(type(entry.default), values, f"{name}.")
        )
    return kind(**arguments)


# --- Checks ---------------------------------------------------------------------------------------


def check_names(
    tree: Mapping[str, Any],
    fields: Sequence[Leaf],
    *,
    where: str,
    removed: Mapping[str, str] | None = None,
) -> None:
    """Raise ConfigError for a name that does not exist, so that typos are noticed."""
    names = [leaf.name for leaf in fields]

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
        if name in (removed or {}):
            raise ConfigError(f"{where} sets {name}, which was removed; {(removed or {})[name]}")
        if name not in names:
            raise ConfigError(
                f"{where} sets {name}, but there is no such setting; {nearest(name, names)}"
            )


def _check_variables(
    environ: Mapping[str, str], fields: Sequence[Leaf], removed: Mapping[str, str]
) -> None:
    """Reject unknown variables of a settings table; others may be for games (UNDERSTUDY_URL)."""
    names = [leaf.variable for leaf in fields]
    tables = tuple(
        {f"{leaf.prefix}{leaf.name.split('.')[0].upper()}_" for leaf in fields if "." in leaf.name}
    )
    instead = {fields[0].prefix + old.replace(".", "_").upper(): old for old in removed}
    for name in environ:
        if old := instead.get(name.removesuffix("_FILE")):
            raise ConfigError(f"{name} is set in the environment, but was removed; {removed[old]}")
        if name.startswith(tables) and name.removesuffix("_FILE") not in names:
            raise ConfigError(
                f"{name} is set in the environment, but there is no such setting; "
                f"{nearest(name, names)}"
            )


def nearest(name: str, known: Sequence[str]) -> str:
    """The hint for a name that does not exist: the nearest known one, or all of them."""
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    # A key in the wrong table matches by its last part.
    last = name.rpartition(".")[2]
    near = near or [candidate for candidate in known if candidate.rpartition(".")[2] == last]
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(known) or 'none'}"


def check_value(leaf: Leaf, value: Any, *, origin: str = "", may_move: bool = False) -> Any:
    """Convert a value to its setting's type; ConfigError states the value, its origin and the fix.

    A schedule is allowed only with `may_move`.
    """
    name = leaf.name
    default = leaf.default
    limits = leaf.range
    # Importing NumPy takes a tenth of a second. While it is not imported, no value is of its types;
    # while another thread imports it, `generic` may be missing.
    numpy_scalar: Any = getattr(sys.modules.get("numpy"), "generic", ())
    if isinstance(value, numpy_scalar):
        value = value.item()
    elif isinstance(value, list):
        value = tuple(value)
    by = f" ({origin})" if origin else ""
    if may_move and isinstance(value, Mapping):
        try:
            value = Schedule(**{key: float(number) for key, number in value.items()})
        except (TypeError, ValueError):
            raise ConfigError(
                f"{name} is {value_text(value)}{by}; give numbers: a schedule has start, end and "
                "until"
            ) from None
    if isinstance(value, Schedule) and not may_move:
        raise ConfigError(
            f"{name} is a schedule{by}; this setting is fixed for a run, so give one value"
        )
    about = f": {limits.description}" if limits and limits.description else ""
    if expected := _expected_type(value, default, may_move=may_move):
        if value == "":
            raise ConfigError(
                f"{name} is empty{by}; give {expected}, or remove it for the default, "
                f"{value_text(default)}{about}"
            )
        raise ConfigError(f"{name} is {value_text(value)}{by}; give {expected}{about}")
    if limits is not None and limits.choices and value not in limits.choices:
        raise ConfigError(
            f"{name} is {value_text(value)}{by}; give one of {', '.join(limits.choices)}{about}"
        )
    if limits is not None and isinstance(value, int | float | Schedule):
        for number in (value.start, value.end) if isinstance(value, Schedule) else (value,):
            if not limits.low <= number <= limits.high:
                raise ConfigError(
                    f"{name} is {value_text(number)}{by}; give {limits.allowed_text}{about}"
                )
            if isinstance(number, float) and math.isinf(number):
                raise ConfigError(f"{name} is {number}{by}; give a finite number{about}")
    return float(value) if isinstance(default, float) and isinstance(value, int) else value


def _expected_type(value: Any, default: Any, *, may_move: bool) -> str:
    """The expected type in words if the value has another type, else an empty text."""
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
                isinstance(size, int) and size > 0 for size in value
            )
            return "" if is_sizes else "a list, such as [64, 64]"
        case tuple():
            is_texts = isinstance(value, tuple) and all(isinstance(text, str) for text in value)
            return "" if is_texts else 'a list, such as ["a", "b"]'
        case str():
            return "" if isinstance(value, str) else "text"
    return ""


# --- As text --------------------------------------------------------------------------------------


def mask_secrets(value: Any) -> Any:
    """The value; if it is a URL, its user, password and query are replaced by stars."""
    if not isinstance(value, str) or "://" not in value:
        return value
    return re.sub(r"\?.*", "?***", re.sub(r"://.*@", "://***@", value))


def toml_text(value: Any) -> str:
    """The value as TOML."""
    if isinstance(value, Schedule):
        return f"{{ start = {value.start!r}, end = {value.end!r}, until = {value.until!r} }}"
    if isinstance(value, tuple | list):
        return f"[{', '.join(toml_text(item) for item in value)}]"
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{name} = {toml_text(item)}' for name, item in value.items())} }}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, bool | str) else repr(value)


def value_text(value: Any) -> str:
    """A value in a message: without secrets, and shortened, so that the message stays readable."""
    value = mask_secrets(value)
    if value is None:
        return "none"
    try:
        return shortened(repr(value) if isinstance(value, str) else toml_text(value), 80)
    except ValueError:  # Python writes whole numbers of at most 4,300 digits
        return "a number of too many digits"


def load_object(path: str, *, what: str, known: Iterable[str] = ()) -> Any:
    """Import the object at `module:attribute`; ConfigError suggests the nearest `known` name."""
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
