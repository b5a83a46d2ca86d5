"""LearnerNode: trains a policy with workers as actors; the counterpart of `Worker`."""

import dataclasses
from typing import TYPE_CHECKING, Any

from understudy.core.errors import ConfigError
from understudy.training.train import Run, TrainOptions, train

if TYPE_CHECKING:
    from understudy.workers.team import WorkersConfig


class LearnerNode:
    """Trains a policy with workers as actors: `train` with the engine `workers`."""

    def __init__(
        self,
        game: Any = None,
        *,
        algorithm: Any = "dqn",
        listen: "str | WorkersConfig | None" = None,
        options: TrainOptions | None = None,
        **arguments: Any,
    ) -> None:
        """`listen` is HOST:PORT, by default 127.0.0.1:4444; `arguments` are those of `train`."""
        self._game = game
        options = options or TrainOptions()
        if options.engine not in (None, "workers"):
            raise ConfigError(
                f"engine is {options.engine!r}, but the actors of a LearnerNode are workers; omit "
                "it, or use understudy.train"
            )
        options = dataclasses.replace(options, engine="workers")
        if listen is not None and options.listen is not None:
            raise ConfigError(
                "listen is set twice: by the argument and in options; omit one of the two"
            )
        if listen is not None:
            options = dataclasses.replace(options, listen=listen)
        self._arguments = {**arguments, "algorithm": algorithm, "options": options}

    def serve(self) -> Run:
        """Listen, train until the run is over, and return it; workers may come and go."""
        return train(self._game, **self._arguments)
