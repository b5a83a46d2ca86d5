"""Nothing bad passes the gate, whatever was done to it; what is truly better does."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.act.policies import random_policy
from tests.card import Card
from tests.simulation.recordings import GAME, SIGNER, balancing_policy, returns_of, with_weights
from understudy.core.errors import Fenced
from understudy.core.signed import Signer
from understudy.experience.game import game_spec
from understudy.models.catalogue import Control, live_models
from understudy.models.gate import Bounds, GateDecision, Played, of_trial
from understudy.models.manifest import Lineage, model_name, number_of
from understudy.models.objects import FolderObjects
from understudy.models.registry import Registry
from understudy.models.shared import Journal
from understudy.nn.policy import Policy
from understudy.release.forgets import is_replacement, learned_before, replacements
from understudy.release.gatekeeper import Gatekeeper
from understudy.release.model_check import check_in_subprocess, check_model
from understudy.testing.clock import ManualClock

CHAMPION = balancing_policy(angle=1.0, spin=0.018)
"""Falls in every second episode; lasts for about 407 of 500 steps."""
BOUNDS = Bounds(max_episodes=480)
LINEAGE = Lineage(algorithm="dqn")
NEWEST = 1_000_000
"""An entry of the trial that is under way, whichever it is."""


class ReturnsOfModels(dict[str, Sequence[Played]]):
    """What each model returned in the hands of four players; computed on first access."""

    def __init__(self) -> None:
        super().__init__()
        self.policies: dict[str, Policy] = {}

    def __missing__(self, model: str) -> Sequence[Played]:
        model_no = number_of(model)
        played = returns_of(self.policies[model], 480, seed=model_no)
        self[model] = [
            Played(
                2 * at + (model_no > 1),
                1e12,
                one,
                f"player-{at % 4}",
                propensity=0.5,
                entry=NEWEST,
            )
            for at, one in enumerate(played)
        ]
        return self[model]


class GateHarness:
    """A registry with a champion, and what each policy would return in players' hands."""

    def __init__(self, folder: Path) -> None:
        self.objects = FolderObjects(folder)
        trusted = {SIGNER.key_id: SIGNER.public}
        self.registry = Registry(self.objects, trusted=trusted, signer=SIGNER, clock=ManualClock())
        self.epoch = self.registry.takeover(GAME.game, owner="test")
        self.returns = ReturnsOfModels()
        self.keeper = Gatekeeper(self.registry, bounds=BOUNDS, check=check_model)
        self.champion_no = self.release(CHAMPION)
        assert (
            self.keeper.admit(GAME.game, self.champion_no, epoch=self.epoch).decision == "promote"
        )

    def release(self, policy: Policy) -> int:
        manifest = self.registry.release(policy, LINEAGE, epoch=self.epoch)
        self.play(manifest.model_no, policy)
        return manifest.model_no

    def play(self, model_no: int, policy: Policy) -> None:
        self.returns.policies[model_name(GAME.game, model_no)] = policy

    def is_promoted(self, model_no: int) -> bool:
        """Whether the candidate passes checks and live play; afterwards the champion is who it
        was."""
        found = self.keeper.admit(GAME.game, model_no, epoch=self.epoch)
        if found.decision == "wait":
            judged = self.keeper.judge(
                GAME.game, lambda model, since_s: self.returns[model], epoch=self.epoch
            )
            assert judged is not None
            found = judged
        now = self.registry.catalogue(GAME.game)
        assert now.model_of("canary") == 0
        assert (now.model_of("champion") == model_no) == (found.decision == "promote")
        if found.decision == "promote":
            self.registry.set_alias(
                GAME.game,
                "champion",
                self.champion_no,
                why="the next one is tried against the same",
            )
        return found.decision == "promote"

    def blob(self, model_no: int) -> Path:
        manifest = self.registry.catalogue(GAME.game).models[model_no]
        return self.objects._folder / f"blobs/{manifest.policy_sha256}.safetensors"


@pytest.fixture
def harness(quick_path: Path) -> GateHarness:
    return GateHarness(quick_path)


def better(rng: np.random.Generator) -> Policy:
    """One that never falls; no two are alike."""
    spin = rng.uniform(0.3, 0.6)
    angle = rng.uniform(0.9, 1.1)
    return balancing_policy(angle=angle, spin=spin, position=0.05, velocity=rng.uniform(0.08, 0.12))


