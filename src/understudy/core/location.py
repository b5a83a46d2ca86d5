"""The address of a backend: `SCHEME://HOST:PORT,HOST:PORT/PATH?option=value`.

Secrets are never part of an address, since `ps`, logs and errors show it: an option names the file
that contains them. This module also has what streams and models on AWS share: botocore's session
with its credential chain, and endpoint checks.
"""

import difflib
import functools
import ipaddress
import os
import re
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit

from understudy.core.errors import ConfigError, MissingExtra

_MAX_DIGITS = 20


@dataclass(frozen=True, slots=True)
class Location:
    """A parsed address of a backend; options are text, validated by the backend that reads them."""

    scheme: str
    hosts: tuple[tuple[str, int | None], ...]
    path: str = ""
    options: Mapping[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """The address as one line of text, with special characters quoted."""
        named = [(f"[{name}]" if ":" in name else name, port) for name, port in self.hosts]
        hosts = ",".join(name if port is None else f"{name}:{port}" for name, port in named)
        path = f"/{quote(self.path)}" if self.path else ""
        query = urlencode(self.options, safe="/:,", quote_via=quote)
        return f"{self.scheme}://{hosts}{path}{f'?{query}' if query else ''}"

    def check_options(self, allowed: Collection[str]) -> None:
        """Raise ConfigError for an unknown option, so that typos are noticed."""
        for name in self.options:
            if name not in allowed:
                near = difflib.get_close_matches(name, allowed, n=1, cutoff=0.5)
                advice = (
                    f"did you mean {near[0]}?"
                    if near
                    else f"its options are {', '.join(sorted(allowed))}"
                )
                raise ConfigError(f"{self.scheme}:// has no option {name!r}; {advice}")

    def text(self, name: str, default: str = "") -> str:
        return self.options.get(name, default)

    def number(self, name: str, default: float, *, least: float = 0.0, most: float = 1e12) -> float:
        """An option as a number; ConfigError if it is not a number or out of range."""
        text = self.options.get(name)
        try:
            value = default if text is None else float(text)
        except ValueError:
            value = float("nan")
        if not least <= value <= most:
            raise ConfigError(
                f"{name} of {self.scheme}:// is {text!r}; give a number from {least:g} to "
                f"{most:g}, such as {default:g}"
            )
        return value

    def integer(self, name: str, default: int, *, least: int = 0, most: int) -> int:
        """An option as a whole number in digits; ConfigError if it is not one or out of range."""
        text = self.options.get(name, str(default))
        is_number = text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS
        if not (is_number and least <= int(text) <= most):
            raise ConfigError(
                f"{name} of {self.scheme}:// is {text[:80]!r}; give a whole number from {least} "
                f"to {most}, such as {default}"
            )
        return int(text)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """An option as a boolean; ConfigError if it is neither true nor false."""
        text = self.options.get(name, "true" if default else "false").lower()
        if text not in ("true", "false"):
            raise ConfigError(f"{name} of {self.scheme}:// is {text!r}; give true or false")
        return text == "true"


def parse_location(text: str) -> Location:
    """Parse a backend's address; ConfigError if it is malformed or contains a password."""
    try:
        split = urlsplit(text)
        options = parse_qsl(split.query, keep_blank_values=True, strict_parsing=bool(split.query))
        hosts = tuple(_host(part) for part in split.netloc.split(",") if part)
    except ValueError as error:
        raise ConfigError(f"the address cannot be read ({error}); write it as {_FORM}") from None
    if not split.scheme or "://" not in text:
        raise ConfigError(
            f"{without_secrets(text)!r} is not the address of a backend; write it as {_FORM}"
        )
    names = [name for name, _ in options]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"option {max(names, key=names.count)!r} of {split.scheme}:// is given twice; give it "
            "once"
        )
    return Location(split.scheme.lower(), hosts, unquote(split.path.strip("/")), dict(options))


_FORM = "SCHEME://HOST:PORT/PATH?option=value"


def _host(text: str) -> tuple[str, int | None]:
    if "@" in text:
        raise ConfigError(
            "the address contains a user or password, which any user of this machine could read; "
            "put them in a file and name it: ?credentials=FILE, with the lines "
            'username = "..." and password = "..."'
        )
    if text.startswith("["):
        name, _, rest = text[1:].partition("]")
        port = rest.removeprefix(":")
    else:
        name, _, port = text.partition(":")
    if not name or (port and not (port.isdigit() and int(port) < 65536)):
        raise ConfigError(f"{text[:80]!r} is not a host; write HOST:PORT")
    return name, int(port) if port else None


