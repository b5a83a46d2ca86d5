"""understudy turns the games people play into bots worth playing against."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from understudy.client.connect import ClientConfig as ClientConfig
    from understudy.client.connect import connect as connect
    from understudy.client.sender import SenderConfig as SenderConfig
    from understudy.training import events as events
    from understudy.training.events import Stop as Stop
    from understudy.training.learner_node import LearnerNode as LearnerNode
    from understudy.training.train import TrainOptions as TrainOptions
    from understudy.training.train import train as train
    from understudy.tuning.tune import tune as tune
    from understudy.workers.worker import Worker as Worker

    __version__: str

__all__ = [
    "ClientConfig",
    "LearnerNode",
    "SenderConfig",
    "Stop",
    "TrainOptions",
    "Worker",
    "__version__",
    "connect",
    "events",
    "train",
    "tune",
]

_LAZY = {
    "ClientConfig": "understudy.client.connect:ClientConfig",
    "LearnerNode": "understudy.training.learner_node:LearnerNode",
    "SenderConfig": "understudy.client.sender:SenderConfig",
    "Stop": "understudy.training.events:Stop",
    "TrainOptions": "understudy.training.train:TrainOptions",
    "Worker": "understudy.workers.worker:Worker",
    "connect": "understudy.client.connect:connect",
    "events": "understudy.training.events:",
    "train": "understudy.training.train:train",
    "tune": "understudy.tuning.tune:tune",
}


def __getattr__(name: str) -> Any:
    # Importing stays silent and cheap: each part is loaded on first use.
    if name in _LAZY:
        return _load(name)
    if name == "__version__":
        from importlib import metadata  # late: it costs a sixth of the client's import time

        try:
            return metadata.version("understudy")
        except metadata.PackageNotFoundError:
            return "0+source"
    raise AttributeError(f"module 'understudy' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


def _load(name: str) -> Any:
    from importlib import import_module

    path, _, attribute = _LAZY[name].partition(":")
    try:
        module = import_module(path)
    except ModuleNotFoundError as error:
        of_platform = ("LearnerNode", "TrainOptions", "Worker", "train", "tune")
        if name not in of_platform or (error.name or "").startswith("understudy"):
            raise
        from understudy.core.errors import MissingExtra

        raise MissingExtra(
            f"understudy.{name} needs the package {error.name}; pip install 'understudy[platform]'"
        ) from error
    return getattr(module, attribute) if attribute else module
