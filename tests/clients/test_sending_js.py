"""The JavaScript sender: nothing waits, nothing is lost without a word, nothing is sent under
another number."""

from typing import Any

import pytest

from tests.clients.nodes import ask, needs_node
from tests.clients.test_episodes_js import taken
from understudy.core.tensors import DTYPES
from understudy.experience.chunk import By, chunk_of
from understudy.experience.frame import Frame, FrameKind, decode_frame_batch, read_drop
from understudy.experience.game import game_spec
from understudy.experience.spaces import Box

pytestmark = needs_node
SPEC = game_spec("test", obs=3, actions=4)


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return dict(ask("sending.mjs"))


def steps(one: dict[str, Any]) -> int:
    """Steps that arrived, each once, under rules that the platform keeps too."""
    chunks, _, _ = taken(SPEC, one["batches"])
    return sum(chunk.meta.n_steps for some in chunks.values() for chunk in some)


def test_a_busy_gateway_is_retried_after_its_delay_with_the_same_bytes(found):
    one = found["later"]
    assert one["waits"][0] >= 295
    assert one["batches"][0] == one["batches"][1]
    assert steps(one) == one["stats"]["acked"] == 5
    assert (one["stats"]["lastError"], one["stats"]["failedSends"], one["isAll"]) == ("", 1, True)


def test_only_unaccepted_frames_are_sent_again(found):
    one = found["oneLater"]
    assert [[frame["chunkNo"] for frame in some] for some in one["frames"][:2]] == [[0, 1], [0]]
    assert steps(one) == one["stats"]["acked"] == 10
    assert one["waits"][0] >= 95


def test_permanently_rejected_steps_are_counted_reported_and_never_sent_again(found):
    one = found["refused"]
    stats = one["stats"]
    assert (stats["refused"], stats["acked"], stats["waiting"], one["isAll"]) == (5, 5, 0, True)
    assert stats["lastError"] == "bad_rows: none of ours"
    (report,) = drops(one)
    assert (report.ranges, report.n_steps) == (((0, 0),), 5)
    numbers = [(frame["kind"], frame["chunkNo"]) for some in one["frames"] for frame in some]
    assert numbers.count((0, 0)) == 1


def drops(one: dict[str, Any]) -> list[Any]:
    frames = [
        frame for raw in one["batches"] for frame in decode_frame_batch(bytes.fromhex(raw)).frames
    ]
    return [
        read_drop(frame)
        for frame in frames
        if isinstance(frame, Frame) and frame.kind is FrameKind.DROP
    ]


def test_a_batch_that_is_too_large_is_halved_until_it_is_accepted(found):
    one = found["tooLarge"]
    # After each success twice as many are tried; the last one is the close.
    assert [len(some) for some in one["frames"]] == [9, 4, 2, 4, 2, 4, 2, 3, 1, 2, 1]
    assert (one["stats"]["acked"], one["stats"]["failedSends"], one["isAll"]) == (45, 5, True)
    assert steps_at(one, [2, 4, 6, 8, 9, 10]) == 45


def steps_at(one: dict[str, Any], batches: list[int]) -> int:
    """Steps in those batches, which are the ones that were taken."""
    return steps(one | {"batches": [one["batches"][at] for at in batches]})


def test_a_connection_too_slow_for_a_batch_gets_half_of_it(found):
    one = found["tooSlow"]
    assert [len(some) for some in one["frames"]] == [20, 10, 5, 2, 4, 8, 4, 8, 4, 6, 3, 3, 1]
    assert (one["stats"]["acked"], one["stats"]["failedSends"], one["isAll"]) == (100, 6, True)
    assert steps_at(one, [3, 4, 6, 8, 10, 11, 12]) == 100


def test_only_a_gateway_rejects_permanently_and_not_a_proxy(found):
    one = found["inBetween"]
    assert (one["stats"]["refused"], one["stats"]["stopped"], one["stats"]["failedSends"]) == (
        0,
        "",
        5,
    )
    assert (steps(one), one["stats"]["acked"], one["isAll"]) == (5, 5, True)


def test_redirects_are_not_followed(found):
    one = found["redirected"]
    assert (one["reached"], one["isAll"], one["stats"]["waiting"]) == (0, False, 5)
    assert one["stats"]["lastError"].startswith("unreachable")


def test_numbers_of_64_bits_are_exact_or_refused_and_so_are_masks(found):
    one = found["edges"]
    assert one["bad"] == ["not_in_space"] * 8
    assert one["masks"] == [*["bad_dtype"] * 9, "bad_shape"]
    assert one["good"] == [""] * 4
    whole = {"u": Box((), DTYPES["U64"]), "i": Box((), DTYPES["I64"])}
    (chunks,) = taken(
        game_spec("test", obs=whole, actions=4, has_action_mask=True), one["batches"]
    )[0].values()
    (chunk,) = chunks
    assert chunk.columns["obs.u"].tolist()[::2] == [2**64 - 1, 2**63, 0, 0]
    assert chunk.columns["obs.i"].tolist()[::2] == [-(2**63), 2**63 - 1, 0, 0]
    assert chunk.columns["action_mask"].tolist()[4::2] == [
        [True, True, False, False],
        [False, True, False, False],
    ]


