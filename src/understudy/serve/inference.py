"""Decisions made on the server: gathered for a moment, decided together, and never later than promised."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import structlog

from understudy.core.errors import Refused
from understudy.core.game import GameSpec
from understudy.core.heads import env_actions, masked
from understudy.core.policy import Policy
from understudy.core.random_action import random_action
from understudy.core.tensors import Array
from understudy.core.writer import check_mask, obs_writer
from understudy.serve.bots import Bots, OnStage
from understudy.serve.wire import Acted, Advice, Advised, Ask

_log = structlog.get_logger("understudy.gateway")
GATHER_S = 0.002
MAX_BATCH = 256


@dataclass(slots=True)
class _Question:
    policy: Policy
    obs: dict[str, Array]
    legal: Array | None
    deterministic: bool
    answer: "asyncio.Future[Any]"


class Decider:
    """Answers `act` and `advise`; on the event loop, with the arithmetic in a thread."""

    def __init__(self, bots: Bots, rng: np.random.Generator, *, within_s: float) -> None:
        self._bots, self._rng, self._within_s = bots, rng, within_s
        # A thread of its own: a decision must not wait for a disk.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="understudy-decider")
        self._waiting: list[_Question] = []
        self._gathering: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def act(self, spec: GameSpec, asked: Ask) -> Acted:
        """What the champion does; a random legal action when there is none, or no time."""
        mask, columns = _legal(spec, asked.legal), _columns(spec, asked.obs)
        try:
            async with asyncio.timeout(self._within_s):
                # Shielded: a first look at the registry goes on for those who come next.
                stage = await asyncio.shield(self._keep(self._bots.now(spec.game)))
                if why := why_not(stage, spec):
                    return self._fallback(spec, mask, why)
                action = await self._ask(stage, columns, mask, asked.deterministic)
        except TimeoutError:
            return self._fallback(spec, mask, f"the bot took longer than {self._within_s:.3g} s")
        if action is None:
            return self._fallback(spec, mask, "the bot failed")
        return Acted(action=action, model_no=stage.model_no)

    async def advise(self, spec: GameSpec, asked: Ask) -> Advised:
        """Every legal action with what the champion thinks of it, best first."""
        if spec.discrete is None:
            raise Refused("not_discrete", f"{spec.game} has no discrete actions to rank; ask for act instead")
        mask, columns = _legal(spec, asked.legal), _columns(spec, asked.obs)
        stage = await self._bots.now(spec.game)
        if why := why_not(stage, spec):
            raise Refused("no_bot", f"{why}; play on, or release one")
        return await asyncio.get_running_loop().run_in_executor(self._thread, _advise, stage, columns, mask, spec)

    def _fallback(self, spec: GameSpec, mask: Array | None, why: str) -> Acted:
        action = random_action(spec, self._rng, legal=None if mask is None else mask[0])
        return Acted(action=_as_json(action), model_no=0, is_fallback=True, why=why)

    def _ask(
        self, stage: OnStage, obs: dict[str, Array], mask: Array | None, deterministic: bool
    ) -> "asyncio.Future[Any]":
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        assert stage.policy is not None
        self._waiting.append(_Question(stage.policy, obs, mask, deterministic, answer))
        if len(self._waiting) >= MAX_BATCH:
            self._decide()
        elif self._gathering is None:
            self._gathering = loop.call_later(GATHER_S, self._decide)
        return answer

    def _decide(self) -> None:
        questions, self._waiting = self._waiting, []
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        groups: dict[tuple[int, bool, bool], list[_Question]] = {}
        for one in questions:
            groups.setdefault((id(one.policy), one.legal is None, one.deterministic), []).append(one)
        for group in groups.values():
            self._keep(self._answer(group))

    async def _answer(self, group: list[_Question]) -> None:
        seed = int(self._rng.integers(1 << 62))
        try:
            actions = await asyncio.get_running_loop().run_in_executor(self._thread, _decide, group, seed)
        except Exception as error:
            _log.error("bot_failed", error=repr(error)[:300], next="players get random actions")
            actions = [None] * len(group)
        for one, action in zip(group, actions, strict=True):
            if not one.answer.done():
                one.answer.set_result(action)

    def _keep(self, work: Any) -> asyncio.Task[Any]:
        """A task that is not lost while it runs."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Let decisions that are under way end."""
        await asyncio.to_thread(self._thread.shutdown)


def why_not(stage: OnStage, spec: GameSpec) -> str:
    """Why nobody can decide; empty when the champion can."""
    policy = stage.policy
    if policy is None:
        return stage.damage or f"{spec.game} has no bot yet"
    if policy.game.schema != spec.schema:
        return f"{spec.game}/{stage.model_no} plays another schema"
    if policy.stack > 1:
        return f"{spec.game}/{stage.model_no} looks at {policy.stack} observations, and only clients keep those"
    return ""


def _as_json(action: Any) -> Any:
    """Arrays as lists, also inside parts."""
    if isinstance(action, dict):
        return {name: _as_json(part) for name, part in action.items()}
    return action.tolist() if isinstance(action, np.ndarray) else action


def _columns(spec: GameSpec, obs: Any) -> dict[str, Array]:
    columns = {name: np.empty((1, *space.shape), space.dtype) for name, space in spec.obs_columns.items()}
    obs_writer(spec)(list(columns.values()), 0, obs)
    return columns


def _legal(spec: GameSpec, legal: list[bool] | None) -> Array | None:
    if legal is None:
        return None
    if spec.discrete is None:
        raise Refused("bad_legal", f"{spec.game} has no discrete actions; leave out legal")
    mask = check_mask(np.asarray(legal, np.bool_), spec.discrete.n)
    if not mask.any():
        raise Refused("bad_legal", "legal allows no action; give a mask with at least one")
    return mask[None]


# --- In a thread ------------------------------------------------------------------------------------------------------


def _decide(group: list[_Question], seed: int) -> list[Any]:
    policy = group[0].policy
    obs = {name: np.concatenate([one.obs[name] for one in group]) for name in group[0].obs}
    legal = None if group[0].legal is None else np.concatenate([one.legal for one in group if one.legal is not None])
    is_greedy = group[0].deterministic
    noise = None if is_greedy else policy.head.noise(np.random.default_rng(seed), len(group))
    decision = policy.decide(obs, noise, legal=legal, deterministic=is_greedy)
    return [np.asarray(action).tolist() for action in env_actions(policy.game, decision.action)]


def _advise(stage: OnStage, obs: dict[str, Array], mask: Array | None, spec: GameSpec) -> Advised:
    policy, discrete = stage.policy, spec.discrete
    assert policy is not None
    assert discrete is not None
    output = policy.head.outputs[0]
    scores = np.asarray(policy.outputs(obs)[output], np.float32)
    row = np.asarray((scores if mask is None else masked(scores, mask))[0], np.float64)
    shares = np.exp(row - row.max())
    shares /= shares.sum()
    ranked = [int(at) for at in np.argsort(-row, kind="stable") if mask is None or mask[0, at]]
    is_value = output == "q"
    return Advised(
        model_no=stage.model_no,
        actions=[
            Advice(
                action=at + discrete.start,
                name=spec.action_names[at] if spec.action_names else str(at + discrete.start),
                value=float(row[at]) if is_value else None,
                probability=None if is_value else float(shares[at]),
            )
            for at in ranked
        ],
    )
