"""Proxies between a store and its Cassandra: requests are cut off, delayed or held back."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from understudy.stores.cassandra.wire import Done, Send


class Crash(Exception):
    """The process is dead from here on."""


def is_write(statement: Any) -> bool:
    """Whether a request changes something."""
    prepared = getattr(statement, "prepared_statement", None)
    return prepared is None or not prepared.query_string.startswith("SELECT")


class Cut:
    """Lets some writes through, then nothing at all."""

    def __init__(self, send: Send, writes: int) -> None:
        self._send = send
        self.left = writes

    def __call__(self, statement: Any, done: Done) -> None:
        if is_write(statement):
            self.left -= 1
        if self.left < 0:
            raise Crash
        # Answered before the next leaves, so that exactly these writes happened.
        arrived = threading.Event()
        answer: list[Any] = []

        def keep(rows: Any, error: Any) -> None:
            answer[:] = [rows, error]
            arrived.set()

        self._send(statement, keep)
        assert arrived.wait(30.0)
        done(*answer)


class Delay:
    """Holds every write back for a random time."""

    def __init__(self, send: Send, *, most_s: float, seed: int) -> None:
        self._send = send
        self._most_s = most_s
        self._rng = np.random.default_rng(seed)
        self._lock = threading.Lock()
        self.delayed = 0

    def __call__(self, statement: Any, done: Done) -> None:
        if not is_write(statement):
            self._send(statement, done)
            return
        with self._lock:
            self.delayed += 1
            delay_s = self._rng.uniform(0.0, self._most_s)
        timer = threading.Timer(delay_s, self._send, (statement, done))
        timer.daemon = True
        timer.start()


class Hold:
    """Keeps writes back until they are let go; `seen` is set when the first one waits."""

    def __init__(self, send: Send, *, only: Callable[[Any], bool] = is_write) -> None:
        self._send = send
        self._only = only
        self._held: list[tuple[Any, Done]] = []
        self.holds = True
        self.seen = threading.Event()
        self._lock = threading.Lock()

    def __call__(self, statement: Any, done: Done) -> None:
        with self._lock:
            if self.holds and self._only(statement):
                self._held.append((statement, done))
                self.seen.set()
                return
        self._send(statement, done)

    def let_go(self) -> None:
        with self._lock:
            self.holds = False
            held = self._held
            self._held = []
        for statement, done in held:
            self._send(statement, done)


def is_commit(statement: Any) -> bool:
    """Whether a request is the compare-and-set that makes a commit count."""
    return "partitions SET commit_no" in _text(statement)


def is_claim(statement: Any) -> bool:
    """Whether a request is the compare-and-set that makes a claim count."""
    return "partitions SET epoch = ?, lease = ?, owner" in _text(statement)


def is_row(statement: Any) -> bool:
    """Whether a request writes anything by other means than a compare-and-set."""
    return is_write(statement) and " IF " not in _text(statement)


def is_data(statement: Any) -> bool:
    """Whether a request writes a frame or a commit."""
    return _text(statement).startswith("INSERT") and any(
        name in _text(statement) for name in (".chunks ", ".commits ")
    )


def _text(statement: Any) -> str:
    prepared = getattr(statement, "prepared_statement", None)
    return "" if prepared is None else str(prepared.query_string)
