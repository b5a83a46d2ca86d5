# mypy: disable-error-code="import-not-found, import-untyped, no-any-unimported"
"""cpprb's prioritised replay."""

from typing import Any

import numpy as np
from cpprb import PrioritizedReplayBuffer

from bench.against import payload
from bench.against.link import Link, Round, serve


def replay(_: Link, request: dict[str, Any]) -> Round:
    """A full replay of transitions; cpprb's next_of stores only one copy of each frame."""
    kind = request["payload"]
    capacity = request["capacity"]
    shape: tuple[int, ...] = (4,) if kind == "vector" else payload.FRAME
    column = {"shape": shape, "dtype": np.float32 if kind == "vector" else np.uint8}
    columns: dict[str, Any] = {
        "obs": column,
        "action": {"dtype": np.int32},
        "reward": {},
        "done": {},
    }
    options = {"next_of": "obs"} if kind == "frames" else {}
    rows = PrioritizedReplayBuffer(
        capacity,
        columns if options else columns | {"next_obs": column},
        alpha=request["alpha"],
        **options,
    )
    inserted = 0

    def insert(fresh: dict[str, Any]) -> None:
        nonlocal inserted
        priority = fresh.pop("priority")
        rows.add(**fresh, priorities=priority)
        inserted += payload.BLOCK

    while inserted < capacity:
        insert(payload.block(kind, inserted))

    def run() -> dict[str, Any]:
        values, drawn = payload.cycles(
            lambda first: payload.block(kind, first),
            insert,
            lambda: rows.sample(payload.BLOCK, beta=request["beta"]),
            lambda drawn, values: rows.update_priorities(drawn["indexes"], values),
            first=inserted,
            count=request["cycles"],
        )
        return {
            "values": values,
            "right": payload.is_right(*(drawn[name] for name in request["columns"])),
        }

    return run


if __name__ == "__main__":
    serve(["cpprb", "numpy"], {"replay": replay})
