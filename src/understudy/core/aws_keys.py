"""Whose keys an AWS service is called with, from one place and never from two.

A file that was named goes before a profile that was named, and that before where every AWS tool looks: the environment,
then the shared files, then the machine's own role.
"""

import configparser
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from understudy.core.errors import ConfigError

_FORM = "it must have a section [{name}] with aws_access_key_id = ... and aws_secret_access_key = ..."
_ELSEWHERE = (
    "role_arn",
    "sso_session",
    "sso_start_url",
    "credential_process",
    "web_identity_token_file",
    "login_session",
)
"""What a profile has that gets its keys from somebody else."""


@dataclass(frozen=True, slots=True)
class AwsKeys:
    """Keys that no log shows."""

    key_id: str
    secret: str = field(repr=False)
    token: str | None = field(default=None, repr=False)
    """Of keys that are for some hours only; belongs to these and to no others."""
    region: str = ""
    """The region of the profile they come from."""


@dataclass(frozen=True, slots=True)
class Profile:
    """A profile whose keys have to be asked for: a role, a single sign-on, a program."""

    name: str
    region: str = ""
    file: str = ""
    """The credentials file that was named, which goes before the shared one."""


def find_keys(*, credentials: str, profile: str, environ: Mapping[str, str] | None = None) -> AwsKeys | Profile | None:
    """The keys that an address with these two options means; None: the machine's own role, if it has one.

    ConfigError for a file or a profile that was named and is not there: nobody else's keys are taken instead.
    """
    environ = os.environ if environ is None else environ
    if credentials:
        return read_keys(Path(credentials).expanduser(), profile or "default")
    if not profile and (found := _environment(environ)):
        return found
    name = profile or environ.get("AWS_PROFILE") or "default"
    return _shared(name, environ, must_exist=name != "default" or bool(profile))


def source_of_keys(*, credentials: str, profile: str) -> str:
    """Where the keys come from that an address with these two options means, for people."""
    if credentials:
        return f"[{profile or 'default'}] of credentials file {credentials}"
    return f"profile [{profile}]" if profile else "AWS_ACCESS_KEY_ID, AWS_PROFILE or the role of this machine"


def read_keys(path: Path, name: str) -> AwsKeys | Profile:
    """The keys of one section of a shared credentials file, which must be there."""
    sections, form = _parse(path, must_exist=True), _FORM.format(name=name)
    if not sections.has_section(name):
        raise ConfigError(f"credentials file {path} has no section [{name}]; {form}")
    inside = dict(sections[name])
    if any(option in inside for option in _ELSEWHERE):
        return Profile(name, inside.get("region", ""), str(path))
    found = _keys(inside)
    if found is None:
        raise ConfigError(f"[{name}] of credentials file {path} lacks a key or its secret; {form}")
    return found


def _environment(environ: Mapping[str, str]) -> AwsKeys | None:
    key_id, secret = environ.get("AWS_ACCESS_KEY_ID", ""), environ.get("AWS_SECRET_ACCESS_KEY", "")
    if bool(key_id) != bool(secret):
        there, lacks = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")[:: 1 if key_id else -1]
        raise ConfigError(f"{there} is set and {lacks} is not; set both, or neither and give ?profile=NAME")
    return AwsKeys(key_id, secret, environ.get("AWS_SESSION_TOKEN") or None) if key_id else None


def _shared(name: str, environ: Mapping[str, str], *, must_exist: bool) -> AwsKeys | Profile | None:
    """A profile of the two files that AWS tools share; in the second one its section has a longer name."""
    files = [
        Path(environ.get("AWS_SHARED_CREDENTIALS_FILE") or "~/.aws/credentials").expanduser(),
        Path(environ.get("AWS_CONFIG_FILE") or "~/.aws/config").expanduser(),
    ]
    secrets, settings = (_parse(path, must_exist=False) for path in files)
    inside = {}
    for sections, section in ((settings, name if name == "default" else f"profile {name}"), (secrets, name)):
        inside.update(dict(sections[section]) if sections.has_section(section) else {})
    if not inside and must_exist:
        raise ConfigError(f"there is no profile [{name}] in {files[0]} or {files[1]}; add it, or name another one")
    if any(option in inside for option in _ELSEWHERE):
        return Profile(name, inside.get("region", ""))
    found = _keys(inside)
    if found is None and (must_exist or "aws_access_key_id" in inside):
        raise ConfigError(f"profile [{name}] lacks a key or its secret; {_FORM.format(name=name)} in {files[0]}")
    return found


def _keys(section: Mapping[str, str]) -> AwsKeys | None:
    key_id, secret = section.get("aws_access_key_id", ""), section.get("aws_secret_access_key", "")
    if not (key_id and secret):
        return None
    return AwsKeys(key_id, secret, section.get("aws_session_token") or None, section.get("region", ""))


def _parse(path: Path, *, must_exist: bool) -> configparser.ConfigParser:
    """ConfigError says what is wrong with a file, never what is in it."""
    found, form = configparser.ConfigParser(interpolation=None, default_section=""), _FORM.format(name="default")
    try:
        found.read_string(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if must_exist:
            raise ConfigError(f"credentials file {path} is not there; correct credentials=FILE: {form}") from None
    except OSError as error:
        raise ConfigError(f"credentials file {path} cannot be read: {error.strerror}; {form}") from None
    except (configparser.Error, UnicodeDecodeError):
        raise ConfigError(f"{path} is no credentials file; {form}") from None
    return found
