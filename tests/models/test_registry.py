"""The registry: numbers never reused, one learner at a time, nothing half there."""

import os
import random
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tests.act.policies import random_policy
from tests.card import Card
from tests.faults.profiles import sizes
from tests.models.processes import FORKED
from understudy.core.errors import ConfigError, Corrupt, Fenced, Refused, Unreachable
from understudy.core.signed import Signer
from understudy.experience.game import game_spec
from understudy.models.catalogue import Control
from understudy.models.manifest import Lineage
from understudy.models.objects import FolderObjects
from understudy.models.registry import Registry
from understudy.models.shared import Journal
from understudy.nn.policy import Policy
from understudy.testing.clock import ManualClock

GAME = game_spec("pong", obs=6, actions=3)
SIGNER = Signer(bytes(range(32)))
TRUSTED = {SIGNER.key_id: SIGNER.public}
LINEAGE = Lineage(algorithm="dqn")


def policy(seed: int = 0) -> Policy:
    return random_policy(GAME, "argmax", seed=seed)


def registry(folder: Path, *, signs: bool = True) -> Registry:
    return Registry(FolderObjects(folder), trusted=TRUSTED, signer=SIGNER if signs else None)


def test_models_are_numbered_and_aliases_point_to_them(tmp_path: Path):
    ours = registry(tmp_path)
    epoch = ours.takeover("pong", owner="a")
    first, second = (ours.release(policy(seed), LINEAGE, epoch=epoch) for seed in (0, 1))
    assert (first.model_no, second.model_no) == (1, 2)
    ours.set_alias("pong", "champion", 1, why="the first")
    ours.set_alias("pong", "champion", 2, why="better", epoch=epoch)
    theirs = registry(tmp_path, signs=False)
    assert theirs.catalogue("pong").model_of("champion") == 2
    assert theirs.policy("pong", 2) == policy(1)
    assert [old.why for old in theirs.catalogue("pong").history] == ["the first", "better"]
    assert ours.rollback("pong", why="it was not") == 1
    assert theirs.catalogue("pong").model_of("champion") == 1


class FarObjects(FolderObjects):
    """Objects where a look has a cost and is counted."""

    poll_every_s = 0.5
    looks = 0

    def get(self, name: str) -> bytes | None:
        self.looks += 1
        return super().get(name)


def test_costly_looks_happen_at_intervals_and_own_writes_are_visible_at_once(
    tmp_path: Path,
):
    clock = ManualClock()
    objects = FarObjects(tmp_path)
    others = registry(tmp_path)
    ours = Registry(objects, trusted=TRUSTED, signer=SIGNER, clock=clock)
    epoch = ours.takeover("pong", owner="a")
    ours.release(policy(), LINEAGE, epoch=epoch)
    assert ours.catalogue("pong").models.keys() == {1}
    looks = objects.looks
    for _ in range(100):
        ours.catalogue("pong")
    assert objects.looks == looks
    others.set_alias("pong", "champion", 1, why="by hand")
    assert ours.catalogue("pong").model_of("champion") == 0
    assert ours.damage("pong").keys() == set(), "what others wrote since is not a hole"
    others.takeover("pong", owner="b")
    with pytest.raises(Fenced):
        ours.release(policy(1), LINEAGE, epoch=epoch)
    clock.advance(0.5)
    assert ours.catalogue("pong").model_of("champion") == 1


def test_a_failed_look_does_not_delay_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    registry(tmp_path).takeover("pong", owner="a")
    ours = Registry(FarObjects(tmp_path), trusted=TRUSTED, signer=SIGNER, clock=ManualClock())
    with monkeypatch.context() as broken:
        broken.setattr(
            FarObjects, "get", lambda *_: (_ for _ in ()).throw(Unreachable("nobody answers"))
        )
        for _ in range(2):
            with pytest.raises(Unreachable):
                ours.catalogue("pong")
    assert ours.catalogue("pong").epoch == 1


