"""Importing: chunks of files take the way that every game's take, through link, stream and ingest, each once.

A session keeps the random part of its id, or gets one that is made of its content; its time becomes that of the import
where it is too old to enter. So whatever was imported before, or recorded here, is found again in the store and left
out, and an import that was killed goes on where it ended.
"""

from collections.abc import Container, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from understudy.app.crowd.ledger import LedgerLink
from understudy.app.exchange.begun import Begun, Sent
from understudy.app.exchange.destination import Destination, Landing
from understudy.app.exchange.history import OnSteps, noise_of
from understudy.app.exchange.incoming import Incoming, Outline, same_spec, survey
from understudy.app.exchange.plan import Plan, placed
from understudy.app.exchange.sending import Sender, send
from understudy.core.clock import Clock, SystemClock
from understudy.core.door import deployment_key, pseudonym
from understudy.core.errors import ConfigError
from understudy.core.game import GameSpec
from understudy.core.log import FileLock
from understudy.core.names import PlayerName, player_name
from understudy.core.ports import SessionFilter, SessionInfo

NOBODY = player_name("imported")
"""Whose steps they are, where neither file nor caller says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What an import found and did."""

    game: str
    schema: str
    sessions: int
    steps: int
    """In the files."""
    stored_steps: int
    """New in the store."""
    there_sessions: int
    there_steps: int
    """In the store already, so left out."""
    refused_steps: int
    waiting_steps: int
    """In the stream for good, and not seen in a store elsewhere yet."""
    refusals: Mapping[str, int]
    by_running_ingest: bool
    details: Mapping[str, Any]
    """What else the files' format has to say."""

    def to_json(self) -> dict[str, Any]:
        own = {name: getattr(self, name) for name in self.__slots__ if name != "details"}
        return {**own, "refusals": dict(self.refusals), **self.details}


def import_files(
    place: Destination, files: Sequence[Incoming], *, player: PlayerName | None = None, clock: Clock | None = None,
    on_steps: OnSteps | None = None,
) -> Imported:  # fmt: skip
    """Store every step of the files that is not in the store yet; nothing at all when one of the files is bad."""
    clock = clock or SystemClock()
    found = [survey(one, on_steps) for one in files]
    spec = same_spec(files)
    plans = _planned(files, found, player)
    lock = FileLock(place.data.root / "import.lock", what="an import into this folder")
    with lock, place.landing(clock) as landing:
        landing.settle(spec.game, {})  # what a killed import has sent counts as here
        begun, key = Begun(place.data.root), deployment_key(place.data.root)
        sent = _place(plans, _origins(files), landing, spec=spec, begun=begun, key=key, now_s=clock.now())
        link = place.link(spec, clock)
        with closing(LedgerLink(link, place.data.ledger)) as noting:
            place.register(spec, link)
            if sent and landing.is_elsewhere:
                begun.add(sent)
            if sent:
                send(files, plans, Sender(noting, clock), after_each=landing.step, on_steps=on_steps)
        after = _settled(landing, plans, sent, spec=spec, begun=begun)
        return _counted(files, spec, plans, after, landing)


def _planned(
    files: Sequence[Incoming], found: Sequence[Mapping[int, Outline]], player: PlayerName | None
) -> dict[int, Plan]:
    """A plan for each session; ConfigError when two files contradict each other."""
    plans: dict[int, Plan] = {}
    for owner, outlines in enumerate(found):
        for noise, outline in outlines.items():
            first = plans.setdefault(noise, Plan(owner, outline, player or outline.player or NOBODY))
            if not first.outline.is_like(outline):
                raise ConfigError(
                    f"{files[first.owner].name} and {files[owner].name} hold different steps of session "
                    f"{outline.origin}; import the one that has them all"
                )
    return plans


def _origins(files: Sequence[Incoming]) -> dict[int, int]:
    return {noise: origin for one in files for noise, origin in one.origins.items()}


def _place(
    plans: dict[int, Plan], origins: Mapping[int, int], landing: Landing, *, spec: GameSpec, begun: Begun, key: bytes,
    now_s: float,
) -> dict[int, Sent]:  # fmt: skip
    """Give an id to each plan that is to be sent; what will be sent under them."""
    known = _known(landing, spec, {*plans, *origins.values()})
    players = {one.player: pseudonym(key, spec.game, one.player) for one in plans.values()}
    for noise, plan in plans.items():
        if known.get(origins.get(noise, -1)) is not None:
            continue  # recorded here, and exported from here
        before = begun.sessions.get(noise) if landing.is_elsewhere else None
        plans[noise] = placed(plan, known.get(noise), players[plan.player], now_s=now_s, sent=before)
    return {
        noise: Sent(plan.session, players[plan.player])
        for noise, plan in plans.items() if plan.session is not None
    }  # fmt: skip


def _settled(
    landing: Landing, plans: Mapping[int, Plan], sent: Mapping[int, Sent], *, spec: GameSpec, begun: Begun
) -> dict[int, SessionInfo]:
    """What the store has of these sessions once what was sent is stored, or does not get on."""
    landing.settle(spec.game, {one.session: one.player for one in sent.values()})
    after = _known(landing, spec, plans.keys())
    if landing.is_elsewhere:
        begun.finish([noise for noise in plans if noise in after and after[noise].closed])
    return after


def _known(landing: Landing, spec: GameSpec, wanted: Container[int]) -> dict[int, SessionInfo]:
    """Sessions of the store by the random part of their ids; the fullest, should there be several."""
    known: dict[int, SessionInfo] = {}
    for info in landing.sessions(SessionFilter(game=spec.game)):
        noise = noise_of(info.session)
        if noise in wanted and (noise not in known or known[noise].n_steps < info.n_steps):
            known[noise] = info
    return known


def _counted(
    files: Sequence[Incoming],
    spec: GameSpec,
    plans: Mapping[int, Plan],
    after: Mapping[int, SessionInfo],
    landing: Landing,
) -> Imported:
    sent = {noise: plan for noise, plan in plans.items() if plan.session is not None}
    now = {noise: after[noise].n_steps if noise in after else 0 for noise in sent}
    lacking = {noise: max(0, plan.outline.steps - now[noise]) for noise, plan in sent.items()}
    is_waiting = {noise: landing.is_elsewhere and not (noise in after and after[noise].closed) for noise in sent}
    out = [plan.outline for plan in plans.values() if plan.session is None]
    details: dict[str, Any] = {}
    for one in files:
        for name, value in one.report().items():
            is_number = isinstance(value, int) and not isinstance(value, bool)
            details[name] = details.get(name, 0) + value if is_number else value
    return Imported(
        game=spec.game, schema=spec.schema, sessions=len(plans),
        steps=sum(plan.outline.steps for plan in plans.values()),
        stored_steps=sum(now[noise] - plan.had_steps for noise, plan in sent.items()),
        there_sessions=len(out),
        there_steps=sum(one.steps for one in out) + sum(plan.had_steps for plan in sent.values()),
        refused_steps=sum(steps for noise, steps in lacking.items() if not is_waiting[noise]),
        waiting_steps=sum(steps for noise, steps in lacking.items() if is_waiting[noise]),
        refusals=landing.refusals, by_running_ingest=not landing.is_ours, details=details,
    )  # fmt: skip
