"""The platform's config: everything that can be set, what it means and its default, and where it
comes from."""

import dataclasses
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from understudy.backends.addresses import check_backends
from understudy.backends.data import DataFolder, data_folder
from understudy.core import settings
from understudy.core.errors import ConfigError, UnderstudyError
from understudy.core.location import is_loopback, parse_location
from understudy.core.log import write_file
from understudy.core.settings import Resolved as Resolved
from understudy.core.settings import from_tree, setting
from understudy.core.settings import hidden as hidden
from understudy.experience.chunk import CONSENTS
from understudy.models.gate import Bounds
from understudy.release.schedule import LearningSchedule

if TYPE_CHECKING:
    from understudy.serve.server import Listen
    from understudy.serve.state import GatewayConfig

ROLES = ("gateway", "ingest", "learner")
DEFAULT_PORT = 8600
FILE_NAME = "understudy.toml"
USED_FILE = "backends.json"
HERE = {"stream.url": "file", "store.url": "local", "models.url": "folder"}
"""The addresses that are kept, and the word for each that means: in the data folder."""
ENGINE = "ingest.engine"
"""Kept too: a Spark job that another engine took over from does not go on by itself."""
_FILES = ("ca", "certificate", "credentials", "key")
"""Options of an address that name a file."""
_DEFAULT = "or empty: in the data folder; not set: as at the last start, else the same."
_SCHEDULE = LearningSchedule()
_BOUNDS = Bounds()
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,251}[A-Za-z0-9_])?|\[[0-9A-Fa-f:.]{2,45}\]")
_ADDRESS = re.compile(
    r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,251}[A-Za-z0-9_])?|[0-9A-Fa-f:.]{2,45}(%[A-Za-z0-9._-]{1,32})?"
)
"""An IPv6 address has brackets in a Host header, and none where one listens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySection:
    """[gateway]"""

    host: str = setting(
        "127.0.0.1", says="Where it listens; other than loopback needs TLS, or insecure."
    )
    port: int = setting(DEFAULT_PORT, 0, 65535, "0: any free one.")
    hosts: tuple[str, ...] = setting(
        (), says="Names it may be called by, besides those of loopback."
    )
    certificate: str = setting("", says="A PEM file; with certificate_key it speaks TLS.")
    certificate_key: str = setting("", says="The PEM file of its private key.")
    insecure: bool = setting(
        False, says="Plain HTTP for other machines too, where something else encrypts."
    )
    target_steps_s: float = setting(
        0.0, 0, says="Steps a second and game asked of players together; 0: all of them."
    )
    canary_share: float = setting(0.2, 1e-6, 0.5, "The share of episodes that a canary plays.")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSection:
    """[stream]"""

    url: str = setting(
        "",
        says="Where frames wait to be stored, such as kinesis://STREAM or "
        f"kafka://HOST:PORT/TOPIC; file {_DEFAULT}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSection:
    """[store]"""

    url: str = setting(
        "", says=f"Where experience is kept, such as cassandra://HOST/KEYSPACE; local {_DEFAULT}"
    )
    window_hours: float = setting(
        0.0,
        0,
        says="How long the learner keeps a copy of steps kept elsewhere; 0: as long as they do.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestSection:
    """[ingest]"""

    engine: str = setting(
        "native",
        says="native: our own service; spark: a streaming job; not set: as at the last start, else "
        "native.",
        choices=("native", "spark"),
    )
    master: str = setting("local[2]", says="Where Spark runs: this machine, or spark://HOST:7077.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsSection:
    """[models]"""

    url: str = setting(
        "", says=f"Models, specs and keys elsewhere, such as s3://BUCKET/PATH; folder {_DEFAULT}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSection:
    """[learner]"""

    learn_from: tuple[str, ...] = setting(
        (),
        says="Consents it learns from; empty: granted, and unknown too while only this machine "
        "plays.",
    )
    first_steps: int = setting(
        _SCHEDULE.first_steps, 1, says="Steps of people before the first bot is learnt."
    )
    bc_updates: int = setting(
        _SCHEDULE.bc_updates, 1, says="Updates of a clone before it is released."
    )
    bc_growth: float = setting(
        _SCHEDULE.bc_growth,
        1.001,
        says="Where clones are all there is: how much more people must have played.",
    )
    dqn_updates: int = setting(_SCHEDULE.dqn_updates, 1, says="Updates between two candidates.")
    dqn_steps: int = setting(_SCHEDULE.dqn_steps, 1, says="New steps between two candidates.")
    updates_per_step: float = setting(
        _SCHEDULE.updates_per_step, 1e-9, says="How far training may run ahead of play."
    )
    simulator: str = setting(
        "", says="A Gymnasium id in which candidates are tried; empty: live play decides."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSection:
    """[gate]"""

    min_episodes: int = setting(
        _BOUNDS.min_episodes, 2, says="Episodes of canary and champion before they are compared."
    )
    max_episodes: int = setting(
        _BOUNDS.max_episodes, 2, says="Episodes after which an unproven canary is rejected."
    )
    worse_by: float = setting(
        _BOUNDS.worse_by, 0, 0.999, "How much lower its return may be, as a share."
    )
    error: float = setting(_BOUNDS.error, 1e-9, 0.499, "How often a worse canary may pass.")


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSection:
    """[log]"""

    json: bool = setting(False, says="Events as JSON lines, also in a terminal.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Everything that can be set."""

    data: str = setting("", says="The data folder.")
    roles: tuple[str, ...] = setting(ROLES, says="What runs on this machine.")
    gateway: GatewaySection = GatewaySection()
    stream: StreamSection = StreamSection()
    store: StoreSection = StoreSection()
    ingest: IngestSection = IngestSection()
    models: ModelsSection = ModelsSection()
    learner: LearnerSection = LearnerSection()
    gate: GateSection = GateSection()
    log: LogSection = LogSection()

    @property
    def folder(self) -> DataFolder:
        return data_folder(self.data)

    @property
    def learn_from(self) -> tuple[str, ...]:
        """The consents to learn from; on loopback whoever plays is the developer."""
        return self.learner.learn_from or (
            ("granted", "unknown") if self.is_local else ("granted",)
        )

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the gateway."""
        return is_loopback(self.gateway.host)

    @property
    def listen(self) -> "Listen":
        from understudy.serve.server import Listen

        one = self.gateway
        certificate, key = (
            Path(text).expanduser() if text else None
            for text in (one.certificate, one.certificate_key)
        )
        return Listen(
            host=one.host,
            port=one.port,
            certificate=certificate,
            certificate_key=key,
            insecure=one.insecure,
        )

    @property
    def gateway_config(self) -> "GatewayConfig":
        from understudy.serve.state import GatewayConfig

        one = self.gateway
        return GatewayConfig(
            hosts=one.hosts,
            canary_share=one.canary_share,
            target_steps_s=one.target_steps_s or None,
        )

    @property
    def schedule(self) -> LearningSchedule:
        names = (
            "first_steps",
            "bc_updates",
            "bc_growth",
            "dqn_updates",
            "dqn_steps",
            "updates_per_step",
        )
        return LearningSchedule(**{name: getattr(self.learner, name) for name in names})

    @property
    def bounds(self) -> Bounds:
        return Bounds(**dataclasses.asdict(self.gate))

    def check(self) -> "Config":
        """Itself; ConfigError when something in it cannot work."""
        unknown = set(self.roles) - set(ROLES)
        if unknown or not self.roles:
            raise ConfigError(
                f"roles are {','.join(self.roles) or 'none'}; give one or more of {','.join(ROLES)}"
            )
        allowed = [consent for consent in CONSENTS if consent != "denied"]
        if not set(self.learner.learn_from) <= set(allowed):
            raise ConfigError(
                f"learner.learn_from is {list(self.learner.learn_from)}; give some of {allowed}"
            )
        for name in ("certificate", "certificate_key"):
            path = getattr(self.gateway, name)
            if path and not Path(path).expanduser().is_file():
                raise ConfigError(f"gateway.{name} is {path}, where no file is; give a PEM file")
        _check_sections(self)
        if "gateway" in self.roles:
            _check_hosts(self.gateway)
            _ = self.listen, self.gateway_config
        check_backends(stream=self.stream.url, store=self.store.url)
        if self.ingest.engine == "spark":
            check_spark_store(self)
        if self.models.url:
            _check_models(self.models.url)
        if self.learner.simulator and "learner" in self.roles:
            _check_simulator(self.learner.simulator)
        return self


def check_spark_store(config: Config) -> None:
    """ConfigError when the store is one that a Spark job does not write."""
    if not config.store.url:
        raise ConfigError(
            "a Spark job stores where it can be reached over the network, and this store is in the "
            "data folder, which "
            "our own service alone writes; give --store, such as cassandra://HOST/KEYSPACE, or "
            "--engine native (in a "
            "config: store.url, ingest.engine)"
        )


def _check_sections(config: Config) -> None:
    least = config.gate.min_episodes
    most = config.gate.max_episodes
    if least > most:
        raise ConfigError(
            f"gate.min_episodes is {least}, more than gate.max_episodes, {most}; give numbers that "
            "rise, such as 30 "
            "and 480"
        )
    for section, part in (("learner", "schedule"), ("gate", "bounds")):
        try:
            getattr(config, part)
        except ConfigError as error:
            raise ConfigError(f"[{section}] cannot work: {error}") from None


def _check_hosts(section: GatewaySection) -> None:
    """Names that no request and no system can mean."""
    for host in section.hosts:
        if not _HOST.fullmatch(host):
            raise ConfigError(
                f"gateway.hosts has {host[:80]!r}; give names as they stand in an address, without "
                "scheme, port or "
                "spaces, such as play.example"
            )
    if not _ADDRESS.fullmatch(section.host):
        raise ConfigError(
            f"gateway.host is {section.host[:80]!r}; give an address or a name, such as 127.0.0.1"
        )


def _check_models(url: str) -> None:
    """ConfigError where no models can lie; nothing is asked of the network."""
    from understudy.models.objects import open_objects

    try:
        open_objects(url)
    except ConfigError as error:
        said = str(error).replace(url, str(hidden(url)))
        raise ConfigError(f"models.url is {hidden(url)!r}, which cannot be used: {said}") from None


def _check_simulator(env_id: str) -> None:
    """ConfigError unless Gymnasium can make it, as the learner will; nothing is asked of the
    network."""
    from understudy.training.env_info import GameChoice

    # The learner's process finds modules in the folder it was called in; a command by itself does
    # not.
    sys.path.append(os.getcwd())
    try:
        GameChoice(game=env_id).make(1).close()
    except UnderstudyError as error:
        raise ConfigError(
            f"learner.simulator is {env_id[:80]!r}, which cannot be made: {error}"
        ) from None
    finally:
        sys.path.pop()


def write_config(config: Config, path: Path) -> None:
    """Hand a resolved config to child processes; not on their command line, where everybody
    could read it."""
    write_file(path, json.dumps(dataclasses.asdict(config)).encode(), mode=0o600)


def read_config(path: Path) -> Config:
    """What `write_config` wrote."""
    try:
        return from_tree(Config, json.loads(path.read_bytes()), where=str(path))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}; it is written by 'understudy up'"
        ) from None


# --- From where -----------------------------------------------------------------------------------


def resolve(
    flags: Mapping[str, Any], *, file: Path | None = None, environ: Mapping[str, str] | None = None
) -> Resolved[Config]:
    """The config from flags, environment, file, last start and defaults; a flag of None was not
    given.

    The last start is asked for stream, store, models and the engine alone.
    """

    def last_start(name: str, values: Mapping[str, Any]) -> tuple[Any, str] | None:
        # The engine is kept only where the store, which comes first, lies elsewhere still.
        if not (name in HERE or (name == ENGINE and values["store.url"])) or not values["data"]:
            return None
        root = Path(values["data"]).expanduser()
        value = read_used(root).get(name)
        return (
            (value, f"last start ({root / USED_FILE})")
            if value and (name, value) != (ENGINE, "native")
            else None
        )

    environ = os.environ if environ is None else environ
    return settings.resolve(
        Config,
        flags=flags,
        environ=environ,
        file=config_file(flags, file=file, environ=environ),
        instead=lambda name, value: "" if value == HERE.get(name) else value,
        kept=last_start,
    )


def config_file(
    flags: Mapping[str, Any], *, file: Path | None, environ: Mapping[str, str]
) -> Path | None:
    """The file that was named, or the one in the data folder; None where there is none."""
    named = file or (
        Path(environ["UNDERSTUDY_CONFIG"]) if environ.get("UNDERSTUDY_CONFIG") else None
    )
    if named is not None:
        return named
    data = flags.get("data") or environ.get("UNDERSTUDY_DATA")
    path = Path(data).expanduser() / FILE_NAME if data else None
    return path if path is not None and path.is_file() else None


def example(data: str = "") -> str:
    """A config file with every value at its default, each with a line about it."""
    lines, section = (
        ["# understudy's config; 'understudy config show' says where each value comes from."],
        "",
    )
    for leaf in settings.leaves(Config):
        table, _, name = leaf.name.rpartition(".")
        if table != section:
            lines += ["", f"[{table}]"]
            section = table
        value = data if leaf.name == "data" and data else leaf.default
        mark = "" if leaf.name == "data" and data else "# "
        lines += [f"# {leaf.help}", f"{mark}{name} = {settings.toml_text(value)}"]
    return "\n".join(lines) + "\n"


# --- Where it ran last ----------------------------------------------------------------------------
#
# Flags and variables belong to one start; what players did must not go elsewhere because the next
# one lacks them. So `up` keeps its addresses and its engine in the data folder, and every command
# on it goes by them until a flag, a variable or the file says otherwise.


def read_used(root: Path) -> Mapping[str, str]:
    """Addresses by name, empty text for the data folder itself, and the engine; nothing where no
    platform has run."""
    path = root / USED_FILE
    try:
        found = json.loads(path.read_bytes())
        return {**{name: str(found[name]) for name in HERE}, ENGINE: str(found.get(ENGINE, ""))}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}, which says where this deployment's stream, store and models are, cannot be "
            "read "
            f"({type(error).__name__}); restore it, or remove it and give --stream, --store and "
            "--models to "
            "'understudy up'"
        ) from None


def keep_used(config: Config) -> None:
    """Keep the addresses and the engine of a platform that runs."""
    now = {**used_by(config), ENGINE: config.ingest.engine}
    if read_used(config.folder.root) != now:
        write_file(config.folder.root / USED_FILE, json.dumps(now).encode(), mode=0o600)


def restore_used(root: Path, *, models: str) -> None:
    """After a backup was restored: stream and store are where they were, models where they were
    restored to."""
    if before := read_used(root):
        now = {**before, "models.url": _absolute(models)}
        write_file(root / USED_FILE, json.dumps(now).encode(), mode=0o600)


def used_by(config: Config) -> Mapping[str, str]:
    """A config's addresses by name, as they hold from any folder that a command is called in."""
    urls = {
        "stream.url": config.stream.url,
        "store.url": config.store.url,
        "models.url": config.models.url,
    }
    return {name: _absolute(url) for name, url in urls.items()}


def moved(before: Mapping[str, str], config: Config) -> list[str]:
    """A sentence for each part that was elsewhere at the last start."""
    said = []
    for name, now in used_by(config).items():
        then = before.get(name, now)
        part = name.partition(".")[0]
        if then != now:
            said.append(
                f"{part} is {_shown(name, now)} now; at the last start it was "
                f"{_shown(name, then)}: "
                f"what is there stays there; {_NEXT[part]}"
            )
    return said


_NEXT = {
    "stream": "frames that wait there are stored by 'understudy ingest --until-empty' with "
    "--stream as it was",
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
        name: str(Path(location.options[name]).expanduser().absolute())
        for name in _FILES
        if name in location.options
    }
    options = {**location.options, **files}
    return (
        url if options == location.options else dataclasses.replace(location, options=options).url
    )
