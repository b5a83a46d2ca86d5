"""A race seen through an encoder: the wrapper turns each picture into 57 numbers.

    understudy train CarRacing-v3 --algorithm dqn --env-kwargs '{"continuous": false}' \
        --wrapper car_racing:TrackEncoder

Needs `pip install 'gymnasium[box2d]'`. On workers, give each `understudy worker` the same wrapper.
"""

from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

_BLOCK = 12
_ROWS = 84
"""The picture's upper part; the bars below it show speed, wheels and steering."""


class TrackEncoder(gymnasium.ObservationWrapper[NDArray[np.float32], Any, NDArray[np.uint8]]):
    """How much of each 12 x 12 block is road, from 0 to 1, and the speed's bar."""

    def __init__(self, env: gymnasium.Env[NDArray[np.uint8], Any]) -> None:
        super().__init__(env)
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (7 * 8 + 1,), np.float32)

    def observation(self, observation: NDArray[np.uint8]) -> NDArray[np.float32]:
        picture = observation.astype(np.int16)  # int16[96, 96, 3]
        # Grass is green; the road, the car and the kerbs are not.
        is_road = picture[:_ROWS, :, 1] - picture[:_ROWS, :, 0] < 40
        blocks = is_road.reshape(_ROWS // _BLOCK, _BLOCK, 96 // _BLOCK, _BLOCK).mean(axis=(1, 3))
        speed = (picture[_ROWS:, 10:16].min(axis=2) > 100).mean()
        return np.array([*blocks.ravel(), speed], np.float32)
