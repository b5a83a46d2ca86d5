"""Where a game records to: a data folder or an address with a key, and what a client keeps beside its spool."""

import hashlib
import json
import os
import secrets
import sys
from dataclasses import dataclass, field
from pathlib import Path

from understudy.core.door import create_once
from understudy.core.errors import ConfigError
from understudy.core.names import PlayerName, player_name


@dataclass(frozen=True, slots=True)
class Address:
    """A platform that is reached by HTTP."""

    url: str
    key: str = field(repr=False)


def place_of(data: str | os.PathLike[str] | None, url: str | None, key: str | None) -> Path | Address:
    """The folder or address that was named, by arguments first and by the environment then."""
    if data is not None and url is not None:
        raise ConfigError(f"connect was given both data={str(data)!r} and url={url!r}; give the one to record to")
    if data is None and (url := _given("url", url)):
        if not (key := _given("key", key)):
            raise ConfigError(f"{url} needs a key; give key=, or set UNDERSTUDY_KEY as `understudy up` prints it")
        return Address(url, key)
    if key is not None:
        raise ConfigError("connect was given a key and no url; give url= too, or set UNDERSTUDY_URL")
    return _data_folder(_given("data", None) if data is None else data)


def _given(name: str, argument: str | None) -> str:
    """An argument, else UNDERSTUDY_NAME, else what the file holds that UNDERSTUDY_NAME_FILE names."""
    from understudy.core.settings import Leaf, find  # not what a game loads that names its place

    found = find(Leaf(name, "", None), {name: argument or None}, os.environ)
    return str(found[0]) if found else ""


def must_record_into(folder: Path) -> None:
    """ConfigError when the platform of a data folder takes steps or games elsewhere: nobody would look there."""
    path = folder / "backends.json"
    try:
        used = json.loads(path.read_bytes())
        places = {part: str(used[f"{part}.url"]) for part in ("stream", "models")}
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}, which says where the platform takes steps, cannot be read ({type(error).__name__}); restore it, "
            "or record over HTTP: url= and key= as `understudy up` prints them"
        ) from None
    for part, url in places.items():
        if url:
            raise ConfigError(
                f"the platform of {folder} has its {part} elsewhere ({url.partition('?')[0]}), so what is recorded "
                "into the folder would not be stored; record over HTTP: url= and key= as `understudy up` prints them"
            )


def _data_folder(given: str | os.PathLike[str]) -> Path:
    if not given:
        raise ConfigError(
            "connect was told no place to record to; give url= and key= (or set UNDERSTUDY_URL and UNDERSTUDY_KEY), "
            "data='DIR' (or set UNDERSTUDY_DATA), or link=... of your own"
        )
    try:
        folder = Path(given).resolve()
        is_taken = folder.exists() and not folder.is_dir()
    except (ValueError, OSError) as error:
        raise ConfigError(f"data={str(given)[:80]!r} is no folder: {error}; give a path such as 'D'") from None
    if is_taken:
        raise ConfigError(f"data={str(given)!r} is a file; give a folder")
    return folder


def spool_tag(address: str, game: str, key: str = "") -> str:
    """The folder name that sessions of the same address, game and key share."""
    return hashlib.sha256("\0".join((address, game, key)).encode()).hexdigest()[:16]


def user_folder() -> Path:
    """Where this user's programs keep such things."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = str(Path.home() / "Library" / "Caches")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "understudy"


def own_player(folder: Path) -> PlayerName:
    """A random player's name, made once and kept beside the spool."""
    path = folder / "player"
    folder.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        create_once(path, f"p-{secrets.token_hex(8)}".encode())
    return player_name(path.read_text().strip())
