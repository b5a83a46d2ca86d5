"""Fills a large store with image chunks and measures how size affects it; not in `make bench`.

    python bench/large_store.py            20 GB and a million sessions; writes
                                           bench/results/large_store.json
    python bench/large_store.py --quick    1 GB and 50,000 sessions; writes nothing
                                           unless --out is given

Measures: opening after a clean close and after kill -9; how soon another process reads a write,
while checkpoints run; the write-ahead log under ten readers; returning space to the file system;
the writer's memory with many sessions. Writers and readers are separate processes. The temporary
folder (TMPDIR) needs space for one and a half times the store.
"""

import contextlib
import itertools
import sys
import time
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # Run as a file, sys.path starts with bench/; replace it with the folder that contains bench/.
    sys.path[0] = str(ROOT)

import numpy as np  # noqa: E402

from bench.figures import Figure, Findings, Gate, all_of, percentiles  # noqa: E402
from bench.games import PLAYER, SCREEN, noise, session_frames  # noqa: E402
from bench.lag import child, close, line  # noqa: E402
from bench.one_pass import run_once  # noqa: E402
from bench.store import IMAGE_STEPS  # noqa: E402
from understudy.core.names import new_session  # noqa: E402
from understudy.core.tensors import DTYPES, Array  # noqa: E402
from understudy.experience.chunk import Chunk, chunk_of  # noqa: E402
from understudy.experience.frame import Frame, data_frame  # noqa: E402
from understudy.experience.game import GameSpec, game_spec  # noqa: E402
from understudy.experience.spaces import Box  # noqa: E402
from understudy.platform.children import report, stop_with_parent  # noqa: E402
from understudy.ports import Candidate, Cursor, Position, Stored, WriteBatch  # noqa: E402
from understudy.stores.database import FILE_NAME  # noqa: E402
from understudy.stores.local import LocalStore  # noqa: E402
from understudy.stores.view import StoreView  # noqa: E402