def test_the_online_event_triggers_a_poll_for_bots(found):
    one = found["online"]
    assert (one["lastFollowError"].partition(":")[0], one["lastError"], one["before"]) == (
        "not_ready",
        "",
        1,
    )
    assert one["after"][0] >= 2
    assert one["after"][1] == ""


def test_a_program_that_ends_with_unsent_steps_is_warned_once(found):
    assert found["unsent"]["isAll"] == [[False, False], [False, False]]
    (said,) = found["unsent"]["said"]
    assert said.startswith(
        "understudy: 5 steps were not acknowledged before close() timed out (unreachable: "
    )
    assert said.endswith("; without a storage they are lost")


def test_an_ack_ends_the_backoff_of_the_follower(found):
    one = found["answered"]
    assert (one["before"], one["lastFollowError"]) == (1, ""), "a page shows this as offline"
    assert one["asked"][:2] == ["wait_s=25", "wait_s=0"], (
        "it is known at once whether there is an answer"
    )


def test_a_page_that_does_not_poll_holds_no_poll_lock(found):
    assert found["watched"]["seen"] == [0, 1, 0], "after its key ended, with a new one, and closed"


def test_one_invalid_frame_is_isolated_and_rejected_alone(found):
    one = found["poison"]
    assert (one["stats"]["acked"], one["stats"]["refused"], one["isAll"]) == (30, 5, True)
    assert "bad_frame_batch" in one["stats"]["lastError"]
    assert [len(some) for some in one["frames"]] == [7, 3, 4, 2, 1, 1, 2, 1, 1]
    (report,) = drops(one)
    assert (report.ranges, report.n_steps) == (((3, 3),), 5)


def test_beyond_the_cap_the_oldest_frames_are_dropped_and_reported(found):
    one = found["full"]
    stats = one["stats"]
    away = one["away"]
    assert (
        away["dropped"] > 200
    )  # how many exactly depends on what was tried before, which is never dropped
    assert (away["recorded"], away["dropped"] + away["waiting"], away["acked"]) == (1200, 1200, 0)
    assert stats["acked"] + stats["dropped"] == 1200
    assert steps(one) == stats["acked"]
    assert sum(report.n_steps for report in drops(one)) == stats["dropped"]
    assert one["isAll"]


def test_what_an_earlier_page_could_not_send_is_sent_by_the_next(found):
    one = found["unsentFrames"]
    assert (one["isFirstAll"], one["first"]["acked"], one["left"], one["after"]) == (False, 0, 1, 0)
    assert (one["stats"]["adopted"], one["stats"]["recorded"], one["stats"]["acked"]) == (7, 3, 3)
    frames = [
        frame for raw in one["batches"] for frame in decode_frame_batch(bytes.fromhex(raw)).frames
    ]
    sessions = {
        frame.session
        for frame in frames
        if isinstance(frame, Frame) and frame.kind is FrameKind.DATA
    }
    assert len(sessions) == 2


def test_frames_waiting_under_a_revoked_key_are_sent_with_the_next_key(found):
    one = found["newKey"]
    assert (one["stopped"].partition(":")[0], one["waiting"], one["isFirstAll"]) == (
        "revoked_key",
        7,
        False,
    )
    assert (one["stats"]["adopted"], one["isAll"], one["left"]) == (7, True, 0)
    assert arrived(one) == {0: 7}


def arrived(one: dict[str, Any]) -> dict[int, int]:
    """Steps by number of the data frames that came, of a single session, each once."""
    frames = [
        frame for raw in one["batches"] for frame in decode_frame_batch(bytes.fromhex(raw)).frames
    ]
    data = [frame for frame in frames if isinstance(frame, Frame) and frame.kind is FrameKind.DATA]
    assert len({frame.session for frame in data}) == 1
    assert len({frame.chunk_no for frame in data}) == len(data)
    return {frame.chunk_no: chunk_of(frame).meta.n_steps for frame in data}


def test_unsent_frames_of_other_deployments_are_removed_when_they_expire(found):
    assert (found["swept"]["before"], found["swept"]["after"]) == (2, 1)


def test_frames_that_a_closed_page_could_not_store_are_reported_by_the_next(found):
    one = found["beyondTheStorage"]
    assert (one["first"]["recorded"], one["first"]["dropped"], one["isFirstAll"]) == (400, 0, False)
    assert one["chars"] <= 2 * 1024 * 1024
    assert (one["stats"]["adopted"], one["stats"]["dropped"], one["keys"], one["isAll"]) == (
        180,
        220,
        [],
        True,
    )
    (report,) = drops(one)
    assert (report.ranges, report.n_steps) == (((3, 6),), 220)
    kept = arrived(one)
    assert (list(kept), sum(kept.values())) == ([0, 1, 2, 7], 180)


def test_a_page_that_stays_sends_all_it_has_and_reports_nothing(found):
    one = found["overTheStorageAndBack"]
    assert (one["away"], one["back"], one["left"], one["isAll"]) == (1, 0, 0, True)
    assert (sum(arrived(one).values()), one["stats"]["acked"], drops(one)) == (400, 400, [])


