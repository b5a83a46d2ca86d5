"""A wrapper whose steps take 5 ms, so that a short run lasts long enough for faults."""

import time
from typing import Any

import gymnasium


class Slow(gymnasium.Wrapper[Any, Any, Any, Any]):
    def step(self, action: Any) -> Any:
        time.sleep(0.005)
        return super().step(action)