def shuffled(harness: GateHarness, rng: np.random.Generator) -> int:
    def shuffle(weights: np.ndarray) -> np.ndarray:
        return rng.permutation(weights.ravel()).reshape(weights.shape)

    while True:
        policy = with_weights(better(rng), shuffle)
        if returns_of(policy, 20).mean() < 300:  # one in ten still plays like the champion
            return harness.release(policy)


def constant(harness: GateHarness, rng: np.random.Generator) -> int:
    return harness.release(with_weights(better(rng), lambda weights: weights * 0))


def poisoned(harness: GateHarness, rng: np.random.Generator) -> int:
    """Its bytes and its hash are right, its weights are not finite."""
    number = harness.release(better(rng))
    raw = bytearray(harness.blob(number).read_bytes())
    raw[-4:] = np.float32(np.nan).tobytes()
    harness.blob(number).write_bytes(bytes(raw))
    return number


def truncated(harness: GateHarness, rng: np.random.Generator) -> int:
    number = harness.release(better(rng))
    raw = harness.blob(number).read_bytes()
    harness.blob(number).write_bytes(raw[: int(rng.integers(0, len(raw)))])
    return number


def forged(harness: GateHarness, rng: np.random.Generator) -> int:
    """A release that a stranger signed, under the number it should have."""
    policy = better(rng)
    number = harness.release(policy)
    journal = Journal(harness.objects, f"registry/{GAME.game}")
    *_, (last, _) = journal.read()
    manifest = harness.registry.catalogue(GAME.game).models[number]
    facts = manifest.to_json() | {"model_no": number + 1}
    entry = {
        "kind": "release",
        "epoch": harness.epoch,
        "manifest": facts,
        "journal": journal.name,
        "number": last + 1,
    }
    assert journal.append(last + 1, Signer(b"x" * 32).sign(entry | {"at_s": 1.0}))
    harness.play(number + 1, policy)
    return number + 1


def replayed(harness: GateHarness, rng: np.random.Generator) -> int:
    """An older release again: by its number, and by its entry at the journal's end."""
    old = harness.release(better(rng))
    harness.release(CHAMPION)
    journal = Journal(harness.objects, f"registry/{GAME.game}")
    entries = dict(journal.read())
    older = entries[max(entries) - 1]
    assert older is not None
    assert journal.append(max(entries) + 1, older)
    return old


SABOTAGE: Sequence[Callable[[GateHarness, np.random.Generator], int]] = (
    shuffled,
    constant,
    poisoned,
    truncated,
    forged,
    replayed,
)


def test_of_a_hundred_sabotaged_candidates_none_is_promoted_and_of_twenty_better_ones_eighteen_are(
    harness: GateHarness, card: Card
):
    rng = np.random.default_rng(0)
    promoted = [
        kind.__name__
        for _ in range(17)
        for kind in SABOTAGE
        if harness.is_promoted(kind(harness, rng))
    ]
    passed = sum(harness.is_promoted(harness.release(better(rng))) for _ in range(20))
    tried = len(SABOTAGE) * 17
    card.line("sabotaged models, held back", tried=tried, held=tried - len(promoted))
    card.line(
        "of 20 better models at least 18 promoted",
        tried=1,
        held=int(passed >= 18),
        note=f"{passed} of 20",
    )
    assert tried >= 100
    assert promoted == []
    assert passed >= 18


def test_in_a_clean_process_the_same_is_found(harness: GateHarness):
    harness.keeper = Gatekeeper(harness.registry, bounds=BOUNDS, check=check_in_subprocess)
    rng = np.random.default_rng(1)
    assert [kind.__name__ for kind in SABOTAGE if harness.is_promoted(kind(harness, rng))] == []
    assert harness.is_promoted(harness.release(better(rng)))


def test_a_canary_whose_file_is_damaged_while_it_plays_is_not_promoted(harness: GateHarness):
    number = harness.release(better(np.random.default_rng(2)))
    assert harness.keeper.admit(GAME.game, number, epoch=harness.epoch).decision == "wait"
    harness.blob(number).write_bytes(b"")
    found = harness.keeper.judge(
        GAME.game, lambda model, _: harness.returns[model], epoch=harness.epoch
    )
    assert found is not None
    assert found.decision == "reject"
    assert found.why.startswith("its file is no longer valid: ")
    assert harness.registry.catalogue(GAME.game).model_of("canary") == 0