@dataclass(frozen=True, slots=True)
class Credentials:
    """A user name and a password; the password is excluded from repr and logs."""

    username: str
    password: str = field(repr=False)


def read_credentials(path: str | Path) -> Credentials:
    """Read a credentials file; ConfigError states the problem without quoting the content."""
    try:
        fields = tomllib.loads(Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(
            f"credentials file {path} cannot be read: {reason}; {_CREDENTIALS}"
        ) from None
    except tomllib.TOMLDecodeError:
        raise ConfigError(f"credentials file {path} is not TOML; {_CREDENTIALS}") from None
    username = fields.get("username")
    password = fields.get("password")
    if not (isinstance(username, str) and isinstance(password, str) and username):
        raise ConfigError(f"credentials file {path} lacks a username or a password; {_CREDENTIALS}")
    return Credentials(username, password)


_CREDENTIALS = 'it needs two lines: username = "..." and password = "..."'


_FROM_THE_NETWORK = ("container-role", "iam-role")
"""The botocore providers that request the keys of the machine's role over the network."""


def aws_session(scheme: str, *, credentials: str = "", profile: str = "", region: str = "") -> Any:
    """A botocore session; ConfigError if the named credentials file or profile has no keys.

    If a credentials file or profile is named, keys come only from there. Otherwise they come from
    botocore's chain: the environment, the shared files, and the role of the machine. The role's
    keys are not requested here but with the first call.
    """
    try:
        import botocore.session
        from botocore.exceptions import BotoCoreError
    except ImportError as error:
        raise MissingExtra(
            f"{scheme}:// needs the package boto3 ({error}); pip install 'understudy[aws]'"
        ) from None
    session = botocore.session.Session(profile=profile or ("default" if credentials else None))
    if credentials:
        path = str(Path(credentials).expanduser())
        session.set_config_variable("credentials_file", path)
        session.set_config_variable("config_file", path)
    if region or os.environ.get("AWS_REGION"):
        session.set_config_variable("region", region or os.environ["AWS_REGION"])
    reason = "it names no source of keys"
    try:
        models = _service_models(session.get_config_variable("data_path"))
        session.register_component("data_loader", models)
        chain = session.get_component("credential_provider")
        machine = [provider for provider in chain.providers if provider.METHOD in _FROM_THE_NETWORK]
        chain.providers = [provider for provider in chain.providers if provider not in machine]
        if session.get_credentials() is not None:
            return session
        if not (credentials or profile):
            chain.providers += machine
            return session
    except (BotoCoreError, OSError, ValueError) as error:
        reason = str(error)
    raise ConfigError(
        f"{source_of_keys(credentials=credentials, profile=profile)} has no AWS keys: {reason}; it "
        "needs aws_access_key_id and aws_secret_access_key, or a source of them such as role_arn"
    )


@functools.cache
def _service_models(folders: str | None) -> Any:
    """Botocore's descriptions of services, which it would else parse again for every session."""
    from botocore.loaders import create_loader

    return create_loader(folders)


def source_of_keys(*, credentials: str, profile: str) -> str:
    """The source of the keys for these two options of an address, as text for people."""
    if credentials:
        return f"[{profile or 'default'}] of credentials file {credentials}"
    return (
        f"profile [{profile}]"
        if profile
        else "AWS_ACCESS_KEY_ID, AWS_PROFILE or the role of this machine"
    )


def check_endpoint(endpoint: str, *, insecure: bool) -> None:
    """Raise ConfigError for an invalid URL, or http:// to another machine without `insecure`."""
    try:
        split = urlsplit(endpoint)
        host = split.hostname or ""
        _port = split.port
    except ValueError:
        host = ""
        split = urlsplit("")
    server = without_secrets(endpoint)
    if split.scheme not in ("http", "https") or not host or split.username is not None:
        raise ConfigError(
            f"endpoint is {server!r}; give http://127.0.0.1:PORT or https://HOST, without a user"
        )
    if split.scheme == "http" and not insecure and not is_loopback(host):
        raise ConfigError(
            f"endpoint {server} would send requests to another machine unencrypted; give https://, "
            "or insecure=true on a private network"
        )


def without_secrets(url: str) -> str:
    """The start of a URL as an error may show it: without its user, password and query."""
    scheme = re.match(r"([A-Za-z][A-Za-z0-9+.-]*://)?", url)
    assert scheme is not None
    rest = url[scheme.end() :].rpartition("@")[2].partition("?")[0]
    return f"{scheme.group()}{rest}"[:80]


def is_loopback(host: str) -> bool:
    """Whether a host is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
