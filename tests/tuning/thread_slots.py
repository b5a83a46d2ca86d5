"""Slots that are threads of this process; messages arrive in an order that a generator draws."""

import queue
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from understudy.tuning.slots import Fields, SlotLost, StudyGone, serve_trials


class ThreadSlot:
    """A slot, and the link of its thread to the study."""

    def __init__(self, request: Fields, news: threading.Condition) -> None:
        self._to_slot: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.to_study: list[Any] = []
        self._news = news
        self._thread = threading.Thread(target=self._serve, args=(request,), daemon=True)
        self._thread.start()

    def _serve(self, request: Fields) -> None:
        try:
            serve_trials(self._Link(self), request)
        except StudyGone:
            pass
        except BaseException as error:
            self._put(SlotLost(repr(error)))

    def _put(self, message: Any) -> None:
        with self._news:
            self.to_study.append(message)
            self._news.notify()

    class _Link:
        def __init__(self, slot: "ThreadSlot") -> None:
            self._slot = slot

        def send(self, message: Fields) -> None:
            self._slot._put(message)

        def receive(self) -> Fields:
            message = self._slot._to_slot.get()
            if message is None:
                raise StudyGone
            return dict(message)

        def has_message(self) -> bool:
            return not self._slot._to_slot.empty()

    def send(self, message: Fields) -> None:
        self._to_slot.put(message)

    def receive(self) -> Fields:
        message = self.to_study.pop(0)
        if isinstance(message, SlotLost):
            raise message
        return dict(message)

    def kill(self) -> None:
        self._to_slot.put(None)
        self._thread.join(10)


class ThreadSlots:
    def __init__(self, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self._news = threading.Condition()
        self.n_opened = 0

    def open(self, index: int, request: Fields) -> ThreadSlot:
        self.n_opened += 1
        return ThreadSlot(request, self._news)

    def wait(self, slots: Sequence[ThreadSlot], timeout_s: float | None) -> list[ThreadSlot]:
        """One slot of those with a message."""
        with self._news:
            self._news.wait_for(lambda: any(slot.to_study for slot in slots), timeout_s)
            ready = [slot for slot in slots if slot.to_study]
        return [ready[int(self._rng.integers(len(ready)))]] if ready else []

    def close(self) -> None:
        pass