def test_a_damaged_canary_that_nobody_has_played_is_rejected(harness: GateHarness):
    number = harness.release(better(np.random.default_rng(7)))
    assert harness.keeper.admit(GAME.game, number, epoch=harness.epoch).decision == "wait"
    found = harness.keeper.judge(GAME.game, lambda model, _: (), epoch=harness.epoch)
    assert found is not None
    assert found.decision == "wait"
    harness.blob(number).write_bytes(b"")
    found = harness.keeper.judge(
        GAME.game, lambda model, _: (), epoch=harness.epoch, reads_file=False
    )
    assert found is not None
    assert found.decision == "wait"
    found = harness.keeper.judge(GAME.game, lambda model, _: (), epoch=harness.epoch)
    assert found is not None
    assert (found.decision, found.why[:28]) == ("reject", "its file is no longer valid:")
    assert harness.registry.catalogue(GAME.game).model_of("canary") == 0


def test_with_a_game_to_play_in_held_out_episodes_decide_at_once(harness: GateHarness):
    number = harness.release(better(np.random.default_rng(3)))
    found = harness.keeper.admit(GAME.game, number, epoch=harness.epoch, play=returns_of)
    assert found.decision == "promote"
    worse = harness.release(balancing_policy(angle=1.0))
    found = harness.keeper.admit(GAME.game, worse, epoch=harness.epoch, play=returns_of)
    assert found.decision == "reject"
    now = harness.registry.catalogue(GAME.game)
    assert (now.model_of("champion"), now.model_of("canary")) == (number, 0)


def test_a_canary_promoted_by_a_learner_that_stopped_then_is_cleared(harness: GateHarness):
    number = harness.release(better(np.random.default_rng(4)))
    harness.keeper.admit(GAME.game, number, epoch=harness.epoch)
    harness.registry.set_alias(GAME.game, "champion", number, why="kill -9 comes here")
    assert harness.keeper.judge(GAME.game, lambda model, _: (), epoch=harness.epoch) is None
    assert harness.registry.catalogue(GAME.game).model_of("canary") == 0


def test_a_canary_without_a_champion_to_compare_it_with_is_cleared(harness: GateHarness):
    number = harness.release(better(np.random.default_rng(5)))
    harness.keeper.admit(GAME.game, number, epoch=harness.epoch)
    harness.registry.clear_alias(GAME.game, "champion", schema=GAME.schema, why="nobody shall play")
    assert harness.keeper.judge(GAME.game, lambda model, _: (), epoch=harness.epoch) is None
    assert harness.registry.catalogue(GAME.game).model_of("canary") == 0


def test_an_old_learner_decides_nothing(harness: GateHarness):
    number = harness.release(better(np.random.default_rng(6)))
    harness.registry.takeover(GAME.game, owner="another")
    with pytest.raises(Fenced, match="another has taken over"):
        harness.keeper.admit(GAME.game, number, epoch=harness.epoch)
    assert harness.registry.catalogue(GAME.game).model_of("canary") == 0


def test_returns_from_before_the_trial_tell_the_range_and_those_since_are_compared(
    harness: GateHarness,
):
    """People and the champion scored up to 100 before, so a return of 1e6 is worth no more."""
    number = harness.release(better(np.random.default_rng(8)))
    harness.keeper.bounds = Bounds(max_episodes=200)
    assert harness.keeper.admit(GAME.game, number, epoch=harness.epoch).decision == "wait"
    canary_entry = harness.registry.catalogue(GAME.game).pointer("canary")
    assert canary_entry is not None
    since_s = canary_entry.at_s
    champion = [Played(at, since_s - 9, 100.0 - at % 50) for at in range(50)]
    champion += [
        Played(100 + 2 * at, since_s, 90.0 + at % 7, propensity=0.5, entry=NEWEST)
        for at in range(400)
    ]
    canary = [
        Played(101 + 2 * at, since_s, 1e6 if at % 10 == 0 else 0.0, propensity=0.5, entry=NEWEST)
        for at in range(400)
    ]
    people = [Played(at, since_s - 9, float(at)) for at in range(50)]
    people += [Played(at, since_s + 9, 1e9) for at in range(50)]  # came too late to count

    def returns(model: str, since: float) -> list[Played]:
        episodes = canary if model == model_name(GAME.game, number) else champion
        return [one for one in episodes if one.started_s >= since]

    found = harness.keeper.judge(GAME.game, returns, epoch=harness.epoch, people=people)
    assert found is not None
    assert found.decision == "reject"
    assert found.why.startswith("worse: mean return ")
    assert "the champion's 92.3 over 10, clipped to 4.95 to 95.05" in found.why


