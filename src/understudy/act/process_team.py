"""A team whose actors are processes of their own, none of which loads JAX."""

import contextlib
import os
import warnings
from collections.abc import Sequence
from multiprocessing.connection import wait
from typing import Any

from understudy.act.open_files import check_open_files
from understudy.act.remote_team import ActorLost, RemoteTeam, ServedActor
from understudy.act.team import TeamPlan
from understudy.core.child_process import ChildProcess, parent_connection, receive, send

_CLOSE_S = 3.0
"""For a process whose team has ended, to close its envs."""


def process_team(plan: TeamPlan, *, is_asynchronous: bool = False) -> RemoteTeam:
    """Actors in processes of their own, which play at the same time."""
    what = f"{plan.num_actors} actors in processes of their own"
    check_open_files(plan.num_actors, what=what)
    return RemoteTeam(plan, Processes(), is_asynchronous=is_asynchronous)


class Processes:
    """The transport: one process for each actor."""

    def __init__(self, purpose: str = "actor") -> None:
        """`purpose` is an argument of the processes, so that people recognize them."""
        self._purpose = purpose

    def open(self, index: int) -> ChildProcess:
        return ChildProcess(__name__, self._purpose, lost=ActorLost)

    def place(
        self, channels: Sequence[ChildProcess], n_needed: int, timeout_s: float
    ) -> Sequence[ChildProcess]:
        return channels

    def wait(self, channels: Sequence[ChildProcess], timeout_s: float | None) -> list[ChildProcess]:
        by_connection: dict[Any, ChildProcess] = {
            channel.connection: channel for channel in channels
        }
        return [by_connection[ready] for ready in wait(list(by_connection), timeout_s)]

    def close(self) -> None:
        """Nothing is left: each process was ended by its channel."""


def main() -> None:
    # The team's envs are registered first, and modules that register them are imported later.
    warnings.filterwarnings("ignore", message=".*Overriding environment")
    with contextlib.suppress(EOFError, ConnectionError):
        connection = parent_connection(close_s=_CLOSE_S)
        with contextlib.closing(ServedActor(os.getpid())) as actor:
            while True:
                message, parts = receive(connection)
                answer, parts = actor.answer(message, parts)
                send(connection, answer, *parts)


if __name__ == "__main__":
    main()
