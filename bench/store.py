"""Our store against LMDB and SQLite with equal durable commits; the cost of images and erasure."""

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.figures import Figure, Findings, Took, all_of, in_turn, rate_ratios
from bench.games import CART, SCREEN, OneGame, cart_frames, n_steps, noise, session_frames
from bench.peers import LmdbPeer, Peer, SqlitePeer, peers
from bench.sizes import Scale
from understudy.experience.chunk import chunk_of
from understudy.experience.frame import Frame
from understudy.ports import Candidate, Cursor, Position, Stored, WriteBatch
from understudy.stores.local import LocalStore
from understudy.stores.view import StoreView

IMAGE_STEPS = 32
"""Steps of 84x84 bytes: a chunk of 225 kB."""
_IMAGES_A_COMMIT = 8
_PAGE = 512


class _Contest:
    """Writes the same frames to each store; each contestant gets a new store, which is checked."""

    def __init__(self, folder: Path, frames: Sequence[Frame], *, per_commit: int) -> None:
        self._folder = folder
        self._frames = frames
        self._per_commit = per_commit
        self._chunks = [chunk_of(frame) for frame in frames]
        self.n_steps = n_steps(frames)
        self.is_right = True

    def ours(self) -> Took:
        """Session dedup, stream position and frames in one durable transaction per commit."""
        with LocalStore(self._folder / "ours", specs=OneGame(CART)) as store:
            took, is_right = write(store, self._frames, per_commit=self._per_commit)
            self.is_right &= is_right and store.audit().steps == self.n_steps
        shutil.rmtree(self._folder / "ours")
        return took

    def chunks(self, make: Callable[[Path], Peer]) -> Took:
        return self._peer(make, lambda peer, part: peer.write_chunks(self._frames[part]), column=0)

    def rows(self, make: Callable[[Path], Peer]) -> Took:
        return self._peer(make, lambda peer, part: peer.write_rows(self._chunks[part]), column=1)

    def _peer(
        self, make: Callable[[Path], Peer], write: Callable[[Peer, slice], None], *, column: int
    ) -> Took:
        peer = make(self._folder / "peer")
        cpu = time.process_time()
        wall = time.perf_counter()
        for at in range(0, len(self._frames), self._per_commit):
            write(peer, slice(at, at + self._per_commit))
        took = Took(time.process_time() - cpu, time.perf_counter() - wall)
        self.is_right &= peer.count()[column] == (len(self._frames), self.n_steps)[column]
        peer.close()
        shutil.rmtree(self._folder / "peer")
        return took


def write(store: LocalStore, frames: Sequence[Frame], *, per_commit: int) -> tuple[Took, bool]:
    """The cost of writing all frames, and whether each of them was new."""
    candidates = [Candidate(frame, chunk_of(frame)) for frame in frames]
    epoch = store.claim("bench", owner="bench", ttl_s=60.0).epoch
    is_right = True
    cpu = time.process_time()
    wall = time.perf_counter()
    for at in range(0, len(candidates), per_commit):
        batch = WriteBatch("bench", epoch, Position(str(at)), candidates[at : at + per_commit])
        is_right &= set(store.write(batch).fates) == {"new"}
    return Took(time.process_time() - cpu, time.perf_counter() - wall), is_right


def measure(folder: Path, scale: Scale) -> Findings:
    """Measure durable writes of a few long chunks and of many short ones, then images."""
    findings = Findings()
    running, findings.skipped = peers(folder / "look")
    for peer in running:
        peer.close()
    names = [peer.name for peer in running]
    few = _Contest(folder, cart_frames(scale.commits * 16), per_commit=16)
    _compare(findings, "store, commits of 16 chunks", few, names, scale)
    sessions = scale.sessions
    many = _Contest(folder, cart_frames(2 * sessions, steps=60, sessions=sessions), per_commit=64)
    _compare(
        findings,
        f"store, 60-step chunks from {sessions:,} sessions, 64 a commit",
        many,
        names,
        scale,
    )
    findings.notes.append(
        "store: ours deduplicates and stores the stream position and every session's state in the "
        "same commit; 'chunk per key' only stores bodies"
    )
    _measure_images(findings, folder, scale)
    return findings


