"""BotCache: what a client keeps of its bots for the next start, in a folder that several processes may share.

bot.json             the last good casting, and the highest entry seen of each alias
trust.json           the public keys that were pinned when the deployment was first met
SHA256.safetensors   policies
"""

import contextlib
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from understudy.core.canonical import canonical_json, strict_json
from understudy.core.door import create_once
from understudy.core.errors import Corrupt, Refused, StorageFailed, StorageFull
from understudy.core.log import make_folder, write_file
from understudy.core.ports import Casting

_ALIASES = ("champion", "canary")


def _unseen() -> dict[str, int]:
    return dict.fromkeys(_ALIASES, 0)


@dataclass(frozen=True, slots=True)
class Kept:
    """What is known from the last good news."""

    casting: Casting | None = None
    seen: dict[str, int] = field(default_factory=_unseen)
    """The highest entry of each alias whose signature was right; older ones are never obeyed."""

    @property
    def number(self) -> int:
        return 0 if self.casting is None else self.casting.number

    def release(self, alias: str) -> dict[str, Any] | None:
        """The signed release of an alias, taken apart and not checked again."""
        text = None if self.casting is None else getattr(self.casting, f"{alias}_release")
        if text is None:
            return None
        found = strict_json(text)
        if not isinstance(found, dict) or not {"entry", "key_id"} <= found.keys() or "manifest" not in found["entry"]:
            raise Corrupt("the release of a kept bot is damaged")
        return found


class BotCache:
    """Files are replaced whole; a damaged or missing one means that the bot is fetched again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._pinned: tuple[str, ...] = ()

    def read(self) -> Kept:
        """The last good news; nothing when there were none."""
        path = self._folder / "bot.json"
        try:
            found = strict_json(path.read_bytes())
            news, seen = found["casting"], {alias: int(found["seen"][alias]) for alias in _ALIASES}
            return Kept(None if news is None else Casting(**news | {"trust": tuple(news["trust"])}), seen)
        except FileNotFoundError:
            return Kept()
        except (Refused, KeyError, TypeError, ValueError) as error:
            raise Corrupt(f"{path} is damaged and not used: {error!r}"[:200]) from None

    def policy(self, sha256: str) -> bytes:
        try:
            return (self._folder / f"{sha256}.safetensors").read_bytes()
        except FileNotFoundError:
            raise Corrupt(f"{self._folder} has lost the policy of its bot; it is fetched again") from None

    def keep_policy(self, sha256: str, raw: bytes) -> None:
        """Keep a policy that passed its checks; `write` comes after."""
        path = self._folder / f"{sha256}.safetensors"
        if not path.exists():
            make_folder(self._folder)
            write_file(path, raw)

    def write(self, kept: Kept, policies: Collection[str]) -> None:
        """Keep the news, and only these policies; unless another process has newer ones there."""
        with contextlib.suppress(Corrupt):
            if self.read().number > kept.number:
                return
        news = None if kept.casting is None else asdict(kept.casting) | {"trust": list(kept.casting.trust)}
        make_folder(self._folder)
        write_file(self._folder / "bot.json", canonical_json({"casting": news, "seen": kept.seen}))
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
