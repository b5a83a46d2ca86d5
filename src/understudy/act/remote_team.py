"""RemoteTeam: actors elsewhere, behind a transport that carries requests and answers.

    team ──plan, policies, requests──► transport ──► ServedActor
         ◄──chunks and episodes, uncompressed──

If an actor is lost, another one restores its last saved state and repeats the rounds since then,
which end with the same bits.
"""

import contextlib
import math
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol
from zlib import crc32

import cloudpickle
import gymnasium
import numpy as np
from gymnasium.envs.registration import load_env_creator

from understudy.act.actor import Actor
from understudy.act.evaluate import evaluate
from understudy.act.team import (
    State,
    TeamPlan,
    decode_collected,
    encode_collected,
    explore_parts,
    join_collected,
    join_states,
    split_state,
)
from understudy.act.vector import Envs
from understudy.core import errors, tensors
from understudy.core.child_process import Message
from understudy.core.errors import Closed, ConfigError, GameFailed, UnderstudyError
from understudy.core.tensors import Array
from understudy.nn.policy import Policy, decode_policy
from understudy.ports import Collected

SAVE_EVERY = 8
"""Rounds after which an actor sends its state; so many rounds are repeated after a loss."""
MAX_LOSSES = 5
"""An actor that is lost so often without completing a round is not replaced again."""
PLACE_S = 60.0
"""How long a run waits for a place to play for its first actors."""
REPLACE_S = 600.0
"""The same if actors are lost: a node may be started in between."""


class ActorLost(Exception):
    """An actor ended; the message states how."""


class Channel(Protocol):
    """The way to one actor: a queue of requests, each of which has one answer."""

    def send(self, request: Mapping[str, Any], *parts: bytes) -> None:
        """Queue a request; ActorLost if the actor has ended."""
        ...

    def receive(self) -> Message:
        """Wait for the next answer; ActorLost if the actor ended without it."""
        ...

    def hang_up(self) -> None:
        """Let the actor close its envs and end, without waiting; may be called twice."""
        ...

    def end(self) -> None:
        """Wait until the actor has ended, and end it by force if it does not."""
        ...


class Transport(Protocol):
    """Starts actors somewhere."""

    def open(self, index: int) -> Channel:
        """Start a ServedActor that has no plan yet."""
        ...

    def place(self, channels: Sequence[Any], n_needed: int, timeout_s: float) -> Sequence[Any]:
        """Wait until so many actors, and others that follow soon, have a place to play.

        ConfigError if fewer have one after the timeout.
        """
        ...

    def wait(self, channels: Sequence[Any], timeout_s: float | None) -> Sequence[Any]:
        """The channels with an answer, or an actor that ended; none after the timeout."""
        ...

    def close(self) -> None:
        """End what the transport itself has started; may be called twice."""
        ...


