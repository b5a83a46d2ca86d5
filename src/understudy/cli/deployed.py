"""The deployment that a command is about."""

from understudy.app.deployment import Deployment, open_deployment, signing_key
from understudy.app.origins import resolve
from understudy.core.errors import ConfigError


def deployment(text: str | None, *, must_exist: bool = False) -> Deployment:
    """Keys and models of the data folder, as its config says; made where there are none, unless they must exist."""
    config = resolve({"data": text}).config
    where = config.folder
    if must_exist and not signing_key(where).exists():
        raise ConfigError(
            f"{where.root} holds no deployment; start one with 'understudy up --data {where.root}', or name another "
            "folder with --data"
        )
    return open_deployment(where, models=config.models.url)