def _compare(
    findings: Findings, what: str, contest: _Contest, peer_names: Sequence[str], scale: Scale
) -> None:
    contestants: dict[str, Callable[[], Took]] = {"ours": contest.ours}
    kinds: dict[str, type[LmdbPeer] | type[SqlitePeer]] = {"LMDB": LmdbPeer, "SQLite": SqlitePeer}
    for name in peer_names:
        contestants[f"{name}, row per key"] = lambda name=name: contest.rows(kinds[name])  # type: ignore[misc]
        contestants[f"{name}, chunk per key"] = lambda name=name: contest.chunks(kinds[name])  # type: ignore[misc]
    took = in_turn(scale.rounds, contestants)
    gate = all_of((f"all {contest.n_steps} steps in every store, every round", contest.is_right))
    for name, theirs in took.items():
        if name != "ours":
            amount = contest.n_steps
            findings.ratios += rate_ratios(
                what, name, amount, took["ours"], theirs, unit="steps/s", gate=gate
            )


# --- images ---------------------------------------------------------------------------------------


def _measure_images(findings: Findings, folder: Path, scale: Scale) -> None:
    """Incompressible chunks of 225 kB: written, tailed by another reader, one session forgotten."""
    sessions = [
        session_frames(SCREEN, noise(IMAGE_STEPS * 8, seed=seed), max_steps=IMAGE_STEPS)
        for seed in range(max(2, scale.frames // (IMAGE_STEPS * 8)))
    ]
    leaver = b"bench-player-02."
    sessions[0] = [frame.stamped(leaver, frame.received_s) for frame in sessions[0]]
    frames = [frame for turn in zip(*sessions, strict=True) for frame in turn]
    megabytes = sum(frame.size_bytes for frame in frames) / 1e6
    wrote: list[float] = []
    tailed: list[float] = []
    forgot_ms: list[float] = []
    checks = {
        "every chunk new": True,
        "every chunk tailed once": True,
        "the forgotten session gone": True,
    }
    for at in range(max(1, scale.rounds - 2)):
        images = folder / f"images-{at}"
        with LocalStore(images, specs=OneGame(SCREEN)) as store:
            took, is_right = write(store, frames, per_commit=_IMAGES_A_COMMIT)
            wrote.append(megabytes / took.cpu_s)
            checks["every chunk new"] &= is_right
            began = time.perf_counter()
            checks["every chunk tailed once"] &= _tail(images) == len(frames)
            tailed.append(megabytes / (time.perf_counter() - began))
            began = time.perf_counter()
            gone = store.forget(leaver)
            forgot_ms.append((time.perf_counter() - began) * 1e3)
            is_gone = gone == len(sessions[0]) and _tail(images) == len(frames) - gone
            checks["the forgotten session gone"] &= is_gone and not store.is_erasing
        shutil.rmtree(images)
    gate = all_of(*checks.items())
    what = (
        f"store, image chunks of {len(sessions[0][0].body) / 1e3:.0f} kB, {_IMAGES_A_COMMIT} a "
        "commit"
    )
    findings.figures += [
        Figure(name=what, unit="MB/s/core", values=wrote, gate=gate),
        Figure(name="tail of image chunks, decoded", unit="MB/s", values=tailed, gate=gate),
        Figure(
            name="forget one session of "
            f"{sum(frame.size_bytes for frame in sessions[0]) / 1e6:.1f} MB",
            unit="ms",
            values=forgot_ms,
            more_is_better=False,
            gate=gate,
        ),
    ]


def _tail(folder: Path) -> int:
    """How many chunks a reader reads and decodes from the start to the end of a store."""
    n_chunks = 0
    cursor: Cursor | None = None
    with StoreView(folder) as view:
        while (page := view.tail(cursor, max_items=_PAGE, wait_s=0.0)).items:
            n_chunks += sum(isinstance(item, Stored) for item in page.items)
            cursor = page.cursor
    return n_chunks
