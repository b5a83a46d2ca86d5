"""Random batches of 512 transitions from a million rows: ours, and row-per-key reads from LMDB and SQLite."""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from bench.figures import Figure, Findings, Ratio, all_of, in_turn
from bench.games import CART, EPISODE_STEPS, SESSIONS, cart_frames
from bench.ingest import drain
from bench.peers import Peer, peers
from bench.scale import Scale
from understudy.core.chunk import chunk_of
from understudy.core.tensors import Array
from understudy.stores.reader import SegmentReader, Window

BATCH = 512
_PER_COMMIT = 64


def measure(folder: Path, scale: Scale) -> Findings:
    """CPU milliseconds a batch."""
    found = Findings()
    frames = cart_frames(-(-scale.rows // BATCH))
    chunks = [chunk_of(frame) for frame in frames]
    running, found.skipped = peers(folder)
    for peer in running:
        for at in range(0, len(chunks), _PER_COMMIT):
            peer.write_rows(chunks[at : at + _PER_COMMIT])
    n_steps = sum(chunk.meta.n_steps for chunk in chunks)
    del chunks
    moved = drain(folder / "ours", CART, frames, keep=True)
    rng = np.random.default_rng(0)
    windows = {"1-step": Window(), "n-step 3": Window(n_step=3), "stack of 4": Window(stack=4)}
    with SegmentReader(folder / "ours" / "store") as reader:
        # What lies close to a session's end has no three steps behind it.
        last = len(frames) // SESSIONS * BATCH - 8
        is_right = {name: _is_right(reader, window, last) for name, window in windows.items()}
        contestants: dict[str, Callable[[], float]] = {
            name: _timed(lambda window=window: reader.sample(BATCH, rng=rng, window=window), scale.batches)  # type: ignore[misc]
            for name, window in windows.items()
        }
        for peer in running:
            is_right[peer.name] = _peer_is_right(peer, n_steps)
            draw = lambda peer=peer: peer.draw(np.sort(rng.integers(0, n_steps, BATCH)))  # noqa: E731
            contestants[peer.name] = _timed(draw, max(3, scale.batches // 4))
        took = in_turn(2 * scale.rounds, contestants)
        n_rows = reader.n_rows
    for peer in running:
        peer.close()
    stored = (f"{moved.audit.steps} steps stored once by audit", moved.audit.steps == n_steps)
    for name in windows:
        found.figures.append(
            Figure(
                name=f"uniform batch of {BATCH} of {n_rows:,} rows, {name}", unit="ms CPU", values=took[name],
                goal=0.5 if name == "1-step" else None, more_is_better=False,
                gate=all_of(stored, ("every sampled value is the true one", is_right[name])),
                bound_by="one NumPy take per column and segment" if name == "1-step" else "window arithmetic in NumPy",
            )
        )  # fmt: skip
    for peer in running:
        found.ratios.append(
            Ratio(
                name=f"uniform batch of {BATCH} of {n_rows:,} rows", peer=f"{peer.name}, row per key", unit="ms CPU",
                ours=took["1-step"], theirs=took[peer.name], more_is_better=False,
                gate=all_of(stored, ("every sampled value is the true one", is_right[peer.name])),
            )
        )  # fmt: skip
    return found


def _timed(work: Callable[[], object], times: int) -> Callable[[], float]:
    def run() -> float:
        work()
        began = time.process_time()
        for _ in range(times):
            work()
        return (time.process_time() - began) / times * 1e3

    return run


# --- What must come out: an observation's second number counts its session's observations ----------------------------


def _is_right(reader: SegmentReader, window: Window, last: int) -> bool:
    batch = reader.sample(4 * BATCH, rng=np.random.default_rng(1), window=window)
    obs, following = batch.obs["obs"], batch.next_obs["obs"]
    number = (obs[:, -1, 1] if window.stack > 1 else obs[:, 1]).astype(np.int64)
    ends = np.stack([_is_last(number + ahead) for ahead in range(window.n_step)], axis=1)
    taken = np.where(ends.any(axis=1), ends.argmax(axis=1) + 1, window.n_step)
    whole = (batch.factor == 0) | np.isclose(batch.factor, window.discount**taken, rtol=1e-5)
    returns = sum(
        np.where(ahead < taken, window.discount**ahead * ((number + ahead) & 7), 0) for ahead in range(window.n_step)
    )
    right = whole & (batch.action["action"] == number & 1) & np.isclose(batch.reward, returns, rtol=1e-4)
    right &= batch.terminated == ends.any(axis=1)
    if window.stack > 1:
        right &= _is_stacked(obs, number) & (following[:, -1, 1] == number + taken)
    else:
        right &= (following[:, 1] == number + taken) & (following[:, 0] == obs[:, 0])
    return bool(right[number < last].all())


def _is_last(number: Array) -> Array:
    ends: Array = (number + 1) % EPISODE_STEPS == 0
    return ends


def _is_stacked(obs: Array, number: Array) -> Array:
    depth = obs.shape[1]
    first = np.where(number < EPISODE_STEPS, 0, number // EPISODE_STEPS * EPISODE_STEPS + 1)
    wanted = np.maximum(number[:, None] - np.arange(depth)[::-1], first[:, None])
    matches: Array = (obs[:, :, 1] == wanted).all(axis=1)
    return matches


def _peer_is_right(peer: Peer, n_rows: int) -> bool:
    rows = peer.draw(np.sort(np.random.default_rng(1).permutation(n_rows)[:BATCH]))
    number = rows["obs"][:, 1].astype(np.int64)
    is_right = len(rows) == BATCH and (rows["next_obs"][:, 1] == number + 1).all()
    return bool(is_right and (rows["reward"] == number & 7).all() and (rows["terminated"] == _is_last(number)).all())
