"""A sealed ticket opens for its game and schema only, and no text raises anything else."""

import random
import string

import pytest

from understudy.core.errors import Refused
from understudy.experience.ticket import MAX_TICKET_CHARS, Ticket, TicketSeal

SEAL = TicketSeal(bytes(range(32)))
TICKET = Ticket(
    entry=41, model_no=7, propensity=0.05, expires_s=1_800_000_000, id="abcdefgh-_012345"
)
TEXT = SEAL.seal(TICKET, game="cart", schema="0" * 64)


def refused(text: str, seal: TicketSeal = SEAL, game: str = "cart", schema: str = "0" * 64) -> str:
    with pytest.raises(Refused) as error:
        seal.open(text, game=game, schema=schema)
    return error.value.reason


def test_a_ticket_is_a_short_text_that_opens_again():
    assert TEXT == "t1:41:7:0.050000000:1800000000:abcdefgh-_012345:EpEQeaKI0k7XY6GFGWxh4w"
    assert SEAL.open(TEXT, game="cart", schema="0" * 64) == TICKET
    largest = Ticket(
        entry=10**15 - 1, model_no=10**15 - 1, propensity=1.0, expires_s=10**12 - 1, id="_" * 16
    )
    text = SEAL.seal(largest, game="cart", schema="0" * 64)
    assert len(text) <= MAX_TICKET_CHARS
    assert SEAL.open(text, game="cart", schema="0" * 64) == largest


def test_a_ticket_opens_with_its_key_game_and_schema_only():
    assert refused(TEXT, TicketSeal(bytes(32))) == "forged_ticket"
    assert refused(TEXT, game="cart2") == "forged_ticket"
    assert refused(TEXT, schema="1" + "0" * 63) == "forged_ticket"


def test_no_changed_character_is_accepted():
    for at, old in enumerate(TEXT):
        for new in "0:A-_\0é":
            if new != old:
                changed = TEXT[:at] + new + TEXT[at + 1 :]
                assert refused(changed) in ("malformed_ticket", "forged_ticket")


def test_any_other_text_is_malformed_and_is_shown_shortened():
    rng = random.Random(0)
    texts = [
        "",
        "t1",
        TEXT[:-1],
        TEXT + "A",
        TEXT + "\n",
        " " + TEXT,
        "t2" + TEXT[2:],
        "\udfff" * 9,
    ]
    texts += ["".join(rng.choices(string.printable, k=rng.randrange(200))) for _ in range(500)]
    texts.append(TEXT.replace("41", "٤١"))
    assert {refused(text) for text in texts} == {"malformed_ticket"}


def test_the_key_is_not_shown():
    assert bytes(range(32)).hex() not in repr(SEAL)
    assert "_key" not in repr(SEAL)