class RemoteTeam:
    """Actors behind a transport, which play at the same time."""

    def __init__(
        self, plan: TeamPlan, transport: Transport, *, is_asynchronous: bool = False
    ) -> None:
        """When asynchronous, no actor waits for another: `collect` returns rounds that are over.

        An actor plays its next round as soon as its result is read, with the newest policy then. A
        replaced actor begins new episodes, and the team has no state.
        """
        self._plan = plan
        self._transport = transport
        self._is_asynchronous = is_asynchronous
        self._is_closed = False
        self._notes: list[str] = []
        self._policy: Policy | None = None
        self._encoded = b""
        self._actors: list[_RemoteActor] = []
        try:
            self._pickled = pickle_plan(plan)
            for index in range(plan.num_actors):
                self._actors.append(_RemoteActor(self._transport, self._pickled, index))
            channels = [actor.channel for actor in self._actors]
            n_needed = 1 if is_asynchronous else len(channels)
            placed = self._transport.place(channels, n_needed, PLACE_S)
            for actor in self._actors:
                if actor.channel in placed:
                    actor.receive_start()
        except ActorLost as error:
            self.close()
            raise GameFailed(
                f"actor {actor.index} ended before it played: {error}; its message is above this "
                "one, and engine='inline' may show more"
            ) from None
        except BaseException:
            self.close()
            raise

    @property
    def num_envs(self) -> int:
        return self._plan.num_envs

    @property
    def pids(self) -> list[int]:
        """The process of each actor that plays."""
        return [actor.pid for actor in self._actors if not actor.is_starting]

    def collect(
        self, policy: Policy, steps: int, *, round_no: int, explore: Any = None
    ) -> Collected:
        parts = explore_parts(explore, self._plan)
        if policy is not self._policy:
            self._policy = policy
            self._encoded = policy.encode()
        rounds = [_Round(self._encoded, steps, round_no, part) for part in parts]
        for actor, played in zip(self._actors, rounds, strict=True):
            if not (actor.is_playing or actor.is_starting):
                self._start(actor, played)
        results = []
        failures = []
        for index in self._finished(rounds):
            try:
                results.append(self._result(self._actors[index], rounds[index]))
            except UnderstudyError as error:  # raised once every answer is read
                failures.append(error)
            if self._is_asynchronous and not (failures or self._actors[index].is_starting):
                ahead = replace(rounds[index], round_no=round_no + 1)
                self._start(self._actors[index], ahead)
        if failures:
            raise failures[0]
        collected = join_collected([result for result in results if result is not None])
        notes = self._notes
        self._notes = []
        return replace(collected, replaced=tuple(notes))

    def _finished(self, rounds: Sequence["_Round"]) -> Iterator[int]:
        """Yield the actors whose results are read next: all of them, or those that are not late.

        When asynchronous, an actor is late if it takes twice as long as the first one, and one
        that has just started begins its round.
        """
        if not self._is_asynchronous:
            yield from range(len(self._actors))
            return
        waiting = {actor.channel: actor for actor in self._actors}
        deadline_s = math.inf
        while waiting and (left_s := deadline_s - time.monotonic()) > 0:
            if all(actor.is_starting for actor in waiting.values()) and deadline_s == math.inf:
                self._transport.place(list(waiting), 1, REPLACE_S)
            timeout_s = None if deadline_s == math.inf else left_s
            for ready in self._transport.wait(list(waiting), timeout_s):
                actor = waiting.pop(ready)
                if actor.is_starting:
                    actor = self._join(actor, rounds[actor.index])
                    waiting[actor.channel] = actor
                    continue
                if deadline_s == math.inf:
                    now_s = time.monotonic()
                    deadline_s = now_s + (now_s - actor.started_s)
                yield actor.index

    def _join(self, actor: "_RemoteActor", played: "_Round") -> "_RemoteActor":
        """Let an actor that has started play; if it is lost again, return its replacement."""
        try:
            actor.receive_start()
        except ActorLost as error:
            return self._replace(actor, str(error))
        if actor.n_losses == 0:
            self._notes.append(f"actor {actor.index} of {self._plan.num_actors} joined the others")
        self._start(actor, played)
        return actor

    def _start(self, actor: "_RemoteActor", played: "_Round") -> None:
        with contextlib.suppress(ActorLost):  # `_result` notices it, too
            actor.send_round(played, with_state=not self._is_asynchronous)

    def _result(self, actor: "_RemoteActor", played: "_Round") -> Collected | None:
        """The actor's part of a round; None if it is lost and its episodes end there."""
        while True:
            try:
                return actor.receive_round(None if self._is_asynchronous else played)
            except ActorLost as error:
                actor = self._replace(actor, str(error))
            if self._is_asynchronous:
                return None
            with contextlib.suppress(ActorLost):
                actor.resume_round(played)

    def _replace(self, lost: "_RemoteActor", why: str) -> "_RemoteActor":
        lost.channel.end()
        if self._is_closed:
            raise Closed("the team was closed while an actor played")
        if lost.n_losses + 1 >= MAX_LOSSES:
            raise GameFailed(
                f"actor {lost.index} was lost {MAX_LOSSES} times without completing a round, the "
                f"last time because {why}; find out why with engine='inline', which plays in this "
                "process"
            )
        self._notes.append(f"actor {lost.index} was replaced: {why}")
        actor = _RemoteActor(
            self._transport,
            self._pickled,
            lost.index,
            n_restarts=lost.n_restarts + 1 if self._is_asynchronous else 0,
        )
        actor.n_losses = lost.n_losses + 1
        actor.saved = lost.saved
        actor.since = lost.since
        self._actors[lost.index] = actor
        if not self._is_asynchronous:  # else `_finished` lets it begin
            self._transport.place([actor.channel], 1, REPLACE_S)
            with contextlib.suppress(ActorLost):
                actor.receive_start()
        return actor

    def state(self) -> tuple[dict[str, Array], dict[str, Any]]:
        self._check_state()
        return join_states([self._saved(actor) for actor in list(self._actors)])

    def _saved(self, actor: "_RemoteActor") -> State:
        while True:
            try:
                return actor.save()
            except ActorLost as error:
                actor = self._replace(actor, str(error))
            with contextlib.suppress(ActorLost):
                actor.resume_round(None)

    def _check_state(self) -> None:
        if self._is_asynchronous:
            raise ConfigError(
                "an asynchronous team has no state, since its actors do not wait; restart its "
                "episodes"
            )

    def restore(self, arrays: Mapping[str, Array], facts: Mapping[str, Any]) -> None:
        self._check_state()
        states = split_state(arrays, facts, num_actors=self._plan.num_actors)
        for actor, state in zip(self._actors, states, strict=True):
            actor.saved = state
            actor.since = []
            with contextlib.suppress(ActorLost):
                actor.send_restore()
        failures = []
        for actor in list(self._actors):
            try:
                actor.receive()
            except ActorLost as error:
                with contextlib.suppress(ActorLost):  # the next round notices it, too
                    self._replace(actor, str(error)).resume_round(None)
            except UnderstudyError as error:
                failures.append(error)
        if failures:
            raise failures[0]

    def close(self) -> None:
        self._is_closed = True
        with contextlib.ExitStack() as ended:  # all of them, also if one raises an error
            ended.callback(self._transport.close)
            for actor in self._actors:
                ended.callback(actor.channel.end)
                actor.channel.hang_up()


