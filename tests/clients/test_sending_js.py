"""The JavaScript sender: it never blocks, reports every loss and never reuses a number."""

from typing import Any

import pytest

from tests.clients.nodes import needs_node, run_script
from tests.clients.test_episodes_js import accepted
from understudy.core.tensors import DTYPES
from understudy.experience.chunk import By, chunk_of
from understudy.experience.frame import Frame, FrameKind, decode_frame_batch, read_drop
from understudy.experience.game import game_spec
from understudy.experience.spaces import Box

pytestmark = needs_node
SPEC = game_spec("test", obs=3, actions=4)


@pytest.fixture(scope="module")
def scenarios() -> dict[str, Any]:
    return dict(run_script("sending.mjs"))


def steps(scenario: dict[str, Any]) -> int:
    """The number of steps that arrived, each once, checked by the platform's own rules."""
    chunks, _, _ = accepted(SPEC, scenario["batches"])
    return sum(chunk.meta.n_steps for some in chunks.values() for chunk in some)


def test_a_busy_gateway_is_retried_after_its_delay_with_the_same_bytes(scenarios):
    scenario = scenarios["later"]
    assert scenario["waits"][0] >= 295
    assert scenario["batches"][0] == scenario["batches"][1]
    assert steps(scenario) == scenario["stats"]["acked"] == 5
    assert (
        scenario["stats"]["lastError"],
        scenario["stats"]["failedSends"],
        scenario["isAll"],
    ) == ("", 1, True)


def test_only_unaccepted_frames_are_sent_again(scenarios):
    scenario = scenarios["oneLater"]
    assert [[frame["chunkNo"] for frame in some] for some in scenario["frames"][:2]] == [
        [0, 1],
        [0],
    ]
    assert steps(scenario) == scenario["stats"]["acked"] == 10
    assert scenario["waits"][0] >= 95


def test_permanently_rejected_steps_are_counted_reported_and_never_sent_again(scenarios):
    scenario = scenarios["refused"]
    stats = scenario["stats"]
    assert (stats["refused"], stats["acked"], stats["waiting"], scenario["isAll"]) == (
        5,
        5,
        0,
        True,
    )
    assert stats["lastError"] == "bad_rows: none of ours"
    (report,) = drops(scenario)
    assert (report.ranges, report.n_steps) == (((0, 0),), 5)
    numbers = [(frame["kind"], frame["chunkNo"]) for some in scenario["frames"] for frame in some]
    assert numbers.count((0, 0)) == 1


def drops(scenario: dict[str, Any]) -> list[Any]:
    frames = [
        frame
        for raw in scenario["batches"]
        for frame in decode_frame_batch(bytes.fromhex(raw)).frames
    ]
    return [
        read_drop(frame)
        for frame in frames
        if isinstance(frame, Frame) and frame.kind is FrameKind.DROP
    ]


def test_a_batch_that_is_too_large_is_halved_until_it_is_accepted(scenarios):
    scenario = scenarios["tooLarge"]
    # Each success doubles the batch; the last frame is the close.
    assert [len(some) for some in scenario["frames"]] == [9, 4, 2, 4, 2, 4, 2, 3, 1, 2, 1]
    assert (scenario["stats"]["acked"], scenario["stats"]["failedSends"], scenario["isAll"]) == (
        45,
        5,
        True,
    )
    assert steps_at(scenario, [2, 4, 6, 8, 9, 10]) == 45


def steps_at(scenario: dict[str, Any], batches: list[int]) -> int:
    """The number of steps in these batches, which were accepted."""
    return steps(scenario | {"batches": [scenario["batches"][at] for at in batches]})


def test_a_connection_too_slow_for_a_batch_gets_half_of_it(scenarios):
    scenario = scenarios["tooSlow"]
    assert [len(some) for some in scenario["frames"]] == [20, 10, 5, 2, 4, 8, 4, 8, 4, 6, 3, 3, 1]
    assert (scenario["stats"]["acked"], scenario["stats"]["failedSends"], scenario["isAll"]) == (
        100,
        6,
        True,
    )
    assert steps_at(scenario, [3, 4, 6, 8, 10, 11, 12]) == 100


def test_only_a_gateway_rejects_permanently_and_not_a_proxy(scenarios):
    scenario = scenarios["inBetween"]
    assert (
        scenario["stats"]["refused"],
        scenario["stats"]["stopped"],
        scenario["stats"]["failedSends"],
    ) == (
        0,
        "",
        5,
    )
    assert (steps(scenario), scenario["stats"]["acked"], scenario["isAll"]) == (5, 5, True)


