"""StoreStats: statistics of a growing store: schemas played, steps by consent, returns.

The position in the store is saved with the statistics, so nothing is counted twice. An episode
counts if it is complete from its first step to its end: for a model if the episode's note names the
model and no person or script decided in it, for people if they made every decision. Episodes at a
skill are counted apart from those of a bot as released, and those at a temperature, or of a bot
that explores, not at all.

The bot of an episode that the gate compares was drawn by a gateway: the note has its ticket, which
must be sealed for this game, schema and model, and counts once. Episodes with any other ticket, or
with a probability that only the client states, count as if their bot had not been drawn, and by
the reason in `not_compared`; `progress`, the returns for display, leaves them out.
"""

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import numpy as np

from understudy.core.errors import Refused
from understudy.experience.chunk import By, Chunk, RowKind
from understudy.experience.frame import FrameKind
from understudy.experience.session import tombstone_of
from understudy.experience.ticket import Ticket, TicketSeal
from understudy.learn.outliers import believable, is_believable
from understudy.models.calibration import SkillPlayed
from understudy.models.gate import Played
from understudy.ports import Forgotten, Stored
from understudy.training.follower import (
    MAX_READ_S,
    ReaderPosition,
    StoreFollower,
    position_from_json,
)

_MAX_EPISODES = 8_192
"""Episodes kept per model, many more than the gate needs to decide."""
_FIRST_EPISODES = 1_024
"""The first episodes of a model, and of people, which are never dropped."""
_NEWEST_EPISODES = 1_024
"""The newest episodes of people, and of a model at any skill, from which skills are calibrated."""
_MAX_MODELS = 64
_MAX_FORGETS = 1_024
"""Newest `forget` events that are kept for each schema."""
_MAX_USED = 16_384
"""Tickets of each schema that are remembered, the newest, so that each counts once."""
_SAVED_FIELDS = 7
"""What a file holds of each schema."""
_ALL_PLAYERS = -1
"""The bits of all players."""
_PAUSED_S = 600.0
"""An open episode is not waited for after this long without a chunk."""
_SILENT_S = 86_400.0
"""An open episode is dropped after this long without a chunk."""


@dataclass(slots=True)
class _Open:
    """An episode that has not ended yet."""

    next_chunk: int
    started_s: float
    received_s: float
    total: float
    model: str | None
    is_whole: bool
    """Whether no chunk is missing, and no second model has played."""
    is_bots: bool = True
    """Whether no person or script has decided so far."""
    is_persons: bool = True
    """Whether people have made every decision so far."""
    ticket: str | None = None
    """The gateway's draw of the model, if there were several."""
    is_released: bool = True
    """Whether the bot has played as released so far, at no skill or temperature."""
    skill: str | None = None
    noise: float | None = None
    schema: str = ""
    player: str = ""
    is_unsealed: bool = False
    """Whether the client states a probability without a ticket."""


@dataclass(slots=True)
class Recorded:
    """What the store holds of one schema of a game: its first arrival number and its steps."""

    first_arrival: int
    steps: Counter[str] = field(default_factory=Counter)
    """Number of steps by consent at their arrival; those of actors are under `actor`."""
    people: Counter[str] = field(default_factory=Counter)
    """The same, of episodes without a bot or script."""
    players: dict[int, int] = field(default_factory=dict)
    """The first arrival number of each player's steps, by a hash of 16 bits: few others share one;
    0: not known."""
    forgotten: dict[int, int] = field(default_factory=dict)
    """The newest `forget` events that concerned one of them, in order: the first arrival number of
    the player's steps by that of the event."""
    erased: int = 0
    """Of the steps, those that were no longer stored after the last `forget` event."""
    has_end: bool = False
    """Whether an episode of players or bots has ended."""

    @property
    def n_stored(self) -> int:
        return self.steps.total() - self.erased


