"""Imports that have begun: the ids under which they send, in a file of the data folder."""

import json
import uuid
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from understudy.core.errors import Corrupt
from understudy.core.log import write_file


@dataclass(frozen=True, slots=True)
class SendingSession:
    """A session that may be on its way."""

    session: uuid.UUID
    player: bytes
    """A pseudonym."""


class UnfinishedImports:
    """Under which ids imports have begun to send sessions to a store elsewhere, in a file of the
    data folder.

    What is in a stream cannot be asked for before it is stored. So ids are written down before the
    first frame is sent, and an import that is repeated sends the same frames under the same ids:
    the store knows them as the same.
    """

    def __init__(self, root: Path) -> None:
        self._path = root / "import.json"
        self.sessions: dict[int, SendingSession] = self._read()
        """By the random part of their ids."""

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
                f"{self._path} is damaged ({error}); restore it from a backup, or remove it: then "
                "sessions "
                "of an unfinished import may be stored twice"
            ) from None

    def add(self, sessions: Mapping[int, SendingSession]) -> None:
        """Make durable that these are about to be sent."""
        self._keep({**self._read(), **sessions})

    def finish(self, done: Iterable[int]) -> None:
        """These are stored, or will never be sent under those ids again."""
        gone = set(done)
        self._keep({noise: sent for noise, sent in self._read().items() if noise not in gone})

    def forget(self, players: Collection[bytes]) -> None:
        """Let go of erased players: what comes under the old ids is refused, and a new import
        takes new ones."""
        self.finish([noise for noise, sent in self.sessions.items() if sent.player in players])

    def _keep(self, sessions: dict[int, SendingSession]) -> None:
        self.sessions = sessions
        if sessions:
            fields = {
                f"{noise:x}": [one.session.hex, one.player.hex()] for noise, one in sessions.items()
            }
            write_file(self._path, json.dumps(fields).encode(), mode=0o600)
        else:
            self._path.unlink(missing_ok=True)