def test_redirects_are_not_followed(scenarios):
    scenario = scenarios["redirected"]
    assert (scenario["reached"], scenario["isAll"], scenario["stats"]["waiting"]) == (0, False, 5)
    assert scenario["stats"]["lastError"].startswith("unreachable")


def test_64_bit_numbers_and_masks_are_exact_or_rejected(scenarios):
    scenario = scenarios["edges"]
    assert scenario["bad"] == ["not_in_space"] * 8
    assert scenario["masks"] == [*["bad_dtype"] * 9, "bad_shape"]
    assert scenario["good"] == [""] * 4
    whole = {"u": Box((), DTYPES["U64"]), "i": Box((), DTYPES["I64"])}
    (chunks,) = accepted(
        game_spec("test", obs=whole, actions=4, has_action_mask=True), scenario["batches"]
    )[0].values()
    (chunk,) = chunks
    assert chunk.columns["obs.u"].tolist()[::2] == [2**64 - 1, 2**63, 0, 0]
    assert chunk.columns["obs.i"].tolist()[::2] == [-(2**63), 2**63 - 1, 0, 0]
    assert chunk.columns["action_mask"].tolist()[4::2] == [
        [True, True, False, False],
        [False, True, False, False],
    ]


def test_the_online_event_triggers_a_poll_for_bots(scenarios):
    scenario = scenarios["online"]
    assert (
        scenario["lastFollowError"].partition(":")[0],
        scenario["lastError"],
        scenario["before"],
    ) == (
        "not_ready",
        "",
        1,
    )
    assert scenario["after"][0] >= 2
    assert scenario["after"][1] == ""


def test_a_program_that_ends_with_unsent_steps_is_warned_once(scenarios):
    assert scenarios["unsent"]["isAll"] == [[False, False], [False, False]]
    (warning,) = scenarios["unsent"]["warnings"]
    assert warning.startswith(
        "understudy: 5 steps were not acknowledged before close() timed out (unreachable: "
    )
    assert warning.endswith("; without a storage they are lost")


def test_an_ack_ends_the_backoff_of_the_follower(scenarios):
    scenario = scenarios["answered"]
    assert (scenario["before"], scenario["lastFollowError"]) == (1, ""), (
        "a page shows this as offline"
    )
    assert scenario["asked"][:2] == ["wait_s=25", "wait_s=0"], (
        "it polls at once whether the platform responds"
    )


def test_a_page_that_does_not_poll_holds_no_poll_lock(scenarios):
    assert scenarios["watched"]["seen"] == [0, 1, 0], (
        "after its key ended, with a new one, and closed"
    )


def test_one_invalid_frame_is_isolated_and_rejected_alone(scenarios):
    scenario = scenarios["poison"]
    assert (scenario["stats"]["acked"], scenario["stats"]["refused"], scenario["isAll"]) == (
        30,
        5,
        True,
    )
    assert "bad_frame_batch" in scenario["stats"]["lastError"]
    assert [len(some) for some in scenario["frames"]] == [7, 3, 4, 2, 1, 1, 2, 1, 1]
    (report,) = drops(scenario)
    assert (report.ranges, report.n_steps) == (((3, 3),), 5)


def test_beyond_the_cap_the_oldest_frames_are_dropped_and_reported(scenarios):
    scenario = scenarios["full"]
    stats = scenario["stats"]
    away = scenario["away"]
    assert (
        away["dropped"] > 200
    )  # the exact number depends on the frames already tried, which are never dropped
    assert (away["recorded"], away["dropped"] + away["waiting"], away["acked"]) == (1200, 1200, 0)
    assert stats["acked"] + stats["dropped"] == 1200
    assert steps(scenario) == stats["acked"]
    assert sum(report.n_steps for report in drops(scenario)) == stats["dropped"]
    assert scenario["isAll"]


def test_unsent_frames_of_an_earlier_page_are_sent_by_the_next(scenarios):
    scenario = scenarios["unsentFrames"]
    assert (
        scenario["isFirstAll"],
        scenario["first"]["acked"],
        scenario["left"],
        scenario["after"],
    ) == (False, 0, 1, 0)
    assert (
        scenario["stats"]["adopted"],
        scenario["stats"]["recorded"],
        scenario["stats"]["acked"],
    ) == (7, 3, 3)
    frames = [
        frame
        for raw in scenario["batches"]
        for frame in decode_frame_batch(bytes.fromhex(raw)).frames
    ]
    sessions = {
        frame.session
        for frame in frames
        if isinstance(frame, Frame) and frame.kind is FrameKind.DATA
    }
    assert len(sessions) == 2


