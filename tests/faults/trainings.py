"""Trainings under faults, from outside: start processes, wait for them, inspect their files."""

import contextlib
import csv
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from tests.faults.forker import Fault, Job
from tests.faults.processes import environment
from understudy.act.actor import Actor
from understudy.backends.data import DataFolder
from understudy.experience.chunk import Chunk
from understudy.experience.game import GameSpec
from understudy.ingest.specs import SpecFolder
from understudy.learn.algorithms.dqn import Dqn
from understudy.nn.policy import decode_policy
from understudy.ports import Audit, Candidate, Stored, WriteBatch
from understudy.stores.local import LocalStore
from understudy.stores.view import StoreView
from understudy.training.env_info import GameChoice, inspect_env
from understudy.training.folder import RunFolder
from understudy.training.training_job import Checkpoint, decode_checkpoint

# Programs that trainings in this process compile are loaded by every later one, in whatever
# process.
os.environ.setdefault(
    "UNDERSTUDY_COMPILE_CACHE", str(Path(tempfile.gettempdir()) / "understudy-tests-compiled")
)

_CLOCKS = {"train_s", "eval_s", "compile_s", "startup_s"}


@dataclass(frozen=True, slots=True)
class Ended:
    """How a training ended."""

    code: int
    result: Mapping[str, Any]
    errors: str
    died: Mapping[str, Any]
    """Where it was when it killed itself: the step, and in which call."""