def test_an_undecided_comparison_is_repeated_only_with_new_episodes(harness: GateHarness):
    number = harness.release(better(np.random.default_rng(9)))
    harness.keeper.admit(GAME.game, number, epoch=harness.epoch)

    def judged(n_episodes: int) -> str:
        found = harness.keeper.judge(
            GAME.game, lambda model, _: harness.returns[model][:n_episodes], epoch=harness.epoch
        )
        assert found is not None
        return found.why

    assert judged(15).startswith("15 episodes of the candidate")
    assert judged(15) == "no new episode"
    assert judged(16).startswith("16 episodes of the candidate")
    assert judged(480).startswith("better: mean return 500 over ")


# --- Shares and schemas ---------------------------------------------------------------------------


def test_a_canary_plays_more_with_its_episodes_and_its_trial_goes_on(harness: GateHarness):
    clock = ManualClock()
    trusted = {SIGNER.key_id: SIGNER.public}
    harness.registry = Registry(harness.objects, trusted=trusted, signer=SIGNER, clock=clock)
    harness.keeper = Gatekeeper(harness.registry, bounds=BOUNDS, check=check_model)
    number = harness.release(better(np.random.default_rng(10)))
    harness.keeper.admit(GAME.game, number, epoch=harness.epoch)
    shares = []
    for n_episodes in (0, 2, 3, 5):  # of each bot
        clock.advance(60.0)
        found = harness.keeper.judge(
            GAME.game,
            lambda model, _, n=n_episodes: harness.returns[model][:n],  # type: ignore[misc]
            epoch=harness.epoch,
        )
        assert found is not None
        assert found.decision == "wait"
        canary = harness.registry.catalogue(GAME.game).pointer("canary")
        assert canary is not None
        shares.append((canary.model_no, canary.share, canary.at_s == clock.now() - 60.0))
    assert shares == [
        (number, 0.05, True),
        (number, 0.05, False),
        (number, 0.1, False),
        (number, 0.2, False),
    ]
    assert harness.registry.catalogue(GAME.game).trials == {GAME.schema: 1}


def test_candidates_of_two_schemas_are_admitted_and_judged_apart(harness: GateHarness):
    other_spec = game_spec(GAME.game, obs=5, actions=2)
    other = harness.registry.release(
        random_policy(other_spec, "argmax"), LINEAGE, epoch=harness.epoch
    ).model_no
    found = harness.keeper.admit(GAME.game, other, epoch=harness.epoch)
    assert found.decision == "promote", "the first bot of its schema"
    number = harness.release(better(np.random.default_rng(11)))
    later = harness.registry.release(
        random_policy(other_spec, "argmax", seed=1), LINEAGE, epoch=harness.epoch
    ).model_no
    # Neither is the newest release of the game, but each is the newest of its schema.
    for model_no in (number, later):
        found = harness.keeper.admit(GAME.game, model_no, epoch=harness.epoch)
        assert found.decision == "wait"
    now = harness.registry.catalogue(GAME.game)
    assert [pointer.model_no for pointer in now.live("canary")] == [later, number]
    judged = harness.keeper.judge(
        GAME.game,
        lambda model, _: harness.returns[model],
        schema=GAME.schema,
        epoch=harness.epoch,
    )
    assert judged is not None
    assert judged.decision == "promote"
    now = harness.registry.catalogue(GAME.game)
    assert now.model_of("champion", GAME.schema) == number
    assert now.model_of("champion", other_spec.schema) == other
    assert now.model_of("canary", other_spec.schema) == later
    assert now.trials == {GAME.schema: 1, other_spec.schema: 1}


