"""connect: returns a Game that records, from a name, its shapes and where to record to."""

import atexit
import contextlib
import hashlib
import json
import os
import random
import secrets
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import understudy
from understudy.client.bot import Bots
from understudy.client.episode import Episode, Recorder
from understudy.client.local import LocalLink
from understudy.client.sender import Sender, SenderConfig, Stats
from understudy.client.session import RecordingWarning, Sessions, Tolerance
from understudy.client.spool import Spool
from understudy.core.clock import Clock, SystemClock
from understudy.core.errors import Closed, ConfigError
from understudy.core.log import create_once
from understudy.core.names import PlayerName, player_name
from understudy.core.signed import trusted_keys
from understudy.core.wording import joined
from understudy.experience.chunk import CONSENTS, KINDS, EpisodeNote
from understudy.experience.game import GameSpec, game_spec
from understudy.experience.intake import Intake, deployment_key
from understudy.experience.skill import BotSkill, bot_skill
from understudy.ports import Link

Opened = TypeVar("Opened", Episode, Recorder)

_JOIN_S = 1.0
"""How long `close` waits for threads after telling them to stop."""

_GAMES: "set[Game]" = set()
"""Every open game. They are closed at exit, even those the program no longer refers to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientConfig:
    """The rarely changed settings of a client."""

    kind: str = "player"
    """`player` for live games, `actor` for a learner's own envs."""
    strict: bool = False
    """Raise on every invalid input, not only on the first decision."""
    link: Link | None = None
    """Your own connection to a platform, instead of `url` or `data`."""
    spool: str | os.PathLike[str] | None = None
    """Folder for unsent steps. Default: `spool` in the data folder, or in the user's cache."""
    spool_cap_bytes: int = 256 * 1024 * 1024
    """Above this size, the oldest steps that were never sent are dropped and reported. Those of an
    earlier start may have arrived: they stay until the platform answers, and new steps are dropped
    instead."""
    close_timeout_s: float = 5.0
    """How long `close` waits for acknowledgements; the rest stays spooled."""
    background: bool = True
    """Send and fetch bots in background threads; if False, the game must call `pump`."""
    trust: tuple[str, ...] = ()
    """Public keys that may sign bots. Default: the deployment's keys, pinned at first contact."""
    insecure: bool = False
    """Allow http:// to other machines, which exposes the key to the network."""
    sender: SenderConfig = field(default_factory=SenderConfig)
    """When recorded steps are sent, and how failed sends are retried."""
    clock: Clock = field(default_factory=SystemClock)
    rng: random.Random = field(default_factory=random.Random)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError(f"kind is {self.kind!r}; use one of {joined(KINDS)}")
        if self.spool_cap_bytes < 64 * 1024:
            raise ConfigError(f"spool_cap_bytes is {self.spool_cap_bytes}; use at least 65536")
        trusted_keys(*self.trust)