def test_a_learner_cannot_release_after_another_took_over(tmp_path: Path):
    old = registry(tmp_path)
    new = registry(tmp_path)
    epoch = old.takeover("pong", owner="old")
    old.catalogue("pong")
    newer = new.takeover("pong", owner="new")
    for _ in range(3):
        with pytest.raises(Fenced, match="new has taken over"):
            old.release(policy(), LINEAGE, epoch=epoch)
        with pytest.raises(Fenced):
            old.clear_alias("pong", "champion", schema=GAME.schema, why="mine", epoch=epoch)
    assert new.release(policy(), LINEAGE, epoch=newer).model_no == 1


def test_a_release_signed_in_another_epoch_is_ignored(tmp_path: Path):
    """An entry that a paused process had signed has a used number, or is skipped."""
    ours = registry(tmp_path)
    epoch = ours.takeover("pong", owner="a")
    ours.release(policy(), LINEAGE, epoch=epoch)
    journal = Journal(FolderObjects(tmp_path), "registry/pong")
    (_, _), (_, late) = journal.read()
    assert late is not None
    ours.takeover("pong", owner="b")
    assert not journal.append(3, late)
    assert journal.append(4, late)
    seen = registry(tmp_path).catalogue("pong")
    assert (sorted(seen.models), seen.number, seen.unread, seen.bad_entries) == ([1], 3, 1, 1)
    manifest = ours.release(policy(1), LINEAGE, epoch=2)
    assert manifest.model_no == 3, "entry 4 may have released model 2 before it was replaced"
    assert registry(tmp_path).catalogue("pong").models.keys() == {1, 3}


def test_forged_and_broken_entries_are_skipped(tmp_path: Path):
    ours = registry(tmp_path)
    ours.release(policy(), LINEAGE, epoch=ours.takeover("pong", owner="a"))
    journal = Journal(FolderObjects(tmp_path), "registry/pong")
    facts = {
        "journal": "registry/pong",
        "number": 3,
        "at_s": 0.0,
        "kind": "point",
        "alias": "champion",
        "model_no": 1,
        "line": 0,
        "before": "",
    }
    for number, raw in enumerate(
        [
            Signer(b"x" * 32).sign(facts),
            b"",
            b"{}",
            SIGNER.sign({**facts, "number": 6}),
            SIGNER.sign({**facts, "model_no": 9, "number": 7}),
        ],
        3,
    ):
        assert journal.append(number, raw)
    seen = registry(tmp_path).catalogue("pong")
    assert (seen.bad_entries, seen.model_of("champion")) == (4, 1)
    assert (seen.number, seen.unread) == (6, 1)


def test_a_missing_or_changed_policy_is_an_error(tmp_path: Path):
    ours = registry(tmp_path)
    ours.release(policy(), LINEAGE, epoch=ours.takeover("pong", owner="a"))
    (blob,) = (tmp_path / "blobs").iterdir()
    raw = bytearray(blob.read_bytes())
    raw[-1] ^= 1
    blob.write_bytes(raw)
    with pytest.raises(Refused, match="bad_hash"):
        ours.policy("pong", 1)
    blob.unlink()
    with pytest.raises(Corrupt, match="restore it"):
        ours.policy("pong", 1)


def test_an_unknown_model_or_alias_is_a_clear_error(tmp_path: Path):
    ours = registry(tmp_path)
    with pytest.raises(ConfigError, match="'pong' is not registered; known are none"):
        ours.policy("pong", 3)
    with pytest.raises(ConfigError, match="no previous champion"):
        ours.rollback("pong", why="")
    with pytest.raises(ConfigError, match="not known"):
        ours.set_alias("pong", "king", 1, why="")
    with pytest.raises(ConfigError, match="read-only"):
        registry(tmp_path, signs=False).takeover("pong", owner="a")


def _release_many(folder: Path, owner: int, count: int) -> None:
    ours = registry(folder)
    epoch = ours.catalogue("pong").epoch
    for number in range(count):
        ours.release(policy(1000 * owner + number), LINEAGE, epoch=epoch)


