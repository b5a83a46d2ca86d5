"""Keys: hashed at rest, scoped, revocable from anywhere."""

from pathlib import Path
from typing import Any

import pytest

from understudy.core.errors import ConfigError, Refused
from understudy.core.signed import Signer
from understudy.models.keys import Keys
from understudy.models.objects import FolderObjects
from understudy.testing.clock import ManualClock

SIGNER = Signer(bytes(range(32)))


def keys(folder: Path, clock: ManualClock | None = None) -> Keys:
    trusted = {SIGNER.key_id: SIGNER.public}
    return Keys(FolderObjects(folder), trusted=trusted, signer=SIGNER, clock=clock or ManualClock())


def reason(ring: Keys, text: str | None) -> str:
    with pytest.raises(Refused) as refused:
        ring.check(text)
    return refused.value.reason


def test_a_key_is_checked_by_its_text_which_is_not_stored(tmp_path: Path):
    ours = keys(tmp_path)
    text, key = ours.create(["play"], game="pong", label="the shop's build")
    ours.follow()
    assert ours.check(text) == key
    assert key.may("play")
    assert not key.may("read")
    assert key.is_for("pong")
    assert not key.is_for("chess")
    secret = text.split("_", 2)[2].encode()  # it may hold underscores itself
    assert not any(secret in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_an_admin_key_has_every_scope():
    # Written out, since the matrix of routes relies on it.
    from understudy.models.keys import SCOPES, Key

    key = Key(id="a", hash="b", scopes=("admin",))
    assert all(key.may(scope) for scope in SCOPES)


def test_an_invalid_key_is_refused(tmp_path: Path):
    clock = ManualClock()
    ours = keys(tmp_path, clock)
    text, _ = ours.create(["play"])
    short, _ = ours.create(["play"], expires_s=clock.now() + 60)
    other, _ = ours.create(["play"])
    ours.follow()
    assert reason(ours, None) == "no_key"
    assert reason(ours, "") == "no_key"
    swapped = text[:16] + other[16:]
    for wrong in (
        "x",
        text[:-1],
        text + "A",
        text[:-1] + ("A" if text[-1] != "A" else "B"),
        swapped,
        f" {text}",
        "é",
    ):
        assert reason(ours, wrong) == "wrong_key"
    ours.check(short)
    clock.advance(61)
    assert reason(ours, short) == "expired_key"


def test_a_key_revoked_at_one_gateway_is_refused_by_the_others(tmp_path: Path):
    one = keys(tmp_path)
    other = keys(tmp_path)
    text, key = one.create(["play"])
    other.follow()
    other.check(text)
    one.revoke(key.id[:6])
    other.follow()
    assert reason(other, text) == "revoked_key"
    assert one.all() == []
    with pytest.raises(ConfigError, match="0 keys start with"):
        one.revoke(key.id)
    with pytest.raises(ConfigError, match="0 keys"):
        one.revoke("")


def test_origins_are_known_until_their_key_is_revoked(tmp_path: Path):
    ours = keys(tmp_path)
    _, key = ours.create(["play"], origins=("https://game.example",))
    ours.follow()
    assert ours.allows_origin("https://game.example")
    assert not ours.allows_origin("https://evil.example")
    ours.revoke(key.id)
    ours.follow()
    assert not ours.allows_origin("https://game.example")


@pytest.mark.parametrize(
    "wrong",
    [
        {"scopes": []},
        {"scopes": ["root"]},
        {"game": "../x"},
        {"origins": ("javascript:1",)},
        {"label": "\n"},
        {"requests_s": 0},
        {"bytes_s": float("nan")},
        {"expires_s": -1},
        {"origins": ("https://a/b",)},
    ],
)
def test_invalid_facts_are_rejected(tmp_path: Path, wrong: dict[str, Any]):
    with pytest.raises(ConfigError):
        keys(tmp_path).create(**{"scopes": ["play"]} | wrong)
