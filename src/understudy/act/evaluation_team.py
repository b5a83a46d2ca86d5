"""EvaluationTeam: the episodes of evaluations, divided among processes, and all counted."""

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from understudy.act.evaluate import MAX_STEPS, Evaluated
from understudy.act.process_team import Processes
from understudy.act.remote_team import MAX_LOSSES, ActorLost, Channel, pickle_plan, receive_answer
from understudy.act.team import TeamPlan
from understudy.core.errors import GameFailed
from understudy.nn.policy import Policy


class EvaluationTeam:
    """Processes that play the episodes of evaluations at the same time.

    Each episode is played from its own seed, so the number of processes changes no result. The
    number of envs in a process may: on some processors, NumPy rounds the last bits of a product
    differently for another batch size. A process that is lost is replaced, and its part of the
    episodes is played again.
    """

    def __init__(self, plan: TeamPlan) -> None:
        """The processes are the actors of the plan, which also divides the envs among them."""
        self._plan = plan
        self._pickled = pickle_plan(plan)
        self._parts: list[_Part] = []
        try:
            for _ in range(plan.num_actors):
                self._parts.append(self._start())
        except BaseException:
            self.close()
            raise

    def evaluate(
        self, policy: Policy, *, seeds: Sequence[int], max_steps: int = MAX_STEPS
    ) -> Evaluated:
        """Play one episode per seed, as `understudy.act.evaluate.evaluate` does."""
        encoded = policy.encode()
        n = min(len(self._parts), len(seeds))
        # Every n-th seed, so that parts differ by one episode at most.
        requests = [
            {"do": "evaluate", "seeds": list(seeds[index::n]), "max_steps": max_steps}
            for index in range(n)
        ]
        for part, request in zip(self._parts, requests, strict=False):
            part.send(request, encoded)
        returns = np.zeros(len(seeds))
        n_cut = 0
        for index, request in enumerate(requests):
            played, n_part_cut = self._played(index, request, encoded)
            returns[index::n] = np.frombuffer(played, np.float64)
            n_cut += n_part_cut
        return Evaluated(returns, n_cut)

    def _played(self, index: int, request: Mapping[str, Any], encoded: bytes) -> tuple[bytes, int]:
        """The returns of a part, as bytes, and its cut episodes."""
        name = f"process {index} of {self._plan.num_actors} for evaluations"
        n_losses = 0
        while True:
            try:
                answer, (played,) = self._parts[index].receive(name)
                return played, answer["n_cut"]
            except ActorLost as error:
                n_losses += 1
                self._parts[index].channel.end()
                if n_losses == MAX_LOSSES:
                    raise GameFailed(
                        f"{name} was lost {MAX_LOSSES} times, the last time because {error}; find "
                        "out why with engine='inline', which plays in this process"
                    ) from None
            self._parts[index] = self._start()
            self._parts[index].send(request, encoded)

    def _start(self) -> "_Part":
        num_envs = self._plan.num_envs // self._plan.num_actors
        part = _Part(Processes("evaluations").open(0))
        part.send({"do": "start_evaluations", "num_envs": num_envs}, self._pickled)
        return part

    def close(self) -> None:
        """End the processes; may be called twice."""
        for part in self._parts:
            part.channel.hang_up()
        for part in self._parts:
            part.channel.end()
        self._parts = []


class _Part:
    """A process, and the requests that it has not answered yet."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self._n_sent = 0

    def send(self, request: Mapping[str, Any], *parts: bytes) -> None:
        self._n_sent += 1
        with contextlib.suppress(ActorLost):  # `receive` notices it, too
            self.channel.send(request, *parts)

    def receive(self, name: str) -> tuple[Mapping[str, Any], Sequence[bytes]]:
        """The answer to the last request."""
        while True:
            self._n_sent -= 1
            answer = receive_answer(self.channel, name=name)
            if self._n_sent == 0:
                return answer
