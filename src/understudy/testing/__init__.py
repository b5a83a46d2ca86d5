"""For authors of adapters: contract tests to subclass, faults to inject and sample data to store.

class TestMyStream(StreamContract):
    def make(self) -> Stream:
        return MyStream(...)
"""

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
from understudy.testing.stores import StoreAdminContract, StoreContract
from understudy.testing.streams import StreamContract

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
    "StoreAdminContract",
    "StoreContract",
    "StreamContract",
]
