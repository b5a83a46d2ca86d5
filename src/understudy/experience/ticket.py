"""Tickets: a gateway's draw of the bot that plays one episode, sealed with a key of the deployment.

    t1:ENTRY:MODEL_NO:PROPENSITY:EXPIRES_S:ID:SEAL

The seal is a MAC of the text before it, and of the game and schema, under a key that gateways and
the learner derive from the deployment's key. Clients cannot verify it: they pass the text on.
"""

import base64
import hashlib
import hmac
import re
from dataclasses import dataclass

from understudy.core.errors import Refused

MAX_TICKET_CHARS = 128
TICKET_LIFETIME_S = 86_400
"""How long after its draw a ticket is valid: the first chunk of its episode must arrive by then."""
_LABEL = b"understudy tickets/1"
_SEAL_BYTES = 16
_TICKET = re.compile(
    r"t1:([0-9]{1,15}):([0-9]{1,15}):([01]\.[0-9]{9}):([0-9]{1,12}):([A-Za-z0-9_-]{16}):"
    r"([A-Za-z0-9_-]{22})"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """One draw: which model plays an episode of a trial."""

    entry: int
    """The canary's entry in the game's journal, by which the model was drawn."""
    model_no: int
    propensity: float
    """The probability of the model in that draw."""
    expires_s: int
    """When the first chunk of the episode must have arrived, in seconds since 1970."""
    id: str
    """16 random characters; a ticket counts once."""


class TicketSeal:
    """Seals tickets and opens sealed ones; repr does not show the key."""

    def __init__(self, deployment_key: bytes) -> None:
        self._key = hmac.new(deployment_key, _LABEL, hashlib.sha256).digest()

    def seal(self, ticket: Ticket, *, game: str, schema: str) -> str:
        """Return the ticket as text, which is valid for this game and schema only."""
        body = (
            f"t1:{ticket.entry}:{ticket.model_no}:{ticket.propensity:.9f}:{ticket.expires_s}:"
            f"{ticket.id}"
        )
        return f"{body}:{self._mac(body, game, schema)}"

    def open(self, text: str, *, game: str, schema: str) -> Ticket:
        """Return the ticket that a gateway sealed; Refused if it is malformed or forged."""
        match = _TICKET.fullmatch(text)
        if match is None:
            raise Refused(
                "malformed_ticket",
                f"{text[:20]!r} is not a ticket, which starts with t1: and has seven parts; send "
                "it exactly as the gateway returned it",
            )
        entry, model_no, propensity, expires_s, name, mac = match.groups()
        expected = self._mac(text[: -len(mac) - 1], game, schema)
        if not hmac.compare_digest(expected, mac):
            raise Refused(
                "forged_ticket",
                f"the seal of a ticket for model {model_no} does not match this game and schema; "
                "use only tickets that this platform drew",
            )
        return Ticket(
            entry=int(entry),
            model_no=int(model_no),
            propensity=float(propensity),
            expires_s=int(expires_s),
            id=name,
        )

    def _mac(self, body: str, game: str, schema: str) -> str:
        message = "\0".join((game, schema, body)).encode()
        return ticket_text(hmac.new(self._key, message, hashlib.sha256).digest()[:_SEAL_BYTES])


def ticket_text(raw: bytes) -> str:
    """Bytes as the characters that tickets consist of."""
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
