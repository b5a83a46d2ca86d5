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
from understudy.experience.intake import Intake, deployment_key, key_file, pseudonym
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
    now_s = NOW_S

    def now(self):
        return self.now_s

    def monotonic(self):
        return 0.0

    def wait(self, event, timeout_s):
        return False


def new_intake():
    return Intake(KEY, GAME, Still())


def frame(session=None, body=b"body"):
    return data_frame(session or new_session(NOW_S), 0, body)


def only(frames, players):
    """The result of an intake whose clock agrees with an earlier session."""
    intake = new_intake()
    earlier = frame()
    intake.admit([earlier], {earlier.session: ANNA})
    (result,) = intake.admit(frames, players)
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


# --- Whose clock is wrong -------------------------------------------------------------------------


def sent(intake, *sessions):
    """The reason of each session's frame, empty if it was admitted, in one batch."""
    results = intake.admit([frame(one) for one in sessions], dict.fromkeys(sessions, ANNA))
    return [result.reason if isinstance(result, Refused) else "" for result in results]


@pytest.mark.parametrize("days", [-2, 9])
@pytest.mark.parametrize("n_players", [1, 2, 200])
def test_a_platform_whose_clock_is_wrong_rejects_nothing_for_good(days, n_players):
    clock = Still()
    intake = Intake(KEY, GAME, clock)
    sessions = [new_session(NOW_S - at) for at in range(n_players)]
    assert sent(intake, *sessions) == [""] * n_players
    clock.now_s = NOW_S + days * DAY_S
    assert sent(intake, *sessions) == ["clocks_differ"] * n_players
    assert [sent(intake, one) for one in sessions] == [["clocks_differ"]] * n_players
    clock.now_s = NOW_S + 60
    assert sent(intake, *sessions) == [""] * n_players


@pytest.mark.parametrize("days", [-2, 9])
def test_a_platform_that_starts_with_a_wrong_clock_asks_to_send_again_later(days):
    clock = Still()
    clock.now_s = NOW_S + days * DAY_S
    session = new_session(NOW_S)
    (refused,) = Intake(KEY, GAME, clock).admit([frame(session)], {session: ANNA})
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.retry_after_s) == ("clocks_differ", 30.0)
    assert "check its clock" in refused.detail


def test_a_player_whose_clock_is_wrong_is_rejected_for_good_among_others():
    intake = new_intake()
    wrong = new_session(NOW_S + 2 * DAY_S)
    assert sent(intake, new_session(NOW_S), new_session(NOW_S), wrong) == [
        "",
        "",
        "bad_session_time",
    ]
    (refused,) = intake.admit([frame(wrong)], {wrong: ANNA})
    assert refused.retry_after_s is None


def test_sessions_of_false_times_keep_no_other_session_out():
    intake = new_intake()
    for at in range(1000):
        assert sent(intake, new_session(NOW_S - 400 * DAY_S)) == ["clocks_differ"]
        assert at % 100 or sent(intake, new_session(NOW_S)) == [""]
    assert len(intake._recent) <= 128
    # Once others play, they are rejected for good again: 64 sessions tell.
    assert sent(intake, *[new_session(NOW_S) for _ in range(64)]) == [""] * 64
    assert sent(intake, new_session(NOW_S - 400 * DAY_S)) == ["bad_session_time"]


def test_only_sessions_with_a_time_and_a_player_are_asked_about_the_clock():
    intake = new_intake()
    assert sent(intake, new_session(NOW_S), new_session(NOW_S + 2 * DAY_S))[1] == "bad_session_time"
    for _ in range(300):
        assert sent(intake, uuid.uuid4()) == ["bad_session"]
        nameless = new_session(0.0)
        assert intake.admit([frame(nameless)], {})[0].reason == "no_player"
    assert sent(intake, new_session(NOW_S + 2 * DAY_S))[0] == "clocks_differ"  # 2 of 3 by now
    assert len(intake._recent) == 3


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
    assert sorted(path.name for path in (tmp_path / "data").iterdir()) == ["key", "key.id"]


def test_a_key_of_another_deployment_is_reported_and_not_used(tmp_path):
    key = deployment_key(tmp_path / "D")
    deployment_key(tmp_path / "E")
    (tmp_path / "D" / "key").write_bytes((tmp_path / "E" / "key").read_bytes())
    with pytest.raises(ConfigError, match="differs from the key that this deployment was created"):
        deployment_key(tmp_path / "D")
    (tmp_path / "D" / "key").unlink()
    with pytest.raises(ConfigError, match=r"key is missing, and .*key\.id was written with it"):
        deployment_key(tmp_path / "D")
    (tmp_path / "D" / "key").write_bytes(key_file(key))
    (tmp_path / "D" / "key.id").write_bytes(b"damaged")
    with pytest.raises(ConfigError, match=r"key\.id is damaged; delete it if .*key is the right"):
        deployment_key(tmp_path / "D")
    (tmp_path / "D" / "key.id").unlink()
    assert deployment_key(tmp_path / "D") == key
    assert (tmp_path / "D" / "key.id").exists()


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