def test_frames_waiting_under_a_revoked_key_are_sent_with_the_next_key(scenarios):
    scenario = scenarios["newKey"]
    assert (scenario["stopped"].partition(":")[0], scenario["waiting"], scenario["isFirstAll"]) == (
        "revoked_key",
        7,
        False,
    )
    assert (scenario["stats"]["adopted"], scenario["isAll"], scenario["left"]) == (7, True, 0)
    assert arrived(scenario) == {0: 7}


def arrived(scenario: dict[str, Any]) -> dict[int, int]:
    """Steps by chunk number of the data frames that arrived, of one session, each once."""
    frames = [
        frame
        for raw in scenario["batches"]
        for frame in decode_frame_batch(bytes.fromhex(raw)).frames
    ]
    data = [frame for frame in frames if isinstance(frame, Frame) and frame.kind is FrameKind.DATA]
    assert len({frame.session for frame in data}) == 1
    assert len({frame.chunk_no for frame in data}) == len(data)
    return {frame.chunk_no: chunk_of(frame).meta.n_steps for frame in data}


def test_a_clock_that_is_ahead_removes_no_unsent_frames(scenarios):
    scenario = scenarios["clockAhead"]
    assert (scenario["before"], scenario["after"], scenario["stats"]["adopted"]) == (2, 1, 3)
    assert [len(batch) for batch in scenario["frames"]] == [1]


def test_frames_that_the_platform_puts_off_do_not_stop_new_steps(scenarios):
    assert scenarios["putOff"] == {"adopted": 70, "acked": 4}


def test_frames_that_a_closed_page_could_not_store_are_reported_by_the_next(scenarios):
    scenario = scenarios["beyondTheStorage"]
    assert (
        scenario["first"]["recorded"],
        scenario["first"]["dropped"],
        scenario["isFirstAll"],
    ) == (400, 0, False)
    assert scenario["chars"] <= 2 * 1024 * 1024
    assert (
        scenario["stats"]["adopted"],
        scenario["stats"]["dropped"],
        scenario["keys"],
        scenario["isAll"],
    ) == (
        180,
        220,
        [],
        True,
    )
    (report,) = drops(scenario)
    assert (report.ranges, report.n_steps) == (((3, 6),), 220)
    numbers = arrived(scenario)
    assert (list(numbers), sum(numbers.values())) == ([0, 1, 2, 7], 180)


def test_a_page_that_stays_open_sends_everything_and_reports_no_drops(scenarios):
    scenario = scenarios["overTheStorageAndBack"]
    assert (scenario["away"], scenario["back"], scenario["left"], scenario["isAll"]) == (
        1,
        0,
        0,
        True,
    )
    assert (sum(arrived(scenario).values()), scenario["stats"]["acked"], drops(scenario)) == (
        400,
        400,
        [],
    )


@pytest.mark.parametrize("how", ["twoPages", "twoPagesWithLocks"])
def test_frames_of_a_page_are_adopted_once_it_is_gone_and_not_before(scenarios, how):
    scenario = scenarios[how]
    assert (
        scenario["held"],
        scenario["stats"]["adopted"],
        scenario["left"],
        scenario["isAll"],
    ) == (0, 7, 0, True)
    assert arrived(scenario) == {0: 7}


def test_a_page_that_slept_and_lost_its_frames_reuses_no_number(scenarios):
    scenario = scenarios["asleep"]
    assert (scenario["asleepAt"]["recorded"], scenario["asleepAt"]["acked"]) == (409, 0)
    adopted = scenario["taken"]["adopted"]
    dropped = scenario["taken"]["dropped"]
    assert adopted + dropped == 409
    assert min(adopted, dropped) > 100
    # The platform's own rules find no conflict; some frames arrived twice and count once.
    chunks, _, again = accepted(game_spec("test", obs=2000, actions=4), scenario["batches"])
    assert again > 0
    assert sum(chunk.meta.n_steps for some in chunks.values() for chunk in some) == 420 - dropped
    assert sum(report.n_steps for report in drops(scenario)) == dropped
    first = scenario["first"]
    assert (first["acked"], first["dropped"], first["waiting"]) == (420 - dropped, dropped, 0)
    assert (scenario["isFirstAll"], scenario["isAll"], scenario["left"]) == (True, True, [])


@pytest.mark.parametrize("has_arrived", [False, True])
def test_an_unstored_frame_in_flight_when_a_page_closes_is_reported_by_the_next(
    scenarios, has_arrived
):
    scenario = scenarios["underWay"]
    assert scenario["seen"] == [1, 7]
    (report,) = drops(scenario)
    assert (report.ranges, report.n_steps) == (((0, 0),), 7)
    assert (scenario["stats"]["dropped"], scenario["isAll"]) == (7, True)
    # Whether it arrived or not, the platform knows every number, and stores what arrived.
    chunks, _, _ = accepted(
        SPEC, (scenario["lost"] if has_arrived else []) + scenario["batches"], closed=False
    )
    assert sum(chunk.meta.n_steps for some in chunks.values() for chunk in some) == (
        7 if has_arrived else 0
    )


