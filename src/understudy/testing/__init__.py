"""For authors of adapters: contract tests to subclass, faults to inject and sample data to store.

class TestMyStore(StoreContract, StoreAdminContract):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.path = tmp_path
        self.count = 0

    def make(self, clock: Clock) -> FullStore:
        self.count += 1
        return MyStore(self.path / f"store-{self.count}", clock)

    def reopen(self, store: FullStore, clock: Clock) -> FullStore:
        return MyStore(self.path / f"store-{self.count}", clock)

StoreContract needs both ports of a store, and `make` and `reopen`. StreamContract, LinkContract and
ObjectsContract need `make()`, TeamContract also `policy()` and `make_noting(folder)`,
ReplayContract `make(game, needs, config)`, SearcherContract `make(plan)`; AlgorithmContract, which
imports JAX, is in `understudy.testing.algorithm`. Each contract names its optional hooks. Malicious
players, in trials of the gate and in recorded steps, are simulated by
`understudy.testing.poisoning`.
"""

import sys

if "pytest" in sys.modules:
    # Must precede the import of these modules, so that a failed assertion shows its values.
    sys.modules["pytest"].register_assert_rewrite(
        *(
            f"{__name__}.{module}"
            for module in (
                "algorithm",
                "links",
                "objects",
                "replays",
                "searchers",
                "store_harness",
                "stores",
                "streams",
                "teams",
            )
        )
    )

from understudy.testing.clock import START_S, ManualClock
from understudy.testing.faults import (
    Crash,
    CrashingStore,
    Faults,
    FaultyLink,
    FaultyStream,
    FaultySync,
)
from understudy.testing.links import LinkContract
from understudy.testing.objects import ObjectsContract
from understudy.testing.replays import ReplayContract
from understudy.testing.searchers import SearcherContract
from understudy.testing.stores import StoreAdminContract, StoreContract
from understudy.testing.streams import StreamContract
from understudy.testing.teams import TeamContract

__all__ = [
    "START_S",
    "Crash",
    "CrashingStore",
    "Faults",
    "FaultyLink",
    "FaultyStream",
    "FaultySync",
    "LinkContract",
    "ManualClock",
    "ObjectsContract",
    "ReplayContract",
    "SearcherContract",
    "StoreAdminContract",
    "StoreContract",
    "StreamContract",
    "TeamContract",
]
