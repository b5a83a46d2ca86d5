"""Every built-in replay passes the Replay contract, and so does one named by its import path."""

from understudy.algorithm import Transitions
from understudy.experience.game import GameSpec
from understudy.replay import Replay, ReplayConfig, make_replay
from understudy.testing.replays import ReplayContract


class TestHostReplay(ReplayContract):
    def make(self, game: GameSpec, needs: Transitions, config: ReplayConfig) -> Replay:
        return make_replay("host", game, needs, config)


class TestFifoReplay(ReplayContract):
    def make(self, game: GameSpec, needs: Transitions, config: ReplayConfig) -> Replay:
        return make_replay("tests.learn.replays:FifoReplay", game, needs, config)


class TestDeviceReplay(ReplayContract):
    def make(self, game: GameSpec, needs: Transitions, config: ReplayConfig) -> Replay:
        return make_replay("device", game, needs, config)
