"""The whole platform on one machine: its roles, its development keys, and a game to paste."""

import contextlib
import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from understudy.app.config import Config, write_config
from understudy.app.data import DataFolder
from understudy.app.deployment import Deployment, open_deployment
from understudy.app.roles.children import FENCED, python_module
from understudy.app.roles.supervise import Role, Supervisor, Tell
from understudy.core.clock import Clock, SystemClock
from understudy.core.door import deployment_key
from understudy.core.errors import Refused
from understudy.core.log import make_folder, write_file

GAME = """import understudy

game = understudy.connect("my-game", obs=2, actions=["left", "right"])
for number in range(60):
    episode, place = game.episode(), 0.0
    for step in range(50):
        obs = [place, step / 50]
        if number % 2:  # the bot decides; at random until there is one
            action = episode.act(obs)
        else:  # a person decided: here somebody who likes the middle
            action = 1 if place < 0 else 0
            episode.acted(obs, action)
        place += 0.1 if action == 1 else -0.1
        episode.reward(-abs(place))
    episode.end([place, 1.0])
game.close()
"""
"""A game of one's own in a few lines; run once, it brings enough steps of people for a first bot."""


@dataclass(frozen=True, slots=True)
class DevelopmentKeys:
    """Keys that `up` makes by itself where only this machine can reach it."""

    key: str
    admin_key: str


def roles_folder(data: DataFolder) -> Path:
    """Where roles' standings are written."""
    return data.root / "roles"


class Platform:
    """A platform that is being run; a context manager that leaves no process."""

    def __init__(
        self, config: Config, *, tell: Tell, log: Callable[[str, str], None] | None = None, clock: Clock | None = None
    ) -> None:
        self.config, self.data = config.check(), config.folder
        folder = roles_folder(self.data)
        make_folder(folder)
        opened = open_deployment(self.data, models=config.models.url)
        deployment_key(self.data.root)
        self._config_file = folder / f"config-{'-'.join(config.roles)}.json"
        # First the locks: where these roles run already, nothing of theirs is touched.
        self.supervisor = Supervisor(self._roles(), folder, clock=clock or SystemClock(), tell=tell, log=log)
        with contextlib.ExitStack() as failing:
            failing.callback(self.supervisor.close)
            write_config(config, self._config_file)
            self.keys = development_keys(opened) if config.is_local and "gateway" in config.roles else None
            failing.pop_all()

    @property
    def url(self) -> str | None:
        """Where the gateway listens, when there is one and it is ready."""
        standing = self.supervisor.standings.get("gateway")
        return standing.report.get("url") if standing else None

    def ready_line(self) -> dict[str, str | None]:
        """What a program is told when the platform is ready."""
        keys = self.keys
        return {
            "url": self.url, "admin_key": keys.admin_key if keys else None, "key": keys.key if keys else None
        }  # fmt: skip

    def _roles(self) -> list[Role]:
        known = {
            "gateway": Role(name="gateway", command=self._gateway, drains_s=30.0),
            # What the gateway acknowledged last is stored, too.
            "ingest": Role(
                name="ingest", command=self._module("ingest"), drains_s=120.0,
                stops_after=("gateway",),
            ),
            "learner": Role(
                name="learner", command=self._module("learner_process"), drains_s=120.0, is_needed=False,
                gives_way_with=FENCED,
            ),
        }  # fmt: skip
        return [known[name] for name in dict.fromkeys(self.config.roles)]

    def _module(self, name: str) -> Callable[[Mapping[str, Any]], Sequence[str]]:
        return lambda _: python_module(f"understudy.app.roles.{name}", str(self.data.root), str(self._config_file))

    def _gateway(self, report: Mapping[str, Any]) -> Sequence[str]:
        if report.get("port") and not self.config.gateway.port:
            # Any port would do the first time; after a crash games look for it where it was.
            gateway = dataclasses.replace(self.config.gateway, port=int(report["port"]))
            self.config = dataclasses.replace(self.config, gateway=gateway)
            write_config(self.config, self._config_file)
        return self._module("gateway_process")(report)

    def close(self) -> None:
        self.supervisor.close()
        with contextlib.suppress(OSError):
            self._config_file.unlink()

    def __enter__(self) -> "Platform":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def development_keys(deployment: Deployment) -> DevelopmentKeys:
    """The folder's development keys: the same ones at every start, new ones when those were revoked."""
    path, keys = deployment.data.root / "development.json", deployment.keys
    with contextlib.suppress(OSError, ValueError, TypeError, Refused):
        found = DevelopmentKeys(**json.loads(path.read_text()))
        keys.follow()
        keys.check(found.key)
        keys.check(found.admin_key)
        return found
    key, _ = keys.create(["play", "work", "read"], registers=True, label="development")
    admin, _ = keys.create(["admin"], registers=True, label="development, admin")
    write_file(path, json.dumps({"key": key, "admin_key": admin}).encode(), mode=0o600)
    return DevelopmentKeys(key, admin)
