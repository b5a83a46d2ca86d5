"""Pace: as many rounds as asked for, and an end when asked."""

import threading
import time

from understudy.app.crowd.pace import rounds


def test_rounds_keep_their_pace_and_their_time():
    told = list[int]()
    began_s = time.monotonic()
    played = rounds(lambda: None, told.append, stop=threading.Event(), rate=100, seconds=0.5)
    assert 0.5 <= time.monotonic() - began_s < 5
    assert 1 <= played <= 51
    assert told[0] == 0
    assert len(told) >= 2
    assert told == sorted(told)


def test_they_end_when_somebody_asks():
    stop, seen = threading.Event(), list[int]()

    def play() -> None:
        seen.append(1)
        if len(seen) == 5:
            stop.set()

    assert rounds(play, lambda _: None, stop=stop, rate=0) == 5


def test_nobody_plays_when_it_was_asked_before():
    stop = threading.Event()
    stop.set()
    assert rounds(lambda: None, lambda _: None, stop=stop, rate=1) == 0
