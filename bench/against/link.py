"""A contestant's side of the benchmark: JSON lines with the harness, and the training clock.

Runs in the peers' own environments, so it uses only the standard library and NumPy.
"""

import base64
import contextlib
import importlib.metadata
import io
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

EVERY_STEPS = 2560
Round = Callable[[], dict[str, Any]]
Layers = Sequence[tuple[Any, Any]]
"""Kernel `[inputs, outputs]` and bias of each dense layer, first to last."""


class Link:
    """Sends and receives one JSON object per line; output of libraries goes to standard error."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def say(self, **fields: Any) -> None:
        self._out.write(json.dumps(fields) + "\n")

    def hear(self) -> dict[str, Any] | None:
        """The next request; None if the harness has exited."""
        line = sys.stdin.readline()
        return json.loads(line) if line else None


def serve(
    packages: Sequence[str], work: Mapping[str, Callable[[Link, dict[str, Any]], Round]]
) -> None:
    """Prepare the requested measure, then run a round of it per request."""
    link = Link()
    request = link.hear()
    if request is None:
        return
    run = work[request["do"]](link, request)
    versions = {}
    for name in packages:
        # A package of another peer may be missing in an environment that was not installed for all.
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    link.say(says="ready", versions=versions)
    while link.hear() is not None:
        link.say(says="done", **run())


class Training:
    """The clock of one training run; pauses during evaluations and times compilation separately."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._compiled: list[tuple[float, float]] = []
        self._began_s = time.perf_counter()
        self._waited_s = 0.0
        self._next = EVERY_STEPS
        if "jax" in sys.modules:
            sys.modules["jax"].monitoring.register_event_duration_secs_listener(self._note)

    def start(self) -> None:
        """Restart the clock: everything before is set-up."""
        self._began_s = time.perf_counter()
        self._waited_s = 0.0
        self._compiled.clear()

    def goes_on(self, steps: int, export: Callable[[], dict[str, Any]]) -> bool:
        """Every 2,560 steps, send the result of `export` (`dense` or `policy`); False if solved."""
        if steps < self._next:
            return True
        self._next = (steps // EVERY_STEPS + 1) * EVERY_STEPS
        return not self.look(steps, export)["stop"]

    def look(self, steps: int, export: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The harness's evaluation: `mean`, `held_out` (None below the goal), whether to `stop`."""
        paused_s = time.perf_counter()
        compile_s = union_s(self._compiled)
        train_s = paused_s - self._began_s - self._waited_s - compile_s
        self._link.say(
            says="weights", steps=steps, train_s=train_s, compile_s=compile_s, **export()
        )
        answer = self._link.hear()
        self._waited_s += time.perf_counter() - paused_s
        return answer or {"mean": 0.0, "held_out": None, "stop": True}

    def _note(self, event: str, duration_s: float, **_: Any) -> None:
        if event.startswith("/jax/core/compile/"):
            now_s = time.perf_counter()
            self._compiled.append((now_s - duration_s, now_s))


def union_s(intervals: Sequence[tuple[float, float]]) -> float:
    """Seconds covered by at least one interval: tracing reports parts and their enclosing whole."""
    covered_s = 0.0
    until_s = float("-inf")
    for begin_s, end_s in sorted(intervals):
        covered_s += max(0.0, end_s - max(begin_s, until_s))
        until_s = max(until_s, end_s)
    return covered_s


def dense(layers: Layers, activation: str) -> dict[str, Any]:
    """Dense layers as fields of a line."""
    import numpy as np

    def packed(array: Any) -> dict[str, Any]:
        values = np.ascontiguousarray(array, np.float32)
        return {"shape": list(values.shape), "float32": base64.b64encode(values.tobytes()).decode()}

    return {
        "activation": activation,
        "layers": [[packed(kernel), packed(bias)] for kernel, bias in layers],
    }


def torch_layers(module: Any) -> Layers:
    """The dense layers of a torch module, in the order in which it lists them."""
    layers = [layer for layer in module.modules() if type(layer).__name__ == "Linear"]
    return [(layer.weight.detach().numpy().T, layer.bias.detach().numpy()) for layer in layers]


def pack(array: Any) -> str:
    """An array, with its shape and type, as text for a field of a line."""
    import numpy as np

    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


def unpack(text: str) -> Any:
    """The array of `pack`."""
    import numpy as np

    return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
