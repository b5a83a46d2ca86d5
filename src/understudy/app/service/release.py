"""Releasing by hand: a finished run's policy becomes a model, through the gate's checks of the policy itself."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import understudy
from understudy.app.deployment import Deployment
from understudy.app.runs.folder import RunFolder
from understudy.app.service.gatekeeper import fitting_champion
from understudy.app.service.model_check import Budget, check_apart
from understudy.core.errors import ConfigError, Refused
from understudy.core.manifest import Lineage, Manifest, make_manifest
from understudy.models.gate import Bounds, Evidence, Verdict, verdict


@dataclass(frozen=True, slots=True)
class Released:
    """A model that was released, and what the gate said to it."""

    manifest: Manifest
    verdict: Verdict

    @property
    def is_champion(self) -> bool:
        return self.verdict.decision == "promote"


def release_run(deployment: Deployment, run: Path, *, which: str = "best") -> Released:
    """Release a finished run's policy; it becomes champion at once where the game has none."""
    folder = RunFolder(run)
    facts, result = folder.facts(is_whole=False), folder.result()
    if result is None:
        raise ConfigError(f"{run} has not ended; wait for it, or go on with it: understudy train --resume --out {run}")
    policy, registry, lineage = folder.policy(which), deployment.registry, _lineage(facts, result, run)
    raw, game = policy.encode(), str(policy.game.game)
    # Looked at before it is released, so that what fails is not even a model.
    manifest = make_manifest(policy, raw, model_no=1, lineage=lineage)
    if not all(np.isfinite(values).all() for values in manifest.golden.values()):
        raise Refused("not_released", f"what {run} gives for usual observations is not finite; train it anew")
    checks = check_apart(manifest, raw, Budget())
    judged = verdict(Evidence(checks=checks, has_champion=False), Bounds())
    if judged.decision == "reject":
        raise Refused("not_released", f"{run} failed a check: {judged.why}")
    registry.register(policy.game)
    # Under whoever releases this game already: a run that is added must not stop the learner.
    catalogue = registry.catalogue(game)
    epoch = catalogue.epoch or registry.takeover(game, owner="by hand")
    manifest = registry.release(policy, lineage, epoch=epoch)
    if fitting_champion(catalogue, manifest.schema):
        return Released(manifest, Verdict("wait", f"passed {len(checks)} checks; the champion stays until you promote"))
    registry.point(game, "champion", manifest.model_no, why=judged.why)
    return Released(manifest, judged)


def _lineage(facts: Mapping[str, Any], result: Mapping[str, Any], run: Path) -> Lineage:
    numbers = {name: float(value) for name, value in result.items() if isinstance(value, int | float)}
    metrics = {name: value for name, value in sorted(numbers.items()) if np.isfinite(value)}
    plain = {name: value for name, value in sorted(facts.items()) if _is_small(value)}
    return Lineage(
        algorithm=str(facts.get("algorithm", "")), seed=int(facts.get("seed", 0)), code_version=understudy.__version__,
        config={**plain, "run": run.resolve().name}, metrics=metrics,
    )  # fmt: skip


def _is_small(value: Any) -> bool:
    return isinstance(value, str | int | float | bool | list | dict | None) and len(json.dumps(value)) < 4096


def model_rows(deployment: Deployment, games: Sequence[str]) -> list[dict[str, Any]]:
    """Every model of these games, with what points to it."""
    rows = []
    for game in games:
        catalogue, damage = deployment.registry.catalogue(game), deployment.registry.damage(game, every=True)
        for number, manifest in sorted(catalogue.models.items()):
            aliases = [alias for alias in ("champion", "canary") if catalogue.points_to(alias) == number]
            rows.append({
                "model": manifest.name, "aliases": aliases, "algorithm": manifest.lineage.algorithm,
                "damage": next((damage[name] for name in (*aliases, manifest.name) if name in damage), ""),
                "steps": manifest.lineage.steps, "bytes": manifest.policy_bytes, "sha256": manifest.policy_sha256,
            })  # fmt: skip
    return rows