class Game:
    """A connected game. Episodes on any number of threads share it and its one sender."""

    def __init__(
        self,
        spec: GameSpec,
        link: Link,
        *,
        spool: Path,
        tag: str,
        bots_tag: str,
        consent: str,
        config: ClientConfig,
        receipts: str | os.PathLike[str] | None = None,
    ) -> None:
        _check_consent(consent)
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
            receipts=receipts,
        )
        self._bots = Bots(
            link,
            spec,
            spool / "bots" / bots_tag,
            clock=clock,
            rng=config.rng,
            trust=config.trust,
            has_thread=config.background,
        )
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._stop = threading.Event()
        self._closing = threading.Lock()
        """Acquired by the first `close`, and never released."""
        self._closer: threading.Thread | None = None
        """Closes the game for a signal handler."""
        self._player: PlayerName | None = None
        self._closed: str | None = None
        self._all_sent = False
        """What the first `close` returned."""
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
        skill: str | None = None,
        temperature: float | None = None,
    ) -> Episode:
        """Start recording an episode; `player` defaults to a random id stored on this machine.

        In `act`, the bot plays as released, or at a `skill` (`easy`, `even`, `hard`) or a
        `temperature` (1 is as released, more is more random).
        """
        note = EpisodeNote(
            row=0, seat=seat, match=match, opponents=_kinds(opponents), seed=seed, model=model
        )
        return self._open(Episode, player, note, consent, bot_skill(skill, temperature))

    def recorder(
        self,
        player: str | None = None,
        *,
        seat: int = 0,
        match: str | None = None,
        consent: str | None = None,
        opponents: Sequence[str] = (),
        model: str | None = None,
        skill: str | None = None,
        temperature: float | None = None,
    ) -> Recorder:
        """Return a recorder with its own session, for a loop that resets and steps one env.

        `skill` and `temperature` are those of the bot in all of its episodes, as in `episode`.
        """
        note = EpisodeNote(row=0, seat=seat, match=match, opponents=_kinds(opponents), model=model)
        return self._open(Recorder, player, note, consent, bot_skill(skill, temperature))

    def _open(
        self,
        kind: type[Opened],
        player: str | None,
        note: EpisodeNote,
        consent: str | None,
        skill: BotSkill | None,
    ) -> Opened:
        if self._closed:
            raise Closed(self._closed)
        if skill is not None:
            note = replace(note, **skill.to_note())
        consent = self.consent if consent is None else consent
        _check_consent(consent)
        if player is not None:
            name = player_name(player)
        else:
            name = self._player = self._player or default_player(self._spool_folder)
        self._start()
        session = self._sessions.acquire(
            name, note.seat, is_recorded=self._sessions.recording_rate.draw()
        )
        try:
            return kind(
                self._sessions,
                session,
                note=note,
                consent=consent,
                tolerance=self._tolerance,
                bots=self._bots,
                skill=skill,
            )
        except BaseException:
            self._sessions.release(session)
            raise

    def end_session(self, player: str | None = None) -> bool:
        """End a player's sessions, cutting running episodes; return whether there were any.

        Call it when a player leaves. Without it, a session is closed once its player has had no
        episode for `SenderConfig.session_idle_s`.
        """
        name = self._player if player is None else player_name(player)
        n_ended = 0 if name is None else self._sessions.end_player(name)
        if n_ended:
            self._sender.wake.set()
        return n_ended > 0

    def wait_for_bot(self, timeout_s: float = 5.0) -> bool:
        """Wait for a bot; return whether there is one.

        Games need not call this: `act` uses a bot as soon as one arrives.
        """
        return self._bots.wait(timeout_s)

    def flush(self, timeout_s: float = 10.0) -> bool:
        """Wait until all recorded steps are acknowledged, rejected or dropped; False on timeout.

        Steps are dropped only if they fit neither into the spool nor into memory. Steps of an
        earlier start are sent in the background, and not waited for.
        """
        if self._closed:
            return self._all_sent
        return self._sender.flush(timeout_s, pumps=not self._threads)

    def pump(self) -> float:
        """Send and check for bots once, without threads; returns seconds until it is due again."""
        return min(self._sender.step(), self._bots.pump())

    def stats(self) -> Stats:
        """Return counters of what was recorded, sent and dropped so far."""
        return Stats(
            **asdict(self._sender.counts),
            recorded_steps=self._sessions.handoff.put_steps
            + self._sessions.waiting_steps(is_recorded=True),
            skipped_steps=self._sessions.skipped_steps,
            recording_rate=self._sessions.recording_rate.value,
            bad_inputs=self._tolerance.bad_inputs,
            last_bad_input=self._tolerance.last_bad_input,
            ignored_calls=self._tolerance.ignored_calls,
            open_episodes=self._sessions.n_open,
            bot=self._bots.name,
            refused_bots=self._bots.refused_bots,
            last_bot_error=self._bots.last_error,
        )

    def close(self, timeout_s: float | None = None) -> bool:
        """Cut open episodes and send until the timeout; return whether all recorded steps are sent.

        All steps are spooled first, even if that takes longer; what is not sent stays there. Steps
        of an earlier start are waited for only while the platform accepts them. In a signal handler
        that interrupted a call on an episode, the last steps of its session are spooled only when
        that call continues: `close` returns False after the timeout.
        """
        timeout_s = self._config.close_timeout_s if timeout_s is None else timeout_s
        if self._closing.acquire(blocking=False):
            self._closed = f"the game {self.spec.game} was closed; to record, connect again"
            if not _interrupts_call():
                self._close(timeout_s)
                return self._all_sent
            # The interrupted call may hold any lock of this game.
            self._closer = threading.Thread(
                target=self._close, args=(timeout_s,), name="understudy-close", daemon=True
            )
            self._closer.start()
        if self._closer is not None:
            self._closer.join(timeout_s + 4 * _JOIN_S)  # `_close` joins up to three times
            if self._closer.is_alive():
                self._sender.warn(
                    "interrupted",
                    f"the game {self.spec.game} was closed in a signal handler that interrupted "
                    "one of its calls; the last steps are lost if the process ends before that "
                    "call does, such as by os._exit",
                )
                return False
        return self._all_sent

    def _close(self, timeout_s: float) -> None:
        with self._lock:
            # Threads that start now are in the list, and no others will start.
            threads = list(self._threads)
        self._bots.stop()
        sessions = self._sessions.close(self._closed or "")
        try:
            self._all_sent = self._sender.finish(sessions, timeout_s, pumps=not threads)
        finally:
            self._stop.set()
            self._sender.wake_all()
            self._release()
            _join(threads)
            # If a request still hangs, this ends it; its frames are in the spool.
            self._link.close()
            _join(threads)
            self._bots.join(_JOIN_S)
            _GAMES.discard(self)

    def _release(self) -> None:
        lost_steps = self._sender.release()
        if lost_steps:
            self._sender.warn(
                "lost",
                f"{lost_steps} recorded steps are lost: they did not reach the platform, and "
                f"could not be saved in {self._spool_folder}; free some space there",
            )
        elif not self._all_sent:
            self._sender.warn(
                "left",
                "some recorded steps have not reached the platform yet; they are saved on this "
                "machine and will be sent when the game starts again, with the same address",
            )

    def __enter__(self) -> "Game":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        if self._threads or not self._config.background:
            return
        with self._lock:
            if self._threads or self._closed:
                return
            # Two threads: while a request waits for the platform, steps are still spooled.
            self._threads = [
                threading.Thread(
                    target=run, args=(self._stop,), name=f"{name}-{self.spec.game}", daemon=True
                )
                for name, run in (
                    ("understudy-spool", self._sender.run_spooling),
                    ("understudy-sender", self._sender.run_sending),
                )
            ]
            for thread in self._threads:
                thread.start()

    def abandon(self) -> None:
        """Close this Game in a forked child: its sender and its spool belong to the parent."""
        self._closed = (
            f"the game {self.spec.game} was connected before this process was forked; "
            "call understudy.connect again in the child"
        )
        self._lock = threading.Lock()
        self._threads = []
        self._closing.acquire(blocking=False)
        self._closer = None
        self._sessions.abandon(self._closed)
        self._sender.abandon()
        self._bots.abandon()


