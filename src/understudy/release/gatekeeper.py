"""Gatekeeper: takes a candidate from its release to champion or to nothing, and says why.

    release ─► checks in a clean process ─► canary ─► live returns beside the champion's
                                        │                └─► champion, or cleared
                                        └─► the first bot: champion at once

Everything it knows between two calls is in the registry and the store, so the next learner goes on
where it was.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import understudy
from understudy.backends.deployment import Deployment
from understudy.core.errors import ConfigError, Corrupt, GameFailed, Refused
from understudy.core.tensors import Array
from understudy.experience.game import GameSpec
from understudy.models.catalogue import Catalogue
from understudy.models.gate import Bounds, Evidence, GateDecision, ModelCheck, looks, verdict
from understudy.models.manifest import Lineage, Manifest, make_manifest, model_name
from understudy.models.registry import Registry
from understudy.nn.policy import Policy
from understudy.release.model_check import Budget, check_apart
from understudy.release.store_stats import Played
from understudy.training.folder import RunFolder

CheckModel = Callable[[Manifest, bytes, Budget], Sequence[ModelCheck]]

Returns = Callable[[str, float], Sequence[Played]]
"""Episodes of a model, by its name, that began since a time."""

Play = Callable[[Policy, int], Array]
"""Returns of a policy over this many held-out episodes, the same ones for every policy."""


class Gatekeeper:
    """Decides about the candidates of any game; the caller holds the epoch."""

    def __init__(
        self,
        registry: Registry,
        *,
        bounds: Bounds | None = None,
        budget: Budget | None = None,
        check: CheckModel = check_apart,
    ) -> None:
        self._registry = registry
        self._check = check
        self.bounds = bounds or Bounds()
        self._budget = budget or Budget()

    def admit(
        self, game: str, model_no: int, *, epoch: int, play: Play | None = None
    ) -> GateDecision:
        """Check a release: the first bot becomes champion, a later one canary, a bad one nothing.

        With a game to `play` in, held-out episodes decide at once and no player meets a worse bot.
        """
        now = self._registry.catalogue(game)
        checks = self._checks(now, model_no)
        champion = (
            fitting_champion(now, now.models[model_no].schema) if model_no in now.models else 0
        )
        found = verdict(Evidence(checks=checks, has_champion=champion > 0), self.bounds)
        if found.decision == "wait" and play is not None:
            policies = (self._registry.policy(game, number) for number in (model_no, champion))
            ours, theirs = (play(policy, self.bounds.max_episodes) for policy in policies)
            found = verdict(
                Evidence(checks=(), has_champion=True, candidate=ours, champion=theirs), self.bounds
            )
        if found.decision == "promote":
            self._registry.point(game, "champion", model_no, why=found.why, epoch=epoch)
        elif found.decision == "wait":
            found = GateDecision(
                "wait", f"passed {len(checks)} checks; it plays a share of the episodes"
            )
            self._registry.point(game, "canary", model_no, why=found.why, epoch=epoch)
        return found

    def judge(self, game: str, returns: Returns, *, epoch: int) -> GateDecision | None:
        """Compare the canary with the champion by what both returned since it began; None when
        there is no canary."""
        now = self._registry.catalogue(game)
        canary = now.aliases.get("canary")
        champion = now.points_to("champion")
        if canary is None or not canary.model_no:
            return None
        if canary.model_no == champion or not fitting_champion(
            now, now.models[canary.model_no].schema
        ):
            # The learner that promoted it was stopped before it could say the rest, or the champion
            # was taken away.
            why = (
                "it is the champion"
                if canary.model_no == champion
                else "there is no champion to compare it with"
            )
            self._registry.point(game, "canary", 0, why=why, epoch=epoch)
            return None
        ours, theirs = (
            returns(model_name(game, number), canary.at_s) for number in (canary.model_no, champion)
        )
        found = compare(ours, theirs, self.bounds)
        if found.decision == "wait":
            return found
        if found.decision == "promote":
            # What was checked long ago may have been damaged since: no game could load it as
            # champion.
            try:
                self._registry.policy(game, canary.model_no)
            except (Refused, Corrupt) as error:
                found = GateDecision("reject", f"its file is no longer good: {error}")
        if found.decision == "promote":
            self._registry.point(game, "champion", canary.model_no, why=found.why, epoch=epoch)
        self._registry.point(game, "canary", 0, why=f"{found.decision}: {found.why}", epoch=epoch)
        return found

    def _checks(self, now: Catalogue, model_no: int) -> Sequence[ModelCheck]:
        name = model_name(now.game, model_no)
        if model_no not in now.models:
            return [ModelCheck("release", False, f"{name} is not in the registry")]
        if model_no != max(now.models):
            return [
                ModelCheck(
                    "release",
                    False,
                    f"{name} is not the newest release, which is {max(now.models)}",
                )
            ]
        try:
            raw = self._registry.policy_bytes(now.models[model_no])
        except Corrupt as error:
            return [ModelCheck("loads", False, str(error))]
        return self._check(now.models[model_no], raw, self._budget)


def fitting_champion(now: Catalogue, schema: str) -> int:
    """The champion, when it plays what this schema describes; 0 otherwise."""
    champion = now.models.get(now.points_to("champion"))
    return champion.model_no if champion is not None and champion.schema == schema else 0


def compare(ours: Sequence[Played], theirs: Sequence[Played], bounds: Bounds) -> GateDecision:
    """The verdict of the first look that decides; each look sees what was known when it was due,
    and no more.

    So it comes to the same however often, and however late, it is asked.
    """
    for due in looks(bounds):
        if min(len(ours), len(theirs)) < due:
            return GateDecision(
                "wait",
                f"{len(ours)} episodes of the canary, {len(theirs)} of the champion; looked at "
                f"from {due} of both",
            )
        known = max(ours[due - 1].arrival_no, theirs[due - 1].arrival_no)
        champion = [one.return_ for one in theirs if one.arrival_no <= known]
        evidence = Evidence(
            checks=(),
            has_champion=True,
            candidate=[one.return_ for one in ours[:due]],
            champion=champion,
        )
        found = verdict(evidence, bounds)
        if found.decision != "wait":
            return found
    raise AssertionError("the last look decides")


@contextlib.contextmanager
def held_out(env_id: str | None, spec: GameSpec, *, attempt: int) -> Iterator[Play | None]:
    """What plays a policy on seeds that no training has seen; None where the game is not here,
    or is another one."""
    env_info = None
    if env_id:
        with contextlib.suppress(ImportError, ConfigError):
            from understudy.training.env_info import (  # late: they need gymnasium
                GameChoice,
                look_at,
            )
            from understudy.training.evaluation import AFTERWARDS, judge_of

            choice = GameChoice(game=env_id)
            env_info = look_at(choice)
    if env_info is None or (env_info.spec.obs, env_info.spec.action) != (spec.obs, spec.action):
        yield None
        return
    with contextlib.ExitStack() as opened:
        judge = judge_of(choice, env_info, 100, opened)

        def play(policy: Policy, episodes: int) -> Array:
            returns = judge.returns(policy, episodes=episodes, series=AFTERWARDS, attempt=attempt)
            if returns is None:
                raise GameFailed(
                    f"{env_id} could not be played; leave it out of `envs`, and live play judges"
                )
            return returns

        yield play


# --- releasing by hand ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Released:
    """A model that was released, and what the gate said to it."""

    manifest: Manifest
    verdict: GateDecision

    @property
    def is_champion(self) -> bool:
        return self.verdict.decision == "promote"


def release_run(deployment: Deployment, run: Path, *, which: str = "best") -> Released:
    """Release a finished run's policy; it becomes champion at once where the game has none."""
    folder = RunFolder(run)
    facts = folder.facts(is_whole=False)
    result = folder.result()
    if result is None:
        raise ConfigError(
            f"{run} has not ended; wait for it, or go on with it: understudy train --resume --out "
            f"{run}"
        )
    policy = folder.policy(which)
    registry = deployment.registry
    raw = policy.encode()
    game = str(policy.game.game)
    numbers = {
        name: float(value)
        for name, value in sorted(result.items())
        if isinstance(value, int | float)
    }
    small = {
        name: value
        for name, value in sorted(facts.items())
        if isinstance(value, str | int | float | bool | list | dict | None)
        and len(json.dumps(value)) < 4096
    }
    lineage = Lineage(
        algorithm=str(facts.get("algorithm", "")),
        seed=int(facts.get("seed", 0)),
        code_version=understudy.__version__,
        config={**small, "run": run.resolve().name},
        metrics={name: value for name, value in numbers.items() if np.isfinite(value)},
    )
    # Looked at before it is released, so that what fails is not even a model.
    manifest = make_manifest(policy, raw, model_no=1, lineage=lineage)
    if not all(np.isfinite(values).all() for values in manifest.golden.values()):
        raise Refused(
            "not_released", f"what {run} gives for usual observations is not finite; train it anew"
        )
    checks = check_apart(manifest, raw, Budget())
    judged = verdict(Evidence(checks=checks, has_champion=False), Bounds())
    if judged.decision == "reject":
        raise Refused("not_released", f"{run} failed a check: {judged.why}")
    registry.register(policy.game)
    # In the epoch of the learner that releases this game already: a run that is added must not stop
    # the learner.
    catalogue = registry.catalogue(game)
    epoch = catalogue.epoch or registry.takeover(game, owner="by hand")
    manifest = registry.release(policy, lineage, epoch=epoch)
    if fitting_champion(catalogue, manifest.schema):
        return Released(
            manifest,
            GateDecision(
                "wait", f"passed {len(checks)} checks; the champion stays until you promote"
            ),
        )
    registry.point(game, "champion", manifest.model_no, why=judged.why)
    return Released(manifest, judged)


def model_rows(deployment: Deployment, games: Sequence[str]) -> list[dict[str, Any]]:
    """Every model of these games, with what points to it."""
    rows = []
    for game in games:
        catalogue = deployment.registry.catalogue(game)
        damage = deployment.registry.damage(game, every=True)
        for number, manifest in sorted(catalogue.models.items()):
            aliases = [
                alias for alias in ("champion", "canary") if catalogue.points_to(alias) == number
            ]
            rows.append(
                {
                    "model": manifest.name,
                    "aliases": aliases,
                    "algorithm": manifest.lineage.algorithm,
                    "damage": next(
                        (damage[name] for name in (*aliases, manifest.name) if name in damage), ""
                    ),
                    "steps": manifest.lineage.steps,
                    "bytes": manifest.policy_bytes,
                    "sha256": manifest.policy_sha256,
                }
            )
    return rows
