"""Bots of every game: who plays now, as the registry says, and the decisions that are made on
the server."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import structlog

from understudy.core.errors import Corrupt, Refused, StorageFailed
from understudy.core.tensors import Array
from understudy.experience.game import GameSpec, random_action
from understudy.experience.writer import check_mask, obs_writer
from understudy.models.catalogue import Alias, Catalogue, casting
from understudy.models.manifest import open_policy
from understudy.models.registry import Registry
from understudy.nn.heads import env_actions, masked
from understudy.nn.policy import Policy
from understudy.ports import LiveModels
from understudy.serve.wire import Acted, Advice, Advised, Ask

_log = structlog.get_logger("understudy.gateway")
GATHER_S = 0.002
MAX_BATCH = 256
_UNREAD = -1
_IDLE_S = 600.0
"""A game nobody asked about for so long is no longer followed."""
_AGAIN_S = 5.0
"""How long after a bad model its file is looked at again: somebody may have restored it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModels:
    """What a game's players get; replaced as a whole, never changed."""

    bot: LiveModels
    seen: int = _UNREAD
    """The newest entry of the journal that was looked at; above the bot's number while its model
    is bad."""
    policy: Policy | None = None
    """The champion, opened and checked."""
    model_no: int = 0
    raw: bytes = b""
    """The policy's own bytes, as they were signed."""
    canary_no: int = 0
    damage: str = ""
    """What is wrong with the champion that nobody gets for it."""
    again_s: float = float("inf")
    """When to look again although nothing new was written."""


@dataclass(slots=True)
class _Game:
    stage: ServedModels = field(default_factory=lambda: ServedModels(bot=LiveModels(number=0)))
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    looking: asyncio.Lock = field(default_factory=asyncio.Lock)
    asked_s: float = 0.0
    is_failing: bool = False


