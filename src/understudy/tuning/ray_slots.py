"""Slots on Ray: each is an actor, here or on a node of a cluster, and a process beside it.

An actor asks for the CPUs of its trial and of the trial's rollout workers at once, and nothing in
it asks Ray for more: no slot waits for another one, so none can wait for ever. Ray restarts and
repeats nothing; the study starts the trials of a lost slot again.
"""

import contextlib
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from understudy.act.ray_session import RaySession, lost_reason
from understudy.core.errors import LearningFailed
from understudy.core.plural import plural
from understudy.tuning.slots import Fields, Places, SlotLost, host_slot, hosted_request


class RaySlots:
    """Slots that are actors of one Ray; those without a place join when there is one."""

    def __init__(self, session: RaySession, folder: Path, *, cpus: int) -> None:
        """Each slot has `cpus` CPUs of one node; its output is in a file of `folder` there."""
        self._session = session
        self._ray = session.ray
        self._folder = folder
        self._cpus = cpus
        self._class = self._ray.remote(concurrency_groups={"receive": 1})(_Host).options(
            num_cpus=cpus,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy="SPREAD",
        )
        self._places = Places()

    def open(self, index: int, request: Fields) -> "_RaySlot":
        request = hosted_request(request, index=index, folder=self._folder)
        return _RaySlot(self._ray, self._class.remote(request))

    def wait(self, slots: Sequence["_RaySlot"], timeout_s: float | None) -> list["_RaySlot"]:
        """As Slots.wait; ConfigError if no slot has found a place in time."""
        by_ref = {slot.message: slot for slot in slots}
        placed, _ = self._ray.wait([slot.placed for slot in slots], timeout=0)
        if not placed:
            timeout_s = self._places.limited(timeout_s, self._no_place)
        ready, _ = self._ray.wait(list(by_ref), num_returns=1, timeout=timeout_s)
        if placed:
            self._places.note()
        return [by_ref[ref] for ref in ready]

    def _no_place(self) -> str:
        free, total = self._session.free_cpus()
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        largest = max((node.get("CPU", 0.0) for node in nodes), default=0.0)
        needs = f"{self._cpus} {plural(self._cpus, 'CPU')} on one node"
        return (
            f"the Ray cluster has no place for a slot, which needs {needs} (one, and one for each "
            f"rollout worker): {free:g} of its {total:g} CPUs are free, and the largest of its "
            f"{len(nodes)} {plural(len(nodes), 'node')} has {largest:g}; add nodes, wait for "
            "other jobs, or use fewer rollout_workers"
        )

    def close(self) -> None:
        """Nothing is left: each actor was ended by its slot, and Ray ends with its session."""


class _RaySlot:
    """A handle to an actor, and the reference of its next message."""

    def __init__(self, ray: Any, handle: Any) -> None:
        self._ray = ray
        self._handle = handle
        self.placed = handle.is_placed.remote()
        self.message = self._next()

    def _next(self) -> Any:
        return self._handle.receive.options(concurrency_group="receive").remote()

    def send(self, message: Fields) -> None:
        try:
            self._handle.send.remote(message)
        except self._ray.exceptions.RayError as error:
            raise SlotLost(lost_reason(error)) from None

    def receive(self) -> Fields:
        try:
            message: Fields = self._ray.get(self.message)
        except self._ray.exceptions.RayTaskError as error:
            raise LearningFailed(
                f"a Ray actor failed: {error}; install understudy on every node"
            ) from None
        except self._ray.exceptions.RayError as error:
            raise SlotLost(lost_reason(error)) from None
        if message["is"] == "lost":
            raise SlotLost(message["why"])
        self.message = self._next()
        return message

    def kill(self) -> None:
        self._ray.kill(self._handle, no_restart=True)


class _Host:
    """The class of the actors; `send` and `receive` run at the same time."""

    def __init__(self, request: Fields) -> None:
        self._slot = host_slot(request)

    def is_placed(self) -> None:
        """Answered once the actor has a node."""

    def send(self, message: Fields) -> None:
        with contextlib.suppress(SlotLost):  # `receive` returns it
            self._slot.send(message)

    def receive(self) -> Fields:
        try:
            return self._slot.receive()
        except SlotLost as error:
            return {"is": "lost", "why": f"{error}, on {socket.gethostname()}"}