class Forker:
    """A process that forks one for each training; see `tests/faults/forker.py`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._jobs = 0
        folder.mkdir(parents=True, exist_ok=True)
        # Compiled once, by whoever comes first. A folder of its own: who is killed may leave half a
        # program there.
        cache = {"UNDERSTUDY_COMPILE_CACHE": str(folder / "compiled")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.forker"],
            env=environment() | cache,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def start(self, arguments: Sequence[str | Path], fault: Fault | None = None) -> "Training":
        """A training that runs from now on; `understudy train`'s own words."""
        self._jobs += 1
        words = ["train", *(str(one) for one in arguments), "--json"]
        job = Job(
            arguments=words,
            answer=str(self._folder / f"job{self._jobs}"),
            fault=asdict(fault) if fault else {},
        )
        return Training(self, job, self.ask(asdict(job))["pid"])

    def run(self, arguments: Sequence[str | Path], fault: Fault | None = None) -> Ended:
        """A whole training, to its end."""
        ended = self.start(arguments, fault).wait()
        assert ended is not None, "it stopped instead of ending"
        return ended

    def ask(self, order: Mapping[str, Any]) -> Mapping[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Mapping[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the forker ended with {self._process.wait(10)}"
        answer: Mapping[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait(30)


class Training:
    """One training that was started."""

    def __init__(self, forker: Forker, job: Job, pid: int) -> None:
        self._forker = forker
        self._job = job
        self.pid = pid

    def wait(self) -> Ended | None:
        """How it ended; None when it was stopped (SIGSTOP) instead."""
        answer = self._forker.ask({"wait": self.pid})
        if answer["is_stopped"]:
            return None
        job = self._job
        lines = Path(job.answer).read_text().strip().splitlines()
        died = json.loads(job.died.read_text()) if job.died.exists() else {}
        return Ended(
            answer["code"], json.loads(lines[-1]) if lines else {}, job.errors.read_text(), died
        )

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        """End it, whatever state it is in."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
            self.wait()


# --- what a run leaves ----------------------------------------------------------------------------


def every_file_reads(run: Path) -> Sequence[Checkpoint]:
    """The checkpoints there, each of which must read; so must the policies and the facts."""
    found = [
        decode_checkpoint(path.read_bytes())
        for path in sorted((run / "checkpoints").glob("*.safetensors"))
    ]
    for path in run.glob("*.safetensors"):
        decode_policy(path.read_bytes())
    json.loads((run / "run.json").read_text())
    return found


def traces(run: Path) -> dict[str, Any]:
    """Everything of an ended run that another run with the same settings and seed must have too."""
    checkpoints = every_file_reads(run)
    result = json.loads((run / "result.json").read_text())
    with (run / "curve.csv").open(newline="") as file:
        curve = [
            {name: text for name, text in row.items() if name != "train_s"}
            for row in csv.DictReader(file)
        ]
    left_out = {*_CLOCKS, "run", "policy", "resumed_at_step"}
    return {
        "last": (run / "last.safetensors").read_bytes(),
        "best": RunFolder(run).policy_path().read_bytes(),
        "result": {name: value for name, value in result.items() if name not in left_out},
        "curve": curve,
        "checkpoints": [_comparable(one) for one in checkpoints],
        "stored": stored(run),
        "files": sorted(path.name for path in run.iterdir()),
    }


def _comparable(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """All of a checkpoint but the time of day: clocks, and the ids of sessions."""
    arrays = {
        name: (array.dtype.str, array.shape, array.tobytes())
        for name, array in checkpoint.arrays.items()
        if not name.endswith("sessions")
    }
    facts = json.loads(json.dumps(checkpoint.facts))
    for clock in _CLOCKS:
        facts["training"].pop(clock, None)
    facts.get("actor", {}).pop("sessions", None)
    return {"env_steps": checkpoint.env_steps, "facts": facts, **arrays}


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Where two runs' traces are not the same, in words."""
    found = [name for name in one if name != "checkpoints" and one[name] != other[name]]
    if len(one["checkpoints"]) != len(other["checkpoints"]):
        return [*found, "number of checkpoints"]
    for mine, theirs in zip(one["checkpoints"], other["checkpoints"], strict=True):
        found += [
            f"checkpoint: {name}"
            for name in mine.keys() | theirs.keys()
            if mine.get(name) != theirs.get(name)
        ]
    return found


def chunks_in(run: Path) -> Iterator[Chunk]:
    """Everything in the run's own store that a learner may sample."""
    if not (run / "store").exists():
        return
    with StoreView(run / "store") as view:
        cursor = None
        while True:
            page = view.tail(cursor, max_items=1024, wait_s=0.0)
            if not page.items:
                return
            cursor = page.cursor
            yield from (
                item.chunk
                for item in page.items
                if isinstance(item, Stored) and item.chunk is not None
            )


def stored(run: Path) -> dict[tuple[int, int], int]:
    """Env, number and checksum of each chunk in the run's store; fails on a duplicate."""
    found: dict[Any, int] = {}
    for chunk in chunks_in(run):
        key = (chunk.meta.session, chunk.meta.chunk_no)
        assert key not in found, f"{key} is stored twice"
        found[key] = hash(
            tuple((name, column.tobytes()) for name, column in sorted(chunk.columns.items()))
        )
    order = {session: at for at, session in enumerate(sorted({session for session, _ in found}))}
    return {(order[session], number): crc for (session, number), crc in found.items()}


def store_audit(run: Path) -> Audit:
    """What a full check of the run's own store finds."""
    with LocalStore(run / "store", specs=NoSpecs()) as store:
        return store.audit()


class NoSpecs:
    """For stores that are only looked at."""

    def spec(self, game: str, schema: str) -> GameSpec | None:
        return None

    def has_game(self, game: str) -> bool:
        return True


# --- what runs learn from -------------------------------------------------------------------------


PLAYERS = [bytes([number]) * 16 for number in range(4)]


def fill_store(data: DataFolder, *, steps: int) -> None:
    """CartPole-v1 as four players played it, `steps` steps each, half of them at random."""
    choice = GameChoice(game="CartPole-v1")
    game = inspect_env(choice).spec
    envs = choice.make(len(PLAYERS))
    path = data.games / game.game / f"{game.schema}.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(game.to_json())
    algorithm = Dqn(game)
    policy = algorithm.policy(algorithm.init(jax.random.PRNGKey(0)))
    actor = Actor(envs, game, root_seed=5, created_ms=1_700_000_000_000)
    with contextlib.closing(envs), LocalStore(data.store, specs=SpecFolder(data.games)) as store:
        claim = store.claim("p", owner="test", ttl_s=60.0)
        for round_no in range(steps // 64):
            chunks = actor.collect(policy, 64, round_no=round_no, explore=0.5).chunks
            candidates = [
                Candidate(chunk.frame().stamped(player, 1_700_000_001), chunk)
                for player, chunk in zip(PLAYERS, chunks, strict=True)
            ]
            store.write(WriteBatch("p", claim.epoch, None, candidates))