@pytest.mark.parametrize("how", ["twoPages", "twoPagesWithLocks"])
def test_frames_of_a_page_are_adopted_once_it_is_gone_and_not_before(found, how):
    one = found[how]
    assert (one["held"], one["stats"]["adopted"], one["left"], one["isAll"]) == (0, 7, 0, True)
    assert arrived(one) == {0: 7}


def test_a_page_that_slept_and_lost_its_frames_reuses_no_number(found):
    one = found["asleep"]
    assert (one["asleepAt"]["recorded"], one["asleepAt"]["acked"]) == (409, 0)
    adopted = one["taken"]["adopted"]
    dropped = one["taken"]["dropped"]
    assert adopted + dropped == 409
    assert min(adopted, dropped) > 100
    # Under the platform's own rules nothing is in conflict; some came twice, and count once.
    chunks, _, again = taken(game_spec("test", obs=2000, actions=4), one["batches"])
    assert again > 0
    assert sum(chunk.meta.n_steps for some in chunks.values() for chunk in some) == 420 - dropped
    assert sum(report.n_steps for report in drops(one)) == dropped
    first = one["first"]
    assert (first["acked"], first["dropped"], first["waiting"]) == (420 - dropped, dropped, 0)
    assert (one["isFirstAll"], one["isAll"], one["left"]) == (True, True, [])


@pytest.mark.parametrize("has_arrived", [False, True])
def test_an_unstored_frame_in_flight_when_a_page_closes_is_reported_by_the_next(found, has_arrived):
    one = found["underWay"]
    assert one["seen"] == [1, 7]
    (report,) = drops(one)
    assert (report.ranges, report.n_steps) == (((0, 0),), 7)
    assert (one["stats"]["dropped"], one["isAll"]) == (7, True)
    # Whether it came or not, the platform knows of every number, and keeps what came.
    chunks, _, _ = taken(SPEC, (one["lost"] if has_arrived else []) + one["batches"], closed=False)
    assert sum(chunk.meta.n_steps for some in chunks.values() for chunk in some) == (
        7 if has_arrived else 0
    )


def test_a_gateway_that_does_not_know_the_game_gets_it_registered_again(found):
    one = found["unregistered"]
    assert (one["puts"], one["stats"]["acked"], one["isAll"]) == (2, 5, True)


def test_malformed_responses_change_nothing(found):
    one = found["strange"]
    assert (one["stats"]["acked"], one["stats"]["failedSends"], steps(one)) == (5, 3, 5)


def test_bad_input_throws_at_first_and_later_only_ends_its_episode(found):
    one = found["badInput"]
    assert one["codes"][:4] == ["bad_shape", "bad_player", "bad_metadata", "bad_metadata"]
    assert one["codes"][4:] == [""] * 11
    assert one["stats"]["badInputs"] == 11
    # Of each of the 8 spoiled episodes one step; of the 3 with a bad action the second too: what
    # followed it is known.
    assert steps(one) == one["stats"]["acked"] == 5 + 8 + 3
    assert one["isAll"]


def test_an_episode_that_the_game_discarded_is_cut(found):
    one = found["forgotten"]
    assert (one["openEpisodes"], steps(one), one["isAll"]) == (0, 3, True)


def test_a_hidden_page_stores_its_steps_for_the_next_one(found):
    assert (found["hidden"]["before"], found["hidden"]["after"]) == (0, 1)


def test_frames_are_encoded_and_stored_while_a_request_is_in_flight(found):
    one = found["slow"]
    assert (one["before"], one["during"]) == (1, 2)
    assert steps(one) == one["stats"]["acked"] == 10


def test_without_a_bot_the_game_decides_and_records_the_decider(found):
    one = found["offered"]
    assert one["actions"][:2] == [2, 3]
    assert one["actions"][2] in range(4)
    (chunks,) = taken(SPEC, one["batches"])[0].values()
    assert chunks[0].columns["by"][:4].tolist() == [By.SCRIPT] * 4


def test_images_are_compressed_and_a_hidden_page_does_not_wait_for_it(found):
    one = found["images"]
    assert (one["isFlushed"], one["isAll"], one["stats"]["acked"]) == (True, True, 160)
    assert one["small"] < 150 * 84 * 84 / 20
    (chars,) = one["chars"]
    assert chars > 10 * 84 * 84
    spec = game_spec("test", obs=Box((84, 84), DTYPES["U8"]), actions=4)
    (chunks,) = taken(spec, one["batches"])[0].values()
    seen = [
        int(row[0, 0])
        for chunk in chunks
        for row in chunk.columns["obs"][chunk.columns["row"] == 0]
    ]
    assert seen == [*range(150), *range(10)]
    assert all((row == row[0, 0]).all() for chunk in chunks for row in chunk.columns["obs"])


def test_a_player_without_a_name_keeps_the_same_one(found):
    first, second = found["own"]["names"]
    assert first == second
    assert first.startswith("p-")
