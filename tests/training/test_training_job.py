"""Checkpoints: what was saved is read again bit by bit, or not at all; a kill at any moment
leaves one that reads."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from understudy.core.errors import ConfigError, Corrupt, StorageFull
from understudy.core.log import write_file
from understudy.testing import Crash
from understudy.training.training_job import Checkpoint, Checkpoints, decode_checkpoint

ARRAYS: dict[str, Any] = {
    "state.leaf0000": np.arange(6, dtype=np.float32).reshape(2, 3),
    "state.leaf0001": np.array(7, np.int32),
    "source.masses": np.linspace(0, 1, 5),
    "source.sessions": np.zeros((0, 16), np.uint8),
    "key": np.array([1, 2], np.uint32),
    "flags": np.array([True, False]),
}
FACTS = {"counts": {"updates": 12, "rate_scale": 0.5}, "source": {"limiter": None}, "name": "ünder"}


def checkpoint(env_steps: int = 128) -> Checkpoint:
    return Checkpoint(env_steps, ARRAYS, FACTS)


def assert_same(found: Checkpoint | None, wanted: Checkpoint) -> None:
    assert found is not None
    assert (found.env_steps, found.facts, found.arrays.keys()) == (
        wanted.env_steps,
        wanted.facts,
        wanted.arrays.keys(),
    )
    for name, array in wanted.arrays.items():
        assert (found.arrays[name].dtype, found.arrays[name].shape) == (array.dtype, array.shape)
        assert found.arrays[name].tobytes() == array.tobytes()


def test_a_checkpoint_is_read_as_it_was_written():
    assert_same(decode_checkpoint(checkpoint().encode()), checkpoint())


def test_no_changed_byte_goes_unseen():
    raw = checkpoint().encode()
    rng = np.random.default_rng(0)
    for at in range(len(raw)):
        changed = bytearray(raw)
        changed[at] ^= int(rng.integers(1, 256))
        with pytest.raises(Corrupt):
            decode_checkpoint(bytes(changed))


@pytest.mark.parametrize("length", [0, 1, 7, 8, 100, -1])
def test_a_shortened_file_is_corrupt(length):
    with pytest.raises(Corrupt):
        decode_checkpoint(checkpoint().encode()[:length])


def test_a_header_that_could_not_be_read_again_is_not_written(tmp_path: Path, monkeypatch):
    header_bytes = int.from_bytes(checkpoint().encode()[:8], "little")
    monkeypatch.setattr("understudy.training.training_job._MAX_HEADER_BYTES", header_bytes)
    assert_same(decode_checkpoint(checkpoint().encode()), checkpoint())
    with pytest.raises(ConfigError, match=f"at most {header_bytes} can be read"):
        Checkpoints(tmp_path).save(Checkpoint(128, ARRAYS, {**FACTS, "long": "x" * 64}))
    assert list(tmp_path.iterdir()) == []


# --- A folder of them -----------------------------------------------------------------------------


def test_the_newest_checkpoint_is_used_and_only_a_few_are_kept(tmp_path: Path):
    held = Checkpoints(tmp_path / "deep" / "checkpoints", keep=2)
    assert held.latest() is None
    for env_steps in (256, 1_024, 90_000):
        path = held.save(checkpoint(env_steps))
        assert_same(held.latest(), checkpoint(env_steps))
    assert sorted(one.name for one in path.parent.iterdir()) == [
        "000000001024.safetensors",
        "000000090000.safetensors",
    ]


def test_a_damaged_checkpoint_is_skipped_for_the_one_before(tmp_path: Path):
    held = Checkpoints(tmp_path)
    held.save(checkpoint(1))
    held.save(checkpoint(2)).write_bytes(checkpoint(2).encode()[:-3])
    (tmp_path / "notes.txt").write_text("not ours")
    assert_same(held.latest(), checkpoint(1))


def test_where_none_reads_the_error_names_them_all(tmp_path: Path):
    held = Checkpoints(tmp_path)
    for env_steps in (1, 2):
        held.save(checkpoint(env_steps)).write_bytes(b"rubbish")
    with pytest.raises(Corrupt, match=r"000000000002.safetensors.*000000000001.safetensors"):
        held.latest()


def killed_at(monkeypatch: pytest.MonkeyPatch, moment: int) -> list[str]:
    """From now on this process dies at the given call to the disk; the list fills with the calls
    it made."""
    calls: list[str] = []

    def dying(name: str) -> Any:
        real = getattr(os, name)

        def call(*given: Any, **more: Any) -> Any:
            calls.append(name)
            if len(calls) > moment:
                if name == "write":
                    real(given[0], bytes(given[1])[:40])  # some bytes of it reach the disk
                raise Crash
            return real(*given, **more)

        return call

    for name in ("open", "write", "fsync", "replace", "unlink"):
        monkeypatch.setattr(os, name, dying(name))
    return calls


@pytest.mark.parametrize("moment", range(10))
def test_a_kill_during_save_leaves_a_readable_checkpoint_and_nothing_else(
    tmp_path: Path, monkeypatch, moment
):
    held = Checkpoints(tmp_path, keep=1)
    held.save(checkpoint(1))
    with monkeypatch.context() as patch:
        calls = killed_at(patch, moment)
        try:
            held.save(checkpoint(2))
        except Crash:
            pass
        else:
            assert len(calls) <= moment
    found = held.latest()
    assert found is not None
    assert_same(found, checkpoint(found.env_steps))
    if "replace" in calls[:moment]:
        assert found.env_steps == 2
    held.save(checkpoint(3))
    assert [one.name for one in tmp_path.iterdir()] == ["000000000003.safetensors"]


def test_a_full_disk_leaves_the_checkpoint_before_and_no_file_of_its_own(
    tmp_path: Path, monkeypatch
):
    held = Checkpoints(tmp_path)
    held.save(checkpoint(1))
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "no room")))
        with pytest.raises(StorageFull, match="no room"):
            held.save(checkpoint(2))
    assert [one.name for one in tmp_path.iterdir()] == ["000000000001.safetensors"]
    assert_same(held.latest(), checkpoint(1))


def test_only_checkpoints_are_deleted_and_the_folder_if_nothing_else_is_in_it(tmp_path: Path):
    held = Checkpoints(tmp_path / "held")
    held.save(checkpoint(1))
    note = tmp_path / "held" / "note.txt"
    note.write_text("mine")
    held.delete()
    assert list((tmp_path / "held").iterdir()) == [note]
    note.unlink()
    held.save(checkpoint(2))
    held.delete()
    assert not (tmp_path / "held").exists()


def test_saving_again_at_the_same_step_replaces(tmp_path: Path):
    held = Checkpoints(tmp_path)
    path = held.save(checkpoint(5))
    write_file(path, b"damage")
    held.save(checkpoint(5))
    assert_same(held.latest(), checkpoint(5))
