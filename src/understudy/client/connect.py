"""connect: from a game's name and shape, and the folder or address it records to, to a Game that
records."""

import atexit
import contextlib
import hashlib
import json
import os
import random
import secrets
import sys
import threading
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

import understudy
from understudy.client.bot import Bots
from understudy.client.episode import Episode, Recorder
from understudy.client.local import LocalLink
from understudy.client.sender import Sender, SenderConfig, Stats
from understudy.client.session import RecordingWarning, Sessions, Tolerance
from understudy.client.spool import Spool
from understudy.core.clock import Clock, SystemClock
from understudy.core.errors import Closed, ConfigError
from understudy.core.names import PlayerName, player_name
from understudy.core.signed import trusted_keys
from understudy.experience.chunk import CONSENTS, KINDS, EpisodeNote
from understudy.experience.game import GameSpec, game_spec
from understudy.experience.intake import Intake, create_once, deployment_key
from understudy.ports import Link

Held = TypeVar("Held", Episode, Recorder)

_JOIN_S = 1.0
"""How long closing waits for a sender that was told to stop."""

_GAMES: "set[Game]" = set()
"""Every game that is not closed; leaving the program closes them, even those nobody refers to
any more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """The rarely changed settings of a client."""

    kind: str = "player"
    """`player` for live games, `actor` for a learner's own envs."""
    strict: bool = False
    """Raise on every bad input, not only on the first decision."""
    spool: Path | None = None
    """Where unsent chunks wait; the data folder's `spool`, or the user's cache folder."""
    spool_cap_bytes: int = 256 * 1024 * 1024
    """Beyond this the oldest unsent chunks are dropped and reported."""
    close_timeout_s: float = 5.0
    """How long closing waits for acknowledgements; the rest stays spooled."""
    background: bool = True
    """Send, and look for bots, in threads; otherwise the game calls `pump` now and then."""
    trust: tuple[str, ...] = ()
    """Public keys of those who may sign bots; none: the deployment's own, remembered from the
    first meeting."""
    insecure: bool = False
    """Allow http:// to other machines, where anybody on the way can read the key."""
    sender: SenderConfig = field(default_factory=SenderConfig)
    clock: Clock = field(default_factory=SystemClock)
    rng: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"kind is {self.kind!r}; give one of {KINDS}")
        if self.spool_cap_bytes < 64 * 1024:
            raise ConfigError(f"spool_cap_bytes is {self.spool_cap_bytes}; give at least 65536")
        trusted_keys(*self.trust)


