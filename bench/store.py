"""The store beside LMDB and SQLite: the same chunks, the same number of them in each durable commit."""

import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.figures import Findings, Took, all_of, in_turn, rate_ratios
from bench.games import CART, OneGame, cart_frames, n_steps
from bench.peers import LmdbPeer, Peer, SqlitePeer, peers
from bench.scale import Scale
from understudy.core.chunk import chunk_of
from understudy.core.frame import Frame
from understudy.core.ports import Candidate, Position, WriteBatch
from understudy.stores.local import LocalStore

PER_COMMIT = 16


class _Contest:
    """One round's stores; each contestant gets a new one and checks what it holds afterwards."""

    def __init__(self, folder: Path, frames: Sequence[Frame]) -> None:
        self._folder, self._frames = folder, frames
        self._chunks = [chunk_of(frame) for frame in frames]
        self.n_steps = n_steps(frames)
        self.is_right = True

    def ours(self) -> Took:
        """Session dedup, stream position, log commit, and sealing into columns that can be sampled."""
        candidates = [Candidate(frame, chunk) for frame, chunk in zip(self._frames, self._chunks, strict=True)]
        with LocalStore(self._folder / "ours", specs=OneGame(CART)) as store:
            epoch = store.claim("bench", owner="bench", ttl_s=60.0).epoch
            cpu, wall = time.process_time(), time.perf_counter()
            for at in range(0, len(candidates), PER_COMMIT):
                batch = WriteBatch("bench", epoch, Position(str(at)), candidates[at : at + PER_COMMIT])
                self.is_right &= set(store.write(batch).fates) == {"new"}
            store.freeze(wait=True)
            took = Took(time.process_time() - cpu, time.perf_counter() - wall)
            self.is_right &= store.audit().steps == self.n_steps
        shutil.rmtree(self._folder / "ours")
        return took

    def chunks(self, make: Callable[[Path], Peer]) -> Took:
        return self._peer(make, lambda peer, at: peer.write_chunks(self._frames[at : at + PER_COMMIT]), column=0)

    def rows(self, make: Callable[[Path], Peer]) -> Took:
        return self._peer(make, lambda peer, at: peer.write_rows(self._chunks[at : at + PER_COMMIT]), column=1)

    def _peer(self, make: Callable[[Path], Peer], write: Callable[[Peer, int], None], *, column: int) -> Took:
        peer = make(self._folder / "peer")
        cpu, wall = time.process_time(), time.perf_counter()
        for at in range(0, len(self._frames), PER_COMMIT):
            write(peer, at)
        took = Took(time.process_time() - cpu, time.perf_counter() - wall)
        self.is_right &= peer.count()[column] == (len(self._frames), self.n_steps)[column]
        peer.close()
        shutil.rmtree(self._folder / "peer")
        return took


def measure(folder: Path, scale: Scale) -> Findings:
    """Durable writes of 16 chunks a commit."""
    found = Findings()
    running, found.skipped = peers(folder / "look")
    for peer in running:
        peer.close()
    contest = _Contest(folder, cart_frames(scale.commits * PER_COMMIT))
    contestants: dict[str, Callable[[], Took]] = {"ours": contest.ours}
    kinds: dict[str, type[LmdbPeer] | type[SqlitePeer]] = {"LMDB": LmdbPeer, "SQLite": SqlitePeer}
    for peer in running:
        contestants[f"{peer.name}, row per key"] = lambda name=peer.name: contest.rows(kinds[name])  # type: ignore[misc]
        contestants[f"{peer.name}, chunk per key"] = lambda name=peer.name: contest.chunks(kinds[name])  # type: ignore[misc]
    took = in_turn(scale.rounds, contestants)
    gate = all_of((f"all {contest.n_steps} steps in every store, every round", contest.is_right))
    for name, theirs in took.items():
        if name != "ours":
            found.ratios += rate_ratios(
                f"store, commits of {PER_COMMIT} chunks", name, contest.n_steps, took["ours"], theirs,
                unit="steps/s", gate=gate,
            )  # fmt: skip
    found.notes.append(
        "store: ours deduplicates, keeps the stream position and seals into columns inside the figure; 'chunk per key' "
        "only keeps bodies, from which no row can be drawn without decoding its chunk"
    )
    return found
