"""A run's own store: it keeps what the two newest checkpoints may ask for, whenever it is killed,
and its file stops growing."""

import contextlib
import functools
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import understudy
from tests.experience.chunks import chunk_with
from tests.faults.profiles import sizes
from tests.learn.sessions import session_id
from tests.platform.switches import GAME as SWITCHES
from tests.platform.switches import QUICK
from tests.stores.local_stores import dies_in_a_child
from understudy.algorithm import Transitions
from understudy.core.errors import ConfigError
from understudy.core.tensors import Array
from understudy.experience.chunk import Chunk, ChunkId
from understudy.experience.game import game_spec
from understudy.experience.spaces import Box
from understudy.learn.replay import HostReplay
from understudy.replay import ReplayConfig
from understudy.stores.database import FILE_NAME
from understudy.stores.view import StoreView
from understudy.testing.clock import ManualClock
from understudy.training.run_store import RunStore
from understudy.training.train import Run
from understudy.training.training_job import Checkpoint, Checkpoints, decode_checkpoint

FRAME = (42, 42)  # float32, which is not compressed: the bytes of an image of 84x84 pixels
IMAGES = game_spec("images", obs=Box(FRAME, np.dtype(np.float32)), actions=2)
SMALL = game_spec("small", obs=Box((4,), np.dtype(np.float32)), actions=2)
STEPS = 32
"""Per chunk."""

CAPACITY = 512
EVERY = 256
ROUND = 256
SETTINGS: dict[str, Any] = QUICK | {
    "capacity": CAPACITY,
    "checkpoint_every": EVERY,
    "min_inserts": 256,
    "epsilon": 0.1,
    "importance_exponent": 0.5,
}


def trained(out: Path, *, steps: int = 2_048, **settings: Any) -> Run:
    """A dqn run of eight envs, whose replay wraps around several times."""
    return understudy.train(
        SWITCHES, algorithm="dqn", seed=3, steps=steps, out=out, settings=SETTINGS | settings
    )


