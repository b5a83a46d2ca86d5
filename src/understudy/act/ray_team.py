"""A team whose actors are Ray actors, on this machine or on the nodes of a cluster.

Policies go through Ray's object store, once per version; results are bytes. A lost actor or node is
handled as a lost process is: Ray itself restarts and repeats nothing.
"""

import collections
import contextlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from understudy.act.ray_session import RaySession, lost_reason
from understudy.act.remote_team import ActorLost, RemoteTeam, ServedActor
from understudy.act.team import TeamPlan
from understudy.core.child_process import THREADS, Message
from understudy.core.errors import ConfigError, GameFailed

CPUS_PER_ACTOR = 1
_CLOSE_S = 3.0


def ray_team(
    plan: TeamPlan, *, address: str | None = None, is_asynchronous: bool = False
) -> RemoteTeam:
    """Actors on the Ray cluster at `address`, or on a Ray that ends with the team.

    When asynchronous, the team begins with the actors that have a free CPU; the others join when
    there is one.
    """
    session = RaySession(address, num_cpus=plan.num_actors * CPUS_PER_ACTOR)
    return RemoteTeam(plan, RayActors(session), is_asynchronous=is_asynchronous)


class RayActors:
    """The transport: one Ray actor for each actor, spread over the nodes."""

    def __init__(self, session: RaySession) -> None:
        self._session = session
        self._ray = session.ray
        self._class = self._ray.remote(_Served).options(
            num_cpus=CPUS_PER_ACTOR,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": {name: os.environ.get(name, "1") for name in THREADS}},
        )
        self._policy = b""
        self._policy_ref: Any = None

    def open(self, index: int) -> "_RayActor":
        return _RayActor(self._ray, self._class.remote(sys.path), self.put)

    def put(self, policy: bytes) -> Any:
        """The policy in the object store; all actors read the same object."""
        if policy is not self._policy:
            self._policy = policy
            self._policy_ref = self._ray.put(policy)
        return self._policy_ref

    def place(
        self, channels: Sequence["_RayActor"], n_needed: int, timeout_s: float
    ) -> list["_RayActor"]:
        by_ref = {channel.placed: channel for channel in channels}
        began_s = time.monotonic()
        ready, rest = self._ray.wait(list(by_ref), num_returns=n_needed, timeout=timeout_s)
        if len(ready) < n_needed:
            free, total = self._session.free_cpus()
            raise ConfigError(
                f"the Ray cluster has room for {len(ready)} of {len(channels)} actors: each needs "
                f"{CPUS_PER_ACTOR} CPU, and {free:g} of the cluster's {total:g} are free; nothing "
                f"changed in {timeout_s:g} s. Add nodes, use fewer actors, or let replay "
                "algorithms begin with fewer: asynchronous=true"
            )
        if rest:
            more, _ = self._ray.wait(
                rest, num_returns=len(rest), timeout=time.monotonic() - began_s
            )
            ready += more
        return [by_ref[ref] for ref in ready]

    def wait(self, channels: Sequence["_RayActor"], timeout_s: float | None) -> list["_RayActor"]:
        by_ref = {channel.answers[0]: channel for channel in channels if channel.answers}
        if len(by_ref) < len(channels):  # nothing could be sent to the others
            return [channel for channel in channels if not channel.answers]
        ready, _ = self._ray.wait(list(by_ref), num_returns=1, timeout=timeout_s)
        return [by_ref[ref] for ref in ready]

    def close(self) -> None:
        self._session.close()


class _RayActor:
    """A handle to a Ray actor and the references of its answers."""

    def __init__(self, ray: Any, handle: Any, put: Any) -> None:
        self._ray = ray
        self._handle = handle
        self._put = put
        self.placed = handle.is_placed.remote()
        self.answers: collections.deque[Any] = collections.deque()
        self._closed: Any = None
        self._hung_up_s = 0.0
        self._is_ended = False

    def send(self, request: Mapping[str, Any], *parts: bytes) -> None:
        sent: list[Any] = list(parts)
        if request["do"] == "collect" and parts[0]:
            sent[0] = self._put(parts[0])
        try:
            self.answers.append(self._handle.answer.remote(request, *sent))
        except self._ray.exceptions.RayError as error:
            raise ActorLost(lost_reason(error)) from None

    def receive(self) -> Message:
        if not self.answers:
            raise ActorLost("it had ended before")
        try:
            answer: Message = self._ray.get(self.answers.popleft())
        except self._ray.exceptions.RayTaskError as error:
            raise GameFailed(
                f"a Ray actor failed: {error}; install understudy and the game on every node"
            ) from None
        except self._ray.exceptions.RayError as error:
            raise ActorLost(lost_reason(error)) from None
        return answer

    def hang_up(self) -> None:
        if self._closed is None and not self._is_ended:
            self._hung_up_s = time.monotonic()
            with contextlib.suppress(self._ray.exceptions.RayError):
                self._closed = self._handle.close.remote()

    def end(self) -> None:
        if self._is_ended:
            return
        self.hang_up()
        is_placed, _ = self._ray.wait([self.placed], timeout=0)
        if is_placed and self._closed is not None:
            left_s = self._hung_up_s + _CLOSE_S - time.monotonic()
            self._ray.wait([self._closed], timeout=max(0.0, left_s))
        self._is_ended = True
        self._ray.kill(self._handle, no_restart=True)


class _Served:
    """The class of the Ray actors."""

    def __init__(self, paths: Sequence[str]) -> None:
        # Modules beside the caller's script, on nodes that have its folder, too.
        sys.path += [path for path in paths if path not in sys.path]
        self._actor = ServedActor(os.getpid())

    def is_placed(self) -> None:
        """Answered once the actor has a node."""

    def answer(self, request: Mapping[str, Any], *parts: bytes) -> Message:
        return self._actor.answer(request, parts)

    def close(self) -> None:
        self._actor.close()
