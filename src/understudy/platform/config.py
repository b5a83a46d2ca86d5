"""The platform's config: all settings with meaning and default, and where values come from."""

import dataclasses
import json
import os
import re
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from understudy.backends.addresses import check_backends
from understudy.backends.data import DataFolder, data_folder
from understudy.core import settings
from understudy.core.errors import ConfigError, UnderstudyError
from understudy.core.location import is_loopback, parse_location
from understudy.core.log import write_file
from understudy.core.settings import Resolved as Resolved
from understudy.core.settings import from_tree, setting
from understudy.core.settings import mask_secrets as mask_secrets
from understudy.core.wording import joined
from understudy.experience.chunk import CONSENTS
from understudy.experience.skill import MAX_EXPLORE_SHARE
from understudy.models.gate import MAX_MARGIN, Bounds
from understudy.ports import MAX_CONTROL_SHARE
from understudy.release.schedule import ALGORITHMS, MAX_COUNT, MAX_FACTOR, LearningSchedule

if TYPE_CHECKING:
    from understudy.serve.server import Listen
    from understudy.serve.state import GatewayConfig

ROLES = ("gateway", "ingest", "learner")
DEFAULT_PORT = 8600
FILE_NAME = "understudy.toml"
LAST_START_FILE = "backends.json"
HERE = {"stream.url": "file", "store.url": "local", "models.url": "folder"}
"""The URLs that `up` saves, each with the value that means "in the data folder"."""
ENGINE = "ingest.engine"
"""Saved too, so that a start without flags continues with Spark instead of the native engine."""
_FILES = ("ca", "certificate", "credentials", "key")
"""Options of a URL whose value is the path of a file."""
_DEFAULT = "or empty: in the data folder; not set: as at the last start, if there was one."
_SCHEDULE = LearningSchedule()
_BOUNDS = Bounds()
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,251}[A-Za-z0-9_])?|\[[0-9A-Fa-f:.]{2,45}\]")
_ADDRESS = re.compile(
    r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,251}[A-Za-z0-9_])?|[0-9A-Fa-f:.]{2,45}(%[A-Za-z0-9._-]{1,32})?"
)
"""An IPv6 address has brackets in a Host header, but none in a listen address."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewaySection:
    """[gateway]: settings of the gateway, which games and browsers connect to."""

    host: str = setting(
        "127.0.0.1", description="Address to listen on; any but loopback needs TLS or insecure."
    )
    port: int = setting(DEFAULT_PORT, 0, 65535, "Port to listen on; 0: any free port.")
    hosts: tuple[str, ...] = setting(
        (), description="Host names that requests may use, besides those of loopback."
    )
    certificate: str = setting("", description="A PEM file; with certificate_key it enables TLS.")
    certificate_key: str = setting("", description="The PEM file of the private key.")
    insecure: bool = setting(
        False,
        description="Allow plain HTTP for other machines, such as behind a proxy that encrypts.",
    )
    trusted_proxies: tuple[str, ...] = setting(
        (),
        description="Addresses or networks of proxies in front, such as 10.0.0.0/8; only their "
        "X-Forwarded-For header is used.",
    )
    max_keyless_connections: int = setting(
        1024,
        1,
        description="Connections of one address that have not sent a valid key; beyond it, the "
        "one idle longest is closed.",
    )
    target_steps_s: float = setting(
        0.0,
        0,
        1e9,
        description="Steps per second to record of each game, for all players together; "
        "0: no limit.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamSection:
    """[stream]: settings of the stream, to which the gateway appends frames."""

    url: str = setting(
        "",
        description="Stream of frames to store, such as kinesis://STREAM or "
        f"kafka://HOST:PORT/TOPIC; file {_DEFAULT}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSection:
    """[store]: settings of the store, from which the learner reads."""

    url: str = setting(
        "", description=f"Store of experience, such as cassandra://HOST/KEYSPACE; local {_DEFAULT}"
    )
    window_hours: float = setting(
        0.0,
        0,
        1e6,
        description="How long the learner's local copy of a remote store keeps steps; "
        "0: as long as the remote store.",
    )


RETENTION_S = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class IngestSection:
    """[ingest]: settings of ingest, which moves frames from the stream to the store."""

    engine: str = setting(
        "native",
        description="native: the built-in service; spark: a streaming job; "
        "not set: as at the last start, or native.",
        choices=("native", "spark"),
    )
    master: str = setting(
        "local[2]", description="Where Spark runs: this machine, or spark://HOST:7077."
    )
    retention_s: float = setting(
        RETENTION_S,
        0.0,
        1e10,
        description="Seconds that a stream in the data folder keeps frames after they are stored.",
    )
    keep_days: float = setting(
        0.0,
        0.0,
        1e5,
        description="Days that a store in the data folder keeps steps; 0: forever.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelsSection:
    """[models]: settings of the models, with specs and keys."""

    url: str = setting(
        "", description=f"Models, specs and keys, such as s3://BUCKET/PATH; folder {_DEFAULT}"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSection:
    """[learner]: settings of the learner."""

    learn_from: tuple[str, ...] = setting(
        (),
        description="Consents to learn from; empty: granted, and also unknown if only this machine "
        "can reach the gateway.",
    )
    first_steps: int = setting(
        _SCHEDULE.first_steps,
        1,
        MAX_COUNT,
        description="Steps recorded from people before the first bot is trained.",
    )
    bc_updates: int = setting(
        _SCHEDULE.bc_updates,
        1,
        MAX_COUNT,
        description="Training updates of a clone (bc) before it is released.",
    )
    growth: float = setting(
        _SCHEDULE.growth,
        1.001,
        MAX_FACTOR,
        description="Factor by which recorded steps must grow before the next training with bc or "
        "iql, from new weights.",
    )
    improve_with: str = setting(
        _SCHEDULE.improve_with,
        description="The algorithm that is to play better than people; dqn needs one discrete "
        "action, bc only clones.",
        choices=ALGORITHMS,
    )
    improve_steps: int = setting(
        _SCHEDULE.improve_steps,
        1,
        MAX_COUNT,
        description="Steps of people and bots from which on it replaces bc.",
    )
    iql_updates: int = setting(
        _SCHEDULE.iql_updates,
        1,
        MAX_COUNT,
        description="Training updates of a candidate of iql before it is released.",
    )
    ranking_updates: int = setting(
        _SCHEDULE.ranking_updates,
        0,
        MAX_COUNT,
        description="Updates by which candidates of bc and iql are ranked on recorded steps before "
        "one is released; 0: always the one of iql.",
    )
    dqn_updates: int = setting(
        _SCHEDULE.dqn_updates, 1, MAX_COUNT, "Training updates of dqn between two candidates."
    )
    dqn_steps: int = setting(
        _SCHEDULE.dqn_steps, 1, MAX_COUNT, "New recorded steps between two candidates of dqn."
    )
    updates_per_step: float = setting(
        _SCHEDULE.updates_per_step,
        1e-9,
        MAX_FACTOR,
        description="Maximum training updates of dqn per recorded step.",
    )
    temperature: float = setting(
        _SCHEDULE.temperature,
        1e-3,
        100.0,
        description="Temperature at which bots of bc and iql choose; 1: as often wrong as people, "
        "below 1: less often.",
    )
    people_share: float = setting(
        _SCHEDULE.people_share,
        0.0,
        1.0,
        description="Least share of people's steps in what iql and dqn learn from; 0: as recorded, "
        "1: only people's.",
    )
    explore_share: float = setting(
        0.05,
        0.0,
        MAX_EXPLORE_SHARE,
        description="Share of bots' episodes in which they explore, for iql or dqn to learn from; "
        "0: none.",
    )
    settings: tuple[str, ...] = setting(
        (),
        description="Settings of bc, iql and dqn in place of those of their presets, as lines of "
        "TOML; docs/learner-service.md has examples.",
    )
    simulator: str = setting(
        "", description="A Gymnasium id to evaluate candidates in; empty: live play decides."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GateSection:
    """[gate]: settings of the gate, which decides about new models."""

    min_episodes: int = setting(
        _BOUNDS.min_episodes,
        2,
        description="Episodes that canary and champion each need before a decision.",
    )
    max_episodes: int = setting(
        _BOUNDS.max_episodes, 2, description="Episodes after which an undecided canary is rejected."
    )
    error: float = setting(
        _BOUNDS.error,
        1e-9,
        0.499,
        "Highest probability that a canary which is not better is promoted.",
    )
    life_error: float = setting(
        _BOUNDS.life_error,
        1e-9,
        0.499,
        "The same for all canaries of a schema together.",
    )
    first_share: float = setting(
        _BOUNDS.first_share, 1e-6, 0.5, "The share of episodes that a canary plays at first."
    )
    max_share: float = setting(
        _BOUNDS.max_share,
        1e-6,
        0.5,
        "The share to which that doubles, every 5 episodes of canary and champion.",
    )
    control_share: float = setting(
        _BOUNDS.control_share,
        0,
        MAX_CONTROL_SHARE,
        "The share of episodes that the best earlier champion plays beside a canary; 0: none.",
    )
    forget_margin: float = setting(
        _BOUNDS.forget_margin,
        0,
        MAX_MARGIN,
        "By how much of the range of returns a replacement, after a forget or a new schema, may be "
        "worse.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LogSection:
    """[log]: settings of logs."""

    json: bool = setting(False, description="Log events as JSON lines, also in a terminal.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """All settings of the platform."""

    REMOVED: ClassVar[Mapping[str, str]] = {
        "gateway.canary_share": "set gate.first_share and gate.max_share instead: a canary's share "
        "grows from the one to the other",
        "gate.worse_by": "leave it out: a candidate is promoted only if it is proven better",
        "learner.bc_growth": "set learner.growth instead",
    }
    """Settings of earlier versions, and what replaced each."""
    data: str = setting("", description="The data folder.")
    roles: tuple[str, ...] = setting(ROLES, description="Roles that run on this machine.")
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
        """Consents to learn from; by default also `unknown` if all players are on this machine."""
        return self.learner.learn_from or (
            ("granted", "unknown") if self.is_local else ("granted",)
        )

    @property
    def is_local(self) -> bool:
        """Whether the gateway runs here, and only this machine can reach it."""
        return (
            "gateway" in self.roles
            and is_loopback(self.gateway.host)
            and not self.gateway.trusted_proxies
        )

    @property
    def listen(self) -> "Listen":
        from understudy.serve.server import Listen

        gateway = self.gateway
        certificate, key = (
            Path(text).expanduser() if text else None
            for text in (gateway.certificate, gateway.certificate_key)
        )
        return Listen(
            host=gateway.host,
            port=gateway.port,
            certificate=certificate,
            certificate_key=key,
            insecure=gateway.insecure,
            trusted_proxies=gateway.trusted_proxies,
            max_keyless_connections=gateway.max_keyless_connections,
        )

    @property
    def gateway_config(self) -> "GatewayConfig":
        from understudy.serve.state import GatewayConfig

        return GatewayConfig(
            hosts=self.gateway.hosts,
            target_steps_s=self.gateway.target_steps_s or None,
        )

    @property
    def schedule(self) -> LearningSchedule:
        names = LearningSchedule.__dataclass_fields__
        return LearningSchedule(**{name: getattr(self.learner, name) for name in names})

    @property
    def algorithm_settings(self) -> dict[str, dict[str, Any]]:
        """Settings of the algorithms by name; ConfigError if a line is not valid."""
        # Imported late: only a learner with such lines needs it.
        from understudy.training.settings import Resolver

        by_algorithm: dict[str, dict[str, Any]] = {}
        for line in self.learner.settings:
            try:
                tables = tomllib.loads(line)
                algorithm = next(iter(tables), "")
                values = tables.get(algorithm)
                if len(tables) != 1 or algorithm not in ALGORITHMS or not isinstance(values, dict):
                    raise ConfigError(f"which sets {', '.join(tables) or 'nothing'}")
                resolver = Resolver(algorithm)
                for name, value in values.items():
                    resolver.set(name, value)
                resolver.settings()
            except (ValueError, ConfigError) as error:
                raise ConfigError(
                    f"learner.settings has {line[:80]!r} ({error}); pass lines such as "
                    f"'iql.widths = [128, 128]', each for one of {', '.join(ALGORITHMS)}"
                ) from None
            by_algorithm.setdefault(algorithm, {}).update(values)
        return by_algorithm

    @property
    def bounds(self) -> Bounds:
        return Bounds(**dataclasses.asdict(self.gate))

    def check(self) -> "Config":
        """Return this config; ConfigError if a value is invalid."""
        unknown = set(self.roles) - set(ROLES)
        if unknown or not self.roles:
            raise ConfigError(
                f"roles are {','.join(self.roles) or 'none'}; pass one or more of {','.join(ROLES)}"
            )
        allowed = [consent for consent in CONSENTS if consent != "denied"]
        if not set(self.learner.learn_from) <= set(allowed):
            raise ConfigError(
                f"learner.learn_from is {joined(self.learner.learn_from)}; pass one or more of "
                f"{joined(allowed)}"
            )
        _ = self.algorithm_settings  # checks the lines
        for name in ("certificate", "certificate_key"):
            path = getattr(self.gateway, name)
            if path and not Path(path).expanduser().is_file():
                raise ConfigError(
                    f"gateway.{name} is {path}, which is not a file; pass the path of a PEM file"
                )
        _check_sections(self)
        if "gateway" in self.roles:
            _check_hosts(self.gateway)
            self.listen.check_key_pair()
            _ = self.gateway_config
        check_backends(stream=self.stream.url, store=self.store.url)
        if self.ingest.keep_days and self.store.url:
            raise ConfigError(
                f"ingest.keep_days is {self.ingest.keep_days:g}, but only steps in the data folder "
                "expire by it; leave it out, and set ttl_s in the store's URL"
            )
        if self.ingest.engine == "spark":
            check_spark_store(self)
        if self.models.url:
            _check_models(self.models.url)
        if self.learner.simulator and "learner" in self.roles:
            _check_simulator(self.learner.simulator)
        return self


def check_spark_store(config: Config) -> None:
    """Raise ConfigError if a Spark job cannot write the store."""
    if not config.store.url:
        raise ConfigError(
            "a Spark job needs a store that it can reach over the network, but this store is in "
            "the data folder, which only the native engine writes; pass --store, such as "
            "cassandra://HOST/KEYSPACE, or --engine native (in a config: store.url, ingest.engine)"
        )


def _check_sections(config: Config) -> None:
    least = config.gate.min_episodes
    most = config.gate.max_episodes
    if least > most:
        raise ConfigError(
            f"gate.min_episodes is {least}, more than gate.max_episodes, {most}; pass increasing "
            "numbers, such as 30 and 1000"
        )
    for section, part in (("learner", "schedule"), ("gate", "bounds")):
        try:
            getattr(config, part)
        except ConfigError as error:
            raise ConfigError(f"[{section}] is invalid: {error}") from None


def _check_hosts(section: GatewaySection) -> None:
    """Raise ConfigError for invalid host names."""
    for host in section.hosts:
        if not _HOST.fullmatch(host):
            raise ConfigError(
                f"gateway.hosts has {host[:80]!r}; pass host names without scheme, port or spaces, "
                "such as play.example"
            )
    if not _ADDRESS.fullmatch(section.host):
        raise ConfigError(
            f"gateway.host is {section.host[:80]!r}; pass an address or a name, such as 127.0.0.1"
        )


def _check_models(url: str) -> None:
    """Raise ConfigError for an unsupported models URL, without using the network."""
    from understudy.models.objects import open_objects

    try:
        open_objects(url)
    except ConfigError as error:
        reason = str(error).replace(url, str(mask_secrets(url)))
        raise ConfigError(
            f"models.url is {mask_secrets(url)!r}, which cannot be used: {reason}"
        ) from None


def _check_simulator(env_id: str) -> None:
    """Raise ConfigError unless Gymnasium can create the env, without using the network."""
    from understudy.training.env_info import GameChoice

    # The learner is run by `python -m`, which finds modules in the current folder; commands do not.
    sys.path.append(os.getcwd())
    try:
        GameChoice(game=env_id).make(1).close()
    except UnderstudyError as error:
        raise ConfigError(
            f"learner.simulator is {env_id[:80]!r}, which cannot be created: {error}"
        ) from None
    finally:
        sys.path.pop()


def write_config(config: Config, path: Path) -> None:
    """Write a resolved config for child processes; a command line could be read by every user."""
    write_file(path, json.dumps(dataclasses.asdict(config)).encode(), mode=0o600)


def read_config(path: Path) -> Config:
    """Read a config that `write_config` wrote."""
    try:
        return from_tree(Config, json.loads(path.read_bytes()), where=str(path))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}; start the role with 'understudy up', which writes it"
        ) from None


# --- Resolution -----------------------------------------------------------------------------------


def resolve(
    flags: Mapping[str, Any], *, file: Path | None = None, environ: Mapping[str, str] | None = None
) -> Resolved[Config]:
    """Return the config, and the source of each value.

    Each value comes from the first of these that sets it: flags (None: not set), environment, file,
    last start (only stream, store, models and ingest engine), defaults.
    """

    def last_start(name: str, values: Mapping[str, Any]) -> tuple[Any, str] | None:
        # The saved engine is used only if the store, which is resolved first, is still remote.
        if not (name in HERE or (name == ENGINE and values["store.url"])) or not values["data"]:
            return None
        root = Path(values["data"]).expanduser()
        value = read_last_start(root).get(name)
        return (
            (value, f"last start ({root / LAST_START_FILE})")
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
        saved=last_start,
    )


def config_file(
    flags: Mapping[str, Any], *, file: Path | None, environ: Mapping[str, str]
) -> Path | None:
    """Return the named config file, or the one in the data folder; None if there is none."""
    named = file or (
        Path(environ["UNDERSTUDY_CONFIG"]) if environ.get("UNDERSTUDY_CONFIG") else None
    )
    if named is not None:
        return named
    data = flags.get("data") or environ.get("UNDERSTUDY_DATA")
    path = Path(data).expanduser() / FILE_NAME if data else None
    return path if path is not None and path.is_file() else None


def example(data: str = "") -> str:
    """Return the text of a config file with the description and the default of every setting."""
    lines = ["# understudy's config; 'understudy config show' shows the source of each value."]
    section = ""
    for leaf in settings.leaves(Config):
        table, _, name = leaf.name.rpartition(".")
        if table != section:
            lines += ["", f"[{table}]"]
            section = table
        value = data if leaf.name == "data" and data else leaf.default
        mark = "" if leaf.name == "data" and data else "# "
        lines += [f"# {leaf.help}", f"{mark}{name} = {settings.toml_text(value)}"]
    return "\n".join(lines) + "\n"


# --- The last start -------------------------------------------------------------------------------
#
# Flags and environment variables apply to one start only, but a later start without them must not
# write its data to another place. `up` therefore saves its URLs and its engine in the data folder,
# and every command on the folder uses them unless a flag, a variable or the file overrides them.


def read_last_start(root: Path) -> Mapping[str, str]:
    """Return the last start's URLs ("": the data folder) and engine; empty if there was none."""
    path = root / LAST_START_FILE
    try:
        fields = json.loads(path.read_bytes())
        return {**{name: str(fields[name]) for name in HERE}, ENGINE: str(fields.get(ENGINE, ""))}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}, which locates this deployment's stream, store and models, cannot be read "
            f"({type(error).__name__}); restore it, or remove it and pass --stream, --store and "
            "--models to 'understudy up'"
        ) from None