_MODULE = "bench.large_store"
_PROBE = game_spec("bench-probe", obs=Box((1,), DTYPES["F64"]), actions=2)
"""The game of the probes: a step's observation is the time at which the store received it."""
_CHUNKS_A_COMMIT = 8
_READERS = 10
_OLD_S = 10_000
"""How much earlier than the rest the first tenth of a store was received."""
_SESSIONS_A_COMMIT = 512
_COMMITS_S = 10.0
"""Commits per second while visibility is measured: 19 MB/s, which one reader can decode."""
_GOAL_MS = 150.0
_GOAL_LOG_MB = 256.0
_GOAL_SLICE_MS = 50.0
_GOAL_GROWTH_MB = 50.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large a run is."""

    gigabytes: float
    sessions: int
    watched_s: float
    """Duration of each of two measurements: visibility, and then the write-ahead log."""


SIZES = {
    "full": Size(gigabytes=20.0, sessions=1_000_000, watched_s=60.0),
    "quick": Size(gigabytes=1.0, sessions=50_000, watched_s=15.0),
    "tiny": Size(gigabytes=0.02, sessions=1_000, watched_s=1.0),
}


def main() -> int:
    """Measure a large store, then many sessions; 0 if every gate passed."""
    return run_once(
        "large_store",
        about=__doc__,
        sizes=SIZES,
        parts={"store": measure, "sessions": measure_sessions},
    )


def measure(folder: Path, size: Size, findings: Findings) -> None:
    """Measure one store, from its first commit to its compaction."""
    target_bytes = int(size.gigabytes * 1e9)
    with child(_MODULE, "write", folder, target_bytes) as writer:
        wrote = line(writer)
    opened = _open(folder)
    stored = all_of(("every commit is stored", opened["next_arrival"] == wrote["next_arrival"]))
    _add(
        findings,
        "fill",
        "MB/s",
        wrote["bytes"] / 1e6 / wrote["seconds"],
        stored,
        more_is_better=True,
    )
    large = f"a store of {_file(folder).stat().st_size / 1e9:.1f} GB"
    _add(findings, f"open {large} after a clean close", "s", opened["seconds"], stored)

    with child(_MODULE, "write", folder, 0) as writer:
        for _ in range(20):
            acknowledged = line(writer)["next_arrival"]
        writer.kill()
    log_mb = _log_mb(folder)
    opened = _open(folder)
    gate = all_of(("every acknowledged commit is stored", opened["next_arrival"] >= acknowledged))
    what = f"open {large} after kill -9, {log_mb:.0f} MB of log"
    _add(findings, what, "s", opened["seconds"], gate)

    _measure_visibility(findings, folder, size)
    _measure_log(findings, folder, size)
    with child(_MODULE, "compact", folder) as compacting:
        facts = line(compacting)
    gate = all_of(
        (
            "the oldest tenth expired and the file shrank",
            facts["expired"] > 0 and facts["bytes"] > 0,
        )
    )
    _add(
        findings,
        "expire the oldest tenth",
        "MB/s",
        facts["expired_mb"] / facts["expire_s"],
        gate,
        more_is_better=True,
    )
    what = f"compact, {facts['bytes'] / 1e6:.0f} MB in {facts['slices']} slices"
    _add(
        findings,
        f"{what}: slice p99",
        "ms",
        facts["p99_ms"],
        gate,
        goal=_GOAL_SLICE_MS,
        bound_by="a sync and a checkpoint",
    )
    _add(findings, f"{what}: longest slice", "ms", facts["longest_ms"], gate)


def _measure_visibility(findings: Findings, folder: Path, size: Size) -> None:
    with (
        child(_MODULE, "watch", folder) as reader,
        child(_MODULE, "write", folder, 0, _COMMITS_S) as writer,
    ):
        line(reader)
        end_s = time.monotonic() + size.watched_s
        n_commits = 0
        while time.monotonic() < end_s:
            line(writer)
            n_commits += 1
        writer.kill()
        lag_ms = np.asarray(close(reader)["lag_ms"])
    gate = all_of((f"{n_commits} acknowledged commits seen", len(lag_ms) >= n_commits))
    lag = percentiles(lag_ms)
    name = "write to visible in another process, checkpoints included"
    _add(findings, f"{name}: p50", "ms", lag.p50, gate)
    bound = "one sync, the copy of a page, the reader's poll"
    _add(findings, f"{name}: p99", "ms", lag.p99, gate, goal=_GOAL_MS, bound_by=bound)


def _measure_log(findings: Findings, folder: Path, size: Size) -> None:
    largest_mb = 0.0
    with contextlib.ExitStack() as running:
        readers = [running.enter_context(child(_MODULE, "tail", folder)) for _ in range(_READERS)]
        for reader in readers:
            line(reader)
        with child(_MODULE, "write", folder, 0) as writer:
            end_s = time.monotonic() + size.watched_s
            while time.monotonic() < end_s:
                line(writer)
                largest_mb = max(largest_mb, _log_mb(folder))
            writer.kill()
        read = [close(reader)["chunks"] for reader in readers]
    gate = all_of((f"each of {_READERS} readers read", min(read) > 0))
    what = f"largest write-ahead log under {_READERS} readers"
    bound = "the longest page that a reader holds"
    _add(findings, what, "MB", largest_mb, gate, goal=_GOAL_LOG_MB, bound_by=bound)


def measure_sessions(folder: Path, size: Size, findings: Findings) -> None:
    """The writer's memory must not grow with the number of sessions."""
    with child(_MODULE, "sessions", folder, size.sessions) as writer:
        facts = line(writer)
    gate = all_of((f"{size.sessions:,} sessions stored", facts["sessions"] == size.sessions))
    what = f"the writer's memory, after a tenth of {size.sessions:,} sessions"
    _add(findings, what, "MB", facts["before_mb"], gate)
    grown_mb = max(0.0, facts["after_mb"] - facts["before_mb"])
    what = "the writer's memory, growth since then"
    bound = "the store's caches"
    _add(findings, what, "MB", grown_mb, gate, goal=_GOAL_GROWTH_MB, bound_by=bound)
    _add(
        findings, f"open a store of {size.sessions:,} sessions", "s", _open(folder)["seconds"], gate
    )


