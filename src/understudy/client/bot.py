"""Bots in the game: the last good ones from the disk at once, newer ones as they come, each checked
before it plays.

    link.bot ─► signatures ─► number not lower than seen ─► schema ─► policy: hash, golden
        ─► disk ─► on stage

Nothing here ever makes a game wait: a decision reads one attribute, and a thread that begins with
the first decision does the rest. What is kept for the next start lies in a folder that several
processes may share:

    bot.json             the last good casting, and the highest entry seen of each alias
    trust.json           the public keys that were pinned when the deployment was first met
    SHA256.safetensors   policies
"""

import contextlib
import random
import threading
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from understudy.client.sender import Backoff
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
from understudy.core.log import make_folder, write_file
from understudy.core.signed import Trusted, open_signed, trusted_keys
from understudy.experience.game import GameSpec
from understudy.experience.intake import create_once
from understudy.experience.writer import action_writer
from understudy.ports import Link, LiveModels

if TYPE_CHECKING:
    # Policies are loaded with the first bot; a game that only records does without them.
    from understudy.models.manifest import Manifest
    from understudy.nn.policy import Policy


_POLL_S = 25.0
"""How long one question waits for news."""
_PUMP_EVERY_S = 1.0
_RETRY_FIRST_S = 0.5
_RETRY_CAP_S = 30.0
_AGAIN_FIRST_S = 15.0
_AGAIN_CAP_S = 600.0
"""A refused bot is looked at again after this, in case it was damaged on its way; doubled up to
the second."""
_MAX_CANARY = 0.5
_ALIASES = ("champion", "canary")
_BAD = (Refused, Corrupt, ConfigError, KeyError, TypeError, ValueError, AttributeError)
"""What checking strange documents may raise."""


class BotCache:
    """Files are replaced whole; a damaged or missing one means that the bot is fetched again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pinned: tuple[str, ...] = ()

    def read(self) -> tuple[LiveModels | None, dict[str, int]]:
        """The last good news, None when there were none, and the highest entry seen of each
        alias."""
        path = self._folder / "bot.json"
        try:
            found = strict_json(path.read_bytes())
            news = found["casting"]
            seen = {alias: int(found["seen"][alias]) for alias in _ALIASES}
            return None if news is None else LiveModels(
                **news | {"trust": tuple(news["trust"])}
            ), seen
        except FileNotFoundError:
            return None, dict.fromkeys(_ALIASES, 0)
        except (Refused, KeyError, TypeError, ValueError) as error:
            raise Corrupt(f"{path} is damaged and not used: {error!r}"[:200]) from None

    def policy(self, sha256: str) -> bytes:
        try:
            return (self._folder / f"{sha256}.safetensors").read_bytes()
        except FileNotFoundError:
            raise Corrupt(
                f"{self._folder} has lost the policy of its bot; it is fetched again"
            ) from None

    def keep_policy(self, sha256: str, raw: bytes) -> None:
        """Keep a policy that passed its checks; `write` comes after."""
        path = self._folder / f"{sha256}.safetensors"
        if not path.exists():
            make_folder(self._folder)
            write_file(path, raw)

    def write(
        self, live_models: LiveModels | None, seen: dict[str, int], policies: Collection[str]
    ) -> None:
        """Keep the news, and only these policies; unless another process has newer ones there."""
        with contextlib.suppress(Corrupt):
            there = self.read()[0]
            if there is not None and there.number > (
                0 if live_models is None else live_models.number
            ):
                return
        news = (
            None
            if live_models is None
            else asdict(live_models) | {"trust": list(live_models.trust)}
        )
        make_folder(self._folder)
        write_file(self._folder / "bot.json", canonical_json({"casting": news, "seen": seen}))
        for path in self._folder.glob("*.safetensors"):
            if path.stem not in policies:
                path.unlink(missing_ok=True)

    def pinned(self, met: Sequence[str] = ()) -> tuple[str, ...]:
        """The deployment's public keys as they were when it was first met, which may be now."""
        path = self._folder / "trust.json"
        if met and not self._pinned and not path.exists():
            # Where nothing can be written, they are remembered until the program ends.
            self._pinned = tuple(met)
            with contextlib.suppress(OSError, StorageFull, StorageFailed):
                make_folder(self._folder)
                create_once(path, canonical_json(list(met)))
        try:
            found = strict_json(path.read_bytes())
        except OSError:
            return self._pinned
        if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
            raise Corrupt(f"{path} is damaged; delete it to meet the deployment anew")
        return tuple(found)


@dataclass(frozen=True, slots=True, eq=False)
class Bot:
    """A model that passed every check."""

    manifest: "Manifest"
    policy: "Policy"


@dataclass(frozen=True, slots=True)
class LivePolicies:
    """Who plays new episodes; replaced as a whole."""

    champion: Bot | None = None
    canary: Bot | None = None
    canary_share: float = 0.0


