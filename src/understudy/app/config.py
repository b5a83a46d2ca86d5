"""The platform's config: everything that can be set, what it means and its default; see `origins.py` for from where."""

import ipaddress
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from understudy.app.backends import check_backends
from understudy.app.data import DataFolder, data_folder
from understudy.app.service.schedule import LearningSchedule
from understudy.core.errors import ConfigError, UnderstudyError
from understudy.core.log import write_file
from understudy.core.meta import CONSENTS
from understudy.models.gate import Bounds

if TYPE_CHECKING:
    from understudy.serve.house import GatewayConfig
    from understudy.serve.server import Listen

ROLES = ("gateway", "ingest", "learner")
DEFAULT_PORT = 8600
_HERE = "or empty: in the data folder; not set: as at the last start, else the same."
_SCHEDULE, _BOUNDS = LearningSchedule(), Bounds()
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,251}[A-Za-z0-9_])?|\[[0-9A-Fa-f:.]{2,45}\]")
_ADDRESS = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,251}[A-Za-z0-9_])?|[0-9A-Fa-f:.]{2,45}(%[A-Za-z0-9._-]{1,32})?")
"""An IPv6 address has brackets in a Host header, and none where one listens."""


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A table of the config; unknown keys are refused, so that a misspelt one is noticed."""


class GatewaySection(Section, frozen=True, kw_only=True):
    """[gateway]"""

    host: Annotated[str, Meta(description="Where it listens; other than loopback needs TLS, or insecure.")] = (
        "127.0.0.1"
    )
    port: Annotated[int, Meta(ge=0, le=65535, description="0: any free one.")] = DEFAULT_PORT
    hosts: Annotated[tuple[str, ...], Meta(description="Names it may be called by, besides those of loopback.")] = ()
    certificate: Annotated[str, Meta(description="A PEM file; with certificate_key it speaks TLS.")] = ""
    certificate_key: Annotated[str, Meta(description="The PEM file of its private key.")] = ""
    insecure: Annotated[bool, Meta(description="Plain HTTP for other machines too, where something else encrypts.")] = (
        False
    )
    target_steps_s: Annotated[
        float, Meta(ge=0, description="Steps a second and game asked of players together; 0: all of them.")
    ] = 0.0
    canary_share: Annotated[float, Meta(gt=0, le=0.5, description="The share of episodes that a canary plays.")] = 0.2


class StreamSection(Section, frozen=True, kw_only=True):
    """[stream]"""

    url: Annotated[
        str,
        Meta(description="Where frames wait to be stored, such as kinesis://STREAM or kafka://HOST:PORT/TOPIC; "
                         f"file {_HERE}"),
    ] = ""  # fmt: skip


class StoreSection(Section, frozen=True, kw_only=True):
    """[store]"""

    url: Annotated[
        str,
        Meta(description="Where experience is kept, such as cassandra://HOST/KEYSPACE; "
                         f"local {_HERE}"),
    ] = ""  # fmt: skip
    window_hours: Annotated[
        float,
        Meta(ge=0, description="How long the learner keeps a copy of steps kept elsewhere; 0: as long as they do."),
    ] = 0.0


class IngestSection(Section, frozen=True, kw_only=True):
    """[ingest]"""

    engine: Annotated[
        Literal["native", "spark"],
        Meta(
            description="native: our own service; spark: a streaming job; not set: as at the last start, else native."
        ),
    ] = "native"
    master: Annotated[str, Meta(description="Where Spark runs: this machine, or spark://HOST:7077.")] = "local[2]"


class ModelsSection(Section, frozen=True, kw_only=True):
    """[models]"""

    url: Annotated[
        str,
        Meta(description="Models, specs and keys elsewhere, such as s3://BUCKET/PATH; "
                         f"folder {_HERE}"),
    ] = ""  # fmt: skip


class LearnerSection(Section, frozen=True, kw_only=True):
    """[learner]"""

    learn_from: Annotated[
        tuple[str, ...],
        Meta(description="Consents it learns from; empty: granted, and unknown too while only this machine plays."),
    ] = ()
    first_steps: Annotated[int, Meta(ge=1, description="Steps of people before the first bot is learnt.")] = (
        _SCHEDULE.first_steps
    )
    bc_updates: Annotated[int, Meta(ge=1, description="Updates of a clone before it is released.")] = (
        _SCHEDULE.bc_updates
    )
    bc_growth: Annotated[
        float, Meta(gt=1, description="Where clones are all there is: how much more people must have played.")
    ] = _SCHEDULE.bc_growth
    dqn_updates: Annotated[int, Meta(ge=1, description="Updates between two candidates.")] = _SCHEDULE.dqn_updates
    dqn_steps: Annotated[int, Meta(ge=1, description="New steps between two candidates.")] = _SCHEDULE.dqn_steps
    updates_per_step: Annotated[float, Meta(gt=0, description="How far training may run ahead of play.")] = (
        _SCHEDULE.updates_per_step
    )
    simulator: Annotated[
        str, Meta(description="A Gymnasium id in which candidates are tried; empty: live play decides.")
    ] = ""


class GateSection(Section, frozen=True, kw_only=True):
    """[gate]"""

    min_episodes: Annotated[
        int, Meta(ge=2, description="Episodes of canary and champion before they are compared.")
    ] = _BOUNDS.min_episodes
    max_episodes: Annotated[int, Meta(ge=2, description="Episodes after which an unproven canary is rejected.")] = (
        _BOUNDS.max_episodes
    )
    worse_by: Annotated[float, Meta(ge=0, lt=1, description="How much lower its return may be, as a share.")] = (
        _BOUNDS.worse_by
    )
    error: Annotated[float, Meta(gt=0, lt=0.5, description="How often a worse canary may pass.")] = _BOUNDS.error


class LogSection(Section, frozen=True, kw_only=True):
    """[log]"""

    json: Annotated[bool, Meta(description="Events as JSON lines, also in a terminal.")] = False


class Config(Section, frozen=True, kw_only=True):
    """Everything that can be set."""

    data: Annotated[str, Meta(description="The data folder.")] = ""
    roles: Annotated[tuple[str, ...], Meta(description="What runs on this machine.")] = ROLES
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
        return self.learner.learn_from or (("granted", "unknown") if self.is_local else ("granted",))

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach the gateway."""
        try:
            return ipaddress.ip_address(self.gateway.host).is_loopback
        except ValueError:
            return self.gateway.host == "localhost"

    @property
    def listen(self) -> "Listen":
        from understudy.serve.server import Listen

        one = self.gateway
        certificate, key = (
            Path(text).expanduser() if text else None for text in (one.certificate, one.certificate_key)
        )
        return Listen(
            host=one.host, port=one.port, certificate=certificate, certificate_key=key, insecure=one.insecure
        )  # fmt: skip

    @property
    def gateway_config(self) -> "GatewayConfig":
        from understudy.serve.house import GatewayConfig

        one = self.gateway
        return GatewayConfig(
            hosts=one.hosts, canary_share=one.canary_share, target_steps_s=one.target_steps_s or None
        )  # fmt: skip

    @property
    def schedule(self) -> LearningSchedule:
        part = self.learner
        return LearningSchedule(
            first_steps=part.first_steps, bc_updates=part.bc_updates, bc_growth=part.bc_growth,
            dqn_updates=part.dqn_updates, dqn_steps=part.dqn_steps, updates_per_step=part.updates_per_step,
        )  # fmt: skip

    @property
    def bounds(self) -> Bounds:
        return Bounds(**msgspec.structs.asdict(self.gate))

    def check(self) -> "Config":
        """Itself; ConfigError when something in it cannot work."""
        unknown = set(self.roles) - set(ROLES)
        if unknown or not self.roles:
            raise ConfigError(f"roles are {','.join(self.roles) or 'none'}; give one or more of {','.join(ROLES)}")
        allowed = [consent for consent in CONSENTS if consent != "denied"]
        if not set(self.learner.learn_from) <= set(allowed):
            raise ConfigError(f"learner.learn_from is {list(self.learner.learn_from)}; give some of {allowed}")
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
            "a Spark job stores where it can be reached over the network, and this store is in the data folder, which "
            "our own service alone writes; give --store, such as cassandra://HOST/KEYSPACE, or --engine native (in a "
            "config: store.url, ingest.engine)"
        )