def _add(
    findings: Findings,
    name: str,
    unit: str,
    value: float,
    gate: Gate,
    *,
    more_is_better: bool = False,
    goal: float | None = None,
    bound_by: str = "",
) -> None:
    findings.figures.append(
        Figure(
            name=name,
            unit=unit,
            values=[value],
            gate=gate,
            more_is_better=more_is_better,
            goal=goal,
            bound_by=bound_by,
        )
    )


def _open(folder: Path) -> dict[str, Any]:
    with child(_MODULE, "open", folder) as opening:
        return line(opening)


def _file(folder: Path) -> Path:
    return folder / FILE_NAME


def _log_mb(folder: Path) -> float:
    return _file(folder).with_name(f"{FILE_NAME}-wal").stat().st_size / 1e6


# --- The processes --------------------------------------------------------------------------------


def _write(folder: Path, target_bytes: int, commits_s: float = 0.0) -> None:
    """Commit eight image chunks and a probe until the target; 0: forever, reporting each commit.

    Commits at full speed, or `commits_s` times a second. The images are recorded and compressed
    once; each commit stores them under the id of a new session.
    """
    probe = _template(_PROBE, np.zeros((2, 1)))
    images = session_frames(SCREEN, noise(_CHUNKS_A_COMMIT * IMAGE_STEPS), max_steps=IMAGE_STEPS)
    chunks = [chunk_of(frame) for frame in images]
    began_s = time.monotonic()
    written = 0
    with LocalStore(folder) as store:
        epoch = store.claim("bench", owner="bench", ttl_s=60.0).epoch
        for number in itertools.count():
            if commits_s:
                time.sleep(max(0.0, began_s + number / commits_s - time.monotonic()))
            is_old = written < target_bytes / 10
            received_s = int(time.time()) - (_OLD_S if is_old else 0)
            session = new_session(time.time())
            candidates = [
                _renamed(frame, chunk, session, received_s)
                for frame, chunk in zip(images, chunks, strict=True)
            ]
            candidates.append(_probe(probe, number, received_s))
            store.write(WriteBatch("bench", epoch, Position(str(number)), candidates))
            written += sum(candidate.frame.size_bytes for candidate in candidates)
            if not target_bytes:
                report({"next_arrival": store.next_arrival})
            elif written >= target_bytes:
                break
        seconds = time.monotonic() - began_s
        report({"next_arrival": store.next_arrival, "bytes": written, "seconds": seconds})


def _renamed(frame: Frame, chunk: Chunk, session: uuid.UUID, received_s: int) -> Candidate:
    """The chunk, as if it belonged to another session."""
    body = frame.body.replace(str(frame.session).encode(), str(session).encode())
    renamed = data_frame(session, frame.chunk_no, body).stamped(PLAYER, received_s)
    return Candidate(renamed, replace(chunk, meta=replace(chunk.meta, session=session)))


def _template(spec: GameSpec, observations: Array) -> Chunk:
    """The first chunk of a session with these observations."""
    return chunk_of(session_frames(spec, observations)[0])


def _probe(template: Chunk, number: int, received_s: int) -> Candidate:
    """The next chunk of the template's session; its observation is the monotonic time."""
    n_steps = template.meta.n_steps
    meta = replace(template.meta, chunk_no=number, first_step=number * n_steps)
    obs = np.full_like(template.columns["obs"], time.monotonic())
    chunk = Chunk(meta, {**template.columns, "obs": obs})
    return Candidate(chunk.frame().stamped(PLAYER, received_s), chunk)


