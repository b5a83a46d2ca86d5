"""Bots in the game: the last good ones load from disk at once, newer ones pass all checks first.

    link.bot ─► signatures ─► entry number not lower than seen ─► schema ─► policy: hash, golden
        outputs ─► disk ─► live

A game never waits for the network: the first `act` loads the stored bots, later ones read one
attribute, and a thread fetches newer bots. The thread starts with the first `act` or
`wait_for_bot`, so a game that only records never fetches bots. While a canary is on trial, the
gateway draws the bot of each episode: its draws are fetched in advance as *tickets*, and without
one the champion plays. A folder, which several processes and versions of a game may share, stores
what the next start needs:

    trust.json                  the deployment's public keys, pinned at first contact
    SCHEMA/bot.json             the last good live models, and the highest entry number seen of each
                                alias (champion, canary)
    SCHEMA/SHA256.safetensors   policies
"""

import contextlib
import random
import threading
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from understudy.client.backoff import Backoff
from understudy.core.canonical import canonical_json, strict_json
from understudy.core.clock import Clock
from understudy.core.errors import (
    ConfigError,
    Corrupt,
    LinkFailed,
    Refused,
    StorageFailed,
    StorageFull,
    UnderstudyError,
)
from understudy.core.log import create_once, make_folder, write_file
from understudy.core.signed import Trusted, open_signed, trusted_keys
from understudy.experience.game import GameSpec
from understudy.experience.skill import (
    DEFAULT_NOISE,
    MAX_EXPLORE_SHARE,
    BotSkill,
    checked_noise,
    exploring_skill,
)
from understudy.experience.writer import action_writer
from understudy.ports import DrawnTicket, Link, LiveModels, TicketBatch

if TYPE_CHECKING:
    # Imported with the first bot; a game that only records does not need policies.
    from understudy.models.manifest import Manifest
    from understudy.nn.policy import Policy


_POLL_S = 25.0
"""How long one poll waits for newer live models."""
_PUMP_EVERY_S = 1.0
_RETRY_FIRST_S = 0.5
_RETRY_CAP_S = 30.0
_AGAIN_FIRST_S = 15.0
_AGAIN_CAP_S = 600.0
"""A rejected bot is checked again after `_AGAIN_FIRST_S`, in case it was damaged in transit; the
wait doubles up to `_AGAIN_CAP_S`."""
_N_TICKETS = 64
"""Tickets that are fetched at once; more are fetched when half of them are used."""
_ALIASES = ("champion", "canary")
_BAD = (Refused, Corrupt, ConfigError, KeyError, TypeError, ValueError, AttributeError)
"""What checking an invalid document may raise."""


class BotCache:
    """Stores a schema's bots on disk; if a file is damaged or missing, its bot is fetched again."""

    def __init__(self, folder: Path, schema: str) -> None:
        self._trust_folder = folder
        self._folder = folder / schema[:16]  # short, since paths may be limited
        self._pinned: tuple[str, ...] = ()

    def read(self) -> tuple[LiveModels | None, dict[str, int]]:
        """Return the last good live models, if any, and the highest entry number seen per alias."""
        path = self._folder / "bot.json"
        try:
            document = strict_json(path.read_bytes())
            fields = document["live_models"]
            newest_entries = {alias: int(document["seen"][alias]) for alias in _ALIASES}
            if fields is None:
                return None, newest_entries
            return LiveModels(**fields | {"trust": tuple(fields["trust"])}), newest_entries
        except FileNotFoundError:
            return None, dict.fromkeys(_ALIASES, 0)
        except (Refused, KeyError, TypeError, ValueError) as error:
            raise Corrupt(f"{path} is damaged and was ignored: {error!r}"[:200]) from None

    def policy(self, sha256: str) -> bytes:
        try:
            return (self._folder / f"{sha256}.safetensors").read_bytes()
        except FileNotFoundError:
            raise Corrupt(
                f"the policy of the bot is missing in {self._folder}; it is fetched again"
            ) from None

    def write_policy(self, sha256: str, raw: bytes) -> None:
        """Store a policy that passed its checks; must be called before `write`."""
        path = self._folder / f"{sha256}.safetensors"
        if not path.exists() or path.read_bytes() != raw:
            make_folder(self._folder)
            write_file(path, raw)

    def write(
        self,
        live_models: LiveModels | None,
        newest_entries: dict[str, int],
        policies: Collection[str],
    ) -> None:
        """Store live models and delete other policies, unless another process stored newer ones."""
        with contextlib.suppress(Corrupt):
            stored = self.read()[0]
            number = 0 if live_models is None else live_models.number
            if stored is not None and stored.number > number:
                return
        fields = None
        if live_models is not None:
            fields = asdict(live_models) | {"trust": list(live_models.trust)}
        make_folder(self._folder)
        document = canonical_json({"live_models": fields, "seen": newest_entries})
        write_file(self._folder / "bot.json", document)
        for path in self._folder.glob("*.safetensors"):
            if path.stem not in policies:
                path.unlink(missing_ok=True)

    def pinned(self, keys: Sequence[str] = ()) -> tuple[str, ...]:
        """Return the deployment's pinned public keys; at first contact, pin `keys`."""
        path = self._trust_folder / "trust.json"
        if keys and not self._pinned and not path.exists():
            # If nothing can be written, the keys stay pinned until the program ends.
            self._pinned = tuple(keys)
            with contextlib.suppress(OSError, StorageFull, StorageFailed):
                make_folder(self._trust_folder)
                create_once(path, canonical_json(list(keys)))
        try:
            pinned = strict_json(path.read_bytes())
        except OSError:
            return self._pinned
        if not isinstance(pinned, list) or not all(isinstance(text, str) for text in pinned):
            raise Corrupt(f"{path} is damaged; delete it to trust the platform's current keys")
        return tuple(pinned)