def test_every_rejection_is_recorded_with_its_reason(harness: GateHarness):
    failed = poisoned(harness, np.random.default_rng(0))
    assert harness.keeper.admit(GAME.game, failed, epoch=harness.epoch).decision == "reject"
    worse = harness.release(balancing_policy())

    def play(policy: Policy, episodes: int) -> np.ndarray:
        return np.asarray(returns_of(policy, episodes))

    decision = harness.keeper.admit(GAME.game, worse, epoch=harness.epoch, play=play)
    assert decision.decision == "reject"
    now = Registry(harness.objects, trusted={SIGNER.key_id: SIGNER.public}).catalogue(GAME.game)
    assert now.verdicts[failed].startswith("reject: loads: bad_hash")
    assert now.verdicts[worse].startswith("reject: worse: mean return")
    assert (now.model_of("champion"), now.bad_entries) == (harness.champion_no, 0)


@pytest.mark.parametrize("spin", [0.018, 0.5], ids=["undecided", "better"])
def test_a_withdrawal_during_a_comparison_holds(harness: GateHarness, spin: float):
    model_no = harness.release(balancing_policy(angle=1.0, spin=spin))
    assert harness.keeper.admit(GAME.game, model_no, epoch=harness.epoch).decision == "wait"
    operator = Registry(harness.objects, trusted={SIGNER.key_id: SIGNER.public}, signer=SIGNER)

    def returns(model: str, since_s: float) -> Sequence[Played]:
        if operator.catalogue(GAME.game).model_of("canary"):
            operator.withdraw(GAME.game, why="it cheats")
        return harness.returns[model][:200]

    judged = harness.keeper.judge(GAME.game, returns, epoch=harness.epoch)
    assert judged is not None
    assert judged.decision == "wait"
    now = operator.catalogue(GAME.game)
    assert (now.model_of("canary"), now.model_of("champion")) == (0, harness.champion_no)
    assert now.verdicts[model_no] == "withdrawn: it cheats"


def test_a_champion_that_an_operator_chose_during_a_comparison_stays(harness: GateHarness):
    other = harness.release(better(np.random.default_rng(5)))
    model_no = harness.release(better(np.random.default_rng(7)))
    harness.keeper.admit(GAME.game, model_no, epoch=harness.epoch)

    def returns(model: str, since_s: float) -> Sequence[Played]:
        if harness.registry.catalogue(GAME.game).model_of("champion") != other:
            harness.registry.set_alias(GAME.game, "champion", other, why="by hand")
        return harness.returns[model]

    judged = harness.keeper.judge(GAME.game, returns, epoch=harness.epoch)
    assert judged is not None
    assert judged.decision == "wait"
    assert harness.registry.catalogue(GAME.game).model_of("champion") == other


def test_a_release_is_judged_once_also_if_the_learner_was_killed_before_it_recorded_that(
    harness: GateHarness,
):
    model_no = harness.release(better(np.random.default_rng(3)))
    assert harness.keeper.admit(GAME.game, model_no, epoch=harness.epoch).decision == "wait"
    assert harness.keeper.admit(GAME.game, model_no, epoch=harness.epoch).decision == "wait"
    harness.registry.withdraw(GAME.game, why="it cheats")
    again = harness.keeper.admit(GAME.game, model_no, epoch=harness.epoch)
    assert (again.decision, again.why) == ("reject", "withdrawn: it cheats")
    now = harness.registry.catalogue(GAME.game)
    assert (now.model_of("canary"), now.trials[GAME.schema]) == (0, 1)


@pytest.mark.parametrize("max_share", [0.3, 0.5])
def test_held_out_episodes_decide_between_promotion_and_rejection_whatever_the_share(
    harness: GateHarness, max_share: float
):
    harness.keeper.bounds = Bounds(max_share=max_share)
    rng = np.random.default_rng(0)
    equal = harness.release(better(rng))
    decision = harness.keeper.admit(
        GAME.game, equal, epoch=harness.epoch, play=lambda _, n: rng.normal(size=n)
    )
    assert decision.decision == "reject"
    assert decision.why.startswith("undecided after 1000 ")
    assert harness.registry.catalogue(GAME.game).model_of("canary") == 0
    winner = harness.release(better(rng))
    champion = harness.registry.policy(GAME.game, harness.champion_no)
    decision = harness.keeper.admit(
        GAME.game,
        winner,
        epoch=harness.epoch,
        play=lambda policy, n: np.full(n, 0.0 if policy == champion else 1.0),
    )
    assert decision.decision == "promote"