def connect(
    game: str | GameSpec | None = None,
    *,
    obs: Any = None,
    actions: Any = None,
    has_action_mask: bool | None = None,
    consent: str = "unknown",
    url: str | None = None,
    key: str | None = None,
    data: str | os.PathLike[str] | None = None,
    receipts: str | os.PathLike[str] | None = None,
    config: ClientConfig | None = None,
) -> Game:
    """Return a Game that records to the platform at `url`, or into the folder `data`.

    Defaults come from UNDERSTUDY_URL and UNDERSTUDY_KEY, then UNDERSTUDY_DATA. `game` is a name, or
    a GameSpec that also describes what follows: `obs` is a length, a shape, names or spaces;
    `actions` is a count, names or spaces; with `has_action_mask`, decisions record which actions
    were valid. `consent` tells whether bots may learn from the players' steps: `granted`, `denied`
    or `unknown`. `receipts` is a file that gets a line for every acknowledged frame, for
    `understudy data verify --receipts`. All other settings are fields of ClientConfig.
    """
    config = ClientConfig() if config is None else config
    if not isinstance(config, ClientConfig):
        raise ConfigError(
            f"config is {str(config)[:80]!r}; pass a ClientConfig, such as "
            "understudy.ClientConfig(strict=True)"
        )
    _check_consent(consent)  # before a folder is created
    spec = _spec(game, obs=obs, actions=actions, masked=has_action_mask)
    spool = Path(config.spool) if config.spool is not None else user_folder() / "spool"
    link = config.link
    bots_key = ""
    if link is not None:
        if data is not None or url is not None:
            raise ConfigError(
                "connect got config.link together with data= or url=; pass only one of them"
            )
        address = str(getattr(link, "address", type(link).__qualname__))
    elif isinstance(destination := find_destination(data, url, key), Address):
        # Imported late: games that record into a folder need no sockets.
        from understudy.client.http import HttpLink

        link = HttpLink(destination, spec.game, insecure=config.insecure)
        address = link.address
        bots_key = destination.key
    else:
        with _writing(destination):
            link = local_link(destination, spec, config.clock)
        address = "data"
        spool = spool if config.spool is not None else destination / "spool"
    with _writing(spool):
        return Game(
            spec,
            link,
            spool=spool,
            tag=spool_tag(address, spec.game),
            # A new deployment at this address has other keys; its bots are trusted on first use.
            bots_tag=spool_tag(address, spec.game, bots_key),
            consent=consent,
            config=config,
            receipts=receipts,
        )


