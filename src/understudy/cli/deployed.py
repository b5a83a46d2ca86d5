"""The deployment that a command is about."""

from understudy.app.config import Config, resolve
from understudy.app.deployment import Deployment, open_deployment, signing_key
from understudy.core.errors import ConfigError


def config_of(text: str | None, *, store_url: str | None = None) -> Config:
    """The config of a data folder, with `--store` where it was given."""
    return resolve({"data": text, "store.url": store_url}).config


def deployment(text: str | None, *, must_exist: bool = False) -> Deployment:
    """Keys and models of the data folder, as its config says; made where there are none, unless they must exist."""
    config = config_of(text)
    where = config.folder
    if must_exist and not signing_key(where).exists():
        raise ConfigError(
            f"{where.root} holds no deployment; start one with 'understudy up --data {where.root}', or name another "
            "folder with --data"
        )
    return open_deployment(where, models=config.models.url)


def released_models(text: str | None, games: list[str]) -> list[str]:
    """The models of these games, as `rally/3`; none where there is no deployment."""
    config = config_of(text)
    if not signing_key(config.folder).exists():
        return []
    registry = open_deployment(config.folder, models=config.models.url).registry
    return [f"{game}/{number}" for game in games for number in registry.catalogue(game).models]