class Game:
    """A connected game; many episodes on many threads share it and its one sender."""

    def __init__(
        self,
        spec: GameSpec,
        link: Link,
        *,
        spool: Path,
        tag: str,
        consent: str,
        config: ClientConfig,
    ) -> None:
        if consent not in CONSENTS:
            raise ConfigError(f"consent is {consent!r}; give one of {CONSENTS}")
        self.spec = spec
        self.consent = consent
        self._link = link
        self._config = config
        self._spool_folder = spool
        clock = config.clock
        self._tolerance = Tolerance(strict=config.strict)
        self._sessions = Sessions(
            spec,
            kind=config.kind,
            client=f"understudy-python/{understudy.__version__}"[:128],
            clock=clock,
            rng=config.rng,
        )
        folder = Spool(spool / tag, cap_bytes=config.spool_cap_bytes)
        self._sender = Sender(
            link,
            self._sessions,
            folder,
            spec=spec,
            clock=clock,
            config=config.sender,
            rng=config.rng,
        )
        self._bots = Bots(
            link,
            spec,
            spool / "bots" / tag,
            clock=clock,
            rng=config.rng,
            trust=config.trust,
            has_thread=config.background,
        )
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._player: PlayerName | None = None
        self._closed: str | None = None
        self._all_sent = False
        """What the first `close` answered."""
        _GAMES.add(self)
        if folder.has_sessions():
            self._start()

    def episode(
        self,
        player: str | None = None,
        *,
        seat: int = 0,
        match: str | None = None,
        consent: str | None = None,
        opponents: Sequence[str] = (),
        seed: int | None = None,
        model: str | None = None,
    ) -> Episode:
        """Start recording an episode; without a `player` it belongs to a random id kept on this
        machine."""
        note = EpisodeNote(
            row=0, seat=seat, match=match, opponents=tuple(opponents), seed=seed, model=model
        )
        return self._hold(Episode, player, note, consent)

    def recorder(
        self,
        player: str | None = None,
        *,
        seat: int = 0,
        match: str | None = None,
        consent: str | None = None,
        opponents: Sequence[str] = (),
        model: str | None = None,
    ) -> Recorder:
        """A Gymnasium-shaped recorder with a session of its own, for one env after another
        reset."""
        note = EpisodeNote(row=0, seat=seat, match=match, opponents=tuple(opponents), model=model)
        return self._hold(Recorder, player, note, consent)

    def _hold(
        self, make: type[Held], player: str | None, note: EpisodeNote, consent: str | None
    ) -> Held:
        if self._closed:
            raise Closed(self._closed)
        consent = self.consent if consent is None else consent
        if consent not in CONSENTS:
            raise ConfigError(f"consent is {consent!r}; give one of {CONSENTS}")
        if player is not None:
            name = player_name(player)
        else:
            name = self._player = self._player or own_player(self._spool_folder)
        self._start()
        session = self._sessions.acquire(
            name, note.seat, is_recorded=self._sessions.recording_rate.keeps()
        )
        # A sender that found no session sleeps long; from now on there are steps to cut after a
        # linger.
        self._sender.wake.set()
        try:
            made = make(
                self._sessions,
                session,
                note=note,
                consent=consent,
                tolerance=self._tolerance,
                bots=self._bots,
            )
        except BaseException:
            self._sessions.release(session)
            raise
        # A game may forget its episode without an end; then the sender sees the dead reference and
        # cuts it.
        session.holder = weakref.ref(made)
        return made

    def wait_for_bot(self, timeout_s: float = 5.0) -> bool:
        """Whether there is a bot by then. Nothing needs this: without it, a bot plays as soon as
        it is there."""
        return self._bots.wait(timeout_s)

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until everything recorded so far is acknowledged (or refused or dropped); False
        when time ran out."""
        return (
            self._all_sent
            if self._closed
            else self._sender.flush(timeout_s, pumps=self._thread is None)
        )

    def pump(self) -> float:
        """One round of sending and of looking for bots, for games without threads; seconds until
        the next is due."""
        return min(self._sender.step(), self._bots.pump())

    def stats(self) -> Stats:
        """What happened so far, as numbers."""
        return Stats(
            **asdict(self._sender.counts),
            recorded_steps=self._sessions.handoff.put_steps
            + self._sessions.waiting_steps(is_recorded=True),
            skipped_steps=self._sessions.skipped_steps,
            recording_rate=self._sessions.recording_rate.share,
            bad_inputs=self._tolerance.bad_inputs,
            ignored_calls=self._tolerance.ignored_calls,
            open_episodes=self._sessions.n_open,
            bot=self._bots.name,
            refused_bots=self._bots.refused_bots,
            last_bot_error=self._bots.last_error,
        )

    def close(self, timeout_s: float | None = None) -> bool:
        """Cut open episodes, send what can be sent in time, leave the rest spooled; True when
        all was acknowledged."""
        with self._lock:
            if self._closed:
                return self._all_sent
            self._closed = f"the game {self.spec.game} was closed; connect again to record"
        _GAMES.discard(self)
        self._bots.stop()
        ended = self._sessions.close(self._closed)
        if self._thread is None:
            self._sender.finish(ended, 0.0)
            pause_s = 0.0
            while pause_s <= 0 and not self._sender.is_clear:
                pause_s = self._sender.step()
            self._all_sent = self._sender.is_clear
        else:
            timeout_s = self._config.close_timeout_s if timeout_s is None else timeout_s
            self._all_sent = self._sender.finish(ended, timeout_s)
        self._stop.set()
        self._sender.wake.set()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
        if self._thread is None or not self._thread.is_alive():
            self._sender.release()
            self._link.close()
            self._bots.join(_JOIN_S)
            if not self._all_sent:
                self._sender.warn(
                    "left",
                    "not all recorded steps are acknowledged yet; they stay spooled on this "
                    "machine and are sent by the next start",
                )
        else:
            warnings.warn(
                f"the sender of {self.spec.game} did not end within {_JOIN_S} s, so its link is "
                "still busy; what was "
                "not acknowledged stays spooled and is sent by the next start",
                RecordingWarning,
                stacklevel=2,
            )
        return self._all_sent

    def __enter__(self) -> "Game":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        if self._thread is None and self._config.background:
            with self._lock:
                if self._thread is None and not self._closed:
                    name = f"understudy-sender-{self.spec.game}"
                    self._thread = threading.Thread(
                        target=self._sender.run, args=(self._stop,), name=name, daemon=True
                    )
                    self._thread.start()

    def abandon(self) -> None:
        """In a forked child: this Game, its sender and its spool belong to the parent."""
        self._closed = (
            f"the game {self.spec.game} was connected before this process was forked; "
            "call understudy.connect again in the child"
        )
        self._lock = threading.Lock()
        self._sessions.abandon(self._closed)
        self._sender.abandon()
        self._bots.abandon()


class ConnectSettings(TypedDict, total=False):
    """Fields of ClientConfig that `connect` takes by name as well."""

    spool: str | os.PathLike[str]
    spool_cap_bytes: int
    close_timeout_s: float
    background: bool
    trust: tuple[str, ...]
    insecure: bool
    sender: SenderConfig
    clock: Clock
    rng: random.Random


def connect(
    game: str | None = None,
    *,
    obs: Any = None,
    actions: Any = None,
    has_action_mask: bool | None = None,
    max_episode_steps: int | None = None,
    spec: GameSpec | None = None,
    consent: str = "unknown",
    kind: str | None = None,
    data: str | os.PathLike[str] | None = None,
    url: str | None = None,
    key: str | None = None,
    link: Link | None = None,
    linger_s: float | None = None,
    strict: bool | None = None,
    config: ClientConfig | None = None,
    **settings: Unpack[ConnectSettings],
) -> Game:
    """A Game that records to the platform at `url` with a `key` (or UNDERSTUDY_URL and
    UNDERSTUDY_KEY), into the folder `data` (or UNDERSTUDY_DATA), or through `link`.

    `obs`, `actions`, `has_legal` and `max_episode_steps` describe the game as in
    `core.game.game_spec`; or give a whole `spec`. `kind`, `linger_s`, `strict` and `settings` go
    before what `config` says.
    """
    if spec is not None:
        shape = {
            "obs": obs,
            "actions": actions,
            "has_action_mask": has_action_mask,
            "max_episode_steps": max_episode_steps,
        }
        if extra := [name for name, given in shape.items() if given is not None]:
            raise ConfigError(
                f"connect was given a spec and {', '.join(extra)} as well; the spec says it all, "
                "so drop one"
            )
        if game not in (None, spec.game):
            raise ConfigError(
                f"connect was given the name {game!r} and a spec of {spec.game!r}; give one of them"
            )
    elif game is None or obs is None or actions is None:
        raise ConfigError(
            "connect needs a name, obs= and actions=, such as connect('my-game', obs=6, actions=3)"
        )
    else:
        spec = game_spec(
            game,
            obs=obs,
            actions=actions,
            has_action_mask=bool(has_action_mask),
            max_episode_steps=max_episode_steps,
        )
    config = _config(config, {**settings, "kind": kind, "linger_s": linger_s, "strict": strict})
    folder = config.spool or user_folder() / "spool"
    tag = ""
    if link is not None:
        if data is not None or url is not None:
            raise ConfigError(
                "connect was given a link and data= or url= as well; give the one to record through"
            )
        tag = spool_tag(str(getattr(link, "address", type(link).__qualname__)), spec.game)
    elif isinstance(place := place_of(data, url, key), Address):
        from understudy.client.http import (
            HttpLink,
        )  # late: games that record into a folder need no sockets

        link = HttpLink(place, spec.game, insecure=config.insecure)
        tag = spool_tag(link.address, spec.game, place.key)
    else:
        link = local_link(place, spec, config.clock)
        tag = spool_tag("data", spec.game)
        folder = config.spool or place / "spool"
    return Game(spec, link, spool=folder, tag=tag, consent=consent, config=config)


def _config(config: ClientConfig | None, given: dict[str, Any]) -> ClientConfig:
    config = ClientConfig() if config is None else config
    changes = {name: value for name, value in given.items() if value is not None}
    if "spool" in changes:
        changes["spool"] = Path(changes["spool"])
    if "linger_s" in changes:
        changes["sender"] = replace(
            changes.get("sender", config.sender), linger_s=changes.pop("linger_s")
        )
    known = {one.name for one in fields(ClientConfig)}
    if unknown := changes.keys() - known:
        raise ConfigError(
            f"connect does not know {sorted(unknown)}; known settings are {sorted(known)}"
        )
    return replace(config, **changes)


def local_link(data_folder: Path, spec: GameSpec, clock: Clock) -> LocalLink:
    """The link into the embedded platform's own stream."""
    from understudy.streams.file import FileStream

    must_record_into(data_folder)
    intake = Intake(deployment_key(data_folder), spec.game, clock)
    return LocalLink(
        FileStream(data_folder / "stream"),
        intake=intake,
        specs_folder=data_folder / "models" / "games",
    )


