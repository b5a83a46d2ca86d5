"""Links into the stream of a deployment, for what its own commands send."""

from understudy.app.backends import open_stream
from understudy.app.config import Config
from understudy.app.data import DataFolder
from understudy.app.deployment import open_deployment
from understudy.client.local import LocalLink
from understudy.core.clock import Clock
from understudy.core.door import Door, deployment_key
from understudy.core.game import GameSpec


def open_link(data: DataFolder, config: Config, spec: GameSpec, clock: Clock) -> LocalLink:
    """The way into the stream, through the same door as every game's."""
    door = Door(deployment_key(data.root), spec.game, clock)
    return LocalLink(open_stream(config.stream.url, data), door=door, specs_folder=data.games)


def register(data: DataFolder, config: Config, spec: GameSpec, link: LocalLink) -> None:
    """Make a spec known to whoever stores."""
    if config.models.url:
        open_deployment(data, models=config.models.url).registry.register(spec)
    else:
        link.register(spec)