def _kinds(opponents: Sequence[str]) -> tuple[str, ...]:
    if isinstance(opponents, str) or not isinstance(opponents, Iterable):
        raise ConfigError(
            f"opponents is {str(opponents)[:80]!r}; give a list of kinds, such as ['person']"
        )
    return tuple(opponents)


def _check_consent(consent: str) -> None:
    if consent not in CONSENTS:
        raise ConfigError(f"consent is {consent!r}; use one of {joined(CONSENTS)}")


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"cannot write to {folder} ({error.strerror or error}); give a folder that this user "
            "may write to: data= for the recorded steps, ClientConfig(spool=...) for unsent ones"
        ) from error


def _spec(game: str | GameSpec | None, *, obs: Any, actions: Any, masked: bool | None) -> GameSpec:
    """Return `game` if it is a spec, else the one of its name and shape."""
    if isinstance(game, GameSpec):
        shape = {"obs": obs, "actions": actions, "has_action_mask": masked}
        if extra := [setting for setting, value in shape.items() if value is not None]:
            raise ConfigError(
                f"connect got a spec and {', '.join(extra)}; the spec already describes the game, "
                "so remove one of the two"
            )
        return game
    if game is None or obs is None or actions is None:
        raise ConfigError(
            "connect needs a name, obs= and actions=, such as connect('my-game', obs=6, actions=3)"
        )
    return game_spec(
        game, obs=obs, actions=actions, has_action_mask=False if masked is None else masked
    )


def local_link(data_folder: Path, spec: GameSpec, clock: Clock) -> LocalLink:
    """Return a link that writes to the stream of the platform in a data folder."""
    from understudy.streams.file import FileStream

    check_data_folder(data_folder)
    intake = Intake(deployment_key(data_folder), spec.game, clock)
    stream = FileStream(data_folder / "stream")
    return LocalLink(stream, intake=intake, specs_folder=data_folder / "models" / "games")


# --- Where a game records to, and what a client stores beside its spool ---------------------------


@dataclass(frozen=True, slots=True)
class Address:
    """The URL of a platform's gateway, and a key for it."""

    url: str
    key: str = field(repr=False)