@sizes("count", short=30, full=50)
def test_releases_of_eight_processes_with_kills_leave_whole_models_with_dense_numbers(
    tmp_path: Path, card: Card, count: int
):
    """Readers look all the time: every visible model opens, and its bytes never change."""
    reader = registry(tmp_path)
    reader.takeover("pong", owner="all")
    chance = random.Random(0)
    started: list[BaseProcess] = []
    seen: dict[int, str] = {}

    def start(owner: int) -> BaseProcess:
        process = FORKED.Process(target=_release_many, args=(tmp_path, owner, count))
        process.start()
        started.append(process)
        return process

    def look() -> None:
        for number, manifest in registry(tmp_path, signs=False).catalogue("pong").models.items():
            if number not in seen:
                reader.policy("pong", number)
            assert seen.setdefault(number, manifest.policy_sha256) == manifest.policy_sha256

    running = [start(owner) for owner in range(8)]
    killed = 0
    next_owner = 8
    deadline_s = time.monotonic() + 240
    while any(process.is_alive() for process in running):
        assert time.monotonic() < deadline_s
        look()
        alive = [process for process in running if process.is_alive()]
        if killed < 8 and seen and alive:
            victim = chance.choice(alive)
            os.kill(victim.pid or 0, signal.SIGKILL)
            victim.join()
            running.remove(victim)
            running.append(start(next_owner))
            killed = killed + 1
            next_owner = next_owner + 1
    look()
    assert [process.exitcode for process in running] == [0] * 8
    assert killed == 8
    assert sorted(seen) == list(range(1, len(seen) + 1))
    assert len(seen) >= 8 * count
    assert registry(tmp_path).catalogue("pong").bad_entries == 0
    card.line("models released by 8 learners, 8 of them killed", tried=len(seen), held=len(seen))


def test_a_returned_catalogue_does_not_change(tmp_path: Path):
    ours = registry(tmp_path)
    epoch = ours.takeover("pong", owner="a")
    before = ours.catalogue("pong")
    assert ours.catalogue("pong") is before, "nothing new, nothing copied"
    ours.release(policy(), LINEAGE, epoch=epoch)
    ours.set_alias("pong", "champion", 1, why="the first")
    assert (before.number, before.models, before.aliases, before.history, before.signed) == (
        1,
        {},
        {},
        [],
        {},
    )
    after = ours.catalogue("pong")
    assert (after.number, after.model_of("champion")) == (3, 1)


@pytest.mark.parametrize(
    "text", ["", "pong", "pong/", "/1x", "pong/0", "pong/-1", "pong/1.0", "pong/" + "9" * 12]
)
def test_an_invalid_model_name_is_rejected(text: str, tmp_path: Path):
    with pytest.raises(ConfigError, match="GAME/NUMBER"):
        registry(tmp_path).find(text)


def test_a_model_is_found_by_number_and_by_alias(tmp_path: Path):
    ours = registry(tmp_path)
    epoch = ours.takeover("pong", owner="test")
    first = ours.release(policy(1), LINEAGE, epoch=epoch)
    assert ours.find("pong/1") == ours.find("1", game="pong") == first
    with pytest.raises(ConfigError, match="has no champion yet"):
        ours.find("pong/champion")
    ours.set_alias("pong", "champion", 1, why="test")
    assert ours.find("pong/champion") == ours.find("champion", game="pong") == first
    with pytest.raises(ConfigError, match="not of other"):
        ours.find("pong/1", game="other")
    with pytest.raises(ConfigError, match="the newest are pong/1"):
        ours.find("pong/9")


def test_a_lost_entry_is_reported_and_costs_that_entry_only(tmp_path: Path):
    ours = registry(tmp_path)
    epoch = ours.takeover("pong", owner="test")
    for seed in range(3):
        ours.release(policy(seed), LINEAGE, epoch=epoch)
    assert ours.damage("pong") == {}
    lost = tmp_path / "registry" / "pong" / "0000000003.json"
    raw = lost.read_bytes()
    lost.unlink()
    fresh = registry(tmp_path)
    assert sorted(fresh.catalogue("pong").models) == [1, 3]
    assert "0000000003.json is missing" in fresh.damage("pong")["journal"]
    fresh.set_alias("pong", "champion", 3, why="test")
    assert fresh.release(policy(9), LINEAGE, epoch=epoch).model_no == 4
    assert fresh.takeover("pong", owner="another") > epoch
    assert not lost.exists(), "its number is not used for another entry"
    lost.write_bytes(raw)
    whole = registry(tmp_path)
    assert (sorted(whole.catalogue("pong").models), whole.damage("pong")) == ([1, 2, 3, 4], {})