def test_a_gateway_that_does_not_know_the_game_gets_it_registered_again(scenarios):
    scenario = scenarios["unregistered"]
    assert (scenario["puts"], scenario["stats"]["acked"], scenario["isAll"]) == (2, 5, True)


def test_malformed_responses_change_nothing(scenarios):
    scenario = scenarios["strange"]
    assert (scenario["stats"]["acked"], scenario["stats"]["failedSends"], steps(scenario)) == (
        5,
        3,
        5,
    )


def test_the_first_bad_input_throws_and_later_ones_only_end_their_episodes(scenarios):
    scenario = scenarios["badInput"]
    assert scenario["codes"][:4] == ["bad_shape", "bad_player", "bad_metadata", "bad_metadata"]
    assert scenario["codes"][4:] == [""] * 11
    assert scenario["stats"]["badInputs"] == 11
    # One step of each of the 8 spoiled episodes; of the 3 with a bad action also the second, whose
    # next observation is known.
    assert steps(scenario) == scenario["stats"]["acked"] == 5 + 8 + 3
    assert scenario["isAll"]


def test_invalid_input_costs_only_itself_and_each_kind_is_warned_of_once(scenarios):
    scenario = scenarios["onlyItself"]
    kinds = [
        "early_reward",
        "no_last_obs",
        "bad_metadata",
        "not_finite",
        "bad_dtype",
        "not_finite",
        "bad_dtype",
        "not_finite",
    ]
    assert scenario["lasts"] == [*kinds, *kinds, "not_finite"]
    warned = list(dict.fromkeys(kinds))
    assert [text.split("Refused: ")[1].split(":")[0] for text in scenario["warned"]] == warned
    assert [text.split(" because")[0] for text in scenario["warned"][:4]] == [
        "understudy: a reward was ignored",
        "understudy: an episode's last decision was dropped",
        "understudy: an episode's result was ignored",
        "understudy: an episode's last observation was ignored",
    ]
    assert scenario["stats"]["badInputs"] == 2 * len(kinds)
    # Each episode but the first has its last step or all but it; 1 of `played`, 1 of the last.
    assert steps(scenario) == scenario["stats"]["acked"] == 1 + 2 * len(kinds) + 1
    assert scenario["isAll"]


def test_an_episode_that_the_game_discarded_is_cut(scenarios):
    scenario = scenarios["forgotten"]
    assert (scenario["openEpisodes"], steps(scenario), scenario["isAll"]) == (0, 3, True)


def test_a_hidden_page_stores_its_steps_for_the_next_one(scenarios):
    assert (scenarios["hidden"]["before"], scenarios["hidden"]["after"]) == (0, 1)


def test_frames_are_encoded_and_stored_while_a_request_is_in_flight(scenarios):
    scenario = scenarios["slow"]
    assert (scenario["before"], scenario["during"]) == (1, 2)
    assert steps(scenario) == scenario["stats"]["acked"] == 10


def test_without_a_bot_the_game_decides_and_records_the_decider(scenarios):
    scenario = scenarios["offered"]
    assert scenario["actions"][:2] == [2, 3]
    assert scenario["actions"][2] in range(4)
    (chunks,) = accepted(SPEC, scenario["batches"])[0].values()
    assert chunks[0].columns["by"][:4].tolist() == [By.SCRIPT] * 4


def test_images_are_compressed_and_a_hidden_page_does_not_wait_for_it(scenarios):
    scenario = scenarios["images"]
    assert (scenario["isFlushed"], scenario["isAll"], scenario["stats"]["acked"]) == (
        True,
        True,
        160,
    )
    assert scenario["small"] < 150 * 84 * 84 / 20
    (chars,) = scenario["chars"]
    assert chars > 10 * 84 * 84
    spec = game_spec("test", obs=Box((84, 84), DTYPES["U8"]), actions=4)
    (chunks,) = accepted(spec, scenario["batches"])[0].values()
    seen = [
        int(row[0, 0])
        for chunk in chunks
        for row in chunk.columns["obs"][chunk.columns["row"] == 0]
    ]
    assert seen == [*range(150), *range(10)]
    assert all((row == row[0, 0]).all() for chunk in chunks for row in chunk.columns["obs"])


def test_a_player_without_a_name_keeps_the_same_one(scenarios):
    first, second = scenarios["own"]["names"]
    assert first == second
    assert first.startswith("p-")
