"""A reader process: tails a store into a file and checks its steps while writers write and die.

Run as `python -m tests.faults.tailer STORE:OUT`; it stops when its standard input closes, and fails
on anything unexpected.
"""

import json
import sys
import threading
from pathlib import Path

import numpy as np

from understudy.experience.chunk import Chunk, RowKind
from understudy.ports import Cursor, Forgotten, Stored
from understudy.stores.view import StoreView


def main(store: Path, out: Path) -> None:
    stop = threading.Event()
    threading.Thread(target=_watch_stdin, args=(stop,), daemon=True).start()
    cursor: Cursor | None = None
    last = steps = 0
    with out.open("w") as file, StoreView(store) as view:
        while not stop.is_set():
            page = view.tail(cursor, max_items=64, wait_s=0.05)
            for item in page.items:
                file.write(json.dumps(_line(item)) + "\n")
                last = item.last_no if isinstance(item, Forgotten) else item.arrival_no
                steps += (
                    _checked_steps(item.chunk)
                    if isinstance(item, Stored) and item.chunk is not None
                    else 0
                )
            file.flush()
            cursor = page.cursor
            print(json.dumps({"last": last, "steps": steps}), flush=True)


def _line(item: Stored | Forgotten) -> list[object]:
    """First and last number, and what a stored frame is."""
    if isinstance(item, Forgotten):
        return [item.arrival_no, item.last_no, ""]
    frame = item.frame
    if item.chunk is not None:
        assert (item.chunk.meta.session, item.chunk.meta.chunk_no) == (
            frame.session,
            frame.chunk_no,
        )
    return [item.arrival_no, item.arrival_no, f"{frame.session} {frame.chunk_no} {frame.body_crc}"]


def _checked_steps(chunk: Chunk) -> int:
    """How many steps a chunk has; in each, the observation that follows is the next one."""
    steps = np.flatnonzero(chunk.columns["row"] == RowKind.STEP)
    obs = chunk.columns["obs"]
    moved = obs[steps + 1, 0] - obs[steps, 0]
    assert (moved == 1).all(), f"observations that do not follow one another: {moved}"
    return len(steps)


def _watch_stdin(stop: threading.Event) -> None:
    sys.stdin.read()
    stop.set()


if __name__ == "__main__":
    main(Path(sys.argv[1].split(":")[0]), Path(sys.argv[1].split(":")[1]))