@pytest.mark.parametrize("first_champion", [1, 2])
def test_a_champion_that_was_rolled_back_stays_so_if_the_release_of_the_other_is_damaged(
    tmp_path: Path, first_champion: int
):
    ours = registry(tmp_path)
    epoch = ours.takeover("pong", owner="learner")
    for seed in range(3):
        ours.release(policy(seed), LINEAGE, epoch=epoch)
    for number in dict.fromkeys((first_champion, 2, 3)):
        ours.set_alias("pong", "champion", number, why="better")
    assert ours.rollback("pong", why="it was not") == 2
    entry = tmp_path / "registry" / "pong" / "0000000003.json"
    entry.write_bytes(entry.read_bytes()[:-3])
    now = registry(tmp_path).catalogue("pong")
    assert now.model_of("champion") == (1 if first_champion == 1 else 0)
    assert 3 in now.discarded
    assert "replaced by pong/2, whose release cannot be read" in now.verdicts[3]
    assert "1 invalid entry, ignored" in registry(tmp_path).damage("pong")["journal"]
    assert "entry 3" in registry(tmp_path).damage("pong")["journal"]


def test_other_files_beside_the_specs_stop_nothing(tmp_path: Path):
    ours = registry(tmp_path)
    ours.register(GAME)
    for name in ("old.json", "notes.txt", "a" * 63 + ".json"):
        (tmp_path / "games" / GAME.game / name).write_bytes(b"stray")
    assert list(ours.specs(GAME.game)) == [GAME]
    assert ours.damage(GAME.game) == {}


def test_every_model_is_checked_on_request_and_forged_entries_are_reported(tmp_path: Path):
    ours = registry(tmp_path)
    epoch = ours.takeover("pong", owner="test")
    old, new = (ours.release(policy(seed), LINEAGE, epoch=epoch) for seed in (1, 2))
    ours.set_alias("pong", "champion", new.model_no, why="test")
    (tmp_path / "blobs" / f"{old.policy_sha256}.safetensors").unlink()
    assert ours.damage("pong") == {}
    assert list(ours.damage("pong", every=True)) == ["pong/1"]
    (tmp_path / "registry" / "pong" / "0000000005.json").write_bytes(b"{}")
    damage = registry(tmp_path).damage("pong")["journal"]
    assert "1 invalid entry, ignored" in damage
    assert "entry 5: not a signed document" in damage


def test_an_entry_of_a_newer_version_is_reported_with_the_advice_to_upgrade(tmp_path: Path):
    registry(tmp_path).takeover("pong", owner="test")
    journal = Journal(FolderObjects(tmp_path), "registry/pong")
    entry = {"journal": "registry/pong", "number": 2, "at_s": 0.0, "kind": "retire"}
    assert journal.append(2, SIGNER.sign({**entry, "line": 0, "before": ""}))
    damage = registry(tmp_path).damage("pong")["journal"]
    assert "entry 2: this version does not know entry kind 'retire'; install a newer" in damage


# --- Schemas --------------------------------------------------------------------------------------

UPDATED = game_spec("pong", obs=7, actions=3)
"""A later version of the game, with one more number in its observation."""


def two_schemas(folder: Path) -> tuple[Registry, int]:
    """Models 1 and 2 of the first schema, 3 and 4 of the second; 2 and 4 are champions."""
    ours = registry(folder)
    epoch = ours.takeover("pong", owner="a")
    for spec in (GAME, UPDATED):
        for seed in (0, 1):
            model_no = ours.release(
                random_policy(spec, "argmax", seed=seed), LINEAGE, epoch=epoch
            ).model_no
            ours.set_alias("pong", "champion", model_no, why="better")
    return ours, epoch


