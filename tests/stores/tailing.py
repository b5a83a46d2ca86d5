"""A reader in its own process: prints every item it tails, up to a given last number."""

import sys
import time
from pathlib import Path

from understudy.ports import Stored
from understudy.stores.database import has_store
from understudy.stores.view import StoreView
from understudy.testing.store_harness import last_no


def main(folder: str, last: str) -> None:
    deadline = time.monotonic() + 60.0
    while not has_store(Path(folder)) and time.monotonic() < deadline:
        time.sleep(0.005)
    cursor = None
    seen = 0
    with StoreView(Path(folder)) as view:
        print("ready", flush=True)
        while seen < int(last) and time.monotonic() < deadline:
            tail = view.tail(cursor, max_items=7, wait_s=0.5)
            for item in tail.items:
                kind = "gone"
                if isinstance(item, Stored):
                    kind = (
                        "control"
                        if item.chunk is None
                        else f"{item.chunk.meta.session}/{item.chunk.meta.chunk_no}"
                    )
                print(item.arrival_no, last_no(item), kind, flush=True)
                seen = last_no(item)
            cursor = tail.cursor


if __name__ == "__main__":
    main(*sys.argv[1:])