def save_last_start(config: Config) -> None:
    """Save the URLs and the engine of a running platform."""
    now = {**backend_urls(config), ENGINE: config.ingest.engine}
    if read_last_start(config.folder.root) != now:
        write_file(config.folder.root / LAST_START_FILE, json.dumps(now).encode(), mode=0o600)


def restore_last_start(root: Path, *, models: str) -> None:
    """Save the new location of the models after a restore; the other saved values stay the same."""
    if before := read_last_start(root):
        now = {**before, "models.url": _absolute(models)}
        write_file(root / LAST_START_FILE, json.dumps(now).encode(), mode=0o600)


def backend_urls(config: Config) -> Mapping[str, str]:
    """Return a config's URLs by name, with absolute paths, valid in any working directory."""
    urls = {
        "stream.url": config.stream.url,
        "store.url": config.store.url,
        "models.url": config.models.url,
    }
    return {name: _absolute(url) for name, url in urls.items()}


def location_changes(before: Mapping[str, str], config: Config) -> list[str]:
    """Return a message for each part whose location changed since the last start."""
    messages = []
    for name, now in backend_urls(config).items():
        then = before.get(name, now)
        part = name.partition(".")[0]
        if then != now:
            messages.append(
                f"{part} is {_shown(name, now)} now; at the last start it was "
                f"{_shown(name, then)}: data in the old location is not moved; {_NEXT[part]}"
            )
    return messages


_NEXT = {
    "stream": "to store the frames that are still in the old stream, run 'understudy ingest "
    "--until-empty' with the old --stream",
    "store": "bots learn only from the new store; to go back, pass the old --store",
    "models": "bots and keys of the old location are not available; to go back, pass the old "
    "--models",
}


def _shown(name: str, url: str) -> str:
    return str(mask_secrets(url)) if url else f"in the data folder ({HERE[name]})"


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
