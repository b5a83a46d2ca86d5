"""Bots of every game: the live models that players get, and decisions made on the server."""

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np
import structlog

from understudy.core.clock import Clock
from understudy.core.errors import Corrupt, Refused, StorageFailed
from understudy.core.tensors import Array
from understudy.experience.game import GameSpec, random_action
from understudy.experience.skill import DEFAULT_NOISE, BotSkill, bot_skill
from understudy.experience.ticket import TicketSeal
from understudy.experience.writer import check_mask, obs_writer
from understudy.models.catalogue import Alias, Catalogue, live_models
from understudy.models.manifest import open_policy
from understudy.models.registry import Registry
from understudy.models.trial import Trial, draw_tickets, trial_of
from understudy.nn.heads import env_actions, masked
from understudy.nn.policy import Policy
from understudy.ports import LiveModels, TicketBatch
from understudy.serve.wire import Acted, Advice, Advised, Ask, read_numbers

_log = structlog.get_logger("understudy.gateway")
GATHER_S = 0.002
MAX_BATCH = 256
_UNREAD = -1
_IDLE_S = 600.0
"""After this long without requests, a game's journal is no longer followed."""
_AGAIN_S = 5.0
"""Pause before a damaged model is read again, since it may have been restored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModels:
    """The models that the players of a schema get; replaced as a whole, never changed."""

    bot: LiveModels
    seen: int = _UNREAD
    """Newest journal entry that was read; above `bot.number` while a newer champion is damaged."""
    policy: Policy | None = None
    """The champion's policy, opened and checked."""
    model_no: int = 0
    raw: bytes = b""
    """The bytes of the policy, as signed."""
    others: Mapping[int, Policy] = field(default_factory=dict)
    """The policies of canary and control, by model number."""
    trial: Trial | None = None
    """Between which of them bots are drawn; None without a canary."""
    noise: Mapping[str, float] = field(default_factory=lambda: DEFAULT_NOISE)
    """The noise of each skill below `hard`."""
    damage: str = ""
    """Why no champion is served; empty: there is one, or the schema has none."""
    again_s: float = float("inf")
    """When (monotonic) to read the model again even without a new journal entry."""


_Key = tuple[str, str | None]
"""A game and one of its schemas; None: the newest schema that has a champion."""


@dataclass(slots=True)
class _Followed:
    served: ServedModels = field(default_factory=lambda: ServedModels(bot=LiveModels(number=0)))
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    looking: asyncio.Lock = field(default_factory=asyncio.Lock)
    asked_s: float = 0.0
    is_failing: bool = False