# --- Where a game records to, and what a client keeps beside its spool ----------------------------


@dataclass(frozen=True, slots=True)
class Address:
    """A platform that is reached by HTTP."""

    url: str
    key: str = field(repr=False)


def place_of(
    data: str | os.PathLike[str] | None, url: str | None, key: str | None
) -> Path | Address:
    """The folder or address that was named, by arguments first and by the environment then."""
    if data is not None and url is not None:
        raise ConfigError(
            f"connect was given both data={str(data)!r} and url={url!r}; give the one to record to"
        )
    if data is None and (url := _given("url", url)):
        if not (key := _given("key", key)):
            raise ConfigError(
                f"{url} needs a key; give key=, or set UNDERSTUDY_KEY as `understudy up` prints it"
            )
        return Address(url, key)
    if key is not None:
        raise ConfigError(
            "connect was given a key and no url; give url= too, or set UNDERSTUDY_URL"
        )
    given = _given("data", None) if data is None else data
    if not given:
        raise ConfigError(
            "connect was given no place to record to; give url= and key= (or set UNDERSTUDY_URL "
            "and UNDERSTUDY_KEY), "
            "data='DIR' (or set UNDERSTUDY_DATA), or link=... of your own"
        )
    try:
        folder = Path(given).resolve()
        is_taken = folder.exists() and not folder.is_dir()
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"data={str(given)[:80]!r} is no folder: {error}; give a path such as 'D'"
        ) from None
    if is_taken:
        raise ConfigError(f"data={str(given)!r} is a file; give a folder")
    return folder


