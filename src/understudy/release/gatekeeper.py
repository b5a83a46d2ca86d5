"""Gatekeeper: checks a released candidate, then promotes or rejects it, with a reason.

    release ─► checks in a clean process ─► canary ─► live returns compared with the champion's
                                        │       and the control's ─► champion, or cleared
                                        └─► the first bot: compared with held-out steps of
                                            people ─► champion

All state between calls is in the registry and the store, so another learner can continue at any
time.
"""

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import structlog

import understudy
from understudy.backends.deployment import Deployment
from understudy.core.errors import ConfigError, Corrupt, GameFailed, Refused, StorageFailed
from understudy.core.plural import plural
from understudy.core.tensors import Array
from understudy.experience.game import GameSpec
from understudy.models import gate
from understudy.models.catalogue import (
    ALIASES,
    PROMOTED,
    RESTORED,
    Alias,
    Catalogue,
    Control,
)
from understudy.models.gate import Bounds, GateDecision, ModelCheck, Played
from understudy.models.manifest import Lineage, Manifest, make_manifest, model_name
from understudy.models.registry import Registry, damage_key
from understudy.nn.policy import Policy
from understudy.release.model_check import Budget, check_in_subprocess
from understudy.release.store_stats import believed
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
        self._waiting: dict[tuple[str, str], tuple[int, ...]] = {}
        """Trial, champion and numbers of episodes of each schema's last undecided comparison."""
        self._evidence: dict[tuple[str, str], float] = {}

    def admit(
        self,
        game: str,
        model_no: int,
        *,
        epoch: int,
        play: Play | None = None,
        people: ModelCheck | None = None,
        returns: Returns | None = None,
        margin: float = 0.0,
    ) -> GateDecision:
        """Check a release and move an alias of its schema: to a first bot champion, else canary.

        A release that fails a check is rejected, which the journal records; no alias is moved. A
        canary that is still undecided makes room for the new one. With `play`, held-out episodes
        decide at once between champion and rejection, so no canary is needed. `people`: how a first
        bot compares with held-out steps of people. `returns` tell which of the earlier champions
        plays beside a canary as control. `margin`: as for `gate.compare`.
        """
        now = self._registry.catalogue(game)
        if model_no in now.verdicts:
            # A learner was stopped after the gate had decided, and before it had recorded that.
            return _recorded(now.verdicts[model_no])
        checks = self._checks(now, model_no)
        schema = now.models[model_no].schema if model_no in now.models else ""
        pointer = now.pointer("champion", schema)
        champion = now.model_of("champion", schema)
        decision = gate.decide_by_checks(checks, has_champion=champion > 0, people=people)
        if decision.decision == "wait" and play is not None:
            policies = [self._registry.policy(game, number) for number in (model_no, champion)]
            first = max(self.bounds.min_episodes, self.bounds.max_episodes // 8)
            # Every release after the first bot was a candidate.
            trial_no = sum(manifest.schema == schema for manifest in now.models.values()) - 1
            for n_episodes in (first, self.bounds.max_episodes):
                held_out = [play(policy, n_episodes) for policy in policies]
                decision = gate.compare(
                    *_in_random_order(*held_out, share=self.bounds.max_share),
                    self.bounds,
                    trial_no=max(1, trial_no),
                    margin=margin,
                )
                if decision.decision != "wait":
                    break
            else:
                why = f"undecided after {n_episodes} held-out episodes: {decision.why}"
                decision = GateDecision("reject", why)
        if decision.decision == "reject" and model_no in now.models:
            self._registry.reject(game, model_no, why=decision.why, epoch=epoch)
        elif decision.decision == "promote":
            self._registry.set_alias(
                game,
                "champion",
                model_no,
                why=decision.why,
                epoch=epoch,
                seen={"champion": pointer} if pointer is not None else None,
            )
        elif decision.decision == "wait":
            if undecided := now.model_of("canary", schema):
                _log.info(
                    "decision",
                    model=model_name(game, undecided),
                    decision="undecided",
                    why=f"undecided when {model_name(game, model_no)} took its place",
                )
            self._evidence.pop((game, schema), None)
            control = 0
            if returns is not None and self.bounds.control_share:
                control = self._best_earlier(now, schema, returns)
            share = self.bounds.first_share
            self._registry.set_alias(
                game,
                "canary",
                model_no,
                why=decision.why,
                epoch=epoch,
                share=share,
                control=Control(control, self.bounds.control_share_beside(share))
                if control
                else None,
            )
        return decision

    def _best_earlier(self, now: Catalogue, schema: str, returns: Returns) -> int:
        """The earlier champion with the highest mean return as champion; 0 if there is none.

        It needs as many episodes as a decision, and a valid file.
        """
        played: dict[int, list[Played]] = {}
        champions = [pointer for pointer in now.history if pointer.schema == schema]
        for champion, successor in itertools.pairwise(champions):
            model_no = champion.model_no
            if model_no in {0, now.model_of("champion", schema), *now.discarded}:
                continue
            played.setdefault(model_no, []).extend(
                episode
                for episode in returns(model_name(now.game, model_no), champion.at_s)
                if episode.started_s < successor.at_s
            )
        means = {
            model_no: np.mean([one for own in believed(episodes) for one in own])
            for model_no, episodes in played.items()
            if len(episodes) >= self.bounds.min_episodes
        }
        for model_no in sorted(means, key=lambda number: means[number], reverse=True):
            with contextlib.suppress(Refused, Corrupt, StorageFailed, OSError):
                self._registry.policy(now.game, model_no)
                return model_no
        return 0

    def judge(
        self,
        game: str,
        returns: Returns,
        *,
        epoch: int,
        schema: str | None = None,
        people: Sequence[Played] = (),
        reads_file: bool = True,
        margin: float = 0.0,
    ) -> GateDecision | None:
        """Compare the returns of a schema's canary, champion and control in the canary's trial.

        If that is conclusive, the canary is promoted or rejected, and the alias cleared; until
        then, its share grows with the episodes of both. By default, `schema` is the newest that has
        a canary. Returns are clipped to the range of those of `people` and of the champion before.
        With `reads_file`, a canary whose file is damaged is rejected at once: games cannot play it.
        `margin`: as for `gate.compare`, and the same one throughout a trial. Returns None without a
        canary to compare.
        """
        now = self._registry.catalogue(game)
        canary = now.pointer("canary", schema)
        if canary is None or not canary.model_no:
            return None
        try:
            return self._judge(
                now,
                canary,
                returns,
                epoch=epoch,
                people=people,
                reads_file=reads_file,
                margin=margin,
            )
        except Refused as error:
            if error.reason != "superseded":
                raise
            # An operator changed the canary or the champion in the meantime: that holds.
            return GateDecision("wait", error.detail)

    def _judge(
        self,
        now: Catalogue,
        canary: Alias,
        returns: Returns,
        *,
        epoch: int,
        people: Sequence[Played],
        reads_file: bool,
        margin: float,
    ) -> GateDecision | None:
        """Judge a canary as it was seen; Refused (`superseded`) if it is not the canary now."""
        game = now.game
        pointer = now.pointer("champion", canary.schema)
        champion = 0 if pointer is None else pointer.model_no
        if pointer is None or champion in (0, canary.model_no):
            # A learner was stopped after it promoted the canary and before it cleared the alias, or
            # the schema no longer has a champion.
            why = (
                "it is the champion"
                if champion
                else "there is no champion of its schema to compare it with"
            )
            self._registry.clear_alias(
                game, "canary", schema=canary.schema, why=why, epoch=epoch, seen={"canary": canary}
            )
            return None
        control = now.control_of(canary)
        canary_episodes, champion_episodes, control_episodes = (
            gate.of_trial(returns(model_name(game, number), canary.at_s), canary.first_no)
            if number
            else []
            for number in (canary.model_no, champion, control.model_no if control else 0)
        )
        trial_no = now.trials[canary.schema]
        compared = (
            trial_no,
            champion,
            *(len(each) for each in (canary_episodes, champion_episodes, control_episodes)),
        )
        if self._waiting.get((game, canary.schema)) == compared:
            decision = GateDecision("wait", "no new episode")
        else:
            first = returns(model_name(game, champion), 0.0)[:MAX_EARLIER]
            decision = gate.compare(
                canary_episodes,
                champion_episodes,
                self.bounds,
                control=control_episodes,
                earlier=[
                    episode for episode in (*people, *first) if episode.started_s < int(canary.at_s)
                ],
                trial_no=trial_no,
                margin=margin,
            )
            self._evidence[game, canary.schema] = decision.evidence
            if decision.decision == "wait":
                self._waiting[game, canary.schema] = compared
        if decision.decision == "promote" or reads_file:
            # The file may have been damaged since it was checked.
            try:
                self._registry.policy(game, canary.model_no)
            except (Refused, Corrupt) as error:
                decision = GateDecision("reject", f"its file is no longer valid: {error}")
        if decision.decision == "wait":
            n_episodes = len(canary_episodes) + len(champion_episodes)
            self._raise_share(game, canary, n_episodes, epoch=epoch)
            return decision
        if decision.decision == "promote":
            self._registry.set_alias(
                game,
                "champion",
                canary.model_no,
                why=decision.why,
                epoch=epoch,
                seen={"canary": canary, "champion": pointer},
            )
        why = f"{decision.decision}: {decision.why}"
        try:
            self._registry.clear_alias(
                game, "canary", schema=canary.schema, why=why, epoch=epoch, seen={"canary": canary}
            )
        except Refused as error:
            # Once it is promoted, it does not matter who cleared the alias.
            if decision.decision != "promote" or error.reason != "superseded":
                raise
        return decision

    def evidence(self, game: str, schema: str) -> float:
        """How far a schema's canary has come on the way to a proof, as `GateDecision` has it."""
        return self._evidence.get((game, schema), 0.0)

    def _raise_share(self, game: str, canary: Alias, n_episodes: int, *, epoch: int) -> None:
        """Let a canary play more, once enough episodes were played without rejecting it."""
        share = self.bounds.share_after(n_episodes)
        if share > canary.share:
            self._registry.set_alias(
                game,
                "canary",
                canary.model_no,
                why=canary.why,
                epoch=epoch,
                share=share,
                control=canary.control
                and canary.control._replace(share=self.bounds.control_share_beside(share)),
                seen={"canary": canary},
            )

    def _checks(self, now: Catalogue, model_no: int) -> Sequence[ModelCheck]:
        name = model_name(now.game, model_no)
        if model_no not in now.models:
            return [ModelCheck("release", False, f"{name} is not in the registry")]
        schema = now.models[model_no].schema
        newest = max(number for number, other in now.models.items() if other.schema == schema)
        if model_no != newest:
            return [
                ModelCheck(
                    "release",
                    False,
                    f"{name} is not the newest release of its schema, which is "
                    f"{model_name(now.game, newest)}",
                )
            ]
        try:
            raw = self._registry.policy_bytes(now.models[model_no])
        except Corrupt as error:
            return [ModelCheck("loads", False, str(error))]
        return self._check(now.models[model_no], raw, self._budget)


def follows_carried_over(now: Catalogue, model_no: int) -> bool:
    """Whether a model is the first one after a champion that was carried over to its schema."""
    schema = now.models[model_no].schema
    champion = now.model_of("champion", schema)
    if not champion or not is_carried_over(now.models[champion].lineage):
        return False
    later = (
        number
        for number, model in now.models.items()
        if model.schema == schema and number > champion
    )
    return model_no == min(later, default=0)


def is_carried_over(lineage: Lineage) -> bool:
    """Whether a model is the champion of an earlier schema, with the weights that it had there."""
    return bool(lineage.config.get("carried_over", False))


def _recorded(verdict: str) -> GateDecision:
    """The decision of a verdict in the journal."""
    if verdict.startswith((PROMOTED, RESTORED)):
        return GateDecision("promote", verdict)
    return GateDecision("wait" if verdict.startswith("on trial: ") else "reject", verdict)


def _in_random_order(
    candidate: Array, champion: Array, *, share: float
) -> tuple[list[Played], list[Played]]:
    """Episodes of two bots, as if one player had played them, each by a bot drawn at random."""
    episodes: tuple[list[Played], list[Played]] = ([], [])
    is_candidate = np.random.default_rng(0).random(2 * len(candidate)) < share
    for at, is_drawn in enumerate(is_candidate.tolist()):
        played = episodes[0 if is_drawn else 1]
        returns = candidate if is_drawn else champion
        if len(played) == len(returns):
            break
        propensity = share if is_drawn else 1 - share
        played.append(Played(at, at, float(returns[len(played)]), propensity=propensity))
    return episodes


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
    if catalogue.model_of("champion", manifest.schema):
        return Released(
            manifest,
            GateDecision(
                "wait",
                f"passed {len(checks)} {plural(len(checks), 'check')}; the champion stays until "
                "you promote this model",
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
                alias for alias in ALIASES if catalogue.model_of(alias, manifest.schema) == number
            ]
            control = catalogue.control_of(catalogue.pointer("canary", manifest.schema))
            if control is not None and control.model_no == number:
                aliases.append("control")
            rows.append(
                {
                    "model": manifest.name,
                    "schema": manifest.schema,
                    "aliases": aliases,
                    "algorithm": manifest.lineage.algorithm,
                    "verdict": catalogue.verdicts.get(number, ""),
                    "damage": damage.get(damage_key(catalogue, manifest), ""),
                    "steps": manifest.lineage.steps,
                    "bytes": manifest.policy_bytes,
                    "sha256": manifest.policy_sha256,
                }
            )
    return rows