def _check_sections(config: Config) -> None:
    least, most = config.gate.min_episodes, config.gate.max_episodes
    if least > most:
        raise ConfigError(
            f"gate.min_episodes is {least}, more than gate.max_episodes, {most}; give numbers that rise, such as 30 "
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
                f"gateway.hosts has {host[:80]!r}; give names as they stand in an address, without scheme, port or "
                "spaces, such as play.example"
            )
    if not _ADDRESS.fullmatch(section.host):
        raise ConfigError(f"gateway.host is {section.host[:80]!r}; give an address or a name, such as 127.0.0.1")


def _check_models(url: str) -> None:
    """ConfigError where no models can lie; nothing is asked of the network."""
    from understudy.models.objects import open_objects

    try:
        open_objects(url)
    except ConfigError as error:
        said = str(error).replace(url, str(hidden(url)))
        raise ConfigError(f"models.url is {hidden(url)!r}, which cannot be used: {said}") from None


def _check_simulator(env_id: str) -> None:
    """ConfigError unless Gymnasium can make it, as the learner will; nothing is asked of the network."""
    from understudy.app.runs.choice import GameChoice

    # The learner's process finds modules in the folder it was called in; a command by itself does not.
    sys.path.append(os.getcwd())
    try:
        GameChoice(game=env_id).make(1).close()
    except UnderstudyError as error:
        raise ConfigError(f"learner.simulator is {env_id[:80]!r}, which cannot be made: {error}") from None
    finally:
        sys.path.pop()


def hidden(value: Any) -> Any:
    """A value as it may be shown: names and passwords inside a URL are stars."""
    if not isinstance(value, str) or "://" not in value:
        return value
    return re.sub(r"\?.*", "?***", re.sub(r"://[^/@]*@", "://***@", value))


def write_config(config: Config, path: Path) -> None:
    """Hand a resolved config to child processes; not on their command line, where everybody could read it."""
    write_file(path, msgspec.json.encode(config), mode=0o600)


def read_config(path: Path) -> Config:
    """What `write_config` wrote."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Config)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}; it is written by 'understudy up'") from None
