"""The intake admits frames by their headers, and only under a session's own player."""

import hashlib
import hmac
import os
import stat
import subprocess
import sys
import uuid
from dataclasses import replace

import pytest

from understudy.core.errors import ConfigError, Refused
from understudy.core.names import game_name, new_session, player_name
from understudy.experience.frame import CloseReport, Frame, FrameKind, close_frame, data_frame
from understudy.experience.intake import Intake, create_once, deployment_key, pseudonym
from understudy.experience.session import (
    AHEAD_S,
    DAY_S,
    INGEST_S,
    INTAKE_MAX_AGE_S,
    REMEMBER_S,
    SPOOL_S,
    refused_session,
)

NOW_S = 1_800_000_000.0
GAME = game_name("my-game")
ANNA = player_name("anna")
KEY = bytes(range(32))


class Still:
    def now(self):
        return NOW_S

    def monotonic(self):
        return 0.0

    def wait(self, event, timeout_s):
        return False


def new_intake():
    return Intake(KEY, GAME, Still())


def frame(session=None, body=b"body"):
    return data_frame(session or new_session(NOW_S), 0, body)


def only(frames, players):
    (result,) = new_intake().admit(frames, players)
    return result


def test_a_pseudonym_is_the_keyed_hash_of_game_and_name():
    expected = hmac.new(KEY, b"my-game\0anna", hashlib.sha256).digest()[:16]
    assert pseudonym(KEY, "my-game", "anna") == expected
    assert pseudonym(KEY, "my-gam", "eanna") != expected
    assert pseudonym(bytes(32), "my-game", "anna") != expected


def test_an_admitted_frame_is_stamped_and_keeps_its_body():
    sent = frame()
    got = only([sent], {sent.session: ANNA})
    assert isinstance(got, Frame)
    assert (got.player, got.received_s) == (pseudonym(KEY, "my-game", "anna"), int(NOW_S))
    assert (got.body, got.body_crc, got.chunk_no) == (sent.body, sent.body_crc, sent.chunk_no)


def test_reports_are_admitted_too():
    session = new_session(NOW_S)
    assert isinstance(only([close_frame(session, 3, CloseReport(3, 9))], {session: ANNA}), Frame)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"kind": FrameKind.LATE_REWARD}, "bad_kind"),
        ({"flags": 1}, "bad_kind"),
        ({"body": bytes(512 * 1024)}, "too_large"),
        ({"player": b"p" * 16}, "stamped"),
        ({"received_s": 1}, "stamped"),
        ({"session": uuid.uuid4()}, "bad_session"),
        ({"session": new_session(NOW_S - 8.1 * DAY_S)}, "bad_session_time"),
        ({"session": new_session(NOW_S + 1.1 * DAY_S)}, "bad_session_time"),
    ],
)
def test_an_invalid_frame_is_refused_with_its_reason(change, reason):
    bad = replace(frame(), **change)
    refused = only([bad], {bad.session: ANNA})
    assert isinstance(refused, Refused)
    assert refused.reason == reason


def test_a_session_without_a_name_is_refused_and_its_neighbour_is_not():
    first = frame()
    second = frame()
    refused, admitted = new_intake().admit([first, second], {second.session: ANNA})
    assert isinstance(refused, Refused)
    assert refused.reason == "no_player"
    assert isinstance(admitted, Frame)


@pytest.mark.parametrize("days", [-0.9, 0.0, 7.9])
def test_a_session_from_the_right_time_may_enter(days):
    sent = frame(new_session(NOW_S - days * DAY_S))
    assert isinstance(only([sent], {sent.session: ANNA}), Frame)


def test_each_stage_accepts_older_sessions_than_the_one_before_sends():
    assert SPOOL_S < INTAKE_MAX_AGE_S < INGEST_S < REMEMBER_S
    assert (SPOOL_S, REMEMBER_S) == (7 * DAY_S, 16 * DAY_S), (
        "the limits of client/spool and stores/erasure"
    )
    assert REMEMBER_S >= INGEST_S + AHEAD_S


def test_a_session_has_its_age_when_a_frame_enters():
    session = new_session(NOW_S)
    for entered_s in (NOW_S - 0.9 * DAY_S, NOW_S, NOW_S + 7.9 * DAY_S):
        assert refused_session(session, entered_s=entered_s, oldest_s=INTAKE_MAX_AGE_S) is None
    for entered_s in (NOW_S - 1.1 * DAY_S, NOW_S + 8.1 * DAY_S):
        refused = refused_session(session, entered_s=entered_s, oldest_s=INTAKE_MAX_AGE_S)
        assert refused is not None
        assert "expected -1 to 8" in refused.detail


def test_many_players_do_not_make_the_intake_grow():
    intake = new_intake()
    for n in range(5000):
        sent = frame()
        (got,) = intake.admit([sent], {sent.session: player_name(f"p{n}")})
        assert isinstance(got, Frame)
        assert got.player == pseudonym(KEY, "my-game", f"p{n}")
    assert len(intake._pseudonyms) <= 4096


def test_the_deployment_key_is_created_once_and_for_its_owner_only(tmp_path):
    key = deployment_key(tmp_path / "data")
    assert len(key) == 32
    assert deployment_key(tmp_path / "data") == key
    if os.name != "nt":
        assert stat.S_IMODE((tmp_path / "data" / "key").stat().st_mode) == 0o600
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["key"]


def test_processes_that_start_at_once_agree_on_the_key(tmp_path):
    script = (
        "import sys, pathlib; from understudy.experience.intake import deployment_key; "
        "print(deployment_key(pathlib.Path(sys.argv[1])).hex())"
    )
    started = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(tmp_path / "d")], stdout=subprocess.PIPE, text=True
        )
        for _ in range(6)
    ]
    keys = {process.communicate(timeout=60)[0] for process in started}
    assert len(keys) == 1


def test_an_existing_file_is_never_replaced(tmp_path):
    create_once(tmp_path / "name", b"first")
    create_once(tmp_path / "name", b"second")
    assert (tmp_path / "name").read_bytes() == b"first"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_damaged_key_is_reported_and_not_used(tmp_path):
    (tmp_path / "key").write_bytes(b"short")
    with pytest.raises(ConfigError, match="5 bytes"):
        deployment_key(tmp_path)
    (tmp_path / "key").unlink()
    deployment_key(tmp_path)
    whole = (tmp_path / "key").read_bytes()
    for at in range(len(whole)):
        flipped = bytearray(whole)
        flipped[at] ^= 1
        (tmp_path / "key").write_bytes(flipped)
        with pytest.raises(ConfigError, match=r"key is damaged: .* restore it from a backup"):
            deployment_key(tmp_path)
