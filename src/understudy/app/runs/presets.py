"""Presets: settings for a kind of game, as files; those in the box, and the user's own."""

import difflib
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

from understudy.app.runs.settings import SECTIONS
from understudy.core.errors import ConfigError
from understudy.core.game import GameSpec


def preset_names() -> list[str]:
    """The presets in the box."""
    folder = resources.files("understudy") / "presets"
    return sorted(one.name.removesuffix(".toml") for one in folder.iterdir() if one.name.endswith(".toml"))


def read_preset(name: str) -> dict[str, Any]:
    """A preset by name, or by the path of its file."""
    if name.endswith(".toml") or "/" in name:
        if not (fields := read_toml(Path(name))):
            raise ConfigError(
                f"{name} holds no settings; a preset says at least which algorithm; take the file from a copy, or "
                "leave it out for the preset of the game's kind"
            )
        return fields
    if name not in preset_names():
        near = difflib.get_close_matches(name, preset_names(), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(preset_names())}"
        raise ConfigError(f"there is no preset {name!r}{hint}")
    return _parsed((resources.files("understudy") / "presets" / f"{name}.toml").read_text(), name)


def read_toml(path: Path) -> dict[str, Any]:
    """A settings file; ConfigError says what is wrong with it."""
    try:
        return _parsed(path.read_text(), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the settings file {path} cannot be read: {error}") from None


def _parsed(text: str, name: str) -> dict[str, Any]:
    try:
        fields = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name} is not TOML: {error}") from None
    if unknown := fields.keys() - {"algorithm", *SECTIONS}:
        raise ConfigError(f"{name} has a section {sorted(unknown)[0]!r}; known are algorithm, {', '.join(SECTIONS)}")
    if not isinstance(fields.get("algorithm", ""), str):
        raise ConfigError(f'{name} has algorithm = {fields["algorithm"]!r}; give a name such as "dqn"')
    for section in fields.keys() & SECTIONS:
        if not isinstance(fields[section], dict):
            raise ConfigError(
                f"{name} has {section} = {fields[section]!r}; write a section [{section}] with its settings"
            )
    return fields


def default_preset(algorithm: str, game: GameSpec) -> str:
    """The preset for a kind of game: pixels, continuous actions, or small observations."""
    from understudy.learn.architecture import image_channels  # brings JAX, which `--list` and others can do without

    is_pixels = any(image_channels(one) is not None for one in game.obs.values())
    kind = "pixels" if is_pixels else "vector" if game.discrete is not None else "continuous"
    for name in (f"{algorithm}-{kind}", f"{algorithm}-vector"):
        if name in preset_names():
            return name
    return ""