class Bots:
    """The bots of one connected game; any thread may ask."""

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
        self._cache = BotCache(folder)
        self._trust = tuple(trust)
        self._has_thread = has_thread
        self._backoff = Backoff(clock, rng, first_s=_RETRY_FIRST_S, cap_s=_RETRY_CAP_S)
        self._lock = threading.Lock()
        self._stage: LivePolicies | None = None
        self._live_models: LiveModels | None = None
        """The last good news."""
        self._seen = dict.fromkeys(_ALIASES, 0)
        """The highest entry of each alias whose signature was right; older ones are never
        obeyed."""
        self._after = self._good_number = 0
        self._again_at_s: float | None = None
        self._again_s = _AGAIN_FIRST_S
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._has_registered = False
        self._pump_at_s = clock.monotonic()
        self.refused_bots = 0
        self._refusal = self._link_error = ""

    @property
    def name(self) -> str:
        """The champion's; empty while there is none, or before anybody asked for one."""
        stage = self._stage
        return (
            stage.champion.manifest.name if stage is not None and stage.champion is not None else ""
        )

    @property
    def last_error(self) -> str:
        return self._refusal or self._link_error

    def cast(self) -> Bot | None:
        """Who plays the episode that asks: the canary with its share, else the champion; None
        while there is none."""
        stage = self._stage
        if stage is None:
            stage = self._begin()
        if stage.canary is not None and self.rng.random() < stage.canary_share:
            return stage.canary
        return stage.champion

    def wait(self, timeout_s: float) -> bool:
        """Whether there is a bot by then; for programs that would rather begin late than without
        one."""
        deadline_s = self._clock.monotonic() + timeout_s
        while self.cast() is None and (left_s := deadline_s - self._clock.monotonic()) > 0:
            if self._has_thread and not self._stop.is_set():
                self._clock.wait(self._stop, min(left_s, 0.02))
            elif self._stop.is_set() or (pause_s := self.step(min(left_s, 1.0))) >= left_s:
                break
            else:
                self._clock.wait(self._stop, pause_s)
        return self.cast() is not None

    def _begin(self) -> LivePolicies:
        with self._lock:
            if self._stage is None:
                self._stage = self._load()
                if self._has_thread and not self._stop.is_set():
                    name = f"understudy-bots-{self.spec.game}"
                    self._thread = threading.Thread(
                        target=self.run, args=(self._stop,), name=name, daemon=True
                    )
                    self._thread.start()
            return self._stage

    def _load(self) -> LivePolicies:
        """The last good bots. Their signatures were checked when they were kept; what may have
        rotted is checked."""
        try:
            self._live_models, self._seen = self._cache.read()
            if self._live_models is None:
                return LivePolicies()
            known = trusted_keys(*(self._trust or self._cache.pinned()))
            champion = self._restored(self._live_models.champion_release, known)
            canary = self._restored(self._live_models.canary_release, known)
            self._after = self._good_number = self._live_models.number
            return LivePolicies(champion, canary, min(self._live_models.canary_share, _MAX_CANARY))
        except (*_BAD, OSError) as error:
            self._refuse(error)
            return LivePolicies()

    def _restored(self, release: str | None, known: Trusted) -> Bot | None:
        from understudy.models.manifest import manifest_from_json, open_policy

        if release is None:
            return None
        signed = strict_json(release)
        if (
            not isinstance(signed, dict)
            or not {"entry", "key_id"} <= signed.keys()
            or "manifest" not in signed["entry"]
        ):
            raise Corrupt("the release of a kept bot is damaged")
        if signed["key_id"] not in known:
            raise Refused(
                "unknown_key",
                f"the bot on this disk was signed by {signed['key_id']}, which is not trusted now",
            )
        manifest = self._fitting(manifest_from_json(signed["entry"]["manifest"]))
        return Bot(manifest, open_policy(manifest, self._cache.policy(manifest.policy_sha256)))

    # --- News -------------------------------------------------------------------------------------

    def step(self, wait_s: float = _POLL_S) -> float:
        """Ask once for news, and take them when they are good; how many seconds may pass before
        the next question."""
        now_s = self._clock.monotonic()
        if self._again_at_s is not None:
            if now_s >= self._again_at_s:
                self._after = self._good_number
                self._again_at_s = None
            else:
                wait_s = min(wait_s, self._again_at_s - now_s)
        try:
            news = self._link.bot(self._after, wait_s=wait_s)
            self._link_error = ""
            if news is not None:
                self._take(news)
            self._backoff.succeeded()
            # A link that does not wait must not be asked without end.
            waited_s = self._clock.monotonic() - now_s
            return max(0.0, min(wait_s, _PUMP_EVERY_S) - waited_s) if news is None else 0.0
        except LinkFailed as failed:
            if failed.code == "not_registered" and not self._has_registered:
                # A bot may be asked for before the first step is sent.
                self._has_registered = True
                with contextlib.suppress(LinkFailed):
                    self._link.register(self.spec)
                return 0.0
            self._link_error = str(failed)
            self._backoff.failed(wholly=True, retry_after_s=failed.retry_after_s)
        except Exception as error:
            self._link_error = repr(error)[:300]
            self._backoff.failed(wholly=True, retry_after_s=0.0)
        return max(0.0, self._backoff.left_s)

    def run(self, stop: threading.Event) -> None:
        """Repeat `step` until told to stop."""
        while not stop.is_set():
            wait_s = self.step()
            if wait_s > 0:
                self._clock.wait(stop, wait_s)

    def pump(self) -> float:
        """For games without threads: look for news, if any decision was asked for and it is
        time."""
        if self._stage is None or self._has_thread or self._stop.is_set():
            return float("inf")
        left_s = self._pump_at_s - self._clock.monotonic()
        if left_s <= 0:
            left_s = max(_PUMP_EVERY_S, self.step(0.0))
            self._pump_at_s = self._clock.monotonic() + left_s
        return left_s

    def _take(self, news: LiveModels) -> None:
        try:
            trusted = trusted_keys(*(self._trust or self._cache.pinned(news.trust)))
            champion = self._opened(news, "champion", trusted)
        except _BAD as error:
            # The last good ones stay; a newer entry is waited for, and this one looked at again
            # later.
            self._refuse(error)
            self._after, self._again_at_s = news.number, self._clock.monotonic() + self._again_s
            self._again_s = min(2 * self._again_s, _AGAIN_CAP_S)
            return self._keep(self._live_models)
        self._refusal = ""
        self._again_at_s = None
        self._again_s = _AGAIN_FIRST_S
        canary = None
        try:
            canary = self._opened(news, "canary", trusted)
        except _BAD as error:
            # The champion plays on; a canary that cannot be checked plays nowhere.
            self._refuse(error)
        self._stage = LivePolicies(champion, canary, min(news.canary_share, _MAX_CANARY))
        self._after = self._good_number = news.number
        return self._keep(news if canary else replace(news, canary_release=None))

    def _opened(self, news: LiveModels, alias: str, trusted: Trusted) -> Bot | None:
        from understudy.models.manifest import manifest_from_json, open_policy

        point = self._entry(getattr(news, alias), "point", trusted)
        if point is None:
            if alias == "champion" and self._seen[alias]:
                raise Refused(
                    "old_bot",
                    "the platform knows of no champion, yet there was one; is it the same one?",
                )
            return None
        number = point["number"]
        model_no = point["model_no"]
        if point["alias"] != alias or type(number) is not int or type(model_no) is not int:
            raise Refused(
                "bad_entry", f"the pointer of {alias} is one of {str(point['alias'])[:20]!r}"
            )
        if number < self._seen[alias]:
            raise Refused(
                "old_bot",
                f"entry {number} is older than {self._seen[alias]}, which was seen before",
            )
        self._seen[alias] = number
        if model_no == 0:
            return None
        release = self._entry(getattr(news, f"{alias}_release"), "release", trusted)
        if release is None:
            raise Refused("bad_entry", f"model {model_no} came without its release")
        manifest = self._fitting(manifest_from_json(release["manifest"]))
        if manifest.model_no != model_no:
            raise Refused(
                "bad_entry", f"{alias} means model {model_no}, the release is of {manifest.name}"
            )
        for bot in self._on_stage():
            if bot.manifest == manifest:
                return bot
        raw = self._link.policy(model_no)
        bot = Bot(manifest, open_policy(manifest, raw))
        with contextlib.suppress(StorageFull, StorageFailed, OSError):
            self._cache.keep_policy(manifest.policy_sha256, raw)
        return bot

    def _entry(self, text: str | None, kind: str, trusted: Trusted) -> dict[str, Any] | None:
        if text is None:
            return None
        entry = open_signed(text.encode(), trusted)
        if (entry.get("kind"), entry.get("journal")) != (kind, f"registry/{self.spec.game}"):
            raise Refused(
                "bad_entry",
                f"a {str(entry.get('kind'))[:20]} of {str(entry.get('journal'))[:80]} came instead",
            )
        return entry

    def _fitting(self, manifest: "Manifest") -> "Manifest":
        if (manifest.game, manifest.schema) != (self.spec.game, self.spec.schema):
            raise Refused(
                "wrong_schema",
                f"{manifest.name} learned another version of {self.spec.game} than this one",
            )
        return manifest

    def _on_stage(self) -> list[Bot]:
        stage = self._stage or LivePolicies()
        return [bot for bot in (stage.champion, stage.canary) if bot is not None]

    def _refuse(self, error: Exception) -> None:
        self.refused_bots += 1
        self._refusal = (
            str(error)[:300] if isinstance(error, UnderstudyError) else repr(error)[:300]
        )

    def _keep(self, live_models: LiveModels | None) -> None:
        self._live_models = live_models
        try:
            self._cache.write(
                live_models, self._seen, [bot.manifest.policy_sha256 for bot in self._on_stage()]
            )
        except (StorageFull, StorageFailed, OSError) as error:
            # They play all the same; only the next start has to fetch them again.
            self._link_error = f"cannot be kept for the next start: {error}"[:300]

    # --- Ends -------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Take no more news; whoever waits is woken when the link is closed."""
        self._stop.set()

    def join(self, timeout_s: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)

    def abandon(self) -> None:
        """In a forked child: the thread is the parent's; the bots that are here play on."""
        self._lock = threading.Lock()
        self._thread = None
        self._stop = threading.Event()
        self._stop.set()