def _given(name: str, argument: str | None) -> str:
    """An argument, else UNDERSTUDY_NAME, else what the file holds that UNDERSTUDY_NAME_FILE
    names."""
    from understudy.core.settings import Leaf, find  # not what a game loads that names its place

    found = find(Leaf(name, "", None), {name: argument or None}, os.environ)
    return str(found[0]) if found else ""


def must_record_into(folder: Path) -> None:
    """ConfigError when the platform of a data folder takes steps or games elsewhere: nobody
    would look there."""
    path = folder / "backends.json"
    try:
        used = json.loads(path.read_bytes())
        places = {part: str(used[f"{part}.url"]) for part in ("stream", "models")}
    except FileNotFoundError:
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}, which says where the platform takes steps, cannot be read "
            f"({type(error).__name__}); restore it, "
            "or record over HTTP: url= and key= as `understudy up` prints them"
        ) from None
    for part, url in places.items():
        if url:
            raise ConfigError(
                f"the platform of {folder} has its {part} elsewhere ({url.partition('?')[0]}), so "
                "what is recorded "
                "into the folder would not be stored; record over HTTP: url= and key= as "
                "`understudy up` prints them"
            )


def spool_tag(address: str, game: str, key: str = "") -> str:
    """The folder name that sessions of the same address, game and key share."""
    return hashlib.sha256("\0".join((address, game, key)).encode()).hexdigest()[:16]


def user_folder() -> Path:
    """Where this user's programs keep such things."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = str(Path.home() / "Library" / "Caches")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "understudy"


def own_player(folder: Path) -> PlayerName:
    """A random player's name, made once and kept beside the spool."""
    path = folder / "player"
    folder.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        create_once(path, f"p-{secrets.token_hex(8)}".encode())
    return player_name(path.read_text().strip())


# --- At exit and after a fork ---------------------------------------------------------------------


def _close_all() -> None:
    for game in list(_GAMES):
        # A raised warning (-W error) must not keep the other games from closing.
        with contextlib.suppress(RecordingWarning):
            game.close()


def _after_fork() -> None:
    for game in list(_GAMES):
        game.abandon()
    _GAMES.clear()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
