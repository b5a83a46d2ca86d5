"""Used: the backends on which a deployment ran last, kept in its data folder.

Flags and variables belong to one start; what players did must not go elsewhere because the next one lacks them. So
`up` keeps its addresses and its engine, and every command on the folder goes by them until a flag, a variable or the
file says otherwise.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from understudy.app.config import Config, hidden
from understudy.core.errors import ConfigError
from understudy.core.location import parse_location
from understudy.core.log import write_file

FILE_NAME = "backends.json"
HERE = {"stream.url": "file", "store.url": "local", "models.url": "folder"}
"""The addresses that are kept, and the word for each that means: in the data folder."""
ENGINE = "ingest.engine"
"""Kept too: a Spark job that another engine took over from does not go on by itself."""
_FILES = ("ca", "certificate", "credentials", "key")
"""Options of an address that name a file."""


def read_used(root: Path) -> Mapping[str, str]:
    """Addresses by name, empty text for the data folder itself, and the engine; nothing where no platform has run."""
    path = root / FILE_NAME
    try:
        found = json.loads(path.read_bytes())
        return {**{name: str(found[name]) for name in HERE}, ENGINE: str(found.get(ENGINE, ""))}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}, which says where this deployment's stream, store and models are, cannot be read "
            f"({type(error).__name__}); restore it, or remove it and give --stream, --store and --models to "
            "'understudy up'"
        ) from None


def keep_used(config: Config) -> None:
    """Keep the addresses and the engine of a platform that runs."""
    now = {**used_by(config), ENGINE: config.ingest.engine}
    if read_used(config.folder.root) != now:
        write_file(config.folder.root / FILE_NAME, json.dumps(now).encode(), mode=0o600)


def restore_used(root: Path, *, models: str) -> None:
    """After a backup was restored: stream and store are where they were, models where they were restored to."""
    if before := read_used(root):
        now = {**before, "models.url": _absolute(models)}
        write_file(root / FILE_NAME, json.dumps(now).encode(), mode=0o600)


def used_by(config: Config) -> Mapping[str, str]:
    """A config's addresses by name, as they hold from any folder that a command is called in."""
    urls = {"stream.url": config.stream.url, "store.url": config.store.url, "models.url": config.models.url}
    return {name: _absolute(url) for name, url in urls.items()}


def moved(before: Mapping[str, str], config: Config) -> list[str]:
    """A sentence for each part that was elsewhere at the last start."""
    said = []
    for name, now in used_by(config).items():
        then, part = before.get(name, now), name.partition(".")[0]
        if then != now:
            said.append(f"{part} is {_shown(name, now)} now; at the last start it was {_shown(name, then)}: "
                        f"what is there stays there; {_NEXT[part]}")  # fmt: skip
    return said


_NEXT = {
    "stream": "frames that wait there are stored by 'understudy ingest --until-empty' with --stream as it was",
    "store": "bots learn from the new one alone; to go back, give --store as it was",
    "models": "bots and keys of there are not known here; to go back, give --models as it was",
}


def _shown(name: str, url: str) -> str:
    return str(hidden(url)) if url else f"in the data folder ({HERE[name]})"


def _absolute(url: str) -> str:
    if "://" not in url:
        return str(Path(url).expanduser().absolute()) if url else ""
    location = parse_location(url)
    files = {
        name: str(Path(location.options[name]).expanduser().absolute()) for name in _FILES if name in location.options
    }
    options = {**location.options, **files}
    return url if options == location.options else replace(location, options=options).url