class Played:
    """What a run does with the chunks of its actors: two envs, which play for ever."""

    def __init__(self, folder: Path, *, game: Any, capacity: int) -> None:
        self._game = game
        self.replay = HostReplay(
            game, Transitions(batch=8, n_step=3, prioritised=False), ReplayConfig(capacity=capacity)
        )
        self._store = folder / "store"
        self.history = RunStore(self._store, game, clock=ManualClock())
        self._checkpoints = Checkpoints(folder / "checkpoints")
        self.steps = 0
        self.sizes_before_trim = Counter[str]()  # the largest so far
        self.sizes_after_trim = Counter[str]()
        shape = (4_096, *game.obs_columns["obs"].shape)
        self._noise = np.random.default_rng(5).random(shape, np.float32)

    def chunk(self) -> Chunk:
        """The next chunk, which depends only on the steps before it."""
        number, env = divmod(self.steps // STEPS, 2)
        row = np.zeros(STEPS + 1, np.uint8)
        row[-1] = 2
        nothing = np.zeros(STEPS + 1, np.bool_)
        columns = {
            "obs": self._noise[(first := self.steps % 4_000) : first + STEPS + 1],
            "action": np.zeros(STEPS + 1, np.int32),
            "reward": np.ones(STEPS + 1, np.float32) * (row == 0),
            "is_first": nothing if number else np.arange(STEPS + 1) == 0,
            "terminated": nothing,
            "truncated": nothing,
            "row": row,
        }
        facts: dict[str, Any] = {"game": self._game.game, "session": session_id(env)}
        facts |= {"first_step": number * STEPS, "kind": "actor", "consent": "granted"}
        return chunk_with(columns, chunk_no=number, schema=self._game.schema, **facts)

    def play(self, steps: int) -> None:
        for _ in range(steps // STEPS):
            chunk = self.chunk()
            self.history.add([chunk])
            self.replay.insert(chunk)
            self.steps += STEPS

    def save(self) -> None:
        """Save a checkpoint, as `Training` does."""
        self.history.flush()
        arrays, facts = self.replay.state()
        self._checkpoints.save(Checkpoint(self.steps, arrays, facts))
        self.sizes_before_trim |= self._sizes()
        self.history.trim(self.replay.needed_chunks())
        self.sizes_after_trim |= self._sizes()

    def _sizes(self) -> Counter[str]:
        """The bytes of each file of the store."""
        return Counter({path.name: path.stat().st_size for path in self._store.iterdir()})

    def resume(self, path: Path | None = None) -> None:
        """Resume from the newest checkpoint, or from this one."""
        saved = self._checkpoints.latest() if path is None else decode_checkpoint(path.read_bytes())
        assert saved is not None
        self.replay.restore(saved.arrays, saved.facts, self.history.read)
        self.steps = saved.env_steps

    def rows(self) -> tuple[dict[str, Array], Array]:
        """The replay: where each chunk is, and the observations that may be sampled."""
        rows = np.sort(self.replay._masses.rows)  # type: ignore[union-attr]
        return self.replay.state()[0], self.replay._columns["obs"][rows]


@contextlib.contextmanager
def played(folder: Path, *, game: Any = SMALL, capacity: int = 512) -> Iterator[Played]:
    run = Played(folder, game=game, capacity=capacity)
    with contextlib.closing(run.history):
        yield run


def assert_same(run: Played, other: Played) -> None:
    (places, obs), (other_places, other_obs) = run.rows(), other.rows()
    assert run.steps == other.steps
    assert obs.tobytes() == other_obs.tobytes()
    assert {name: array.tobytes() for name, array in places.items()} == {
        name: array.tobytes() for name, array in other_places.items()
    }


def stored_steps(run: Path) -> int:
    with StoreView(run / "store") as view:
        return sum(view.counts().steps_by_game.values())


def checkpoints(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("*.safetensors"))


# --- How much it keeps ----------------------------------------------------------------------------


@sizes("steps", short=50_000, full=500_000)
def test_its_file_stays_below_one_and_a_half_times_the_bytes_of_the_replay(
    tmp_path: Path, steps: int
):
    capacity = steps // 10
    every = capacity // 5
    replay_bytes = capacity * int(np.prod(FRAME)) * 4
    with played(tmp_path, game=IMAGES, capacity=capacity) as run:
        while run.steps < steps:
            run.play(every)
            run.save()
    sizes = [run.sizes_before_trim, run.sizes_after_trim]
    assert max(size[FILE_NAME] for size in sizes) < 1.5 * replay_bytes
    # The rest, SQLite's log and the space for a full disk, has the same size in every run.
    rest_bytes = max(size.total() - size[FILE_NAME] for size in sizes)
    assert rest_bytes < 64 * 2**20
    if steps == 500_000:
        assert max(size.total() for size in sizes) < 1.5 * replay_bytes
    assert stored_steps(tmp_path) <= capacity + every + 2 * STEPS


def test_a_run_keeps_what_its_two_newest_checkpoints_need_or_everything_if_asked(tmp_path: Path):
    kept = {}
    for keep_history in (False, True):
        run = trained(tmp_path / str(keep_history), keep_history=keep_history)
        assert run.result["env_steps"] == 2_048
        kept[keep_history] = stored_steps(run.folder)
    assert kept[True] == 2_048
    assert CAPACITY / 2 < kept[False] <= CAPACITY + EVERY + ROUND


def test_a_resumed_run_keeps_the_choice_that_it_was_started_with(tmp_path: Path):
    run = trained(tmp_path / "R", steps=1_024, keep_history=True)
    longer = understudy.train(out=run.folder, resume=True, steps=2_048)
    assert stored_steps(longer.folder) == 2_048
    with pytest.raises(ConfigError, match="was started with keep_history true, not false"):
        understudy.train(out=run.folder, resume=True, settings={"keep_history": False})
    # A run of an earlier version, whose preset does not have the setting.
    preset = run.folder / "preset.toml"
    lines = preset.read_text().splitlines(keepends=True)
    preset.write_text("".join(line for line in lines if not line.startswith("keep_history")))
    longer = understudy.train(out=run.folder, resume=True, steps=3_072)
    assert stored_steps(longer.folder) == 3_072


# --- What a resume finds --------------------------------------------------------------------------


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_kill_at_any_moment_leaves_both_checkpoints_resumable(
    every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("understudy.stores.local._SLICE_ROWS", 3)  # several transactions
    whole = {}
    for saves in (4, 5, 6):
        with played(tmp_path / f"whole-{saves}") as run:
            for _ in range(saves):
                run.play(256)
                run.save()
            whole[run.steps] = run

    def work(folder: Path) -> None:
        with played(folder) as run:
            run.resume()
            run.play(256)
            run.save()

    with played(tmp_path / "start") as run:
        for _ in range(5):
            run.play(256)
            run.save()
    (tmp_path / "start" / "store" / "reserve").unlink()  # slow to copy
    step = 1
    n_left = set()
    killed = tmp_path / "killed"
    while True:
        shutil.copytree(tmp_path / "start", killed)
        has_died = dies_in_a_child(functools.partial(work, killed), at=step)
        assert len(checkpoints(killed)) >= 2
        n_left.add(stored_steps(killed))
        for path in checkpoints(killed)[-2:]:
            with played(killed) as resumed:
                resumed.resume(path)
                assert_same(resumed, whole[resumed.steps])
        shutil.rmtree(killed)
        if not has_died:
            break
        step += every
    assert n_left == {640, 896, 896 - 3 * STEPS, 896 - 6 * STEPS}


def test_a_run_goes_back_to_the_older_checkpoint_if_the_newest_one_is_damaged(tmp_path: Path):
    whole = trained(tmp_path / "whole")
    weights = (whole.folder / "last.safetensors").read_bytes()
    older, newest = checkpoints(whole.folder)
    newest.write_bytes(newest.read_bytes()[:-1])
    (whole.folder / "result.json").unlink()
    again = understudy.train(out=whole.folder, resume=True)
    assert again.result["resumed_at_step"] == int(older.stem)
    assert (whole.folder / "last.safetensors").read_bytes() == weights
    assert again.result["updates"] == whole.result["updates"]


def test_a_checkpoint_that_is_saved_again_leaves_the_one_before_it_resumable(tmp_path: Path):
    """As by a run that was killed between its last checkpoint and its result."""
    with played(tmp_path) as run:
        for _ in range(5):
            run.play(256)
            run.save()
        run.save()
    with played(tmp_path) as run:
        run.resume()
        run.save()
    for path in checkpoints(tmp_path):
        with played(tmp_path) as run:
            run.resume(path)


def test_a_checkpoint_without_chunks_keeps_all_that_is_played_after_it(tmp_path: Path):
    with played(tmp_path) as run:
        run.save()
        for _ in range(2):
            run.play(2_048)
            run.save()
        assert stored_steps(tmp_path) < 4_096
    with played(tmp_path / "other") as run:
        run.save()
        run.play(2_048)
        run.save()
        assert stored_steps(tmp_path / "other") == 2_048


# --- Quarantine -----------------------------------------------------------------------------------


def test_a_quarantined_chunk_stays_known_and_readable_while_a_checkpoint_names_it(tmp_path: Path):
    with played(tmp_path) as run:
        run.play(512)
        run.save()
        bad: list[ChunkId] = [(session_id(0), 3), (session_id(1), 7)]
        run.history.quarantine(bad, reason="not_finite")
        for key in bad:
            run.replay.evict(*key)
        run.play(256)
        run.save()
        older, newest = checkpoints(tmp_path)
    for path in (older, newest):
        with played(tmp_path) as resumed:
            resumed.resume(path)
    with played(tmp_path) as run:
        run.resume()
        assert not {*bad} & {*run.replay.chunk_ids()}
        for _ in range(8):
            run.play(256)
            run.save()
        assert run.history.quarantined == bad
        audit = run.history._store.audit()
        assert (list(audit.corrupt), audit.gap_chunks, audit.duplicate_chunks) == ([], 0, 0)
        assert audit.chunks < 40