def test_each_schema_has_its_own_champion_and_history(tmp_path: Path):
    ours, epoch = two_schemas(tmp_path)
    now = ours.catalogue("pong")
    assert [now.model_of("champion", spec.schema) for spec in (GAME, UPDATED)] == [2, 4]
    assert (now.model_of("champion"), ours.find("pong/champion").model_no) == (4, 4)
    assert [now.previous_champion(spec.schema) for spec in (GAME, UPDATED)] == [1, 3]
    assert ours.rollback("pong", why="no", schema=GAME.schema[:8]) == 1
    now = ours.catalogue("pong")
    assert [now.model_of("champion", spec.schema) for spec in (GAME, UPDATED)] == [1, 4]
    assert now.model_of("champion") == 4, "the newest schema is that of the newest first champion"
    ours.clear_alias("pong", "champion", schema=GAME.schema, why="none", epoch=epoch)
    now = ours.catalogue("pong")
    assert (now.model_of("champion", GAME.schema), now.model_of("champion")) == (0, 4)
    assert [pointer.model_no for pointer in now.live("champion")] == [4]
    with pytest.raises(ConfigError, match="0 schemas of the models of pong start with 'x'"):
        ours.rollback("pong", why="", schema="x")


def test_each_schema_has_its_own_canary_which_can_be_withdrawn(tmp_path: Path):
    ours, _ = two_schemas(tmp_path)
    ours.set_alias("pong", "canary", 1, why="try", share=0.05)
    ours.set_alias("pong", "canary", 3, why="try")
    now = ours.catalogue("pong")
    pair = now.pointers(GAME.schema)
    assert [(pointer.model_no, pointer.share) for pointer in pair if pointer] == [
        (2, 0.0),
        (1, 0.05),
    ]
    newest = now.pointers()
    assert [(pointer.model_no, pointer.share) for pointer in newest if pointer] == [
        (4, 0.0),
        (3, 0.2),
    ]
    assert ours.withdraw("pong", why="enough", schema=GAME.schema) == 1
    assert ours.catalogue("pong").model_of("canary", UPDATED.schema) == 3
    assert ours.withdraw("pong", why="enough") == 3
    with pytest.raises(ConfigError, match="has no canary to withdraw"):
        ours.withdraw("pong", why="again")


def test_a_rollback_never_returns_to_what_was_rolled_back_or_withdrawn(tmp_path: Path):
    ours = registry(tmp_path)
    epoch = ours.takeover("pong", owner="a")
    for seed in range(5):
        ours.release(policy(seed), LINEAGE, epoch=epoch)
    for model_no in (1, 2, 3):
        ours.set_alias("pong", "champion", model_no, why="better")
    assert [ours.rollback("pong", why="bad") for _ in range(2)] == [2, 1]
    with pytest.raises(
        ConfigError,
        match=r"no previous champion to roll back to \(rolled back or withdrawn before: pong/2, "
        r"pong/3\); .* understudy models promote pong/NUMBER",
    ):
        ours.rollback("pong", why="bad")
    ours.set_alias("pong", "champion", 4, why="better")
    assert ours.rollback("pong", why="bad") == 1
    ours.set_alias("pong", "champion", 3, why="it was good after all")
    ours.set_alias("pong", "champion", 5, why="better")
    assert registry(tmp_path).rollback("pong", why="bad") == 3
    ours.set_alias("pong", "canary", 1, why="again")
    ours.withdraw("pong", why="bad")
    with pytest.raises(ConfigError, match="no previous champion"):
        ours.rollback("pong", why="bad")


