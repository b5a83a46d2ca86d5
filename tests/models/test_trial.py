"""The draws of a trial have the stated probabilities, and each ticket is sealed and new."""

import math
import random
from collections import Counter
from dataclasses import replace

import pytest

from understudy.experience.ticket import TicketSeal
from understudy.models.catalogue import Alias, Catalogue, Control
from understudy.models.trial import Trial, draw_tickets, trial_of

SEAL = TicketSeal(bytes(32))
TRIAL = Trial(
    game="cart",
    schema="0" * 64,
    entry=41,
    champion=6,
    canary=7,
    share=0.25,
    control=3,
    control_share=0.05,
)


def drawn(trial: Trial, n: int, **options: bool) -> Counter[tuple[int, float]]:
    """How often each model was drawn with each probability, as the tickets state it."""
    batch = draw_tickets(trial, SEAL, n, now_s=1000.5, rng=random.Random(0), **options)
    opened = [SEAL.open(each.ticket, game="cart", schema="0" * 64) for each in batch.tickets]
    assert [each.model_no for each in batch.tickets] == [ticket.model_no for ticket in opened]
    assert {(ticket.entry, ticket.expires_s) for ticket in opened} == {(41, 87_400)}
    assert len({ticket.id for ticket in opened}) == n
    assert (batch.entry, batch.valid_s) == (41, 86_400)
    assert set(batch.models) == {ticket.model_no for ticket in opened}
    return Counter((ticket.model_no, ticket.propensity) for ticket in opened)


def test_draws_have_their_stated_frequencies():
    counts = drawn(TRIAL, 20_000)
    assert counts.keys() == {(7, 0.6), (3, 0.4), (7, 0.25), (6, 0.75)}
    # One draw of eight is beside the control. Bounds: five standard deviations.
    assert counts[7, 0.6] == pytest.approx(1_500, abs=190)
    assert counts[3, 0.4] == pytest.approx(1_000, abs=155)
    assert counts[7, 0.25] == pytest.approx(4_375, abs=295)
    assert counts[6, 0.75] == pytest.approx(13_125, abs=340)


@pytest.mark.parametrize("share", [0.05, 0.1, 0.5])
def test_without_a_control_all_draws_are_between_canary_and_champion(share):
    for counts in (
        drawn(replace(TRIAL, share=share), 5_000, with_control=False),
        drawn(replace(TRIAL, share=share, control=0), 5_000),
    ):
        assert counts.keys() == {(7, share), (6, 1 - share)}
        deviation = math.sqrt(5_000 * share * (1 - share))
        assert counts[7, share] == pytest.approx(5_000 * share, abs=5 * deviation)


def test_a_trial_needs_champion_and_canary():
    champion, canary = (Alias(number, 40 + number, 0.0, "", schema="s") for number in (1, 2))
    now = Catalogue("cart", aliases={("s", "champion"): champion, ("s", "canary"): canary})
    canary = replace(canary, share=0.9, control=Control(5, 0.1))
    trial = trial_of(now, champion, canary)
    assert trial == Trial(
        game="cart",
        schema="s",
        entry=42,
        champion=1,
        canary=2,
        share=0.5,
        control=5,
        control_share=0.1,
    )
    none = replace(canary, model_no=0)
    for pair in ((None, canary), (champion, None), (champion, none), (none, canary)):
        assert trial_of(now, *pair) is None
    assert draw_tickets(None, SEAL, 9, now_s=0.0, rng=random.Random(0)).tickets == ()