# --- The control ----------------------------------------------------------------------------------


class Reigns:
    """A game with several champions, one after another, and their returns as champion."""

    def __init__(self, folder: Path, *mean_returns: float) -> None:
        self.clock = ManualClock()
        self.objects = FolderObjects(folder)
        trusted = {SIGNER.key_id: SIGNER.public}
        self.registry = Registry(self.objects, trusted=trusted, signer=SIGNER, clock=self.clock)
        self.epoch = self.registry.takeover(GAME.game, owner="test")
        self.keeper = Gatekeeper(self.registry, bounds=BOUNDS, check=check_model)
        self.played: dict[str, list[Played]] = {}
        for mean_return in mean_returns:
            model_no = self.release()
            self.registry.set_alias(GAME.game, "champion", model_no, why="test")
            self.play(model_no, mean_return)

    def release(self) -> int:
        policy = better(np.random.default_rng(len(self.registry.catalogue(GAME.game).models)))
        return self.registry.release(policy, LINEAGE, epoch=self.epoch).model_no

    def play(
        self, model_no: int, return_: float, *, propensity: float | None = None, n: int = 30
    ) -> None:
        """So many episodes in as many seconds."""
        episodes = self.played.setdefault(model_name(GAME.game, model_no), [])
        for at in range(n):
            self.clock.advance(1.0)
            player = f"player-{at % 4}"
            start_s = self.clock.now()
            episodes.append(
                Played(at, start_s, return_, player, propensity=propensity, entry=NEWEST)
            )

    def returns(self, model: str, since_s: float) -> list[Played]:
        return [each for each in self.played.get(model, ()) if each.started_s >= since_s]

    def control(self) -> Control | None:
        """The control of the trial of a new candidate."""
        decision = self.keeper.admit(
            GAME.game, self.release(), epoch=self.epoch, returns=self.returns
        )
        assert decision.decision == "wait"
        now = self.registry.catalogue(GAME.game)
        return now.control_of(now.pointer("canary"))


def test_the_earlier_champion_with_the_highest_return_is_the_control(quick_path: Path):
    reigns = Reigns(quick_path, 10.0, 30.0, 20.0, 25.0)
    assert reigns.control() == Control(2, 0.02)
    reigns.play(1, 1_000.0)  # not as champion
    reigns.played["cart/1"].append(Played(0, reigns.clock.now(), 1e9))
    assert reigns.control() == Control(2, 0.02)
    reigns.keeper.bounds = Bounds(control_share=0.0)
    assert reigns.control() is None


def test_an_earlier_champion_that_is_damaged_rolled_back_or_hardly_played_is_no_control(
    quick_path: Path,
):
    assert Reigns(quick_path / "only", 10.0).control() is None
    reigns = Reigns(quick_path / "more", 10.0, 30.0, 20.0, 25.0, 40.0)
    reigns.registry.rollback(GAME.game, why="test")
    reigns.played["cart/2"] = reigns.played["cart/2"][:9]
    assert reigns.control() == Control(3, 0.02)
    reigns = Reigns(quick_path / "damaged", 10.0, 30.0)
    blob = reigns.registry.policy_object(reigns.registry.manifest(GAME.game, 1))
    reigns.objects.delete(blob)
    assert reigns.control() is None


def test_the_controls_share_grows_and_a_candidate_worse_than_it_is_rejected(quick_path: Path):
    reigns = Reigns(quick_path, 30.0, 20.0)
    assert reigns.control() == Control(1, 0.02)
    canary = 3

    def judge() -> GateDecision | None:
        return reigns.keeper.judge(GAME.game, reigns.returns, epoch=reigns.epoch)

    for number, propensity in ((canary, 0.05), (2, 0.95)):
        reigns.play(number, 20.0, propensity=propensity)
    judged = judge()
    assert judged is not None
    assert judged.decision == "wait"
    now = reigns.registry.catalogue(GAME.game)
    assert now.control_of(now.pointer("canary")) == Control(1, 0.05)
    for _ in range(100):
        reigns.play(canary, 20.0, propensity=0.6, n=1)
        reigns.play(1, 30.0, propensity=0.4, n=1)
    judged = judge()
    assert judged is not None
    assert judged.decision == "reject"
    assert judged.why.startswith("worse than the control: mean return 20 over ")
    assert reigns.registry.catalogue(GAME.game).verdicts[canary].startswith("reject: worse than")