def test_a_decision_about_a_canary_that_was_withdrawn_meanwhile_writes_nothing(tmp_path: Path):
    ours = registry(tmp_path)
    epoch = ours.takeover("pong", owner="a")
    for seed in (0, 1):
        ours.release(policy(seed), LINEAGE, epoch=epoch)
    ours.set_alias("pong", "champion", 1, why="the first")
    ours.set_alias("pong", "canary", 2, why="try", share=0.05)
    seen = ours.catalogue("pong").pointer("canary")
    assert seen is not None
    registry(tmp_path).withdraw("pong", why="bad")
    number = registry(tmp_path).catalogue("pong").number
    for write in (
        lambda: ours.set_alias("pong", "canary", 2, why="try", share=0.1, seen={"canary": seen}),
        lambda: ours.set_alias("pong", "champion", 2, why="better", seen={"canary": seen}),
        lambda: ours.clear_alias(
            "pong", "canary", schema=GAME.schema, why="worse", seen={"canary": seen}
        ),
    ):
        with pytest.raises(Refused, match="superseded: pong/2 is not the canary any more"):
            write()
    assert registry(tmp_path).catalogue("pong").number == number


def test_a_canary_with_a_new_share_is_the_same_trial(tmp_path: Path):
    clock = ManualClock()
    ours = Registry(FolderObjects(tmp_path), trusted=TRUSTED, signer=SIGNER, clock=clock)
    epoch = ours.takeover("pong", owner="a")
    for seed in (0, 1):
        ours.release(policy(seed), LINEAGE, epoch=epoch)
    seen = []
    for model_no, share in ((1, 0.05), (1, 0.1), (2, 0.05), (1, 0.05)):
        clock.advance(10.0)
        ours.set_alias("pong", "canary", model_no, why="try", share=share, epoch=epoch)
        now = ours.catalogue("pong")
        canary = now.pointer("canary")
        assert canary is not None
        seen.append((canary.number, canary.at_s - clock.now(), canary.share))
        assert now.trials[GAME.schema] == {0: 1, 1: 1, 2: 2, 3: 3}[len(seen) - 1]
    assert [at for _, at, _ in seen] == [0.0, -10.0, 0.0, 0.0]
    assert [share for *_, share in seen] == [0.05, 0.1, 0.05, 0.05]
    assert sorted(number for number, *_ in seen) == [number for number, *_ in seen]


def test_what_became_of_each_model_is_known_with_the_reason(tmp_path: Path):
    ours = registry(tmp_path)
    epoch = ours.takeover("pong", owner="a")
    for seed in range(5):
        ours.release(policy(seed), LINEAGE, epoch=epoch)
    ours.set_alias("pong", "champion", 1, why="the first")
    ours.set_alias("pong", "canary", 2, why="try it", share=0.05)
    ours.set_alias("pong", "canary", 3, why="try this")
    ours.set_alias("pong", "champion", 3, why="better")
    ours.clear_alias("pong", "canary", schema=GAME.schema, why="promote: better", epoch=epoch)
    ours.set_alias("pong", "canary", 4, why="try it")
    ours.clear_alias("pong", "canary", schema=GAME.schema, why="reject: worse", epoch=epoch)
    assert ours.catalogue("pong").verdicts == {
        1: "promoted: the first; replaced by pong/3",
        2: "undecided when pong/3 took its place",
        3: "promoted: better",
        4: "reject: worse",
    }
    ours.rollback("pong", why="by hand")
    verdicts = ours.catalogue("pong").verdicts
    assert verdicts[1] == "restored by a rollback: by hand"
    assert verdicts[3] == "promoted: better; rolled back to pong/1"


def test_an_entry_of_an_earlier_version_clears_the_newest_pointer(tmp_path: Path):
    """Earlier versions had one alias for all schemas, and named none when they cleared it."""
    ours, _ = two_schemas(tmp_path)
    entry = {"kind": "point", "alias": "champion", "model_no": 0, "why": "old"}
    ours._shared("pong").write(lambda _: entry)
    now = registry(tmp_path, signs=False).catalogue("pong")
    assert now.bad_entries == 0
    assert [now.model_of("champion", spec.schema) for spec in (GAME, UPDATED)] == [2, 0]


