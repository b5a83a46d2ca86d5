"""Origins: where each value of the config comes from.

flag  >  UNDERSTUDY_GATEWAY_PORT  >  UNDERSTUDY_GATEWAY_PORT_FILE  >  understudy.toml  >  last start  >  default

The last start is asked for stream, store, models and the engine alone: see `used.py`.
"""

import difflib
import os
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin

import msgspec

from understudy.app.config import Config, Section, hidden
from understudy.app.used import ENGINE, HERE, read_used
from understudy.app.used import FILE_NAME as USED_FILE
from understudy.core.errors import ConfigError

FILE_NAME = "understudy.toml"
_PREFIX = "UNDERSTUDY_"
_MAX_FILE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class Leaf:
    """One value that can be set: `gateway.port`."""

    name: str
    type: Any
    default: Any
    help: str

    @property
    def variable(self) -> str:
        return _PREFIX + self.name.replace(".", "_").upper()


@dataclass(frozen=True, slots=True)
class Resolved:
    """A config, and for each value where it came from."""

    config: Config
    origins: Mapping[str, str]

    def shown(self) -> dict[str, dict[str, Any]]:
        """Each value as it may be shown, with its origin."""
        tree = msgspec.to_builtins(self.config)
        return {
            name: {"value": hidden(_at(tree, name)), "origin": origin} for name, origin in self.origins.items()
        }  # fmt: skip


def leaves(kind: type[Section] = Config, prefix: str = "") -> Iterator[Leaf]:
    """Every value of the config, in the order of the file."""
    for one in msgspec.structs.fields(kind):
        if isinstance(one.type, type) and issubclass(one.type, Section):
            yield from leaves(one.type, f"{prefix}{one.name}.")
        else:
            (meta,) = get_args(one.type)[1:]
            yield Leaf(f"{prefix}{one.name}", one.type, one.default, meta.description)


def resolve(
    flags: Mapping[str, Any], *, file: Path | None = None, environ: Mapping[str, str] | None = None
) -> Resolved:
    """The config from flags, environment, file and defaults; a flag of None was not given."""
    environ = os.environ if environ is None else environ
    path = config_file(flags, file=file, environ=environ)
    written = _read(path) if path else {}
    _check_variables(environ)
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for leaf in leaves():
        value, origin = _find(leaf, flags, environ, written, path)
        if origin == "default" and _is_kept(leaf, values) and values["data"]:
            value, origin = _last(leaf, Path(values["data"]).expanduser())
        origins[leaf.name] = origin
        _put(values, leaf.name, leaf.default if origin == "default" else _convert(leaf, value, origin))
    return Resolved(msgspec.convert(values, Config), origins)


def config_file(flags: Mapping[str, Any], *, file: Path | None, environ: Mapping[str, str]) -> Path | None:
    """The file that was named, or the one in the data folder; None where there is none."""
    named = file or (Path(environ[f"{_PREFIX}CONFIG"]) if environ.get(f"{_PREFIX}CONFIG") else None)
    if named is not None:
        return named
    data = flags.get("data") or environ.get(f"{_PREFIX}DATA")
    path = Path(data).expanduser() / FILE_NAME if data else None
    return path if path is not None and path.is_file() else None


def _find(
    leaf: Leaf, flags: Mapping[str, Any], environ: Mapping[str, str], written: Mapping[str, Any], path: Path | None
) -> tuple[Any, str]:
    if flags.get(leaf.name) is not None:
        return flags[leaf.name], f"flag --{leaf.name.rpartition('.')[2].replace('_', '-')}"
    if leaf.variable in environ:
        return environ[leaf.variable], leaf.variable
    if file := environ.get(f"{leaf.variable}_FILE"):
        return _text_of(Path(file), f"{leaf.variable}_FILE"), f"{leaf.variable}_FILE ({file})"
    found = _at(written, leaf.name)
    return (None, "default") if found is None else (found, str(path))


def _is_kept(leaf: Leaf, values: Mapping[str, Any]) -> bool:
    """Whether the last start is asked; for the engine only where the store, which comes first, lies elsewhere still."""
    return leaf.name in HERE or (leaf.name == ENGINE and bool(values["store"]["url"]))


def _last(leaf: Leaf, root: Path) -> tuple[Any, str]:
    value = read_used(root).get(leaf.name)
    return (value, f"last start ({root / USED_FILE})") if value and value != leaf.default else (None, "default")


def _convert(leaf: Leaf, value: Any, origin: str) -> Any:
    plain = get_args(leaf.type)[0]
    if value == HERE.get(leaf.name):
        return ""
    if isinstance(value, str) and get_origin(plain) is tuple:
        value = [part.strip() for part in value.split(",") if part.strip()]
    try:
        # What comes from a file of TOML has its type; text from elsewhere has not.
        return msgspec.convert(value, leaf.type, strict=not isinstance(value, str))
    except msgspec.ValidationError as error:
        raise ConfigError(f"{leaf.name} is {hidden(value)!r} ({origin}): {error}; {leaf.help}") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; make one with 'understudy config init'") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no TOML: {error}; 'understudy config init' shows what one looks like") from None
    known = [leaf.name for leaf in leaves()]
    for name in _names(found, known):
        if name not in known:
            raise ConfigError(f"{path} sets {name}, which does not exist; {_nearest(name, known)}")
    return found


def _names(tree: Mapping[str, Any], known: list[str], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        name = prefix + key
        if isinstance(value, dict) and (value or any(one.startswith(f"{name}.") for one in known)):
            yield from _names(value, known, f"{name}.")
        else:
            yield name


def _check_variables(environ: Mapping[str, str]) -> None:
    """A misspelt variable of a section is told; others may belong to games, such as UNDERSTUDY_URL."""
    known = [leaf.variable for leaf in leaves()]
    sections = tuple({f"{_PREFIX}{leaf.name.split('.')[0].upper()}_" for leaf in leaves() if "." in leaf.name})
    for name in environ:
        if name.startswith(sections) and name.removesuffix("_FILE") not in known:
            raise ConfigError(f"{name} is set in the environment and means nothing; {_nearest(name, known)}")


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    # A key in the wrong table is near by its last part.
    near = near or [one for one in known if one.rpartition(".")[2] == name.rpartition(".")[2]]
    return f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"


def _text_of(path: Path, variable: str) -> str:
    try:
        with path.expanduser().open("rb") as file:
            return file.read(_MAX_FILE_BYTES).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{variable} names {path}, which cannot be read: {error}; give a small text file") from None


def _at(tree: Mapping[str, Any], name: str) -> Any:
    for part in name.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            return None
        tree = tree[part]
    return tree


def _put(tree: dict[str, Any], name: str, value: Any) -> None:
    *above, last = name.split(".")
    for part in above:
        tree = tree.setdefault(part, {})
    tree[last] = value


# --- A file to start from ---------------------------------------------------------------------------------------------


def example(data: str = "") -> str:
    """A config file with every value at its default, each with a line about it."""
    lines, section = ["# understudy's config; 'understudy config show' says where each value comes from."], ""
    for leaf in leaves():
        table, _, name = leaf.name.rpartition(".")
        if table != section:
            lines += ["", f"[{table}]"]
            section = table
        value = data if leaf.name == "data" and data else leaf.default
        mark = "" if leaf.name == "data" and data else "# "
        lines += [f"# {leaf.help}", f"{mark}{name} = {_toml(value)}"]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    return msgspec.json.encode(value).decode()
