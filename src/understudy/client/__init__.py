"""The client API of a game: `connect`, its settings, and the classes it returns."""

from understudy.client.connect import ClientConfig, Game, connect
from understudy.client.episode import Episode, Recorder
from understudy.client.sender import SenderConfig, Stats
from understudy.client.session import RecordingWarning
from understudy.experience.builder import Extras

__all__ = [
    "ClientConfig",
    "Episode",
    "Extras",
    "Game",
    "Recorder",
    "RecordingWarning",
    "SenderConfig",
    "Stats",
    "connect",
]
