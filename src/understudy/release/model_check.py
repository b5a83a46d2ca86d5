"""Checks of a model without playing, in a clean process.

`python -m understudy.release.model_check` reads one line of JSON (manifest, budget) and the
policy's bytes from standard input, and prints the results of the checks as one line of JSON. A
model that crashes the process has failed.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from understudy.core.errors import ConfigError, UnderstudyError
from understudy.core.tensors import Array
from understudy.core.wording import shortened
from understudy.experience.game import GameSpec, nested
from understudy.experience.spaces import Box, Discrete, MultiDiscrete, Space
from understudy.models.gate import ModelCheck
from understudy.models.manifest import Manifest, manifest_from_json, open_policy
from understudy.nn.policy import Policy

_FUZZED = 64
_TIMED = 20
_FAR = 1e6
_FAR_WHOLE = 2**53
"""Limits for spaces without bounds, or with bounds that no game reaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Limits of a bot's size and decision time, since it runs in players' games."""

    max_bytes: int = 32 * 1024 * 1024
    max_decision_ms: float = 20.0
    """For the decision on one observation."""
    timeout_s: float = 100.0
    """For the whole check, also on a busy machine; shorter than a learner's shutdown timeout."""

    def __post_init__(self) -> None:
        if self.max_bytes < 1 or self.max_decision_ms <= 0 or self.timeout_s <= 0:
            raise ConfigError(
                "max_bytes, max_decision_ms and timeout_s must be above 0, got "
                f"{self.max_bytes}, {self.max_decision_ms} and {self.timeout_s}"
            )


def check_in_subprocess(manifest: Manifest, raw: bytes, budget: Budget) -> list[ModelCheck]:
    """Check a model in a clean process without JAX or any game."""
    head = json.dumps({"manifest": manifest.to_json(), "budget": asdict(budget)}).encode() + b"\n"
    command = [sys.executable, "-m", "understudy.release.model_check"]
    try:
        process = subprocess.run(
            command, input=head + raw, capture_output=True, timeout=budget.timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return [ModelCheck("loads", False, f"the check timed out after {budget.timeout_s:g} s")]
    try:
        return [ModelCheck(**fields) for fields in json.loads(process.stdout)]
    except (ValueError, TypeError):
        error = process.stderr.decode(errors="replace").strip().rpartition("\n")[2][-200:]
        return [
            ModelCheck(
                "loads", False, f"the check process exited with {process.returncode}: {error}"
            )
        ]


def check_model(manifest: Manifest, raw: bytes, budget: Budget) -> list[ModelCheck]:
    """Check a model in this process; nothing else is checked if it is too large or cannot load."""
    if len(raw) > budget.max_bytes:
        return [
            ModelCheck("size", False, f"{len(raw)} bytes; at most {budget.max_bytes} are allowed")
        ]
    try:
        policy = open_policy(manifest, raw)  # hash, format, finite weights, golden outputs
    except UnderstudyError as error:
        return [ModelCheck("loads", False, shortened(str(error), 300))]
    checks = [ModelCheck("size", True), ModelCheck("loads", True)]
    try:
        checks.append(_chooses_valid_actions(policy))
        checks.append(_is_fast(policy, budget))
    except Exception as error:
        checks.append(ModelCheck("acts", False, f"{type(error).__name__}: {error}"[:300]))
    return checks


def _chooses_valid_actions(policy: Policy) -> ModelCheck:
    rng = np.random.default_rng(0)
    spec = policy.game
    for at, obs in enumerate(fuzzed_observations(spec, rng)):
        action_mask = None
        if spec.discrete is not None and spec.has_action_mask:
            action_mask = rng.random(spec.discrete.n) < 0.5
            action_mask[rng.integers(spec.discrete.n)] = True
        rows = [obs] * policy.stack if policy.stack > 1 else obs
        action = policy.act(rows, action_mask=action_mask, deterministic=at % 2 == 0, rng=rng)
        if not _is_valid(spec, action, action_mask):
            return ModelCheck(
                "acts", False, f"a fuzzed observation leads to invalid action {str(action)[:80]}"
            )
    return ModelCheck("acts", True)


def _is_valid(spec: GameSpec, action: Any, action_mask: Array | None) -> bool:
    if spec.discrete is not None:
        at = action - spec.discrete.start
        return 0 <= at < spec.discrete.n and (action_mask is None or bool(action_mask[at]))
    ((_, space),) = spec.action.items()
    array = np.asarray(action)
    return array.shape == space.shape and bool(
        space.contains(array[None].astype(space.dtype)).all()
    )


def fuzzed_observations(spec: GameSpec, rng: np.random.Generator) -> Iterator[Any]:
    """Observations in the game's format: the bounds of every space, zeros, and random values."""
    for kind in ("low", "high", "zero", "mixed", *["any"] * _FUZZED):
        parts = {path: _fuzzed(space, kind, rng) for path, space in spec.obs.items()}
        yield parts[""] if parts.keys() == {""} else nested(parts)


def _fuzzed(space: Space, kind: str, rng: np.random.Generator) -> Array:
    low, high = _ends(space)
    size = (*space.shape,)
    if kind == "zero":
        drawn = np.clip(np.zeros(size), low, high)
    elif kind in ("low", "high"):
        drawn = np.broadcast_to(low if kind == "low" else high, size)
    elif kind == "mixed":
        drawn = np.where(rng.random(size) < 0.5, low, high)
    else:
        drawn = np.clip(rng.standard_normal(size) * 10.0 ** rng.integers(-3, 5), low, high)
    return np.asarray(drawn).astype(space.dtype)


def _ends(space: Space) -> tuple[Any, Any]:
    """The smallest and the largest value to try, for each element of an observation."""
    low: Any
    high: Any
    match space:
        case Discrete():
            low = space.start
            high = space.start + space.n - 1
        case MultiDiscrete():
            low = 0
            high = np.reshape(space.counts, space.shape) - 1
        case Box():
            low, high = (end.astype(np.float64) for end in space.ends())
        case _:
            low = 0
            high = 1
    far = min(_FAR, float(np.finfo(space.dtype).max)) if space.dtype.kind == "f" else _FAR_WHOLE
    return np.clip(low, -far, far), np.clip(high, -far, far)


def _is_fast(policy: Policy, budget: Budget) -> ModelCheck:
    """Time the fastest of several decisions, so that other load on the machine does not count."""
    obs = next(fuzzed_observations(policy.game, np.random.default_rng(1)))
    rows = [obs] * policy.stack if policy.stack > 1 else obs
    best_s = float("inf")
    for _ in range(_TIMED):
        started_s = time.perf_counter()
        policy.act(rows)
        best_s = min(best_s, time.perf_counter() - started_s)
    why = f"{best_s * 1e3:.3g} ms a decision; at most {budget.max_decision_ms:g} are allowed"
    return ModelCheck("latency", best_s * 1e3 <= budget.max_decision_ms, why)


def main(message: bytes) -> Sequence[dict[str, Any]]:
    """Check the model in a message from standard input; return the results as plain values."""
    head, _, raw = message.partition(b"\n")
    facts = json.loads(head)
    checks = check_model(manifest_from_json(facts["manifest"]), raw, Budget(**facts["budget"]))
    heavy = sorted({"jax", "gymnasium", "numba"} & sys.modules.keys())
    checks.append(
        ModelCheck("light", not heavy, f"the policy imports {', '.join(heavy)}" if heavy else "")
    )
    return [asdict(check) for check in checks]


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.stdin.buffer.read())) + "\n")
