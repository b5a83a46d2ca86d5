# mypy: disable-error-code="import-not-found, import-untyped, no-any-unimported"
"""torchrl's prioritised replay."""

from typing import Any

import torch
from tensordict import TensorDict
from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer

from bench.against import payload
from bench.against.link import Link, Round, serve


def replay(_: Link, request: dict[str, Any]) -> Round:
    """A full replay of transitions in a TensorDict."""
    kind = request["payload"]
    capacity = request["capacity"]
    rows = TensorDictPrioritizedReplayBuffer(
        alpha=request["alpha"],
        beta=request["beta"],
        storage=LazyTensorStorage(capacity),
        batch_size=payload.BLOCK,
        priority_key="priority",
    )
    inserted = 0

    def make(first: int) -> TensorDict:
        columns = {
            name: torch.from_numpy(values) for name, values in payload.block(kind, first).items()
        }
        return TensorDict(columns, batch_size=[payload.BLOCK])

    def insert(fresh: TensorDict) -> None:
        nonlocal inserted
        rows.extend(fresh)
        inserted += payload.BLOCK

    def update(drawn: TensorDict, values: payload.Array) -> None:
        drawn.set("priority", torch.from_numpy(values))
        rows.update_tensordict_priority(drawn)

    while inserted < capacity:
        insert(make(inserted))

    def run() -> dict[str, Any]:
        values, drawn = payload.cycles(
            make, insert, rows.sample, update, first=inserted, count=request["cycles"]
        )
        weight = "priority_weight" if "priority_weight" in drawn.keys() else "_weight"  # noqa: SIM118
        columns = [
            drawn[name if name != "weights" else weight].numpy() for name in request["columns"]
        ]
        return {"values": values, "right": payload.is_right(*columns)}

    return run


if __name__ == "__main__":
    serve(["torchrl", "tensordict", "torch", "numpy"], {"replay": replay})