@dataclass(frozen=True, slots=True)
class _Round:
    """The request of one round to one actor."""

    policy: bytes
    steps: int
    round_no: int
    explore: Any
    crc: int | None = None
    """Of the result, once there is one."""


class _RemoteActor:
    """One actor, and what its replacement needs."""

    def __init__(
        self, transport: Transport, pickled: bytes, index: int, *, n_restarts: int = 0
    ) -> None:
        self.index = index
        self.n_restarts = n_restarts
        """How often it was lost without a restore; its sessions differ by that."""
        self.n_losses = 0
        """How often it was lost since it last completed a round."""
        self.saved: State | None = None
        self.since: list[_Round] = []
        """The rounds that it completed after `saved`."""
        self.is_starting = True
        """It may still wait for a place to play."""
        self.is_playing = False
        """A round was requested, and its result not yet read."""
        self.started_s = 0.0
        """When the last round was requested."""
        self.pid = 0
        self._policy = b""
        self.channel = transport.open(index)
        with contextlib.suppress(ActorLost):
            self.channel.send({"do": "start", "index": index, "n_restarts": n_restarts}, pickled)

    def receive_start(self) -> None:
        self.is_starting = False
        answer, _ = self.receive()
        self.pid = answer["pid"]

    def send_round(self, played: _Round, *, with_state: bool = False) -> None:
        is_new = played.policy is not self._policy
        explore = played.explore
        per_env = b"" if np.ndim(explore) == 0 else np.asarray(explore, np.float32).tobytes()
        self.started_s = time.monotonic()
        self.channel.send(
            {
                "do": "collect",
                "steps": played.steps,
                "round_no": played.round_no,
                "explore": None if per_env or explore is None else float(explore),
                "with_state": with_state and len(self.since) + 1 >= SAVE_EVERY,
            },
            played.policy if is_new else b"",
            per_env,
        )
        self._policy = played.policy
        self.is_playing = True

    def receive_round(self, played: _Round | None) -> Collected:
        """The result of a round; `played` is kept, to be repeated after a loss."""
        answer, parts = self.receive()
        self.n_losses = 0
        if played is not None:
            self.since.append(replace(played, crc=crc32(parts[0])))
        if "facts" in answer:
            self._keep(answer["facts"], parts[1])
        return decode_collected(parts[0])

    def save(self) -> State:
        self.channel.send({"do": "state"})
        answer, parts = self.receive()
        return self._keep(answer["facts"], parts[0])

    def _keep(self, facts: Mapping[str, Any], arrays: bytes) -> State:
        self.saved = (_decode_arrays(arrays), facts)
        self.since = []
        return self.saved

    def send_restore(self) -> None:
        assert self.saved is not None
        arrays, facts = self.saved
        self.channel.send({"do": "restore", "facts": facts}, tensors.encode(arrays, {}))

    def resume_round(self, played: _Round | None) -> None:
        """Restore the saved state, repeat the rounds since then, and request one more."""
        if self.saved is not None:
            self.send_restore()
            self.receive()
        for earlier in self.since:
            self.send_round(earlier)
            _, parts = self.receive()
            if crc32(parts[0]) != earlier.crc:
                raise ConfigError(
                    f"actor {self.index} was replaced and played otherwise than before: its envs "
                    "are not determined by their seeds and actions; make the env draw all its "
                    "randomness from reset(seed=...), or train with asynchronous=true, which "
                    "continues with new episodes instead"
                )
        if played is not None:
            self.send_round(played)

    def receive(self) -> Message:
        """The next answer; raises the error that it reports, or ActorLost if it has none."""
        self.is_playing = False
        return receive_answer(self.channel, name=f"actor {self.index}")


