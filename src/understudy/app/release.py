"""Releasing by hand: a finished run's policy becomes a model, through the gate's checks of the policy itself."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from understudy.app.deployment import Deployment
from understudy.app.runs import RunFolder
from understudy.core.errors import ConfigError, Refused
from understudy.core.manifest import MAX_POLICY_BYTES, Lineage, Manifest, check_golden, golden
from understudy.core.policy import Policy, decode_policy
from understudy.core.version import version
from understudy.models.gate import Bounds, Check, Evidence, Verdict, verdict

MAX_DECISION_S = 0.05
"""A decision for one observation must take less than this: a game waits for it."""


@dataclass(frozen=True, slots=True)
class Released:
    """A model that was released, and what the gate said to it."""

    manifest: Manifest
    verdict: Verdict
    is_champion: bool


def static_checks(policy: Policy) -> list[Check]:
    """What can be seen in a policy without playing: that it travels, is finite, repeats itself, and is fast enough."""
    raw = policy.encode()
    checks = [Check("size", len(raw) <= MAX_POLICY_BYTES, f"{len(raw)} bytes; at most {MAX_POLICY_BYTES}")]
    bad = [name for name, array in policy.weights.items() if not np.isfinite(array).all()]
    checks.append(Check("finite", not bad, f"weights {', '.join(bad[:3])} are not finite" if bad else ""))
    if bad:
        return checks
    outputs = golden(policy)
    wild = [name for name, values in outputs.items() if not np.isfinite(values).all()]
    if wild:
        return [*checks, Check("outputs", False, f"output {wild[0]} is not finite for usual observations")]
    try:
        again = decode_policy(raw)
        check_golden(again, outputs)
        checks.append(Check("golden", True))
    except (Refused, ConfigError) as error:
        return [*checks, Check("golden", False, str(error))]
    took_s = _decision_s(again)
    slow = f"one decision takes {took_s * 1000:.1f} ms; at most {MAX_DECISION_S * 1000:.0f} are allowed"
    return [*checks, Check("latency", took_s <= MAX_DECISION_S, "" if took_s <= MAX_DECISION_S else slow)]


def _decision_s(policy: Policy) -> float:
    """Processor time of one decision, the best of a few."""
    obs = {name: np.zeros((1, *one.shape), one.dtype) for name, one in policy.network.inputs.items()}
    times = []
    for _ in range(5):
        began_s = time.process_time()
        policy.outputs(obs)
        times.append(time.process_time() - began_s)
    return min(times)


def release_run(deployment: Deployment, run: Path, *, which: str = "best") -> Released:
    """Release a finished run's policy; it becomes champion at once where the game has none."""
    folder = RunFolder(run)
    facts, result = folder.facts(), folder.result()
    if result is None:
        raise ConfigError(f"{run} has not ended; wait for it, or go on with it: understudy train --resume --out {run}")
    policy = folder.policy(which)
    checks, registry, game = static_checks(policy), deployment.registry, str(policy.game.game)
    failed = [check for check in checks if not check.passed]
    if failed:
        raise Refused(failed[0].name, f"{run} was not released: {failed[0].detail}")
    registry.register(policy.game)
    catalogue = registry.catalogue(game)
    epoch = catalogue.epoch or registry.takeover(game, owner="by hand")
    manifest = registry.release(policy, _lineage(facts, result, run), epoch=epoch)
    judged = verdict(Evidence(checks=checks, has_champion=bool(catalogue.points_to("champion"))), Bounds())
    is_champion = judged.decision == "promote"
    if is_champion:
        registry.point(game, "champion", manifest.model_no, why=judged.why)
    return Released(manifest, judged, is_champion)


def _lineage(facts: Mapping[str, Any], result: Mapping[str, Any], run: Path) -> Lineage:
    numbers = {name: float(value) for name, value in result.items() if isinstance(value, int | float)}
    metrics = {name: value for name, value in sorted(numbers.items()) if np.isfinite(value)}
    plain = {name: value for name, value in sorted(facts.items()) if _is_small(value)}
    return Lineage(
        algorithm=str(facts.get("algorithm", "")), seed=int(facts.get("seed", 0)), code_version=version(),
        config={**plain, "run": run.resolve().name}, metrics=metrics,
    )  # fmt: skip


def _is_small(value: Any) -> bool:
    return isinstance(value, str | int | float | bool | list | dict | None) and len(json.dumps(value)) < 4096


def parse_model(text: str) -> tuple[str, int]:
    """Game and number of `my-game/7`."""
    game, slash, number = text.rpartition("/")
    if not slash or not number.isascii() or not number.isdigit() or len(number) > 9 or not int(number):
        raise ConfigError(f"{text[:80]!r} names no model; give GAME/NUMBER, such as my-game/7")
    return game, int(number)


def model_rows(deployment: Deployment, games: Sequence[str]) -> list[dict[str, Any]]:
    """Every model of these games, with what points to it."""
    rows = []
    for game in games:
        catalogue = deployment.registry.catalogue(game)
        for number, manifest in sorted(catalogue.models.items()):
            aliases = [alias for alias in ("champion", "canary") if catalogue.points_to(alias) == number]
            rows.append({
                "model": manifest.name, "aliases": aliases, "algorithm": manifest.lineage.algorithm,
                "steps": manifest.lineage.steps, "bytes": manifest.policy_bytes, "sha256": manifest.policy_sha256,
            })  # fmt: skip
    return rows
