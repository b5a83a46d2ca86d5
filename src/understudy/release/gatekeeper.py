"""Gatekeeper: checks a released candidate, then promotes or rejects it, with a reason.

    release ─► checks in a clean process ─► canary ─► live returns compared with the champion's
                                        │                └─► champion, or cleared
                                        └─► the first bot: champion at once

All state between calls is in the registry and the store, so another learner can continue at any
time.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import structlog

import understudy
from understudy.backends.deployment import Deployment
from understudy.core.errors import ConfigError, Corrupt, GameFailed, Refused
from understudy.core.tensors import Array
from understudy.experience.game import GameSpec
from understudy.models import gate
from understudy.models.catalogue import Catalogue
from understudy.models.gate import Bounds, GateDecision, ModelCheck, Played
from understudy.models.manifest import Lineage, Manifest, make_manifest, model_name
from understudy.models.registry import Registry
from understudy.nn.policy import Policy
from understudy.release.model_check import Budget, check_in_subprocess
from understudy.training.folder import RunFolder

_log = structlog.get_logger("understudy.learner")

CheckModel = Callable[[Manifest, bytes, Budget], Sequence[ModelCheck]]

Returns = Callable[[str, float], Sequence[Played]]
"""Episodes of a model, given by name, that started at a given time or later."""

Play = Callable[[Policy, int], Array]
"""Returns of a policy over this many held-out episodes, the same ones for every policy."""

MAX_EARLIER = 1_024
"""First episodes of a champion that tell the range of returns; StoreStats keeps as many."""


class Gatekeeper:
    """Decides about candidates of any game; callers pass the epoch that they hold."""

    def __init__(
        self,
        registry: Registry,
        *,
        bounds: Bounds | None = None,
        budget: Budget | None = None,
        check: CheckModel = check_in_subprocess,
    ) -> None:
        self._registry = registry
        self._check = check
        self.bounds = bounds or Bounds()
        self._budget = budget or Budget()
        self._waiting: dict[str, tuple[int, ...]] = {}
        """The models and numbers of episodes of each game's last undecided comparison."""

    def admit(
        self, game: str, model_no: int, *, epoch: int, play: Play | None = None
    ) -> GateDecision:
        """Check a release and move an alias: a first bot becomes champion, a later one canary.

        A release that fails a check is rejected and no alias is moved. With `play`, held-out
        episodes decide at once between champion and rejection, so no canary is needed.
        """
        now = self._registry.catalogue(game)
        checks = self._checks(now, model_no)
        champion = (
            champion_for_schema(now, now.models[model_no].schema) if model_no in now.models else 0
        )
        decision = gate.decide_by_checks(checks, has_champion=champion > 0)
        if decision.decision == "wait" and play is not None:
            policies = [self._registry.policy(game, number) for number in (model_no, champion)]
            first = max(self.bounds.min_episodes, self.bounds.max_episodes // 8)
            for n_episodes in (first, self.bounds.max_episodes):
                # In turn, as if one player had played them all.
                candidate_episodes, champion_episodes = (
                    [
                        Played(2 * at + bot, 0.0, return_)
                        for at, return_ in enumerate(play(policy, n_episodes).tolist())
                    ]
                    for bot, policy in enumerate(policies)
                )
                decision = gate.compare(candidate_episodes, champion_episodes, self.bounds)
                if decision.decision != "wait":
                    break
        if decision.decision == "promote":
            self._registry.set_alias(game, "champion", model_no, why=decision.why, epoch=epoch)
        elif decision.decision == "wait":
            self._registry.set_alias(game, "canary", model_no, why=decision.why, epoch=epoch)
        return decision

    def judge(
        self,
        game: str,
        returns: Returns,
        *,
        epoch: int,
        people: Sequence[Played] = (),
        reads_file: bool = True,
    ) -> GateDecision | None:
        """Compare the returns of canary and champion since the canary started.

        If that is conclusive, the canary is promoted or rejected, and the alias cleared. Returns
        are clipped to the range of those of `people` and of the champion before that time. With
        `reads_file`, a canary whose file is damaged is rejected at once: games cannot play it.
        Returns None without a canary to compare.
        """
        now = self._registry.catalogue(game)
        canary = now.aliases.get("canary")
        champion = now.model_of("champion")
        if canary is None or not canary.model_no:
            return None
        if canary.model_no == champion or not champion_for_schema(
            now, now.models[canary.model_no].schema
        ):
            # A learner was stopped after it promoted the canary and before it cleared the alias, or
            # the game no longer has a champion of this schema.
            why = (
                "it is the champion"
                if canary.model_no == champion
                else "there is no champion of its schema to compare it with"
            )
            self._registry.set_alias(game, "canary", 0, why=why, epoch=epoch)
            return None
        canary_episodes, champion_episodes = (
            returns(model_name(game, number), canary.at_s) for number in (canary.model_no, champion)
        )
        compared = (canary.number, champion, len(canary_episodes), len(champion_episodes))
        if self._waiting.get(game) == compared:
            decision = GateDecision("wait", "no new episode")
        else:
            first = returns(model_name(game, champion), 0.0)[:MAX_EARLIER]
            decision = gate.compare(
                canary_episodes,
                champion_episodes,
                self.bounds,
                earlier=[
                    episode for episode in (*people, *first) if episode.started_s < int(canary.at_s)
                ],
            )
            if decision.decision == "wait":
                self._waiting[game] = compared
        if decision.decision == "promote" or reads_file:
            # The file may have been damaged since it was checked.
            try:
                self._registry.policy(game, canary.model_no)
            except (Refused, Corrupt) as error:
                decision = GateDecision("reject", f"its file is no longer valid: {error}")
        if decision.decision == "wait":
            return decision
        if decision.decision == "promote":
            self._registry.set_alias(
                game, "champion", canary.model_no, why=decision.why, epoch=epoch
            )
        why = f"{decision.decision}: {decision.why}"
        self._registry.set_alias(game, "canary", 0, why=why, epoch=epoch)
        return decision

    def _checks(self, now: Catalogue, model_no: int) -> Sequence[ModelCheck]:
        name = model_name(now.game, model_no)
        if model_no not in now.models:
            return [ModelCheck("release", False, f"{name} is not in the registry")]
        if model_no != max(now.models):
            return [
                ModelCheck(
                    "release",
                    False,
                    f"{name} is not the newest release, which is "
                    f"{model_name(now.game, max(now.models))}",
                )
            ]
        try:
            raw = self._registry.policy_bytes(now.models[model_no])
        except Corrupt as error:
            return [ModelCheck("loads", False, str(error))]
        return self._check(now.models[model_no], raw, self._budget)


def champion_for_schema(now: Catalogue, schema: str) -> int:
    """The number of the champion if it has this schema; 0 otherwise."""
    champion = now.models.get(now.model_of("champion"))
    return champion.model_no if champion is not None and champion.schema == schema else 0


@contextlib.contextmanager
def held_out_play(
    env_id: str | None, spec: GameSpec, *, attempt: int, max_steps: int
) -> Iterator[Play | None]:
    """Yield a function that plays held-out episodes; None without an env that matches the spec.

    Episodes of a game without a step limit are cut after `max_steps` steps, which is logged.
    """
    env_info = None
    if env_id:
        with contextlib.suppress(ImportError, ConfigError):
            # Imported here, since these need gymnasium.
            from understudy.training.env_info import GameChoice, inspect_env
            from understudy.training.evaluation import AFTERWARDS, make_evaluator

            choice = GameChoice(game=env_id)
            env_info = inspect_env(choice)
    if env_info is None or (env_info.spec.obs, env_info.spec.action) != (spec.obs, spec.action):
        yield None
        return
    with contextlib.ExitStack() as opened:
        evaluator = make_evaluator(
            choice, env_info, episodes=100, max_steps=max_steps, opened=opened
        )

        def play(policy: Policy, episodes: int) -> Array:
            evaluated = evaluator.play(
                policy, episodes=episodes, series=AFTERWARDS, attempt=attempt
            )
            if evaluated is None:
                raise GameFailed(
                    f"{env_id} could not be played; remove it from `envs` to decide by live play"
                )
            if evaluated.n_cut:
                _log.warning(
                    "held_out_episodes_cut",
                    env=env_id,
                    episodes=episodes,
                    cut=evaluated.n_cut,
                    max_steps=max_steps,
                )
            return evaluated.returns

        yield play


# --- Releasing manually ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Released:
    """A released model, and the gate's decision on it."""

    manifest: Manifest
    decision: GateDecision

    @property
    def is_champion(self) -> bool:
        return self.decision.decision == "promote"


def release_run(deployment: Deployment, run: Path, *, which: str = "best") -> Released:
    """Release a finished run's policy; it becomes champion if its game and schema have none."""
    folder = RunFolder(run)
    facts = folder.facts(is_whole=False)
    result = folder.result()
    if result is None:
        raise ConfigError(
            f"{run} has not finished; wait for it, or resume it: understudy train --resume --out "
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
    # Checked before it is released, so that a bad policy never becomes a model.
    manifest = make_manifest(policy, raw, model_no=1, lineage=lineage)
    if not all(np.isfinite(values).all() for values in manifest.golden.values()):
        raise Refused(
            "not_released",
            f"the outputs of {run} for test observations are not finite; train it again",
        )
    checks = check_in_subprocess(manifest, raw, Budget())
    decision = gate.decide_by_checks(checks, has_champion=False)
    if decision.decision == "reject":
        raise Refused("not_released", f"{run} failed a check: {decision.why}")
    registry.register(policy.game)
    # In the epoch of the learner that already releases this game, if any, so as not to stop it.
    catalogue = registry.catalogue(game)
    epoch = catalogue.epoch or registry.takeover(game, owner="by hand")
    manifest = registry.release(policy, lineage, epoch=epoch)
    if champion_for_schema(catalogue, manifest.schema):
        return Released(
            manifest,
            GateDecision(
                "wait",
                f"passed {len(checks)} checks; the champion stays until you promote this model",
            ),
        )
    registry.set_alias(game, "champion", manifest.model_no, why=decision.why)
    return Released(manifest, decision)


def model_rows(deployment: Deployment, games: Sequence[str]) -> list[dict[str, Any]]:
    """Every model of these games, with the aliases that point to it."""
    rows = []
    for game in games:
        catalogue = deployment.registry.catalogue(game)
        damage = deployment.registry.damage(game, every=True)
        for number, manifest in sorted(catalogue.models.items()):
            aliases = [
                alias for alias in ("champion", "canary") if catalogue.model_of(alias) == number
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