class StoreStats:
    """Statistics of all games of one store, which `follow` brings up to date; not thread-safe."""

    def __init__(self, follower: StoreFollower, seal: TicketSeal | None = None) -> None:
        """Without `seal`, no ticket is valid."""
        self._follower = follower
        self._seal = seal
        self._used: dict[str, dict[str, None]] = {}
        """The ids of used tickets by schema, oldest first."""
        self._not_compared: dict[str, Counter[str]] = {}
        """By game and reason."""
        self.position = ReaderPosition()
        self.read_no = 0
        """The highest arrival number that was read."""
        self._open: dict[str, _Open] = {}
        self._played: dict[str, list[Played]] = {}
        self._people: dict[str, list[Played]] = {}
        """First episodes of people, by schema."""
        self._newest_people: dict[str, deque[Played]] = {}
        self._skilled: dict[str, deque[SkillPlayed]] = {}
        """Newest episodes at a skill, by model."""
        self._n_skilled: Counter[str] = Counter()
        """Number of all episodes at a skill, by model."""
        self._counts: dict[str, int] = {}
        """Number of all episodes without an invalid draw, by model."""
        self._means: dict[str, tuple[int, float | None]] = {}
        """Mean return of a model as it is shown, and the number of its episodes at that time."""
        self.schemas: dict[str, dict[str, Recorded]] = {}
        """By game and schema."""
        self._unread_players = 0
        """Bits of the players with steps that were removed before they were read here; a model may
        have learned from these, with any schema: before the statistics were counted again, or after
        they were last saved."""
        self._unread_forgotten: list[int] = []
        """Arrival numbers of the newest `forget` events that concerned one of them."""
        self._must_recount = False
        """Whether there was a `forget` event since `erased` was counted."""
        follower.join(self)

    def follow(self, *, max_items: int = 256) -> bool:
        """Read and count what is new in the store, for about a second; whether there was anything.

        `max_items`: the size of a page.
        """
        has_read = self._follower.catch_up(self, max_s=MAX_READ_S, max_items=max_items)
        if self._must_recount:
            stored = self._follower.view.steps_by_schema(until_no=self.position.seen_no)
            for schemas in self.schemas.values():
                for name, recorded in schemas.items():
                    recorded.erased = recorded.steps.total() - stored.get(name, 0)
            self._must_recount = False
        return has_read

    def read(self, item: Stored | Forgotten) -> None:
        """Count an item of the store; called by the follower."""
        if isinstance(item, Forgotten):
            self.read_no = max(self.read_no, item.last_no)
            if item.reason == "forgotten" and item.player is not None and not item.chunks:
                self._forget(item.player, item.arrival_no)
            elif not item.at_s:  # no event, but a placeholder
                self._unread_players |= (
                    _ALL_PLAYERS if item.player is None else _player_bit(tombstone_of(item.player))
                )
            return
        self.read_no = max(self.read_no, item.arrival_no)
        if item.chunk is not None:
            self._add(item, item.chunk)
        elif item.frame.kind is FrameKind.CLOSE:
            self._open.pop(str(item.frame.session), None)

    @property
    def n_steps(self) -> int:
        """Steps of all games that were read so far, including those erased later."""
        return sum(
            recorded.steps.total()
            for schemas in self.schemas.values()
            for recorded in schemas.values()
        )

    def returns(self, model: str, *, since_s: float) -> list[Played]:
        """Episodes of a model that started at `since_s` or later, in the order they became known.

        A comparison uses the same `since_s` for both models, so earlier episodes count for neither.
        """
        played = self._played.get(model, ())
        return [episode for episode in played if episode.started_s >= int(since_s)]

    def settled_until_s(self, schema: str) -> float:
        """The start of the oldest episode of a bot with this schema that is still played.

        All that started before have ended, or have paused for long.
        """
        newest_s = max((episode.received_s for episode in self._open.values()), default=0.0)
        return min(
            (
                episode.started_s
                for episode in self._open.values()
                if episode.schema == schema
                and episode.model is not None
                and episode.is_released
                and episode.received_s >= newest_s - _PAUSED_S
            ),
            default=math.inf,
        )

    def people(self, schema: str) -> Sequence[Played]:
        """The first episodes of people with this schema."""
        return self._people.get(schema, ())

    def newest_people(self, schema: str) -> Sequence[Played]:
        """The newest episodes of people with this schema."""
        return self._newest_people.get(schema, ())

    def skilled(self, model: str) -> tuple[int, Sequence[SkillPlayed]]:
        """The number of a model's episodes at a skill, and the newest of them."""
        return self._n_skilled[model], self._skilled.get(model, ())

    def progress(self, game: str, schema: str) -> dict[str, Any]:
        """Mean returns of the first people with this schema and of the game's models, for display.

        Episodes whose draw the gate does not believe are left out; those without a draw count.
        The best person is the player with the highest mean. Players whose mean is far from that of
        most others are left out of both.
        """
        people = self.people(schema)
        means = [float(np.mean(returns)) for returns in believed(people)]
        n_players = len({episode.player for episode in people})
        return {
            "people": {
                "players": n_players,
                "left_out": n_players - len(means),
                "episodes": len(people),
                "mean": float(np.mean(means)) if means else None,
                "best": max(means, default=None),
            },
            "returns": {
                model: {"episodes": n, "mean": mean}
                for model, n in self._counts.items()
                if n and model.startswith(f"{game}/") and (mean := self._mean(model, n)) is not None
            },
        }

    def not_compared(self, game: str) -> dict[str, int]:
        """The number of episodes whose draw was not believed, by reason.

        `unsealed`: a probability without a ticket, as clients of earlier versions state it.
        `malformed_ticket`, `forged_ticket`: no gateway of this deployment sealed it for this game
        and schema. `other_model`: another one was drawn. `expired`, `reused`.
        """
        return dict(self._not_compared.get(game, {}))

    def _mean(self, model: str, n_episodes: int) -> float | None:
        """A model's mean return over the episodes that are kept, computed once for each number.

        None if none of them has a valid draw.
        """
        known = self._means.get(model)
        if known is None or known[0] != n_episodes:
            drawn = [episode for episode in self._played[model] if not episode.has_invalid_draw]
            returns = [one for own in believed(drawn) for one in own]
            known = n_episodes, float(np.mean(returns)) if returns else None
            self._means[model] = known
        return known[1]

    def schema(
        self, game: str, *, min_steps: int, learn_from: Sequence[str] = ("granted",)
    ) -> str | None:
        """The schema to learn: the newest with `min_steps` steps of people with these consents.

        If none has as many, it is the one with the most.
        """
        schemas = self.schemas.get(game)
        if not schemas:
            return None
        steps = {
            name: sum(stored.people[consent] for consent in learn_from)
            for name, stored in schemas.items()
        }
        mature = [name for name in schemas if steps[name] >= min_steps]
        if mature:
            return max(mature, key=lambda name: schemas[name].first_arrival)
        return max(schemas, key=lambda name: (steps[name], schemas[name].steps.total()))

    def forgotten(self, game: str, schema: str) -> Mapping[int, int]:
        """The newest `forget` events of players with steps of this schema, by arrival number.

        Each with the arrival number of the player's first steps, or 0 if that is not known. An
        event counts if the player may have had such steps, and for any schema if that is not known:
        the steps were removed before they were read, or an earlier version read them.
        """
        recorded = self.schemas.get(game, {}).get(schema)
        return recorded.forgotten if recorded is not None else {}

    def _forget(self, tombstone: bytes, arrival_no: int) -> None:
        is_unread = bool(self._unread_players & _player_bit(tombstone))
        if is_unread:
            self._unread_forgotten = [*self._unread_forgotten, arrival_no][-_MAX_FORGETS:]
        for schemas in self.schemas.values():
            for recorded in schemas.values():
                first_no = 0 if is_unread else recorded.players.get(_short_hash(tombstone))
                if first_no is not None:
                    recorded.forgotten[arrival_no] = first_no
                    if len(recorded.forgotten) > _MAX_FORGETS:
                        del recorded.forgotten[next(iter(recorded.forgotten))]
        self._drop_episodes(player_hash(tombstone))
        self._must_recount = True

    def _drop_episodes(self, player: str) -> None:
        """Remove a forgotten player's episodes from the returns of people and models."""
        self._open = {
            session: episode for session, episode in self._open.items() if episode.player != player
        }
        for schema, first in self._people.items():
            self._people[schema] = [episode for episode in first if episode.player != player]
        for schema, newest in self._newest_people.items():
            others = (episode for episode in newest if episode.player != player)
            self._newest_people[schema] = deque(others, _NEWEST_EPISODES)
        for model, played in list(self._played.items()):
            kept = [episode for episode in played if episode.player != player]
            self._played[model] = kept
            dropped = [episode for episode in played if episode.player == player]
            self._counts[model] -= sum(not episode.has_invalid_draw for episode in dropped)
            self._means.pop(model, None)
            if not kept:
                del self._played[model], self._counts[model]
        for model, skilled in self._skilled.items():
            kept_skilled = [episode for episode in skilled if episode.player != player]
            self._n_skilled[model] -= len(skilled) - len(kept_skilled)
            self._skilled[model] = deque(kept_skilled, _NEWEST_EPISODES)

    # --- Episodes ---------------------------------------------------------------------------------

    def _add(self, item: Stored, chunk: Chunk) -> None:
        meta = chunk.meta
        columns = chunk.columns
        schemas = self.schemas.setdefault(meta.game, {})
        if meta.schema not in schemas:
            forgotten = dict.fromkeys(self._unread_forgotten, 0)
            schemas[meta.schema] = Recorded(item.arrival_no, forgotten=forgotten)
        recorded = schemas[meta.schema]
        recorded.steps["actor" if meta.kind == "actor" else meta.consent] += meta.n_steps
        if meta.kind == "actor":
            return
        recorded.players.setdefault(_short_hash(tombstone_of(item.frame.player)), item.arrival_no)
        session = str(meta.session)
        received_s = float(item.frame.received_s)
        by = columns.get("by")
        running = self._open.pop(session, None)
        ends = [*(note.row for note in meta.episodes[1:]), chunk.n_rows]
        for note, end in zip(meta.episodes, ends, strict=True):
            rows = slice(note.row, end)
            is_step = columns["row"][rows] == RowKind.STEP
            is_first = bool(columns["is_first"][note.row])
            if is_first or running is None or running.next_chunk != meta.chunk_no:
                running = _Open(meta.chunk_no, received_s, received_s, 0.0, None, is_first)
                running.schema = meta.schema
            # An episode that an earlier version left open has none.
            running.player = player_hash(tombstone_of(item.frame.player))
            running.total += float(columns["reward"][rows][is_step].astype(np.float64).sum())
            # The first chunks of an episode may lack the model: a client names it once it decides.
            if running.model is not None and (note.model, note.noise, note.ticket) != (
                running.model,
                running.noise,
                running.ticket,
            ):
                running.is_whole = False
            running.model = note.model or running.model
            running.ticket = note.ticket or running.ticket
            running.is_unsealed |= note.propensity is not None
            running.is_released &= note.is_released_play
            running.skill = note.skill
            running.noise = note.noise
            deciders = set() if by is None else set(by[rows][is_step].tolist())
            if note.model is None and deciders <= {By.UNKNOWN, By.PERSON}:
                recorded.people[meta.consent] += int(is_step.sum())
            running.is_bots &= not deciders & {By.PERSON, By.SCRIPT}
            # A chunk may hold only the last row of an episode, and no step.
            running.is_persons &= by is not None and deciders <= {By.PERSON}
            has_ended = bool(columns["row"][end - 1] == RowKind.FINAL)
            recorded.has_end |= has_ended
            if has_ended:
                self._count(item, chunk, running, row=note.row)
            running.next_chunk = meta.chunk_no + 1
            running.received_s = received_s
        # Only unfinished episodes are kept; silent ones are dropped.
        if running is not None and not has_ended and not note.cut:
            self._open[session] = running
            oldest = next(iter(self._open))
            if self._open[oldest].received_s < received_s - _SILENT_S:
                del self._open[oldest]

    def _count(self, item: Stored, chunk: Chunk, ended: _Open, *, row: int) -> None:
        if not ended.is_whole:
            return
        played = Played(item.arrival_no, ended.started_s, ended.total, ended.player, row)
        if ended.model is None:
            first = self._people.setdefault(chunk.meta.schema, [])
            if ended.is_persons and len(first) < _FIRST_EPISODES:
                first.append(played)
            if ended.is_persons:
                newest = deque[Played](maxlen=_NEWEST_EPISODES)
                self._newest_people.setdefault(chunk.meta.schema, newest).append(played)
            return
        if not ended.is_bots or not ended.model.startswith(f"{chunk.meta.game}/"):
            return
        if not ended.is_released:
            if ended.skill is not None and ended.noise is not None:
                skilled = SkillPlayed(ended.skill, ended.noise, ended.total, ended.player)
                self._count_skilled(ended.model, skilled)
            return
        if ended.model not in self._played:
            while len(self._played) >= _MAX_MODELS:
                oldest = next(iter(self._played))
                del self._played[oldest]
                self._counts.pop(oldest, None)
                self._means.pop(oldest, None)
        ticket, why_invalid = self._ticket(chunk.meta.game, ended)
        if ticket is not None:
            played = played._replace(propensity=ticket.propensity, entry=ticket.entry)
        played = played._replace(has_invalid_draw=bool(why_invalid))
        self._counts.setdefault(ended.model, 0)
        self._counts[ended.model] += not why_invalid
        episodes = self._played.setdefault(ended.model, [])
        episodes.append(played)
        if len(episodes) > _MAX_EPISODES:
            del episodes[_FIRST_EPISODES]

    def _ticket(self, game: str, ended: _Open) -> tuple[Ticket | None, str]:
        """Use the ticket of an episode that counts; None, and why, if it is not valid."""
        why = "unsealed" if ended.is_unsealed else ""
        ticket = None
        if ended.ticket is not None and self._seal is not None:
            try:
                ticket = self._seal.open(ended.ticket, game=game, schema=ended.schema)
                why = self._why_invalid(ticket, game, ended)
            except Refused as error:
                why = error.reason
        if why:
            self._not_compared.setdefault(game, Counter())[why] += 1
            return None, why
        if ticket is not None:
            used = self._used.setdefault(ended.schema, {})
            used[ticket.id] = None
            if len(used) > _MAX_USED:
                del used[next(iter(used))]
        return ticket, ""

    def _why_invalid(self, ticket: Ticket, game: str, ended: _Open) -> str:
        """Why a sealed ticket does not count for an episode; empty if it does."""
        if ended.model != f"{game}/{ticket.model_no}":
            return "other_model"
        if ended.started_s > ticket.expires_s:
            return "expired"
        return "reused" if ticket.id in self._used.get(ended.schema, ()) else ""

    def _count_skilled(self, model: str, played: SkillPlayed) -> None:
        while model not in self._skilled and len(self._skilled) >= _MAX_MODELS:
            oldest = next(iter(self._skilled))
            del self._skilled[oldest]
            del self._n_skilled[oldest]
        newest = deque[SkillPlayed](maxlen=_NEWEST_EPISODES)
        self._skilled.setdefault(model, newest).append(played)
        self._n_skilled[model] += 1

    # --- Checkpoints ------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The complete state, as plain values."""
        return {
            "position": self.position.to_json(),
            "read_no": self.read_no,
            "open": {session: list(astuple(episode)) for session, episode in self._open.items()},
            "played": {model: list(played) for model, played in self._played.items()},
            "people": {schema: list(played) for schema, played in self._people.items()},
            "newest_people": {
                schema: list(played) for schema, played in self._newest_people.items()
            },
            "skilled": {
                model: [self._n_skilled[model], list(played)]
                for model, played in self._skilled.items()
            },
            "counts": self._counts,
            "used_tickets": {schema: list(used) for schema, used in self._used.items()},
            "not_compared": self._not_compared,
            "unread_players": hex(self._unread_players),
            "unread_forgotten": self._unread_forgotten,
            "schemas": {
                game: {
                    name: [
                        stored.first_arrival,
                        dict(stored.steps),
                        dict(stored.people),
                        stored.players,
                        stored.forgotten,
                        stored.has_end,
                        stored.erased,
                    ]
                    for name, stored in schemas.items()
                }
                for game, schemas in self.schemas.items()
            },
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from what `state` returned."""
        self.position = position_from_json(state["position"])
        self._open = {name: _Open(*fields) for name, fields in state["open"].items()}
        self._played, self._people = (
            {name: [Played(*fields) for fields in played] for name, played in state[kind].items()}
            for kind in ("played", "people")
        )
        self._used = {
            schema: dict.fromkeys(used) for schema, used in state.get("used_tickets", {}).items()
        }
        self._not_compared = {
            game: Counter(reasons) for game, reasons in state.get("not_compared", {}).items()
        }
        if "used_tickets" not in state:
            # An earlier version believed what clients state.
            for episode in self._open.values():
                episode.ticket = None
            self._played = {
                model: [episode._replace(propensity=None) for episode in played]
                for model, played in self._played.items()
            }
        # A file of an earlier version has neither of these.
        self._newest_people = {
            schema: deque((Played(*fields) for fields in played), _NEWEST_EPISODES)
            for schema, played in state.get("newest_people", state["people"]).items()
        }
        skilled = state.get("skilled", {})
        self._n_skilled = Counter({model: n for model, (n, _) in skilled.items()})
        self._skilled = {
            model: deque((SkillPlayed(*fields) for fields in played), _NEWEST_EPISODES)
            for model, (_, played) in skilled.items()
        }
        self._counts = {
            # A file of an earlier version has no counts.
            model: state.get("counts", {}).get(model, len(played))
            for model, played in self._played.items()
        }
        self._means = {}
        self.read_no = state.get("read_no", 0)
        # An earlier version did not record which players it had read.
        self._unread_players = int(state.get("unread_players", hex(_ALL_PLAYERS)), 16)
        self._unread_forgotten = list(state.get("unread_forgotten", ()))
        self.schemas = {
            game: {name: _recorded(*fields) for name, fields in schemas.items()}
            for game, schemas in state["schemas"].items()
        }
        # A file of an earlier version lacks what was erased.
        self._must_recount = any(
            len(fields) < _SAVED_FIELDS
            for schemas in state["schemas"].values()
            for fields in schemas.values()
        )

    def close(self) -> None:
        self._follower.leave(self)


def _recorded(
    first_arrival: int,
    steps: Mapping[str, int],
    people: Mapping[str, int] | None = None,
    players: Mapping[str, int] | str = "0x0",
    forgotten: Mapping[str, int] | Sequence[int] = (),
    has_end: bool = True,
    erased: int = 0,
) -> Recorded:
    """What a file holds of a schema; one of an earlier version lacks the last fields.

    Earlier versions wrote which players there are as bits, and no first arrival numbers.
    """
    if isinstance(players, str):
        bits = f"{int(players, 16):b}"[::-1]
        players = {str(at): 0 for at, bit in enumerate(bits) if bit == "1"}
    if not isinstance(forgotten, Mapping):
        forgotten = {str(number): 0 for number in forgotten}
    return Recorded(
        first_arrival,
        Counter(steps),
        Counter(steps if people is None else people),
        {int(player): first_no for player, first_no in players.items()},
        {int(number): first_no for number, first_no in forgotten.items()},
        has_end=has_end,
        erased=erased,
    )


def concerning(
    state: Mapping[str, Any], forgets: Iterable[int], *, game: str, schemas: Collection[str]
) -> dict[int, int]:
    """Those `forget` events that may be of a player with steps of these schemas.

    Each with the arrival number of the player's first steps, or 0 if that is not known. `state`:
    what `StoreStats.state` returned, or {}. `forgets`: arrival numbers of events.
    """
    if "unread_players" not in state:
        return dict.fromkeys(forgets, 0)
    stored = state["schemas"].get(game, {})
    every = [_recorded(*stored[name]).forgotten for name in schemas if name in stored]
    events = {}
    for number in forgets:
        first_nos = [forgotten[number] for forgotten in every if number in forgotten]
        is_dropped = any(
            len(forgotten) >= _MAX_FORGETS and number < min(forgotten) for forgotten in every
        )
        if number > state.get("read_no", 0) or is_dropped:
            first_nos = [0]
        if first_nos:
            events[number] = min(first_nos)
    return events


def player_hash(tombstone: bytes) -> str:
    """How a player is named in the saved statistics, so that these contain no pseudonym."""
    return tombstone.hex()[:16]


def _short_hash(tombstone: bytes) -> int:
    return int.from_bytes(tombstone[:2])


def _player_bit(tombstone: bytes) -> int:
    return 1 << _short_hash(tombstone)


def believed(played: Sequence[Played]) -> list[list[float]]:
    """The returns of each player, without players whose mean is far above that of most."""
    by_player: dict[str, list[float]] = {}
    for episode in played:
        by_player.setdefault(episode.player, []).append(episode.return_)
    sizes = [abs(float(np.mean(returns))) for returns in by_player.values()]
    largest = believable(sizes)
    return [
        returns
        for size, returns in zip(sizes, by_player.values(), strict=True)
        if is_believable(size, largest)
    ]
