"""Gatekeeper: takes a candidate from its release to champion or to nothing, and says why.

    release ─► checks in a clean process ─► canary ─► live returns beside the champion's ─► champion, or cleared
                                        └─► the first bot: champion at once

Everything it knows between two calls is in the registry and the store, so whoever takes over goes on where it was.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence

from understudy.app.service.model_check import Budget, check_apart
from understudy.app.service.tally import Played
from understudy.core.errors import ConfigError, Corrupt, GameFailed, Refused
from understudy.core.game import GameSpec
from understudy.core.manifest import Manifest, model_name
from understudy.core.policy import Policy
from understudy.core.tensors import Array
from understudy.models.catalogue import Catalogue
from understudy.models.gate import Bounds, Check, Evidence, Verdict, looks, verdict
from understudy.models.registry import Registry

CheckModel = Callable[[Manifest, bytes, Budget], Sequence[Check]]

Returns = Callable[[str, float], Sequence[Played]]
"""Episodes of a model, by its name, that began since a time."""

Play = Callable[[Policy, int], Array]
"""Returns of a policy over this many held-out episodes, the same ones for every policy."""


class Gatekeeper:
    """Decides about the candidates of any game; the caller holds the epoch."""

    def __init__(
        self, registry: Registry, *, bounds: Bounds | None = None, budget: Budget | None = None,
        check: CheckModel = check_apart,
    ) -> None:  # fmt: skip
        self._registry, self._check = registry, check
        self.bounds, self._budget = bounds or Bounds(), budget or Budget()

    def admit(self, game: str, model_no: int, *, epoch: int, play: Play | None = None) -> Verdict:
        """Check a release: the first bot becomes champion, a later one canary, a bad one nothing.

        With a game to `play` in, held-out episodes decide at once and no player meets a worse bot.
        """
        now = self._registry.catalogue(game)
        checks = self._checks(now, model_no)
        champion = fitting_champion(now, now.models[model_no].schema) if model_no in now.models else 0
        found = verdict(Evidence(checks=checks, has_champion=champion > 0), self.bounds)
        if found.decision == "wait" and play is not None:
            found = self._played(game, model_no, champion, play)
        if found.decision == "promote":
            self._registry.point(game, "champion", model_no, why=found.why, epoch=epoch)
        elif found.decision == "wait":
            found = Verdict("wait", f"passed {len(checks)} checks; it plays a share of the episodes")
            self._registry.point(game, "canary", model_no, why=found.why, epoch=epoch)
        return found

    def judge(self, game: str, returns: Returns, *, epoch: int) -> Verdict | None:
        """Compare the canary with the champion by what both returned since it began; None when there is no canary."""
        now = self._registry.catalogue(game)
        canary, champion = now.aliases.get("canary"), now.points_to("champion")
        if canary is None or not canary.model_no:
            return None
        if canary.model_no == champion or not fitting_champion(now, now.models[canary.model_no].schema):
            # Whoever promoted it was stopped before it could say the rest, or somebody took the champion away.
            why = "it is the champion" if canary.model_no == champion else "there is no champion to compare it with"
            self._registry.point(game, "canary", 0, why=why, epoch=epoch)
            return None
        ours, theirs = (returns(model_name(game, number), canary.at_s) for number in (canary.model_no, champion))
        found = compare(ours, theirs, self.bounds)
        if found.decision == "wait":
            return found
        found = self._still_sound(game, canary.model_no, found)
        if found.decision == "promote":
            self._registry.point(game, "champion", canary.model_no, why=found.why, epoch=epoch)
        self._registry.point(game, "canary", 0, why=f"{found.decision}: {found.why}", epoch=epoch)
        return found

    def _checks(self, now: Catalogue, model_no: int) -> Sequence[Check]:
        name = model_name(now.game, model_no)
        if model_no not in now.models:
            return [Check("release", False, f"{name} is not in the registry")]
        if model_no != max(now.models):
            return [Check("release", False, f"{name} is not the newest release, which is {max(now.models)}")]
        try:
            raw = self._registry.policy_bytes(now.models[model_no])
        except Corrupt as error:
            return [Check("loads", False, str(error))]
        return self._check(now.models[model_no], raw, self._budget)

    def _played(self, game: str, model_no: int, champion: int, play: Play) -> Verdict:
        episodes = self.bounds.max_episodes
        ours, theirs = (play(self._registry.policy(game, number), episodes) for number in (model_no, champion))
        return verdict(Evidence(checks=(), has_champion=True, candidate=ours, champion=theirs), self.bounds)

    def _still_sound(self, game: str, model_no: int, found: Verdict) -> Verdict:
        """What was checked long ago may have been damaged since: nobody would get it as champion."""
        if found.decision == "promote":
            try:
                self._registry.policy(game, model_no)
            except (Refused, Corrupt) as error:
                return Verdict("reject", f"its file is no longer good: {error}")
        return found


def fitting_champion(now: Catalogue, schema: str) -> int:
    """The champion, when it plays what this schema describes; 0 otherwise."""
    champion = now.models.get(now.points_to("champion"))
    return champion.model_no if champion is not None and champion.schema == schema else 0


def compare(ours: Sequence[Played], theirs: Sequence[Played], bounds: Bounds) -> Verdict:
    """The verdict of the first look that decides; each look sees what was known when it was due, and no more.

    So it comes to the same however often, and however late, it is asked.
    """
    for due in looks(bounds):
        if min(len(ours), len(theirs)) < due:
            return Verdict(
                "wait",
                f"{len(ours)} episodes of the canary, {len(theirs)} of the champion; looked at from {due} of both",
            )
        known = max(ours[due - 1].arrival_no, theirs[due - 1].arrival_no)
        champion = [one.return_ for one in theirs if one.arrival_no <= known]
        evidence = Evidence(
            checks=(), has_champion=True, candidate=[one.return_ for one in ours[:due]], champion=champion
        )
        found = verdict(evidence, bounds)
        if found.decision != "wait":
            return found
    raise AssertionError("the last look decides")


@contextlib.contextmanager
def held_out(env_id: str | None, spec: GameSpec, *, attempt: int) -> Iterator[Play | None]:
    """What plays a policy on seeds nobody has trained on; None where the game is not here, or is another one."""
    with contextlib.ExitStack() as opened:
        yield _play(env_id, spec, attempt=attempt, opened=opened) if env_id else None


def _play(env_id: str, spec: GameSpec, *, attempt: int, opened: contextlib.ExitStack) -> Play | None:
    try:
        from understudy.app.runs.choice import GameChoice, look_at  # late: they need gymnasium
        from understudy.app.runs.evaluation import AFTERWARDS, judge_of

        choice = GameChoice(game=env_id)
        seen = look_at(choice)
    except (ImportError, ConfigError):
        return None
    if (seen.spec.obs, seen.spec.action) != (spec.obs, spec.action):
        return None
    judge = judge_of(choice, seen, 100, opened)

    def play(policy: Policy, episodes: int) -> Array:
        returns = judge.returns(policy, episodes=episodes, series=AFTERWARDS, attempt=attempt)
        if returns is None:
            raise GameFailed(f"{env_id} could not be played; leave it out of `envs`, and live play judges")
        return returns

    return play