class ServedBots:
    """Follows the registry for every requested schema; a damaged model never replaces a good one.

    Callers pass only registered schemas, or None for the newest schema that has a champion.
    """

    def __init__(
        self,
        registry: Registry,
        executor: Executor,
        *,
        trust: list[str],
        follow_every_s: float,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._executor = executor
        self._monotonic = monotonic
        self._trust = trust
        self.every_s = max(follow_every_s, registry.poll_every_s)
        """How often the registry is read."""
        self._followed: dict[_Key, _Followed] = {}
        self._is_stopping = False

    async def now(self, game: str, schema: str | None = None) -> ServedModels:
        """Return a schema's live models, read from the registry on the first request."""
        key = (game, schema)
        followed = self._followed.get(key)
        if followed is None:
            followed = self._followed[key] = _Followed()
            # Usually known already: clients that name no schema get the newest one's.
            newest = self._followed.get((game, None), followed).served
            if newest.policy is not None and newest.policy.game.schema == schema:
                followed.served = newest
        followed.asked_s = self._monotonic()
        if followed.served.seen == _UNREAD:
            await self._look(key, followed)
        return followed.served

    async def newer(
        self,
        game: str,
        after: int,
        *,
        wait_s: float,
        schema: str | None = None,
        with_policy: bool = False,
    ) -> ServedModels | None:
        """Wait for live models with a number above `after`; None if there are none within `wait_s`.

        With `with_policy`, they must include a champion.
        """
        deadline_s = self._monotonic() + wait_s
        while True:
            served = await self.now(game, schema)
            if served.bot.number > after and (served.policy is not None or not with_policy):
                return served
            remaining_s = deadline_s - self._monotonic()
            if remaining_s <= 0 or self._is_stopping:
                return None
            try:
                changed = self._followed[game, schema].changed
                await asyncio.wait_for(changed.wait(), remaining_s)
            except TimeoutError:
                return None

    def stop_waiting(self) -> None:
        """End all current and later waits of `newer`, because the gateway is stopping."""
        self._is_stopping = True
        for followed in self._followed.values():
            followed.changed.set()

    async def follow(self) -> None:
        """Read the registry regularly until cancelled, when the gateway stops."""
        while True:
            await asyncio.sleep(self.every_s)
            for key, followed in list(self._followed.items()):
                if self._monotonic() - followed.asked_s > _IDLE_S:
                    del self._followed[key]
                    followed.changed.set()
                else:
                    await self._look(key, followed)

    async def _look(self, key: _Key, followed: _Followed) -> None:
        async with followed.looking:
            try:
                served = await asyncio.get_running_loop().run_in_executor(
                    self._executor, self._read, key, followed.served
                )
            except Exception as error:
                # Logged once and retried at the next read; the last good bot stays meanwhile.
                if not followed.is_failing:
                    _log.warning(
                        "registry_not_readable",
                        game=key[0],
                        error=repr(error)[:300],
                        next="the last known bot stays",
                    )
                followed.is_failing = True
                return
            followed.is_failing = False
            if served is not followed.served:
                followed.served = served
                changed = followed.changed
                followed.changed = asyncio.Event()
                changed.set()

    # --- In a thread ------------------------------------------------------------------------------

    def _read(self, key: _Key, before: ServedModels) -> ServedModels:
        game, schema = key
        now = self._registry.catalogue(game)
        if now.number == before.seen and self._monotonic() < before.again_s:
            return before
        champion, canary = now.pointers(schema)
        if champion is None or not champion.model_no:
            return ServedModels(bot=self._bot(now, champion, None), seen=now.number)
        again_s = self._monotonic() + _AGAIN_S
        served = self._with_champion(now, champion, canary, before)
        if served is not None:
            return served
        if before.policy is not None and before.model_no not in now.discarded:
            return replace(before, seen=now.number, again_s=again_s)
        # A gateway that starts while the champion is damaged uses the last intact one.
        for earlier in reversed(now.history):
            if (
                earlier.model_no
                and earlier.model_no not in now.discarded
                and earlier.schema == champion.schema
                and earlier.number < champion.number
                and (served := self._with_champion(now, earlier, canary, before))
            ):
                return replace(
                    served, bot=replace(served.bot, number=earlier.number), again_s=again_s
                )
        damage = (
            f"{now.models[champion.model_no].name} is damaged, and no earlier champion is intact"
        )
        no_bot = LiveModels(number=0, trust=tuple(self._trust))
        return ServedModels(bot=no_bot, seen=now.number, again_s=again_s, damage=damage)

    def _with_champion(
        self, now: Catalogue, champion: Alias, canary: Alias | None, before: ServedModels
    ) -> ServedModels | None:
        """Return models with this champion, or None if it is damaged; omit other damaged ones."""
        number = champion.model_no
        policy = before.policy
        raw = before.raw
        if number != before.model_no or policy is None:
            opened = self._opened(now, number, before)
            if opened is None:
                return None
            policy, raw = opened
        others: dict[int, Policy] = {}

        def has(model_no: int) -> bool:
            """Whether a model is intact, which is then in `others`."""
            other = before.others.get(model_no)
            if other is None and (opened := self._opened(now, model_no, before)):
                other = opened[0]
            if other is not None:
                others[model_no] = other
            return other is not None

        if canary is not None and not has(canary.model_no):
            canary = None
        control = now.control_of(canary)
        if control is not None and not has(control.model_no):
            control = None
        if canary is not None:
            canary = replace(canary, control=control)
        return ServedModels(
            bot=self._bot(now, champion, canary),
            seen=now.number,
            policy=policy,
            model_no=number,
            raw=raw,
            others=others,
            trial=trial_of(now, champion, canary),
            noise=noise.noise if (noise := now.noise.get(champion.schema)) else DEFAULT_NOISE,
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
        return live_models(now, champion, canary, trust=self._trust)


@dataclass(slots=True)
class _Question:
    policy: Policy
    obs: dict[str, Array]
    action_mask: Array | None
    deterministic: bool
    skill: BotSkill | None
    answer: "asyncio.Future[Any]"


class TicketIssuer:
    """Draws the bots of new episodes while a canary is on trial, as sealed tickets."""

    def __init__(
        self, bots: ServedBots, seal: TicketSeal, clock: Clock, rng: random.Random | None = None
    ) -> None:
        self._bots = bots
        self._seal = seal
        self._clock = clock
        self._rng = rng or random.SystemRandom()

    async def draw(
        self, game: str, n: int, *, schema: str | None, with_control: bool
    ) -> TicketBatch:
        """Return this many tickets of a schema's trial; none without a trial."""
        trial = (await self._bots.now(game, schema)).trial
        return self._drawn(trial, n, with_control=with_control)

    def spec_of(self, specs: Sequence[GameSpec], ticket: str) -> GameSpec | None:
        """Return the spec for whose schema a ticket was sealed; None if it is not valid."""
        for spec in specs:
            with contextlib.suppress(Refused):
                self._seal.open(ticket, game=spec.game, schema=spec.schema)
                return spec
        return None

    def choose(self, served: ServedModels, ask: Ask) -> tuple[Policy, int, str | None]:
        """Return the policy that answers a request, its model number, and its ticket if it has one.

        With `draw` it is drawn, and with a ticket it is that one's, as long as it is live.
        Otherwise it is the champion. Refused if the ticket is not valid.
        """
        assert served.policy is not None
        policies = {served.model_no: served.policy, **served.others}
        # A policy that needs the last observations cannot play here.
        can_draw = all(policy.stack == 1 for policy in policies.values())
        game = served.policy.game
        if ask.ticket is not None:
            ticket = self._seal.open(ask.ticket, game=game.game, schema=game.schema)
            if can_draw and ticket.model_no in policies:
                return policies[ticket.model_no], ticket.model_no, ask.ticket
        elif ask.draw and can_draw and served.trial is not None:
            (drawn,) = self._drawn(served.trial, 1, with_control=True).tickets
            return policies[drawn.model_no], drawn.model_no, drawn.ticket
        return served.policy, served.model_no, None

    def _drawn(self, trial: Trial | None, n: int, *, with_control: bool) -> TicketBatch:
        return draw_tickets(
            trial,
            self._seal,
            n,
            now_s=self._clock.now(),
            rng=self._rng,
            with_control=with_control,
        )


class PolicyServer:
    """Answers `act` and `advise` with a bot of the spec's schema, computed in a thread."""

    def __init__(
        self, bots: ServedBots, rng: np.random.Generator, tickets: TicketIssuer, *, within_s: float
    ) -> None:
        self._bots = bots
        self._rng = rng
        self._tickets = tickets
        self._within_s = within_s
        # A thread of its own, since a decision must not wait for the disk.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="understudy-decider")
        self._waiting: list[_Question] = []
        self._gathering: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def act(self, specs: Sequence[GameSpec], ask: Ask) -> Acted:
        """Return the bot's action, by default the champion's; a random valid one if it cannot.

        Of several specs, the ticket's decides, without one the newest that has a champion; if that
        is not known in time, the last one that the observation fits. A random action has the ticket
        of its request or draw, too: a client that drew again would choose the fast bots.
        """
        skill = bot_skill(ask.skill, ask.temperature)
        if ask.temperature is not None and ask.deterministic:
            raise Refused(
                "bad_temperature",
                "temperature and deterministic are both given, but a temperature applies to "
                "sampled actions; give one of the two",
            )
        if len(specs) > 1 and ask.ticket is not None:
            # A newer schema may have got its champion in the middle of the episode.
            sealed_for = self._tickets.spec_of(specs, ask.ticket)
            specs = specs if sealed_for is None else [sealed_for]
        spec = specs[0] if len(specs) == 1 else _fitting(specs, ask)
        ticket: str | None = None
        try:
            async with asyncio.timeout(self._within_s):
                if len(specs) > 1:
                    spec = newest_of(specs, await self._served(spec.game), spec)
                mask = _action_mask(spec, ask.action_mask)
                columns = _columns(spec, ask.obs)
                served = await self._served(spec.game, spec.schema)
                if why := no_decision_reason(served, spec):
                    return self._fallback(spec, mask, why)
                skill = skill and skill.with_noise(served.noise)
                policy = served.policy
                model_no = served.model_no
                if skill is None:
                    policy, model_no, ticket = self._tickets.choose(served, ask)
                assert policy is not None
                is_best = ask.deterministic
                if is_best is None:
                    is_best = ask.temperature is None
                action = await self._ask(
                    policy, columns, mask=mask, deterministic=is_best, skill=skill
                )
        except TimeoutError:
            mask = _action_mask(spec, ask.action_mask)
            why = f"the bot took longer than {self._within_s:.3g} s"
            return self._fallback(spec, mask, why, ticket=ticket)
        if action is None:
            return self._fallback(spec, mask, "the bot failed", ticket=ticket)
        noise = msgspec.UNSET if skill is None or skill.noise is None else skill.noise
        return Acted(action=action, model_no=model_no, noise=noise, ticket=ticket or msgspec.UNSET)

    async def _served(self, game: str, schema: str | None = None) -> ServedModels:
        # Shielded, so that a first read of the registry completes for the next requests.
        served: ServedModels = await asyncio.shield(self._keep(self._bots.now(game, schema)))
        return served

    async def advise(self, spec: GameSpec, ask: Ask) -> Advised:
        """Return every valid action with the champion's rating, best first."""
        if spec.discrete is None:
            raise Refused(
                "not_discrete", f"{spec.game} has no discrete actions to rank; use act instead"
            )
        if ask.skill is not None or ask.temperature is not None:
            raise Refused(
                "bad_skill", "advise rates actions as released; leave out skill and temperature"
            )
        mask = _action_mask(spec, ask.action_mask)
        columns = _columns(spec, ask.obs)
        served = await self._bots.now(spec.game, spec.schema)
        if why := no_decision_reason(served, spec):
            raise Refused("no_bot", f"{why}; record more steps, or release a model")
        return await asyncio.get_running_loop().run_in_executor(
            self._thread, _advise, served, columns, mask, spec
        )

    def _fallback(
        self, spec: GameSpec, mask: Array | None, why: str, *, ticket: str | None = None
    ) -> Acted:
        action = random_action(spec, self._rng, action_mask=None if mask is None else mask[0])
        return Acted(
            action=_as_json(action),
            model_no=0,
            is_fallback=True,
            why=why,
            ticket=ticket or msgspec.UNSET,
        )

    def _ask(
        self,
        policy: Policy,
        obs: dict[str, Array],
        *,
        mask: Array | None,
        deterministic: bool,
        skill: BotSkill | None,
    ) -> "asyncio.Future[Any]":
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()
        self._waiting.append(_Question(policy, obs, mask, deterministic, skill, answer))
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
        groups: dict[tuple[int, bool, bool, bool], list[_Question]] = {}
        for question in questions:
            key = (
                id(question.policy),
                question.action_mask is None,
                question.deterministic,
                question.skill is None,
            )
            groups.setdefault(key, []).append(question)
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
        for question, action in zip(group, actions, strict=True):
            if not question.answer.done():
                question.answer.set_result(action)

    def _keep(self, work: Any) -> asyncio.Task[Any]:
        """Create a task and hold a reference to it while it runs."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Wait for decisions in progress."""
        await asyncio.to_thread(self._thread.shutdown)


def no_decision_reason(served: ServedModels, spec: GameSpec) -> str:
    """Return why the champion cannot decide; empty if it can."""
    policy = served.policy
    if policy is None:
        return served.damage or f"{spec.game} has no bot yet"
    if policy.stack > 1:
        return (
            f"{spec.game}/{served.model_no} needs the last {policy.stack} observations, which only "
            "clients have"
        )
    return ""


def _as_json(action: Any) -> Any:
    """Return the action with arrays converted to lists, also in nested parts."""
    if isinstance(action, dict):
        return {name: _as_json(part) for name, part in action.items()}
    return action.tolist() if isinstance(action, np.ndarray) else action


def newest_of(specs: Sequence[GameSpec], newest: ServedModels, default: GameSpec) -> GameSpec:
    """Return the spec of the newest champion, or the default without one."""
    schema = newest.policy.game.schema if newest.policy else ""
    return next((spec for spec in specs if spec.schema == schema), default)


def _fitting(specs: Sequence[GameSpec], ask: Ask) -> GameSpec:
    """Return the last spec that the request fits, or the first one."""
    for spec in reversed(specs):
        with contextlib.suppress(Refused):
            _action_mask(spec, ask.action_mask)
            _columns(spec, ask.obs)
            return spec
    return specs[0]


def _columns(spec: GameSpec, raw: msgspec.Raw) -> dict[str, Array]:
    obs = read_numbers(raw, (space.shape for space in spec.obs.values()), what="obs")
    columns = {
        name: np.empty((1, *space.shape), space.dtype) for name, space in spec.obs_columns.items()
    }
    obs_writer(spec)(list(columns.values()), 0, obs)
    return columns


def _action_mask(spec: GameSpec, action_mask: list[bool] | None) -> Array | None:
    if action_mask is None:
        return None
    if spec.discrete is None:
        raise Refused(
            "bad_action_mask", f"{spec.game} has no discrete actions; leave out action_mask"
        )
    mask = check_mask(np.asarray(action_mask, np.bool_), spec.discrete.n)
    if not mask.any():
        raise Refused("bad_action_mask", "action_mask allows no action; allow at least one")
    return mask[None]


# --- In a thread ----------------------------------------------------------------------------------


def _decide(group: list[_Question], seed: int) -> list[Any]:
    if all(question.answer.done() for question in group):
        # All timed out while they queued; computing them would delay the next ones.
        return [None] * len(group)
    policy = group[0].policy
    if group[0].skill is not None:
        rng = np.random.default_rng(seed)
        return [np.asarray(_choose(question, rng)).tolist() for question in group]
    obs = {
        name: np.concatenate([question.obs[name] for question in group]) for name in group[0].obs
    }
    masks = [question.action_mask for question in group if question.action_mask is not None]
    action_mask = np.concatenate(masks) if masks else None
    is_greedy = group[0].deterministic
    noise = None if is_greedy else policy.head.noise(np.random.default_rng(seed), len(group))
    decision = policy.decide(obs, noise, action_mask=action_mask, deterministic=is_greedy)
    return [np.asarray(action).tolist() for action in env_actions(policy.game, decision.action)]


def _choose(question: _Question, rng: np.random.Generator) -> Any:
    """The action at a skill, as the clients choose it."""
    mask = question.action_mask
    return question.policy.choose_columns(
        {name: column[0] for name, column in question.obs.items()},
        action_mask=None if mask is None else mask[0],
        deterministic=question.deterministic,
        rng=rng,
        skill=question.skill,
    )[0]


def _advise(
    served: ServedModels, obs: dict[str, Array], mask: Array | None, spec: GameSpec
) -> Advised:
    policy = served.policy
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
        model_no=served.model_no,
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