def find_destination(
    data: str | os.PathLike[str] | None, url: str | None, key: str | None
) -> Path | Address:
    """Return the folder or address to record to; arguments take precedence over the environment."""
    if data is not None and url is not None:
        raise ConfigError(f"connect got both data={str(data)!r} and url=; pass only one of them")
    if data is None and (url := _setting("url", url)):
        if not (key := _setting("key", key)):
            raise ConfigError(
                "a platform's URL needs a key; pass key=, or set UNDERSTUDY_KEY as `understudy up` "
                "prints it"
            )
        return Address(url, key)
    if key is not None:
        raise ConfigError("connect got a key but no url; pass url=, or set UNDERSTUDY_URL")
    path = _setting("data", None) if data is None else data
    if not path:
        raise ConfigError(
            "connect has no place to record to; pass url= and key= (or set UNDERSTUDY_URL and "
            "UNDERSTUDY_KEY), data='DIR' (or set UNDERSTUDY_DATA), or ClientConfig(link=...)"
        )
    try:
        folder = Path(path).resolve()
        is_file = folder.exists() and not folder.is_dir()
    except (TypeError, ValueError, OSError) as error:
        raise ConfigError(
            f"data={str(path)[:80]!r} is not a valid folder: {error}; use a path such as 'D'"
        ) from None
    if is_file:
        raise ConfigError(f"data={str(path)!r} is a file; pass a folder")
    return folder


def _setting(name: str, argument: str | None) -> str:
    """Return the argument, else UNDERSTUDY_NAME, else the text in the file UNDERSTUDY_NAME_FILE."""
    # Imported late: a game that passes its destination does not need it.
    from understudy.core.settings import Leaf, find_value

    setting = find_value(Leaf(name, "", None), {name: argument or None}, os.environ)
    return str(setting[0]) if setting else ""


def check_data_folder(folder: Path) -> None:
    """Raise ConfigError if the platform of a data folder keeps its stream or games elsewhere."""
    path = folder / "backends.json"
    try:
        backends = json.loads(path.read_bytes())
        urls = {part: str(backends[f"{part}.url"]) for part in ("stream", "models")}
    except (FileNotFoundError, NotADirectoryError):
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path}, which names the backends of the platform, cannot be read "
            f"({type(error).__name__}); restore it, or record over HTTP: pass url= and key= as "
            "`understudy up` prints them"
        ) from None
    for part, url in urls.items():
        if url:
            raise ConfigError(
                f"the platform of {folder} has its {part} elsewhere ({url.partition('?')[0]}), so "
                "it would never read steps recorded into this folder; record over HTTP: pass url= "
                "and key= as `understudy up` prints them"
            )


def spool_tag(address: str, game: str, key: str = "") -> str:
    """Return the folder name for one address and game, and with a key only for that key."""
    return hashlib.sha256("\0".join((address, game, key)).encode()).hexdigest()[:16]


def user_folder() -> Path:
    """Return the folder for cached files of the current user."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = str(Path.home() / "Library" / "Caches")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "understudy"


def default_player(folder: Path) -> PlayerName:
    """Return this machine's random player name, which is created once and stored in `folder`."""
    path = folder / "player"
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            create_once(path, f"p-{secrets.token_hex(8)}".encode())
        return player_name(path.read_text().strip())


# --- At exit, in a signal handler and after a fork ------------------------------------------------


def _close_all() -> None:
    for game in list(_GAMES):
        # A warning raised as an error (-W error) must not stop the other games from closing.
        with contextlib.suppress(RecordingWarning):
            game.close()


def _interrupts_call() -> bool:
    """Whether `close` interrupted another call on a game or an episode, as in a signal handler."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__") in _CALL_MODULES and frame.f_code not in _CLOSING:
            return True
        frame = frame.f_back
    return False


_CALL_MODULES = (__name__, Episode.__module__)
_CLOSING = (Game.__exit__.__code__, _close_all.__code__)


def _join(threads: Sequence[threading.Thread]) -> None:
    deadline_s = time.monotonic() + _JOIN_S
    for thread in threads:
        if thread.is_alive():
            thread.join(max(0.0, deadline_s - time.monotonic()))


def _after_fork() -> None:
    for game in list(_GAMES):
        game.abandon()
    _GAMES.clear()


atexit.register(_close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
