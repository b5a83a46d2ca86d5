"""Credentials of servers: random, kept in one file that only its owner may read."""

import configparser
import io
import os
import secrets
import tomllib
from collections.abc import Mapping
from pathlib import Path

from understudy.core.errors import ConfigError

USER = "understudy"
REGION = "us-east-1"
_AWS = ("access_key_id", "secret_access_key")


def make(*, is_aws: bool) -> dict[str, str]:
    """New credentials that nobody can guess."""
    if is_aws:
        return {
            "access_key_id": "LOCAL" + secrets.token_hex(8).upper(), "secret_access_key": secrets.token_hex(20),
            "region": REGION,
        }  # fmt: skip
    return {"username": USER, "password": secrets.token_hex(20)}


def write(path: Path, credentials: Mapping[str, str]) -> None:
    """Keep them: as an AWS shared-credentials file, or as TOML with username and password."""
    if "access_key_id" in credentials:
        lines = ["[default]", *(f"aws_{name} = {credentials[name]}" for name in _AWS), f"region = {REGION}"]
    else:
        lines = [f'{name} = "{value}"' for name, value in credentials.items()]
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write("\n".join(lines) + "\n")


def read(path: Path) -> dict[str, str]:
    """Credentials from either kind of file; ConfigError when they are not there."""
    text = path.read_text(encoding="utf-8")
    try:
        if text.lstrip().startswith("["):
            parser = configparser.ConfigParser(interpolation=None)
            parser.read_file(io.StringIO(text))
            found = parser["default"]
            return {**{name: found[f"aws_{name}"] for name in _AWS}, "region": found.get("region", REGION)}
        table = tomllib.loads(text)
        return {"username": str(table["username"]), "password": str(table["password"])}
    except (configparser.Error, KeyError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(
            f"{path} holds no credentials: {error}; give a TOML file with username and password, or an AWS "
            "shared-credentials file with a section [default]"
        ) from None