class ServedBots:
    """Follows the registry for every game that is asked about; a bad model never replaces a good
    one."""

    def __init__(
        self,
        registry: Registry,
        executor: Executor,
        *,
        trust: list[str],
        canary_share: float,
        follow_every_s: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._executor = executor
        self._monotonic = monotonic
        self._trust = trust
        self._canary_share = canary_share
        self.every_s = max(follow_every_s, registry.look_every_s)
        """How often the registry is looked at."""
        self._games: dict[str, _Game] = {}
        self._is_stopping = False

    async def now(self, game: str) -> ServedModels:
        """The game's bot; read from the registry when it is asked for the first time."""
        known = self._games.get(game)
        if known is None:
            known = self._games[game] = _Game()
        known.asked_s = self._monotonic()
        if known.stage.seen == _UNREAD:
            await self._look(game, known)
        return known.stage

    def known_policy(self, game: str) -> Policy | None:
        """The champion as far as it is known by now."""
        known = self._games.get(game)
        return known.stage.policy if known else None

    async def newer(
        self, game: str, after: int, wait_s: float, *, with_policy: bool = False
    ) -> ServedModels | None:
        """The bot once its number is above `after` (and there is a champion, if that is asked);
        None: time ran out."""
        deadline_s = self._monotonic() + wait_s
        while True:
            stage = await self.now(game)
            if stage.bot.number > after and (stage.policy is not None or not with_policy):
                return stage
            left_s = deadline_s - self._monotonic()
            if left_s <= 0 or self._is_stopping:
                return None
            try:
                await asyncio.wait_for(self._games[game].changed.wait(), left_s)
            except TimeoutError:
                return None

    def stop_waiting(self) -> None:
        """Answer whoever waits, now and from now on: the gateway is stopping."""
        self._is_stopping = True
        for known in self._games.values():
            known.changed.set()

    async def follow(self) -> None:
        """Look for news for ever; cancelled when the gateway stops."""
        while True:
            await asyncio.sleep(self.every_s)
            for game, known in list(self._games.items()):
                if self._monotonic() - known.asked_s > _IDLE_S:
                    del self._games[game]
                    known.changed.set()
                else:
                    await self._look(game, known)

    async def _look(self, game: str, known: _Game) -> None:
        async with known.looking:
            try:
                stage = await asyncio.get_running_loop().run_in_executor(
                    self._executor, self._read, game, known.stage
                )
            except Exception as error:
                # Said once, and tried again at the next look: the last good bot stays meanwhile.
                if not known.is_failing:
                    _log.warning(
                        "registry_not_readable",
                        game=game,
                        error=repr(error)[:300],
                        next="the last bot stays",
                    )
                known.is_failing = True
                return
            known.is_failing = False
            if stage is not known.stage:
                known.stage = stage
                changed = known.changed
                known.changed = asyncio.Event()
                changed.set()

    # --- In a thread ------------------------------------------------------------------------------

    def _read(self, game: str, before: ServedModels) -> ServedModels:
        now = self._registry.catalogue(game)
        if now.number == before.seen and self._monotonic() < before.again_s:
            return before
        champion = now.aliases.get("champion")
        if champion is None or not champion.model_no:
            return ServedModels(bot=self._bot(now, champion, None), seen=now.number)
        again_s = self._monotonic() + _AGAIN_S
        stage = self._staged(now, champion, before)
        if stage is not None:
            return stage
        if before.policy is not None:
            return replace(before, seen=now.number, again_s=again_s)
        # A gateway that starts while the champion is damaged goes back to the last one that is not.
        for earlier in reversed(now.history[:-1]):
            if earlier.model_no and (stage := self._staged(now, earlier, before)):
                return replace(
                    stage, bot=replace(stage.bot, number=earlier.number), again_s=again_s
                )
        damage = (
            f"{now.models[champion.model_no].name} is damaged, and no champion before it is whole"
        )
        nobody = LiveModels(number=0, trust=tuple(self._trust))
        return ServedModels(bot=nobody, seen=now.number, again_s=again_s, damage=damage)

    def _staged(self, now: Catalogue, champion: Alias, before: ServedModels) -> ServedModels | None:
        """The stage with this champion; None when its model is bad. A bad canary is left out."""
        number = champion.model_no
        policy = before.policy
        raw = before.raw
        if number != before.model_no or policy is None:
            opened = self._opened(now, number, before)
            if opened is None:
                return None
            policy, raw = opened
        canary = now.aliases.get("canary")
        if (
            canary is not None
            and canary.model_no != before.canary_no
            and not self._opened(now, canary.model_no, before)
        ):
            canary = None
        return ServedModels(
            bot=self._bot(now, champion, canary),
            seen=now.number,
            policy=policy,
            model_no=number,
            raw=raw,
            canary_no=canary.model_no if canary else 0,
        )

    def _opened(
        self, now: Catalogue, model_no: int, before: ServedModels
    ) -> tuple[Policy, bytes] | None:
        if model_no not in now.models:
            return None
        manifest = now.models[model_no]
        try:
            raw = self._registry.policy_bytes(manifest)
            return open_policy(manifest, raw), raw
        except (Corrupt, Refused, StorageFailed, OSError) as error:
            if now.number != before.seen:
                _log.error(
                    "bad_model",
                    model=manifest.name,
                    error=str(error)[:300],
                    next="the last good bot stays",
                )
            return None

    def _bot(self, now: Catalogue, champion: Alias | None, canary: Alias | None) -> LiveModels:
        return casting(now, champion, canary, trust=self._trust, canary_share=self._canary_share)


@dataclass(slots=True)
class _Question:
    policy: Policy
    obs: dict[str, Array]
    legal: Array | None
    deterministic: bool
    answer: "asyncio.Future[Any]"


class PolicyServer:
    """Answers `act` and `advise`; on the event loop, with the arithmetic in a thread."""

    def __init__(self, bots: ServedBots, rng: np.random.Generator, *, within_s: float) -> None:
        self._bots = bots
        self._rng = rng
        self._within_s = within_s
        # A thread of its own: a decision must not wait for a disk.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="understudy-decider")
        self._waiting: list[_Question] = []
        self._gathering: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def act(self, spec: GameSpec, asked: Ask) -> Acted:
        """What the champion does; a random legal action when there is none, or no time."""
        mask = _legal(spec, asked.legal)
        columns = _columns(spec, asked.obs)
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
            raise Refused(
                "not_discrete", f"{spec.game} has no discrete actions to rank; ask for act instead"
            )
        mask = _legal(spec, asked.legal)
        columns = _columns(spec, asked.obs)
        stage = await self._bots.now(spec.game)
        if why := why_not(stage, spec):
            raise Refused("no_bot", f"{why}; play on, or release one")
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, _advise, stage, columns, mask, spec
        )

    def _fallback(self, spec: GameSpec, mask: Array | None, why: str) -> Acted:
        action = random_action(spec, self._rng, legal=None if mask is None else mask[0])
        return Acted(action=_as_json(action), model_no=0, is_fallback=True, why=why)

    def _ask(
        self, stage: ServedModels, obs: dict[str, Array], mask: Array | None, deterministic: bool
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
        questions = self._waiting
        self._waiting = []
        if self._gathering is not None:
            self._gathering.cancel()
            self._gathering = None
        groups: dict[tuple[int, bool, bool], list[_Question]] = {}
        for one in questions:
            groups.setdefault((id(one.policy), one.legal is None, one.deterministic), []).append(
                one
            )
        for group in groups.values():
            self._keep(self._answer(group))

    async def _answer(self, group: list[_Question]) -> None:
        seed = int(self._rng.integers(1 << 62))
        try:
            actions = await asyncio.get_running_loop().run_in_executor(
                self._thread, _decide, group, seed
            )
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


def why_not(stage: ServedModels, spec: GameSpec) -> str:
    """Why nobody can decide; empty when the champion can."""
    policy = stage.policy
    if policy is None:
        return stage.damage or f"{spec.game} has no bot yet"
    if policy.game.schema != spec.schema:
        return f"{spec.game}/{stage.model_no} plays another schema"
    if policy.stack > 1:
        return (
            f"{spec.game}/{stage.model_no} looks at {policy.stack} observations, and only "
            "clients keep those"
        )
    return ""


def _as_json(action: Any) -> Any:
    """Arrays as lists, also inside parts."""
    if isinstance(action, dict):
        return {name: _as_json(part) for name, part in action.items()}
    return action.tolist() if isinstance(action, np.ndarray) else action


def _columns(spec: GameSpec, obs: Any) -> dict[str, Array]:
    columns = {
        name: np.empty((1, *space.shape), space.dtype) for name, space in spec.obs_columns.items()
    }
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


# --- In a thread ----------------------------------------------------------------------------------


def _decide(group: list[_Question], seed: int) -> list[Any]:
    policy = group[0].policy
    obs = {name: np.concatenate([one.obs[name] for one in group]) for name in group[0].obs}
    legal = (
        None
        if group[0].legal is None
        else np.concatenate([one.legal for one in group if one.legal is not None])
    )
    is_greedy = group[0].deterministic
    noise = None if is_greedy else policy.head.noise(np.random.default_rng(seed), len(group))
    decision = policy.decide(obs, noise, legal=legal, deterministic=is_greedy)
    return [np.asarray(action).tolist() for action in env_actions(policy.game, decision.action)]


def _advise(
    stage: ServedModels, obs: dict[str, Array], mask: Array | None, spec: GameSpec
) -> Advised:
    policy = stage.policy
    discrete = spec.discrete
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