def receive_answer(channel: Channel, *, name: str) -> Message:
    """The next answer; raises the error that it reports, or ActorLost if it has none."""
    answer, parts = channel.receive()
    if "error" not in answer:
        return answer, parts
    kind = getattr(errors, answer["error"], None)
    is_ours = isinstance(kind, type) and issubclass(kind, ConfigError | GameFailed)
    error: UnderstudyError = (
        kind(answer["message"])
        if is_ours and kind is not None
        else GameFailed(f"{name} failed: {answer['error']}: {answer['message']}")
    )
    error.add_note(answer["traceback"])
    raise error


def pickle_plan(plan: TeamPlan) -> bytes:
    """The plan, and the registered envs that another interpreter does not know."""
    specs = []
    for spec in gymnasium.registry.values():
        entry = spec.entry_point
        if str(entry).startswith("gymnasium."):
            continue
        with contextlib.suppress(Exception):  # the env of another game
            if isinstance(entry, str) and entry.startswith("__main__:"):
                # The main module of an actor's process is another one.
                creator: Any = load_env_creator(entry)
                spec = replace(spec, entry_point=creator)
            specs.append(cloudpickle.dumps(spec))
    try:
        return bytes(cloudpickle.dumps((plan, specs)))
    except Exception as error:
        raise ConfigError(
            f"the envs of {plan.game.game} cannot be created in another process: {error}; pass a "
            "Gymnasium id or a function that creates an env from values that can be pickled, or "
            "use engine='inline'"
        ) from None


def _decode_arrays(raw: bytes) -> dict[str, Array]:
    return tensors.decode(raw, max_header_bytes=len(raw))[0]


# --- In the process of an actor -------------------------------------------------------------------


class ServedActor:
    """Answers the requests of a RemoteTeam, or of an EvaluationTeam, in another process."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._actor: Actor | None = None
        self._evaluated: Envs | None = None
        self._policy: Policy | None = None

    def answer(self, request: Mapping[str, Any], parts: Sequence[bytes]) -> Message:
        """The answer to a request; an error of the game is one, too."""
        try:
            return self._answer(request, parts)
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # also of a game that exits
            lines = "".join(traceback.format_exception(error))
            name = type(error).__name__
            return {"error": name, "message": str(error), "traceback": lines}, []

    def _answer(self, request: Mapping[str, Any], parts: Sequence[bytes]) -> Message:
        if request["do"] in ("start", "start_evaluations"):
            plan, specs = cloudpickle.loads(parts[0])
            for raw in specs:
                with contextlib.suppress(Exception):  # the env of another game
                    spec = cloudpickle.loads(raw)
                    gymnasium.registry.setdefault(spec.id, spec)
            if request["do"] == "start_evaluations":
                self._evaluated = plan.make_envs(request["num_envs"])
            else:
                self._actor = plan.make_actor(request["index"], n_restarts=request["n_restarts"])
            return {"pid": self._pid}, []
        if request["do"] == "evaluate":
            assert self._evaluated is not None
            policy = decode_policy(parts[0])
            seeds, max_steps = request["seeds"], request["max_steps"]
            returns, n_cut = evaluate(policy, self._evaluated, seeds=seeds, max_steps=max_steps)
            return {"n_cut": n_cut}, [returns.tobytes()]
        actor = self._actor
        assert actor is not None
        match request["do"]:
            case "restore":
                actor.restore(_decode_arrays(parts[0]), request["facts"])
                return {}, []
            case "state":
                arrays, facts = actor.state()
                return {"facts": facts}, [tensors.encode(arrays, {})]
        if parts[0]:
            self._policy = decode_policy(parts[0])
        assert self._policy is not None
        explore = np.frombuffer(parts[1], np.float32) if parts[1] else request["explore"]
        collected = encode_collected(
            actor.collect(
                self._policy, request["steps"], round_no=request["round_no"], explore=explore
            )
        )
        if not request["with_state"]:
            return {}, [collected]
        arrays, facts = actor.state()
        return {"facts": facts}, [collected, tensors.encode(arrays, {})]

    def close(self) -> None:
        """Close the envs; may be called twice."""
        for envs in (self._actor, self._evaluated):
            if envs is not None:
                envs.close()
        self._actor = None
        self._evaluated = None
