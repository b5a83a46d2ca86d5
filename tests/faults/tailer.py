"""A reader in a process of its own: tails a store into a file, and samples from it, while others write and die.

Run as `python -m tests.faults.tailer STORE:OUT`; it stops when its standard input closes. Whatever it cannot explain
ends it with an error.
"""

import json
import sys
import threading
from pathlib import Path

import numpy as np

from understudy.core.errors import ConfigError
from understudy.core.ports import Cursor, Forgotten, Stored
from understudy.stores.reader import SegmentReader
from understudy.stores.view import StoreView


def main(store: Path, out: Path) -> None:
    stop, rng = threading.Event(), np.random.default_rng(0)
    threading.Thread(target=_watch_stdin, args=(stop,), daemon=True).start()
    cursor: Cursor | None = None
    last = sampled = turn = 0
    with out.open("w") as file, StoreView(store) as view:
        reader = SegmentReader(store)
        while not stop.is_set():
            page = view.tail(cursor, max_items=64, wait_s=0.05)
            for item in page.items:
                file.write(json.dumps(_line(item)) + "\n")
                last = item.last_no if isinstance(item, Forgotten) else item.arrival_no
            file.flush()
            cursor, turn = page.cursor, turn + 1
            if turn % 5 == 0:
                sampled += _sample(reader, rng)
            print(json.dumps({"last": last, "sampled": sampled}), flush=True)


def _line(item: Stored | Forgotten) -> list[object]:
    """First and last number, and what a stored frame is."""
    if isinstance(item, Forgotten):
        return [item.arrival_no, item.last_no, ""]
    frame = item.frame
    if item.chunk is not None:
        assert (item.chunk.meta.session, item.chunk.meta.chunk_no) == (frame.session, frame.chunk_no)
    return [item.arrival_no, item.arrival_no, f"{frame.session} {frame.chunk_no} {frame.body_crc}"]


def _sample(reader: SegmentReader, rng: np.random.Generator) -> int:
    reader.refresh()
    try:
        batch = reader.sample(64, rng=rng)
    except ConfigError:
        return 0  # nothing there yet
    step = batch.next_obs["obs"][:, 0] - batch.obs["obs"][:, 0]
    assert (step == 1).all(), f"observations that do not follow one another: {step}"
    return len(batch)


def _watch_stdin(stop: threading.Event) -> None:
    sys.stdin.read()
    stop.set()


if __name__ == "__main__":
    main(Path(sys.argv[1].split(":")[0]), Path(sys.argv[1].split(":")[1]))
