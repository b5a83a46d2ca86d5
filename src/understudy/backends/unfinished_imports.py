"""The session ids of unfinished imports, in a file of the data folder."""

import json
import uuid
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from understudy.core.errors import Corrupt
from understudy.core.log import write_file


@dataclass(frozen=True, slots=True)
class SendingSession:
    """A session whose frames an unfinished import may have sent."""

    session: uuid.UUID
    player: bytes
    """The pseudonym of the session's player."""


class UnfinishedImports:
    """The session ids that unfinished imports into a remote store use, in a local file.

    Frames in a stream cannot be queried before they are stored. The ids are therefore written
    before the first frame is sent, and a repeated import sends the same frames with the same ids,
    so the store recognises the duplicates.
    """

    def __init__(self, root: Path) -> None:
        self._path = root / "import.json"
        self.sessions: dict[int, SendingSession] = self._read()
        """Sessions by the random part of their ids."""

    def _read(self) -> dict[int, SendingSession]:
        try:
            fields = json.loads(self._path.read_bytes())
            return {
                int(noise, 16): SendingSession(uuid.UUID(hex=session), bytes.fromhex(player))
                for noise, (session, player) in fields.items()
            }
        except FileNotFoundError:
            return {}
        except (ValueError, TypeError, AttributeError) as error:
            raise Corrupt(
                f"{self._path} is damaged ({error}); delete it, but then a repeated import may "
                "store sessions of an unfinished one twice"
            ) from None

    def add(self, sessions: Mapping[int, SendingSession]) -> None:
        """Write these sessions to the file before they are sent."""
        self._keep({**self._read(), **sessions})

    def finish(self, done: Iterable[int]) -> None:
        """Remove sessions that are stored, or will not be sent again with those ids."""
        finished = set(done)
        self._keep({noise: sent for noise, sent in self._read().items() if noise not in finished})

    def forget(self, players: Collection[bytes]) -> None:
        """Remove sessions of erased players: their ids are rejected, so imports need new ones."""
        self.finish([noise for noise, sent in self.sessions.items() if sent.player in players])

    def _keep(self, sessions: dict[int, SendingSession]) -> None:
        self.sessions = sessions
        if sessions:
            fields = {
                f"{noise:x}": [sending.session.hex, sending.player.hex()]
                for noise, sending in sessions.items()
            }
            write_file(self._path, json.dumps(fields).encode(), mode=0o600)
        else:
            self._path.unlink(missing_ok=True)