def _watch(folder: Path) -> None:
    """Tail a store from its end; reports how long each probe took to arrive."""
    stop = stop_with_parent()
    lag_ms: list[float] = []
    with StoreView(folder) as view:
        cursor = Cursor(str(view.next_arrival - 1))
        report({"ready": True})
        while not stop.is_set():
            page = view.tail(cursor, max_items=256, wait_s=0.05)
            now_s = time.monotonic()
            cursor = page.cursor
            for item in page.items:
                if (
                    isinstance(item, Stored)
                    and item.chunk is not None
                    and item.chunk.meta.game == _PROBE.game
                ):
                    lag_ms.append((now_s - float(item.chunk.columns["obs"][0, 0])) * 1000)
    report({"lag_ms": lag_ms})


def _tail(folder: Path) -> None:
    """Tail a store from its start to its end, again and again."""
    stop = stop_with_parent()
    cursor: Cursor | None = None
    n_chunks = 0
    with StoreView(folder) as view:
        report({"ready": True})
        while not stop.is_set():
            page = view.tail(cursor, max_items=256, wait_s=0.0)
            cursor = page.cursor if page.items else None
            n_chunks += len(page.items)
    report({"chunks": n_chunks})


def _open_store(folder: Path) -> None:
    began_s = time.monotonic()
    with LocalStore(folder) as store:
        report({"seconds": time.monotonic() - began_s, "next_arrival": store.next_arrival})


def _compact(folder: Path) -> None:
    slices_ms: list[float] = []
    with LocalStore(folder) as store:
        before_mb = sum(size for _, _, size in store.sizes()) / 1e6
        began_s = time.monotonic()
        expired = store.expire(time.time() - _OLD_S / 2)
        expire_s = time.monotonic() - began_s
        left_mb = sum(size for _, _, size in store.sizes()) / 1e6
        last_s = time.monotonic()

        def between() -> None:
            nonlocal last_s
            now_s = time.monotonic()
            slices_ms.append((now_s - last_s) * 1000)
            last_s = now_s

        returned = store.compact(between=between)
    facts = {
        "expired": expired,
        "expired_mb": before_mb - left_mb,
        "expire_s": expire_s,
        "bytes": returned,
    }
    p99_ms = percentiles(np.asarray(slices_ms or [0.0])).p99
    longest_ms = max(slices_ms, default=0.0)
    report(facts | {"slices": len(slices_ms), "p99_ms": p99_ms, "longest_ms": longest_ms})


def _sessions(folder: Path, count: int) -> None:
    """Write one chunk of each of many sessions; report memory after a tenth and after all."""
    template = _template(_PROBE, np.zeros((2, 1)))
    before_mb = 0.0
    with LocalStore(folder) as store:
        epoch = store.claim("bench", owner="bench", ttl_s=60.0).epoch
        for at in range(0, count, _SESSIONS_A_COMMIT):
            now_s = int(time.time())
            candidates = []
            for _ in range(min(_SESSIONS_A_COMMIT, count - at)):
                chunk = replace(
                    template, meta=replace(template.meta, session=new_session(time.time()))
                )
                candidates.append(Candidate(chunk.frame().stamped(PLAYER, now_s), chunk))
            store.write(WriteBatch("bench", epoch, Position(str(at)), candidates))
            if not before_mb and at >= count / 10:
                before_mb = _memory_mb()
        after_mb = _memory_mb()
        with StoreView(folder) as view:
            sessions = view.counts().sessions
    report({"sessions": sessions, "before_mb": before_mb or after_mb, "after_mb": after_mb})


def _memory_mb() -> float:
    """Resident memory of this process."""
    fields = dict(text.split(":", 1) for text in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmRSS"].split()[0]) / 1e3


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["write", where, n_bytes, *pace]:
            _write(Path(where), int(n_bytes), *map(float, pace))
        case ["watch", where]:
            _watch(Path(where))
        case ["tail", where]:
            _tail(Path(where))
        case ["open", where]:
            _open_store(Path(where))
        case ["compact", where]:
            _compact(Path(where))
        case ["sessions", where, n_sessions]:
            _sessions(Path(where), int(n_sessions))
        case _:
            sys.exit(main())
