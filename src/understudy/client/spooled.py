"""What a session's spool folder says about itself, for those who did not make it."""

import contextlib
import shutil
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from understudy.core.canonical import strict_json
from understudy.core.errors import Corrupt, Locked, UnderstudyError
from understudy.core.game import GameSpec, spec_from_json
from understudy.core.lock import FileLock
from understudy.core.names import PlayerName, player_name


@dataclass(frozen=True, slots=True)
class SpooledSession:
    """What a session's folder says about it."""

    player: PlayerName
    game: str
    spec_json: str

    def spec(self) -> GameSpec:
        """The game's spec; SpecError when this build cannot read it."""
        return spec_from_json(self.spec_json)


def read_about(folder: Path) -> SpooledSession:
    """Whose session a spool folder holds; Corrupt when its session.json is missing or damaged."""
    try:
        about = strict_json((folder / "session.json").read_bytes())
        return SpooledSession(player_name(about["player"]), str(about["game"]), str(about.get("spec")))
    except (OSError, UnderstudyError, KeyError, TypeError, AttributeError) as error:
        raise Corrupt(f"{folder} does not say whose session it holds: {error!r}") from None


def forget_spooled(folder: Path, player: str, games: Collection[str]) -> int:
    """Delete what killed games left unsent of a player, in a spool with every tag; how many sessions went."""
    gone = 0
    for path in sorted(folder.glob("*/*/session.json")):
        # Being played or sent right now: what it sends is refused, since its session began before.
        with contextlib.suppress(Corrupt, OSError, Locked):
            about = read_about(path.parent)
            if about.player == player and about.game in games:
                with FileLock(path.parent / ".lock", what="a spooled session"):
                    shutil.rmtree(path.parent)
                    gone += 1
    return gone
