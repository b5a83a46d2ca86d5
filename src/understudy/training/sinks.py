"""Sinks: external loggers, each fed from its own thread, so that none of them can block a run.

    run ─► queue (bounded, drops its oldest) ─► thread ─► TensorBoard, Weights & Biases, MLflow

A sink that hangs, fails or is slow loses entries, which are counted; the run is not affected.
"""

import importlib
import importlib.util
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from understudy.core.errors import ConfigError, MissingExtra
from understudy.core.plural import plural
from understudy.training.events import (
    EpisodeEnded,
    Evaluation,
    Event,
    OnEvent,
    Started,
    Stop,
    Update,
)

QUEUE = 4_096
CLOSE_S = 20.0
"""How long the end of a run waits for queued entries: some sinks take that long to open."""


class Sink(Protocol):
    """Writes named numbers at a step; may raise, block or be slow."""

    def write(self, step: int, numbers: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


Open = Callable[[Started], Sink]
"""Opens a sink for a run; called in the sink's own thread, since signing in may hang."""


# --- Adapters -------------------------------------------------------------------------------------


class _TensorBoard:
    def __init__(self, run: Started) -> None:
        board: Any = importlib.import_module("tensorboardX")
        # Hides what a killed run wrote after its last checkpoint.
        purge = run.env_steps or None
        self._writer = board.SummaryWriter(
            logdir=str(Path(run.run) / "tensorboard"), purge_step=purge
        )

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, run: Started) -> None:
        wandb: Any = importlib.import_module("wandb")
        folder = Path(run.run).resolve()
        self._run = wandb.init(
            project="understudy", group=run.game, name=folder.name, dir=folder, config=_facts(run)
        )

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        self._run.finish()


class _Mlflow:
    def __init__(self, run: Started) -> None:
        self._mlflow: Any = importlib.import_module("mlflow")
        if "MLFLOW_TRACKING_URI" not in os.environ:
            self._mlflow.set_tracking_uri(
                f"sqlite:///{(Path(run.run).resolve() / 'mlflow.db').as_posix()}"
            )
        self._mlflow.set_experiment(run.game)
        self._mlflow.start_run(run_name=Path(run.run).name)
        self._mlflow.log_params(_facts(run))

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(numbers), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


def _facts(run: Started) -> dict[str, Any]:
    return {
        "game": run.game,
        "algorithm": run.algorithm,
        "seed": run.seed,
        "steps": run.steps,
        "run": run.run,
    }


SINKS: Mapping[str, tuple[str, Open]] = {
    "mlflow": ("mlflow", _Mlflow),
    "tensorboard": ("tensorboardX", _TensorBoard),
    "wandb": ("wandb", _Wandb),
}
"""By name: the package that a sink needs, and the function that opens it."""


def sinks_named(names: str | Iterable[str]) -> dict[str, Open]:
    """Functions that open these sinks, such as "tensorboard,wandb"; checks names and packages."""
    requested = (
        [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    )
    for name in requested:
        if name not in SINKS:
            raise ConfigError(
                f"log is {name!r}; give one or more of {', '.join(SINKS)}, separated by commas"
            )
        if importlib.util.find_spec(SINKS[name][0]) is None:
            raise MissingExtra(
                f"log {name!r} needs the package {SINKS[name][0]}; pip install 'understudy[{name}]'"
            )
    return {name: SINKS[name][1] for name in requested}


# --- The thread -----------------------------------------------------------------------------------


def numbers_of(event: Event) -> dict[str, float]:
    """The numbers of an event that are logged; most events have none."""
    match event:
        case EpisodeEnded():
            return {"train/return": event.return_, "train/length": float(event.length)}
        case Update():
            return {
                "learner/updates": float(event.updates),
                "learner/replay_ratio": event.replay_ratio,
                "learner/lag_versions": float(event.lag_versions),
                **{f"learner/{name}": value for name, value in event.metrics.items()},
            }
        case Evaluation():
            ends = {"evaluation/low": event.low, "evaluation/high": event.high}
            return {
                "evaluation/return": event.mean,
                **{name: end for name, end in ends.items() if end is not None},
            }
    return {}


class Feed:
    """One sink with its queue and thread; `handle_event` never blocks and never raises."""

    def __init__(self, name: str, open_sink: Open, *, queue: int = QUEUE) -> None:
        self.name = name
        self._open = open_sink
        self.dropped = 0
        self.error = ""
        self._waiting: deque[tuple[int, dict[str, float]]] = deque(maxlen=queue)
        self._changed = threading.Condition()
        self._is_closing = False
        self._thread: threading.Thread | None = None

    def handle_event(self, event: Event) -> None:
        if isinstance(event, Started) and self._thread is None:
            # A daemon, so that a hanging sink does not keep the process alive.
            self._thread = threading.Thread(
                target=self._run, args=(event,), name=f"log-{self.name}", daemon=True
            )
            self._thread.start()
        numbers = numbers_of(event)
        if not numbers or self.error:
            return
        with self._changed:
            self.dropped += len(self._waiting) == self._waiting.maxlen
            self._waiting.append((event.env_steps, numbers))
            self._changed.notify()

    def _run(self, started: Started) -> None:
        try:
            sink = self._open(started)
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: bool(self._waiting) or self._is_closing)
                    entry = self._waiting.popleft() if self._waiting else None
                if entry is None:
                    break
                sink.write(*entry)
            sink.close()
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Wait for queued entries, up to the timeout."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout_s)

    @property
    def is_hanging(self) -> bool:
        """After `close`: whether the thread is still running."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def warning(self) -> str:
        """What went wrong; empty if nothing did."""
        if self.error:
            return f"log {self.name} failed and was disabled: {self.error}"
        n_lost = self.dropped + (len(self._waiting) if self.is_hanging else 0)
        lost = f"{n_lost} {plural(n_lost, 'entry was', 'entries were')} not written"
        if self.is_hanging:
            return f"log {self.name} is hanging; {lost}"
        return f"log {self.name} was too slow; {lost}" if n_lost else ""


@dataclass(frozen=True, slots=True)
class Feeds:
    """All sinks of one run, as one listener."""

    feeds: Sequence[Feed]

    def __call__(self, event: Event) -> None:
        for feed in self.feeds:
            feed.handle_event(event)

    def close(self, timeout_s: float = CLOSE_S) -> None:
        for wait_s in (0.0, timeout_s):  # signals all of them before it waits
            for feed in self.feeds:
                feed.close(wait_s)

    @property
    def warnings(self) -> list[str]:
        return [feed.warning for feed in self.feeds if feed.warning]


def call_all(*listeners: OnEvent | None) -> OnEvent:
    """One listener that calls all of them; returns Stop if any of them does."""
    present = [listener for listener in listeners if listener is not None]

    def handle_event(event: Event) -> object:
        answers = [listener(event) for listener in present]
        return Stop if Stop in answers else None

    return handle_event
