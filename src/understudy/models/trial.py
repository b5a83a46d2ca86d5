"""The draw of a trial: which of champion, canary and control plays an episode."""

import random
from dataclasses import dataclass

from understudy.experience.ticket import TICKET_LIFETIME_S, Ticket, TicketSeal, ticket_text
from understudy.models.catalogue import Alias, Catalogue
from understudy.ports import (
    CANARY_BESIDE_CONTROL,
    MAX_CANARY_SHARE,
    DrawnTicket,
    TicketBatch,
)

_ID_BYTES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The models between which bots are drawn while a canary is on trial."""

    game: str
    schema: str
    entry: int
    """The canary's entry in the journal; another one when its share changes."""
    champion: int
    canary: int
    share: float
    """The canary's probability beside the champion."""
    control: int = 0
    """0: none."""
    control_share: float = 0.0
    """The control's share of all episodes."""

    def models(self, *, with_control: bool = True) -> tuple[int, ...]:
        """The models between which episodes are drawn."""
        has_control = with_control and self.control
        return (self.champion, self.canary, *((self.control,) if has_control else ()))

    def draw(self, rng: random.Random, *, with_control: bool = True) -> tuple[int, float]:
        """Draw the model of an episode; returns it and its probability in that draw.

        Some of the draws are between canary and control, the others between canary and champion.
        """
        control_odds = 1 - CANARY_BESIDE_CONTROL
        if with_control and self.control and rng.random() < self.control_share / control_odds:
            if rng.random() < CANARY_BESIDE_CONTROL:
                return self.canary, CANARY_BESIDE_CONTROL
            return self.control, control_odds
        if rng.random() < self.share:
            return self.canary, self.share
        return self.champion, 1 - self.share


def trial_of(now: Catalogue, champion: Alias | None, canary: Alias | None) -> Trial | None:
    """The trial of a canary beside this champion; None without one of them."""
    if champion is None or canary is None or not champion.model_no or not canary.model_no:
        return None
    control = now.control_of(canary)
    return Trial(
        game=now.game,
        schema=canary.schema,
        entry=canary.number,
        champion=champion.model_no,
        canary=canary.model_no,
        share=min(canary.share, MAX_CANARY_SHARE),
        control=control.model_no if control else 0,
        control_share=control.share if control else 0.0,
    )


def draw_tickets(
    trial: Trial | None,
    seal: TicketSeal,
    n: int,
    *,
    now_s: float,
    rng: random.Random,
    with_control: bool = True,
) -> TicketBatch:
    """Draw the bots of `n` episodes, each as a sealed ticket; without a trial, none."""
    if trial is None:
        return TicketBatch(entry=0)
    tickets = []
    for _ in range(n):
        model_no, propensity = trial.draw(rng, with_control=with_control)
        ticket = Ticket(
            entry=trial.entry,
            model_no=model_no,
            propensity=propensity,
            expires_s=int(now_s) + TICKET_LIFETIME_S,
            id=ticket_text(rng.randbytes(_ID_BYTES)),
        )
        text = seal.seal(ticket, game=trial.game, schema=trial.schema)
        tickets.append(DrawnTicket(model_no=model_no, ticket=text))
    return TicketBatch(
        entry=trial.entry,
        models=trial.models(with_control=with_control),
        valid_s=TICKET_LIFETIME_S,
        tickets=tuple(tickets),
    )