def test_a_control_that_becomes_champion_again_is_no_longer_compared(quick_path: Path):
    reigns = Reigns(quick_path, 30.0, 20.0)
    assert reigns.control() is not None
    reigns.registry.rollback(GAME.game, why="test")
    now = reigns.registry.catalogue(GAME.game)
    assert now.model_of("champion") == 1
    assert now.control_of(now.pointer("canary")) is None
    assert live_models(now, *now.pointers(), trust=()).control_release is None


# --- After a forget -------------------------------------------------------------------------------


def test_the_first_model_that_is_trained_after_a_forget_replaces_a_champion_from_before(
    quick_path: Path,
):
    reigns = Reigns(quick_path)

    def release(read_no: int | None, cursor: str = "100") -> int:
        config = {} if read_no is None else {"read_no": read_no}
        lineage = replace(LINEAGE, cursor_to=cursor, config=config)
        policy = better(np.random.default_rng(read_no))
        return reigns.registry.release(policy, lineage, epoch=reigns.epoch).model_no

    champion = release(100)
    reigns.registry.set_alias(GAME.game, "champion", champion, why="test")
    before = release(140)
    first = release(160)
    second = release(170)
    third = release(200)
    now = reigns.registry.catalogue(GAME.game)
    models = (before, first, second, third)
    assert [is_replacement(now, number, {}) for number in models] == [False] * 4
    assert [is_replacement(now, number, {90: 1}) for number in models] == [False] * 4
    assert [is_replacement(now, number, {150: 1}) for number in models] == [False, True] + 2 * [
        False
    ]
    both = {150: 1, 180: 0}
    assert replacements(now, GAME.schema, both) == [first, third]
    assert replacements(now, "another", both) == []
    later_player = {150: 101, 180: 1}
    assert replacements(now, GAME.schema, later_player) == [third]
    assert learned_before(now, champion, {150: 1, 180: 101}) == 150, "only from the first player"
    assert [learned_before(now, number, {90: 1, 150: 1}) for number in (champion, *models)] == [
        150,
        150,
        0,
        0,
        0,
    ]
    earlier_version = release(None)
    of_a_run = release(None, cursor="")
    now = reigns.registry.catalogue(GAME.game)
    assert learned_before(now, earlier_version, {150: 1}) == 150
    assert learned_before(now, of_a_run, {150: 0}) == 0


# --- Draws ----------------------------------------------------------------------------------------


def test_draws_of_the_trial_count_although_its_share_grew_and_those_of_an_earlier_one_do_not(
    quick_path: Path,
):
    reigns = Reigns(quick_path, 20.0)
    reigns.control()  # an earlier trial, undecided
    reigns.control()
    now = reigns.registry.catalogue(GAME.game)
    canary = now.pointer("canary")
    assert canary is not None
    assert (canary.model_no, canary.first_no) == (3, canary.number)
    reigns.registry.set_alias(GAME.game, "canary", 3, why="more", share=0.5)
    raised = reigns.registry.catalogue(GAME.game).pointer("canary")
    assert raised is not None
    assert raised.number > raised.first_no == canary.first_no
    played = [Played(at, 1e12 + at, 1.0, propensity=0.5, entry=canary.number) for at in range(3)]
    played.append(Played(3, 1e12, 1.0, propensity=0.5, entry=canary.number - 1))
    played.append(Played(4, 1e12, 1.0, propensity=0.5))
    draws = [each.propensity for each in of_trial(played, raised.first_no)]
    assert draws == [0.5] * 3 + [None] * 2

    def judged(entry: int, n_episodes: int) -> GateDecision:
        returns = {
            model_name(GAME.game, number): [
                Played(at, 1e12 + at, float(10 * number + at % 3), "", propensity=0.5, entry=entry)
                for at in range(n_episodes)
            ]
            for number in (1, 3)
        }
        decision = reigns.keeper.judge(
            GAME.game, lambda model, _: returns.get(model, []), epoch=reigns.epoch
        )
        assert decision is not None
        return decision

    waits = judged(canary.number - 1, 200)
    assert waits.decision == "wait"
    assert waits.why.startswith("0 episodes of the candidate, 0 of the champion")
    assert judged(canary.number, 201).decision == "promote"