@dataclass(frozen=True, slots=True, eq=False)
class Bot:
    """A model that passed every check."""

    manifest: "Manifest"
    policy: "Policy"


@dataclass(frozen=True, slots=True)
class LivePolicies:
    """The bots that play new episodes; never changed, only replaced as a whole."""

    champion: Bot | None = None
    canary: Bot | None = None
    canary_entry: int = 0
    """The journal entry of the canary, by which its tickets are drawn."""
    noise: Mapping[str, float] = field(default_factory=lambda: DEFAULT_NOISE)
    """The noise of each skill below `hard`."""
    control: Bot | None = None
    """An earlier champion that plays beside the canary."""
    explore_share: float = 0.0
    """The share of episodes in which the champion explores."""

    @property
    def by_no(self) -> dict[int, Bot]:
        """The bots by their model numbers."""
        bots = (self.champion, self.canary, self.control)
        return {bot.manifest.model_no: bot for bot in bots if bot is not None}

    @property
    def trial(self) -> tuple[int, frozenset[int]]:
        """The canary's entry and the models, as they must be in the batch of a ticket."""
        return self.canary_entry, frozenset(self.by_no)


@dataclass(slots=True)
class _Tickets:
    """The draws of the next episodes; threads take them from the left."""

    trial: tuple[int, frozenset[int]] = (0, frozenset())
    """The canary's entry by which they were drawn, and between which models."""
    until_s: float = 0.0
    left: deque[DrawnTicket] = field(default_factory=deque)


