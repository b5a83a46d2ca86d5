"""Presets: files of settings for one kind of game, built in or the user's own."""

import difflib
import json
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

from understudy.core.errors import ConfigError
from understudy.core.settings import value_text
from understudy.experience.game import GameSpec
from understudy.training.settings import SECTIONS


def preset_names() -> list[str]:
    """The names of the built-in presets."""
    folder = resources.files("understudy") / "presets"
    return sorted(
        path.name.removesuffix(".toml") for path in folder.iterdir() if path.name.endswith(".toml")
    )


def preset_families() -> list[str]:
    """The names that presets for several kinds of games share, such as apex."""
    return sorted({name.rpartition("-")[0] for name in preset_names() if "-" in name})


def is_family(name: str) -> bool:
    """Whether presets for several kinds of games have this name, such as apex."""
    return name in preset_families()


def read_preset(name: str) -> dict[str, Any]:
    """A preset by name, or by the path of its file; of a family, one of its presets."""
    if name.endswith(".toml") or "/" in name:
        if not (fields := read_toml(Path(name))):
            raise ConfigError(
                f"{name} contains no settings; a preset names at least its algorithm; restore the "
                "file from a copy, or omit it to use the preset for the kind of game"
            )
        return fields
    if is_family(name):
        name = next(preset for preset in preset_names() if preset.startswith(f"{name}-"))
    if name not in preset_names():
        near = difflib.get_close_matches(name, (*preset_families(), *preset_names()), n=1)
        hint = (
            f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(preset_names())}"
        )
        raise ConfigError(f"there is no preset {name!r}{hint}")
    return _parsed((resources.files("understudy") / "presets" / f"{name}.toml").read_text(), name)


BEST = "best.toml"
"""In the folder of a study of `understudy tune`: the settings of its best trial."""


def with_study(preset: str | None, config_file: Path | None) -> tuple[str | None, Path | None]:
    """Preset and settings file, where the preset may be the folder of a study.

    That is the settings of its best trial, over the preset that its trials had.
    """
    if preset is None or preset in (*preset_names(), *preset_families()):
        return preset, config_file
    folder = Path(preset)
    if not folder.is_dir():
        return preset, config_file
    if not (folder / BEST).exists():
        raise ConfigError(
            f"preset is {preset}, a folder without {BEST}; give a preset's name or file, or the "
            "folder of a study whose best trial trains an algorithm of understudy"
        )
    if config_file is not None:
        raise ConfigError(
            f"preset is the study {preset}, whose settings are the file {folder / BEST}, and "
            f"config is {config_file}; omit one of the two"
        )
    try:
        study = json.loads((folder / "study.json").read_bytes())["study"]
        of_trials: str | None = study["trainable"]["config"]["preset"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder / 'study.json'} cannot be read: {error!r}; write it again: understudy tune "
            f"resume {preset}"
        ) from None
    return of_trials, folder / BEST


def read_toml(path: Path) -> dict[str, Any]:
    """The fields of a settings file; ConfigError if it is unreadable or malformed."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"the settings file {path} cannot be read: {error}; pass a readable TOML file"
        ) from None
    return _parsed(text, str(path))


def _parsed(text: str, name: str) -> dict[str, Any]:
    try:
        fields = tomllib.loads(text)
    except ValueError as error:  # also for numbers of too many digits
        raise ConfigError(f"{name} is not TOML: {error}; correct it there") from None
    if unknown := fields.keys() - {"algorithm", *SECTIONS}:
        raise ConfigError(
            f"{name} has a section {sorted(unknown)[0]!r}, which is unknown; use algorithm, "
            f"{', '.join(SECTIONS)}"
        )
    if not isinstance(fields.get("algorithm", ""), str):
        raise ConfigError(
            f'{name} has algorithm = {value_text(fields["algorithm"])}; give a name such as "dqn"'
        )
    for section in fields.keys() & SECTIONS:
        if not isinstance(fields[section], dict):
            raise ConfigError(
                f"{name} has {section} = {value_text(fields[section])}; write a section "
                f"[{section}] with its settings"
            )
    return fields


def default_preset(family: str, game: GameSpec) -> str:
    """The preset of an algorithm or family for a kind of game: pixels, continuous or vector.

    "" if there is none.
    """
    # Imported late: it imports JAX, which `--list` does not need.
    from understudy.learn.architecture import image_channels

    is_pixels = any(image_channels(space) is not None for space in game.obs.values())
    kind = "pixels" if is_pixels else "vector" if game.discrete is not None else "continuous"
    for name in (f"{family}-{kind}", f"{family}-vector"):
        if name in preset_names():
            return name
    return ""