@pytest.mark.parametrize(
    "wrong",
    [
        {"share": 0},
        {"share": "half"},
        {"share": 2},
        {"model_no": 0, "schema": 7},
        {"control": 1},
        {"control": {"model_no": "1", "share": 0.05}},
        {"control": {"model_no": 1, "share": 0.5}},
    ],
)
def test_a_pointer_with_an_invalid_share_or_schema_is_skipped(
    tmp_path: Path, wrong: dict[str, object]
):
    ours, _ = two_schemas(tmp_path)
    entry = {"kind": "point", "alias": "canary", "model_no": 1, "why": "", **wrong}
    ours._shared("pong").write(lambda _: entry)
    now = registry(tmp_path, signs=False).catalogue("pong")
    assert (now.bad_entries, now.model_of("canary")) == (1, 0)
    assert "expected a" in now.last_bad_entry


def test_a_control_whose_release_cannot_be_read_or_has_another_schema_is_none(tmp_path: Path):
    ours, _ = two_schemas(tmp_path)
    for control in (3, 99):
        ours.set_alias("pong", "canary", 1, why="test", share=0.1, control=Control(control, 0.05))
        canary = ours.catalogue("pong").pointer("canary", ours.manifest("pong", 1).schema)
        assert canary is not None
        assert (canary.model_no, canary.control) == (1, None)
    ours.set_alias("pong", "canary", 1, why="test", share=0.1, control=Control(2, 0.05))
    now = ours.catalogue("pong")
    canary = now.pointer("canary", ours.manifest("pong", 1).schema)
    assert canary is not None
    assert canary.control == Control(2, 0.05)


def test_damage_of_every_schemas_champion_is_reported(tmp_path: Path):
    ours, _ = two_schemas(tmp_path)
    for model_no in (2, 4):
        name = ours.policy_object(ours.manifest("pong", model_no))
        (tmp_path / name).write_bytes(b"")
    damage = ours.damage("pong")
    assert sorted(damage) == ["champion", "champion pong/2"]
    assert damage["champion"].endswith("understudy models rollback pong")
    assert damage["champion pong/2"].endswith(
        f"understudy models rollback pong --schema {GAME.schema[:12]}"
    )


def test_the_noise_of_skills_is_published_by_schema_and_only_by_the_current_learner(tmp_path: Path):
    ours = registry(tmp_path)
    epoch = ours.takeover("pong", owner="a")
    ours.release(policy(), LINEAGE, epoch=epoch)
    ours.set_noise("pong", 1, {"easy": 0.6, "even": 0.2}, episodes=20, epoch=epoch)
    ours.set_noise("pong", 1, {"easy": 0.7, "even": 0.3}, episodes=25, epoch=epoch)
    now = registry(tmp_path, signs=False).catalogue("pong")
    (published,) = now.noise.values()
    assert now.noise.keys() == {GAME.schema}
    assert (published.noise, published.model_no, published.episodes) == (
        {"easy": 0.7, "even": 0.3},
        1,
        25,
    )
    with pytest.raises(Refused, match="expected a number from 0 to 1 for each of easy, even"):
        ours.set_noise("pong", 1, {"easy": 2.0, "even": 0.3}, episodes=30, epoch=epoch)
    ours.takeover("pong", owner="b")
    with pytest.raises(Fenced):
        ours.set_noise("pong", 1, {"easy": 0.6, "even": 0.2}, episodes=30, epoch=epoch)
    assert registry(tmp_path).catalogue("pong").bad_entries == 0


def test_the_share_of_exploring_episodes_is_published_with_the_noise(tmp_path: Path):
    ours = registry(tmp_path)
    epoch = ours.takeover("pong", owner="a")
    ours.release(policy(), LINEAGE, epoch=epoch)
    noise = {"easy": 0.6, "even": 0.2}
    shares = []
    for share in (0.0, 0.05, 0.0, 0.6):
        ours.set_noise("pong", 1, noise, episodes=20, epoch=epoch, explore_share=share)
        shares.append(ours.catalogue("pong").noise[GAME.schema].explore_share)
    assert shares == [0.0, 0.05, 0.0, 0.0]
    assert "explore_share is '0.6'" in ours.catalogue("pong").last_bad_entry