class Bots:
    """The bots of one connected game; thread-safe."""

    def __init__(
        self,
        link: Link,
        spec: GameSpec,
        folder: Path,
        *,
        clock: Clock,
        rng: random.Random,
        trust: Sequence[str],
        has_thread: bool,
    ) -> None:
        self._link = link
        self.spec = spec
        self._clock = clock
        self.rng = rng
        self.write_action = action_writer(spec)
        self._cache = BotCache(folder, spec.schema)
        self._trust = tuple(trust)
        self._has_thread = has_thread
        self._backoff = Backoff(clock, rng, first_s=_RETRY_FIRST_S, cap_s=_RETRY_CAP_S)
        self._lock = threading.Lock()
        self._live: LivePolicies | None = None
        self._live_models: LiveModels | None = None
        """The last good live models."""
        self._seen = dict.fromkeys(_ALIASES, 0)
        """The highest validly signed entry number of each alias; lower ones are never accepted."""
        self._after = self._good_number = 0
        self._tickets = _Tickets()
        self._ticket_backoff = Backoff(clock, rng, first_s=_RETRY_FIRST_S, cap_s=_RETRY_CAP_S)
        self._fetching = threading.Lock()
        self._is_low = threading.Event()
        """Set when tickets run low, and by `stop`."""
        self._ticket_thread: threading.Thread | None = None
        self._again_at_s: float | None = None
        self._again_s = _AGAIN_FIRST_S
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._has_registered = False
        self._pump_at_s = clock.monotonic()
        self.refused_bots = 0
        self._rejection = self._link_error = ""

    @property
    def name(self) -> str:
        """The champion's name; empty while there is none, or before the first `pick`."""
        live = self._live
        return live.champion.manifest.name if live is not None and live.champion is not None else ""

    @property
    def last_error(self) -> str:
        return self._rejection or self._link_error

    def pick(self) -> Bot | None:
        """Return the champion, if any, without using a ticket."""
        return (self._live or self._start()).champion

    def draw(self) -> tuple[Bot | None, str | None]:
        """Return the bot of a new episode as the next ticket says, and the ticket; never waits.

        Without a ticket it is the champion, also while the tickets were drawn between other models
        than the live ones: if only some of them were used, the comparison would be biased.
        """
        live = self._live or self._start()
        if live.canary is None:
            return live.champion, None
        tickets = self._tickets
        drawn = None
        if tickets.trial == live.trial and self._clock.monotonic() < tickets.until_s:
            with contextlib.suppress(IndexError):
                drawn = tickets.left.popleft()
        if (drawn is None or 2 * len(tickets.left) <= _N_TICKETS) and not self._is_low.is_set():
            self._is_low.set()
        return (
            (live.champion, None) if drawn is None else (live.by_no[drawn.model_no], drawn.ticket)
        )

    def draw_exploring(self) -> BotSkill | None:
        """Return how the champion explores in a new episode; None in most: it plays as released."""
        live = self._live or self._start()
        if live.champion is None or not live.explore_share:
            return None
        if self.rng.random() >= live.explore_share:
            return None
        return exploring_skill(live.champion.manifest.lineage.config.get("temperature", 1.0))

    def draw_at(self, skill: BotSkill) -> tuple[Bot | None, BotSkill]:
        """Return the champion, if any, and the skill with its noise, which fits the champion."""
        live = self._live or self._start()
        return live.champion, skill.with_noise(live.noise)

    def wait(self, timeout_s: float) -> bool:
        """Wait for a bot and return whether there is one."""
        deadline_s = self._clock.monotonic() + timeout_s
        while self.pick() is None and (remaining_s := deadline_s - self._clock.monotonic()) > 0:
            if self._has_thread and not self._stop.is_set():
                self._clock.wait(self._stop, min(remaining_s, 0.02))
            elif (
                self._stop.is_set() or (pause_s := self.step(min(remaining_s, 1.0))) >= remaining_s
            ):
                break
            else:
                self._clock.wait(self._stop, pause_s)
        return self.pick() is not None

    def _start(self) -> LivePolicies:
        with self._lock:
            if self._live is None:
                self._live = self._load()
                if self._has_thread and not self._stop.is_set():
                    name = f"understudy-bots-{self.spec.game}"
                    self._thread = threading.Thread(
                        target=self.run, args=(self._stop,), name=name, daemon=True
                    )
                    self._thread.start()
            return self._live

    def _load(self) -> LivePolicies:
        """Load the last good bots from disk; signatures were verified before storing them."""
        try:
            self._live_models, self._seen = self._cache.read()
            if self._live_models is None:
                return LivePolicies()
            trusted = trusted_keys(*(self._trust or self._cache.pinned()))
            champion = self._restored(self._live_models.champion_release, trusted)
            noise = self._live_models.noise
            levels, explore_share = _noise_of(strict_json(noise)["entry"] if noise else None)
        except (*_BAD, OSError) as error:
            self._reject(error)
            return LivePolicies()
        # The champion plays without a canary or control that is damaged; unless both are intact,
        # the platform's current models are fetched.
        canary = None
        control = None
        is_intact = True
        try:
            canary = self._restored(self._live_models.canary_release, trusted)
        except (*_BAD, OSError) as error:
            self._reject(error)
            is_intact = False
        try:
            control = self._restored(self._live_models.control_release, trusted)
        except (*_BAD, OSError) as error:
            self._reject(error)
            is_intact = False
        if is_intact:
            self._after = self._good_number = self._live_models.number
        return LivePolicies(
            champion=champion,
            canary=canary,
            canary_entry=self._seen["canary"],
            noise=levels,
            control=control,
            explore_share=explore_share,
        )

    def _restored(self, release: str | None, trusted: Trusted) -> Bot | None:
        from understudy.models.manifest import manifest_from_json, open_policy

        if release is None:
            return None
        signed = strict_json(release)
        if (
            not isinstance(signed, dict)
            or not {"entry", "key_id"} <= signed.keys()
            or "manifest" not in signed["entry"]
        ):
            raise Corrupt("the release of the stored bot is damaged; it is fetched again")
        if signed["key_id"] not in trusted:
            raise Refused(
                "unknown_key",
                f"the bot on this disk was signed by {signed['key_id']}, which is no longer "
                "trusted; the current bot is fetched instead",
            )
        manifest = self._fitting(manifest_from_json(signed["entry"]["manifest"]))
        return Bot(manifest, open_policy(manifest, self._cache.policy(manifest.policy_sha256)))

    # --- Updates ----------------------------------------------------------------------------------

    def step(self, wait_s: float = _POLL_S) -> float:
        """Poll once and accept valid live models; returns seconds until the next poll is due."""
        now_s = self._clock.monotonic()
        if self._again_at_s is not None:
            if now_s >= self._again_at_s:
                self._after = self._good_number
                self._again_at_s = None
            else:
                wait_s = min(wait_s, self._again_at_s - now_s)
        try:
            update = self._link.bot(self._after, wait_s=wait_s, schema=self.spec.schema)
            self._link_error = ""
            if update is not None:
                self._accept(update)
            self._backoff.succeeded()
            self.fetch_tickets()
            # A link that returns at once must not be polled in a busy loop.
            waited_s = self._clock.monotonic() - now_s
            return max(0.0, min(wait_s, _PUMP_EVERY_S) - waited_s) if update is None else 0.0
        except LinkFailed as failed:
            if failed.code == "not_registered" and not self._has_registered:
                # A bot may be requested before the first step is sent.
                self._has_registered = True
                with contextlib.suppress(LinkFailed):
                    self._link.register(self.spec)
                return 0.0
            self._record(str(failed))
            self._backoff.failed(wholly=True, retry_after_s=failed.retry_after_s)
        except Exception as error:
            self._record(repr(error)[:300])
            self._backoff.failed(wholly=True, retry_after_s=0.0)
        return max(0.0, self._backoff.remaining_s)

    def _record(self, error: str) -> None:
        # The poll that closing interrupts fails as well, which is no error.
        if not self._stop.is_set():
            self._link_error = error

    def run(self, stop: threading.Event) -> None:
        """Repeat `step` until `stop` is set."""
        while not stop.is_set():
            wait_s = self.step()
            if wait_s > 0:
                self._clock.wait(stop, wait_s)

    def pump(self) -> float:
        """Poll if it is due, for games without threads; returns seconds until the next poll is due.

        Returns infinity while no bot was requested, or if a thread polls.
        """
        if self._live is None or self._has_thread or self._stop.is_set():
            return float("inf")
        remaining_s = self._pump_at_s - self._clock.monotonic()
        if remaining_s <= 0:
            remaining_s = max(_PUMP_EVERY_S, self.step(0.0))
            self._pump_at_s = self._clock.monotonic() + remaining_s
        return remaining_s

    def _accept(self, update: LiveModels) -> None:
        try:
            trusted = trusted_keys(*(self._trust or self._cache.pinned(update.trust)))
            champion = self._opened(update, "champion", trusted)
        except _BAD as error:
            # The last good bots stay; newer entries are polled for, and this one is checked again
            # later.
            self._reject(error)
            self._after = update.number
            self._again_at_s = self._clock.monotonic() + self._again_s
            self._again_s = min(2 * self._again_s, _AGAIN_CAP_S)
            return self._store(self._live_models)
        self._rejection = ""
        self._again_at_s = None
        self._again_s = _AGAIN_FIRST_S
        canary = None
        control = None
        try:
            canary = self._opened(update, "canary", trusted)
        except _BAD as error:
            # The champion still plays; a canary that fails its checks does not.
            self._reject(error)
        try:
            if canary is not None:
                control = self._opened_control(update, trusted)
        except (*_BAD, LinkFailed) as error:
            # Nor does such a control; if it cannot be fetched, the others do not wait for it.
            self._reject(error)
        try:
            noise, explore_share = self._noise(update.noise, trusted)
        except _BAD as error:
            # The bots still play, with the last good noise.
            self._reject(error)
            live = self._live or LivePolicies()
            noise = live.noise
            explore_share = live.explore_share
            last = self._live_models
            update = replace(update, noise=None if last is None else last.noise)
        self._live = LivePolicies(
            champion=champion,
            canary=canary,
            canary_entry=self._seen["canary"],
            noise=noise,
            control=control,
            explore_share=explore_share,
        )
        self._after = self._good_number = update.number
        if control is None:
            update = replace(update, control_release=None)
        return self._store(update if canary else replace(update, canary_release=None))

    def _opened(self, update: LiveModels, alias: str, trusted: Trusted) -> Bot | None:
        point = self._entry(getattr(update, alias), "point", trusted)
        if point is None:
            if alias == "champion" and self._seen[alias]:
                raise Refused(
                    "old_bot",
                    "the platform has no bot, but it had one before; check that url= or data= "
                    "still names the same platform",
                )
            return None
        number = point["number"]
        model_no = point["model_no"]
        if point["alias"] != alias or type(number) is not int or type(model_no) is not int:
            raise Refused(
                "bad_entry",
                f"the platform sent an invalid entry for the {alias}: its alias is "
                f"{str(point['alias'])[:20]!r}",
            )
        if number < self._seen[alias]:
            raise Refused(
                "old_bot",
                f"entry {number} of the {alias} is older than entry {self._seen[alias]}, which "
                "this game has already seen",
            )
        self._seen[alias] = number
        if model_no == 0:
            return None
        return self._model(getattr(update, f"{alias}_release"), alias, model_no, trusted)

    def _opened_control(self, update: LiveModels, trusted: Trusted) -> Bot | None:
        """The control that the canary's entry names."""
        point = self._entry(update.canary, "point", trusted)
        named = None if point is None else point.get("control")
        if named is None or update.control_release is None:
            return None
        return self._model(update.control_release, "control", named["model_no"], trusted)

    def _model(self, signed: str | None, alias: str, model_no: int, trusted: Trusted) -> Bot:
        """The model of a signed release; Refused unless it is that number."""
        from understudy.models.manifest import manifest_from_json, open_policy

        release = self._entry(signed, "release", trusted)
        if release is None:
            raise Refused(
                "bad_entry", f"the platform named model {model_no} without its signed release"
            )
        manifest = self._fitting(manifest_from_json(release["manifest"]))
        if manifest.model_no != model_no:
            raise Refused(
                "bad_entry",
                f"the {alias} is model {model_no}, but the platform sent the "
                f"release of {manifest.name}",
            )
        for bot in self._live_bots():
            if bot.manifest == manifest:
                return bot
        raw = self._link.policy(model_no)
        bot = Bot(manifest, open_policy(manifest, raw))
        with contextlib.suppress(StorageFull, StorageFailed, OSError):
            self._cache.write_policy(manifest.policy_sha256, raw)
        return bot

    def _entry(self, text: str | None, kind: str, trusted: Trusted) -> dict[str, Any] | None:
        if text is None:
            return None
        entry = open_signed(text.encode(), trusted)
        if (entry.get("kind"), entry.get("journal")) != (kind, f"registry/{self.spec.game}"):
            raise Refused(
                "bad_entry",
                f"the platform sent a {str(entry.get('kind'))[:20]} of "
                f"{str(entry.get('journal'))[:80]} instead of a {kind} of {self.spec.game}",
            )
        return entry

    def _fitting(self, manifest: "Manifest") -> "Manifest":
        if (manifest.game, manifest.schema) != (self.spec.game, self.spec.schema):
            raise Refused(
                "wrong_schema",
                f"{manifest.name} was trained on another version of {self.spec.game}, with other "
                "observations or actions; train a bot on this version",
            )
        return manifest

    def _noise(self, text: str | None, trusted: Trusted) -> tuple[Mapping[str, float], float]:
        entry = self._entry(text, "noise", trusted)
        if entry is not None and entry["schema"] != self.spec.schema:
            raise Refused(
                "wrong_schema",
                f"the platform sent the noise of the skills of another version of {self.spec.game}",
            )
        return _noise_of(entry)

    def _live_bots(self) -> list[Bot]:
        return list((self._live or LivePolicies()).by_no.values())

    def _reject(self, error: Exception) -> None:
        self.refused_bots += 1
        is_ours = isinstance(error, UnderstudyError)
        self._rejection = str(error)[:300] if is_ours else repr(error)[:300]

    def _store(self, live_models: LiveModels | None) -> None:
        self._live_models = live_models
        policies = [bot.manifest.policy_sha256 for bot in self._live_bots()]
        try:
            self._cache.write(live_models, self._seen, policies)
        except (StorageFull, StorageFailed, OSError) as error:
            # The bots still play; only the next start has to fetch them again.
            self._link_error = f"the bot cannot be stored for the next start: {error}"[:300]

    # --- Tickets ----------------------------------------------------------------------------------

    def fetch_tickets(self) -> None:
        """Fetch the draws of the next episodes if a canary is on trial and they run low.

        Tickets of an earlier entry, or of models that are not live any more, are dropped.
        """
        with self._fetching:
            live = self._live
            if live is None or live.canary is None:
                self._tickets = _Tickets()
                return
            now_s = self._clock.monotonic()
            tickets = self._tickets
            if tickets.trial != live.trial or now_s >= tickets.until_s:
                tickets = self._tickets = _Tickets(live.trial)
            self._start_ticket_thread()
            if 2 * len(tickets.left) > _N_TICKETS or self._ticket_backoff.remaining_s > 0:
                return
            try:
                batch = self._link.tickets(
                    _N_TICKETS, schema=self.spec.schema, with_control=live.control is not None
                )
            except Exception as error:
                # The champion plays. A gateway of an earlier version has no tickets.
                failed = error if isinstance(error, LinkFailed) else LinkFailed("", repr(error))
                if failed.code != "not_found":
                    self._record(str(failed)[:300])
                self._ticket_backoff.failed(wholly=True, retry_after_s=failed.retry_after_s)
                return
            if not _fits(batch, live):
                # The gateway knows another trial than this client; the next poll returns it.
                self._ticket_backoff.failed(wholly=True, retry_after_s=0.0)
                return
            self._ticket_backoff.succeeded()
            until_s = now_s + batch.valid_s
            tickets.until_s = min(tickets.until_s, until_s) if tickets.left else until_s
            tickets.left.extend(batch.tickets)

    def _start_ticket_thread(self) -> None:
        """Fetch the next tickets in a thread of their own, since a poll may wait for long."""
        if self._has_thread and self._ticket_thread is None and not self._stop.is_set():
            name = f"understudy-tickets-{self.spec.game}"
            self._ticket_thread = threading.Thread(
                target=self._follow_tickets, args=(self._stop,), name=name, daemon=True
            )
            self._ticket_thread.start()

    def _follow_tickets(self, stop: threading.Event) -> None:
        while not stop.is_set():
            self._is_low.wait(_POLL_S)
            self._is_low.clear()
            if not stop.is_set():
                self.fetch_tickets()

    # --- Stopping ---------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop polling; closing the link ends a poll that is waiting."""
        self._stop.set()
        self._is_low.set()

    def join(self, timeout_s: float) -> None:
        """Wait for the threads to end, this long at most."""
        deadline_s = self._clock.monotonic() + timeout_s
        for thread in (self._thread, self._ticket_thread):
            if thread is not None:
                thread.join(max(0.0, deadline_s - self._clock.monotonic()))

    def abandon(self) -> None:
        """Stop polling in a forked child, which lacks the thread; loaded bots still play."""
        self._lock = threading.Lock()
        self._fetching = threading.Lock()
        self._is_low = threading.Event()
        self._tickets = _Tickets()  # the parent uses them
        self._thread = None
        self._ticket_thread = None
        self._stop = threading.Event()
        self._stop.set()


def _fits(batch: TicketBatch, live: LivePolicies) -> bool:
    """Whether tickets were drawn by the canary's entry, between exactly the live models."""
    models = frozenset(batch.models)
    is_between = all(drawn.model_no in models for drawn in batch.tickets)
    return (batch.entry, models) == live.trial and is_between


def _noise_of(entry: dict[str, Any] | None) -> tuple[Mapping[str, float], float]:
    """The noise of each skill in an entry, and the share of episodes in which bots explore."""
    if entry is None:
        return DEFAULT_NOISE, 0.0
    explore_share = float(entry.get("explore_share", 0.0))
    return checked_noise(entry["noise"]), min(max(explore_share, 0.0), MAX_EXPLORE_SHARE)
