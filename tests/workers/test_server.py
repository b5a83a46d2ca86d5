"""The server of a run: who may do what, what is rejected, and that an ack means in the replay."""

import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.cli.platforms import wait_for
from tests.workers.runs import (
    GAME,
    KEY,
    PLAY_KEY,
    RUN,
    SPEC,
    STEPS,
    Scripted,
    Serving,
    policy_of,
    serving,
    team_plan,
)
from understudy.act.actor import epsilon_ladder
from understudy.act.team import encode_collected
from understudy.core import tensors
from understudy.core.errors import ConfigError, LearningFailed
from understudy.experience.chunk import Chunk, EpisodeNote
from understudy.ports import Collected, PlayedEpisode
from understudy.serve.server import GatewayServer
from understudy.testing.clock import ManualClock
from understudy.workers import server
from understudy.workers.server import broadcast_of
from understudy.workers.wire import RoundHead, WeightsHead, pack, read_object, unpack

ROUTES = [
    ("GET", "/v1/runs"),
    ("POST", f"/v1/runs/{RUN}/join"),
    ("POST", f"/v1/runs/{RUN}/chunks"),
    ("GET", f"/v1/runs/{RUN}/weights"),
    ("POST", f"/v1/runs/{RUN}/results"),
    ("POST", f"/v1/runs/{RUN}/leave"),
    ("GET", "/metrics"),
]


@pytest.fixture
def run() -> Iterator[Serving]:
    with serving() as served:
        served.collect(1)
        yield served


# --- Strangers ------------------------------------------------------------------------------------


def test_a_stranger_gets_nothing_from_any_route(run: Serving):
    for method, path in ROUTES:
        body = run.join_request() if method == "POST" else None
        assert run.ask(method, path, body, key=None).status == 401
        assert run.ask(method, path, body, key="uk_000000000000_" + "a" * 43).code == "wrong_key"
        refused = run.ask(method, path, body, key=PLAY_KEY)
        assert (refused.status, refused.code) == (403, "wrong_scope")
    assert run.ask("GET", "/v1/other", key=None).status == 401
    assert run.ask("GET", "/healthz", key=None).json == {"status": "ok"}
    assert run.team.api.workers == {"train": 0, "evaluate": 0}


# --- Joining --------------------------------------------------------------------------------------


def test_a_new_worker_gets_its_place_and_the_policy(run: Serving):
    info = run.ask("GET", "/v1/runs").json
    assert (info["run"], info["game"], info["num_envs"]) == (RUN, GAME, 2)
    workers = [run.join() for _ in range(3)]
    assert [worker.joined.index for worker in workers] == [0, 1, 2]
    assert [worker.joined.first_env for worker in workers] == [0, 2, 4]
    assert workers[0].policy == policy_of(1)
    # The lowest free index is given again, with other sessions.
    assert workers[0].leave().status == 204
    again = run.join()
    assert again.joined.index == 0
    assert again.joined.incarnation == workers[0].joined.incarnation + 1
    assert not set(again.actor.sessions) & set(workers[0].actor.sessions)


def test_the_ladder_spans_the_nominal_team_and_repeats_beyond_it():
    with serving(plan=team_plan(num_envs=4, num_actors=2)) as run:
        run.collect(1, explore=epsilon_ladder(4))
        explored: Any = [run.join().joined.explore for _ in range(3)]
        assert np.concatenate(explored[:2]) == pytest.approx(epsilon_ladder(4))
        assert explored[2] == explored[0]


def test_a_worker_of_another_game_or_version_is_rejected_by_name(run: Serving):
    other = replace(SPEC, max_episode_steps=77)
    refused = run.ask(
        "POST", f"/v1/runs/{RUN}/join", run.join_request(spec=other.to_json().decode())
    )
    assert refused.code == "other_game"
    assert (
        "the max_episode_steps of the worker's game is 77, that of the learner's 500"
        in refused.raw.decode()
    )
    refused = run.ask("POST", f"/v1/runs/{RUN}/join", run.join_request(understudy="9.9"))
    assert refused.code == "other_version"
    refused = run.ask("POST", f"/v1/runs/{RUN}/join", run.join_request(spec="{}"))
    assert refused.status == 400
    refused = run.ask("POST", "/v1/runs/other/join", run.join_request())
    assert (refused.status, refused.code) == (404, "no_such_run")


def test_a_run_without_a_policy_cannot_be_joined_yet():
    with serving() as run:
        assert run.ask("POST", f"/v1/runs/{RUN}/join", run.join_request()).code == "not_ready"


# --- Rounds ---------------------------------------------------------------------------------------


def send_in_thread(
    worker: Scripted, collected: Collected, number: int = 0
) -> tuple[Any, list[Any]]:
    replies: list[Any] = []
    thread = threading.Thread(
        target=lambda: replies.append(worker.send(collected, number=number)), daemon=True
    )
    thread.start()
    return thread, replies


def test_an_ack_means_in_the_replay_and_a_repeated_round_is_inserted_once(run: Serving):
    worker = run.join()
    played = worker.play()
    first, first_replies = send_in_thread(worker, played)
    wait_for(lambda: run.team.api.queue.size_bytes > 0)
    again, again_replies = send_in_thread(worker, played)
    collected = run.collect(2)
    assert collected.chunks == played.chunks
    assert collected.episodes == played.episodes
    assert first_replies == again_replies == []  # not before it is inserted
    run.insert(collected)
    for thread in (first, again):
        thread.join(20)
    assert [reply.status for reply in (*first_replies, *again_replies)] == [200, 200]
    assert first_replies[0].json["version"] == 2
    # Long after it, too.
    assert worker.send(played, number=0).status == 200
    assert run.collect(2).chunks == []
    assert run.team.api.queue.size_bytes == 0
    assert worker.send(played, number=5).code == "out_of_order"


def test_a_lease_has_one_round_at_a_time_so_that_no_chunk_is_inserted_twice(run: Serving):
    worker = run.join()
    played = worker.play()
    thread, replies = send_in_thread(worker, played, 0)
    wait_for(lambda: run.team.api.queue.size_bytes > 0)
    assert worker.send(played, number=1).code == "out_of_order"
    with run.learning():
        thread.join(20)
        assert replies[0].status == 200
        assert worker.send(worker.play(), number=1).status == 200
    assert len(set(run.chunk_ids)) == len(run.chunk_ids) > 0


def test_only_two_copies_of_a_round_wait_for_its_ack(run: Serving):
    worker = run.join()
    played = worker.play()
    sent = [send_in_thread(worker, played) for _ in range(6)]
    wait_for(lambda: sum(bool(replies) for _, replies in sent) == 3)
    early = [reply for _, replies in sent for reply in replies]
    assert {(reply.status, reply.code) for reply in early} == {(429, "queue_full")}
    with run.learning():
        for thread, _ in sent:
            thread.join(20)
    assert sum(replies[0].status == 200 for _, replies in sent) == 3
    assert len(set(run.chunk_ids)) == len(run.chunk_ids) > 0


def test_a_run_has_a_limit_of_workers(run: Serving, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("understudy.workers.leases.MAX_LEASES", 2)
    first = run.join()
    run.join()
    refused = run.ask("POST", f"/v1/runs/{RUN}/join", run.join_request())
    assert (refused.status, refused.code) == (503, "busy")
    assert first.leave().status == 204
    assert run.join().joined.index == 0


def test_policies_that_new_workers_do_not_read_count_as_memory(run: Serving):
    size_bytes = 16 << 20
    run.team.api.publish(broadcast_of(bytes(size_bytes), 1, None, team_plan()))
    port = int(run.team.url.rpartition(":")[2])
    body = run.join_request()
    head = f"POST /v1/runs/{RUN}/join HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    budget = run.team.api.memory_budget
    with socket.create_connection(("127.0.0.1", port)) as silent:
        silent.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_for(lambda: run.team.api.workers["train"] == 1)
        wait_for(lambda: budget.left_bytes <= (256 << 20) - size_bytes)
    wait_for(lambda: budget.left_bytes == 256 << 20)


def test_collect_returns_rounds_of_several_workers_and_waits_for_none(run: Serving):
    assert run.collect().env_steps == 0
    workers = [run.join(), run.join()]
    run.join()  # sends nothing
    for _ in range(3):
        sent = [send_in_thread(worker, worker.play(), worker.number) for worker in workers]
        n_steps = 0
        while n_steps < 4 * STEPS:
            collected = run.collect()
            run.insert(collected)
            n_steps += collected.env_steps
        for worker, (thread, replies) in zip(workers, sent, strict=True):
            thread.join(20)
            worker.number += 1
            assert replies[0].json["task"] == "train"
    assert len(set(run.chunk_ids)) == len(run.chunk_ids) > 0


def changed(**columns: Callable[[Any], Any]) -> Callable[[Collected], Collected]:
    """A round whose first chunk has other columns."""

    def change(played: Collected) -> Collected:
        chunk = played.chunks[0]
        new = {name: alter(chunk.columns[name].copy()) for name, alter in columns.items()}
        return replace(
            played, chunks=[Chunk(chunk.meta, {**chunk.columns, **new}), *played.chunks[1:]]
        )

    return change


def meta(**facts: Any) -> Callable[[Collected], Collected]:
    def change(played: Collected) -> Collected:
        chunks = [Chunk(replace(chunk.meta, **facts), chunk.columns) for chunk in played.chunks]
        return replace(played, chunks=chunks)

    return change


def with_value(value: Any) -> Callable[[Any], Any]:
    def fill(column: Any) -> Any:
        column[1:2] = value
        return column

    return fill


def every(value: Any) -> Callable[[Any], Any]:
    return lambda column: np.full_like(column, value)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (changed(reward=with_value(np.nan)), "not_finite"),
        (changed(obs=with_value(np.inf)), "not_finite"),
        (changed(action=with_value(7)), "bad_action"),
        (changed(version=every(999)), "bad_version"),
        (changed(version=every(0)), "bad_version"),
        (meta(chunk_no=3), "bad_metadata"),
        (meta(first_step=1), "bad_metadata"),
        (meta(kind="player"), "bad_metadata"),
        (meta(schema="0" * 64), "bad_metadata"),
        (lambda played: replace(played, env_steps=10**9), "bad_metadata"),
        (lambda played: replace(played, env_steps=float(played.env_steps)), "bad_metadata"),
        (lambda played: replace(played, chunks=[], env_steps=0), "bad_metadata"),
        (meta(client="x" * 100_000), "bad_metadata"),
        (meta(client=7), "bad_metadata"),
        (meta(episodes=(EpisodeNote(row=0, match="m" * 100),)), "bad_metadata"),
        (lambda played: replace(played, episodes=[episode_of()] * 1_000), "bad_metadata"),
        (lambda played: replace(played, episodes=[episode_of(return_=1.7e308)]), "bad_number"),
        (
            lambda played: replace(
                played, episodes=[episode_of(env=9), *played.episodes], env_steps=played.env_steps
            ),
            "bad_metadata",
        ),
        (
            lambda played: replace(played, episodes=[episode_of(return_=float("nan"))]),
            "bad_number",
        ),
        (lambda played: replace(played, episodes=[episode_of(length=10**15)]), "bad_metadata"),
        (lambda played: replace(played, episodes=[episode_of(length=1)] * 40), "bad_metadata"),
    ],
)
def test_a_false_round_is_rejected_by_name_and_the_run_continues(
    run: Serving, change: Callable[[Collected], Collected], reason: str
):
    worker = run.join()
    refused = worker.send(change(worker.play()))
    assert (refused.status, refused.code) == (400, reason)
    check_run_continues(run, worker, reason)


def episode_of(env: int = 0, return_: float = 1.0, length: int = 1) -> Any:
    return PlayedEpisode(env, return_, length, 1)


def check_run_continues(run: Serving, worker: Scripted, reason: str) -> None:
    """Nothing was stored, the worker must join again, and an honest one plays."""
    collected = run.collect()
    assert collected.chunks == []
    assert any(reason in message for message in collected.replaced)
    assert run.team.api.queue.size_bytes == 0
    assert worker.send(worker.play(), number=1).status == 410
    honest = run.join()
    with run.learning():
        assert honest.send(honest.play()).status == 200
    assert f'understudy_refused_rounds_total{{reason="{reason}"}} 1.0' in metrics_of(run)


def metrics_of(run: Serving) -> str:
    return run.ask("GET", "/metrics").raw.decode()


def altered(name: str, array: Any) -> Callable[[bytes], bytes]:
    """A round's bytes with another array; None removes it."""

    def alter(raw: bytes) -> bytes:
        arrays, metadata = tensors.decode(raw, max_header_bytes=len(raw))
        arrays[name] = array
        kept = {name: array for name, array in arrays.items() if array is not None}
        return tensors.encode(kept, metadata)

    return alter


def metadata(text: str) -> Callable[[bytes], bytes]:
    return lambda raw: tensors.encode(
        tensors.decode(raw, max_header_bytes=len(raw))[0], {"collected": text}
    )


@pytest.mark.parametrize(
    ("alter", "reason"),
    [
        (lambda raw: raw[: len(raw) // 2], "bad_tensors"),
        (lambda raw: b"", "bad_tensors"),
        (lambda raw: b"\x80\x04cos\nsystem\n(S'true'\ntR.", "bad_tensors"),
        (altered("rows", np.array([10**12, -(10**12)])), "bad_rows"),
        (altered("rows", None), "bad_columns"),
        (altered("sessions", np.zeros((1, 16), np.uint8)), "bad_columns"),
        (altered("column.obs", np.zeros((5, 4), np.float32)), "bad_rows"),
        (altered("column.extra", None), ""),
        (altered("extra", np.zeros(3)), "bad_columns"),
        (altered("returns", np.zeros(77)), "bad_columns"),
        (metadata("[]"), "bad_metadata"),
        (metadata('{"env_steps":1,"notes":[],"shared":{}}'), "bad_metadata"),
        (metadata('{"env_steps":1,"notes":[[],[]],"shared":{"evil":1}}'), "bad_metadata"),
        (metadata("{"), "bad_json"),
    ],
)
def test_bytes_that_are_no_round_are_rejected_by_name(
    run: Serving, alter: Callable[[bytes], bytes], reason: str
):
    worker = run.join()
    raw = encode_collected(worker.play())
    if not reason:
        with run.learning():
            assert worker.send(alter(raw)).status == 200
        return
    refused = worker.send(alter(raw))
    assert (refused.status, refused.code) == (400, reason)
    check_run_continues(run, worker, reason)


def test_a_wrong_shape_is_rejected_by_name(run: Serving):
    worker = run.join()
    raw = encode_collected(worker.play())
    rows = int(tensors.decode(raw, max_header_bytes=len(raw))[0]["rows"].sum())
    refused = worker.send(altered("column.obs", np.zeros((rows, 5), np.float32))(raw))
    assert refused.code == "bad_columns"
    assert "expected float32[4]" in refused.raw.decode()


def test_sessions_of_another_worker_or_run_are_rejected(run: Serving):
    first = run.join()
    second = run.join()
    assert second.send(first.play()).code == "wrong_session"
    with serving(plan=team_plan(root_seed=6)) as other:
        other.collect(1)
        stranger = other.join()
        assert first.send(stranger.play()).code == "wrong_session"
        body = pack(RoundHead(lease=stranger.joined.lease, number=0), b"")
        assert run.ask("POST", f"/v1/runs/{RUN}/chunks", body).code == "join_again"


def test_a_huge_body_is_rejected_before_it_arrives(run: Serving):
    worker = run.join()
    connection = http.client.HTTPConnection("127.0.0.1", int(run.team.url.rpartition(":")[2]))
    connection.putrequest("POST", f"/v1/runs/{RUN}/chunks")
    connection.putheader("Authorization", f"Bearer {KEY}")
    connection.putheader("Content-Length", str(1 << 30))
    connection.endheaders(b"x" * 1000)
    reply = connection.getresponse()
    assert reply.status == 413
    assert json.loads(reply.read())["error"]["code"] == "too_large"
    connection.close()
    with run.learning():
        assert worker.send(worker.play()).status == 200


def test_a_full_queue_answers_429_and_the_same_round_is_accepted_later():
    with serving(queue_bytes=1) as run:
        run.collect(1)
        first = run.join()
        second = run.join()
        thread, replies = send_in_thread(first, first.play())
        wait_for(lambda: run.team.api.queue.size_bytes > 0)
        played = second.play()
        refused = second.send(played, number=0)
        assert (refused.status, refused.code) == (429, "queue_full")
        assert int(refused.headers["retry-after"]) >= 1
        with run.learning():
            thread.join(20)
            assert replies[0].status == 200
            assert second.send(played, number=0).status == 200
        assert len(set(run.chunk_ids)) == len(run.chunk_ids)


def test_a_round_whose_lease_ended_while_it_was_checked_is_not_counted(
    run: Serving, monkeypatch: pytest.MonkeyPatch
):
    is_checked = threading.Event()
    may_return = threading.Event()

    def check(*arguments: Any) -> Collected:
        collected = read_checked(*arguments)
        is_checked.set()
        may_return.wait(20)
        return collected

    read_checked = server._read_checked
    monkeypatch.setattr(server, "_read_checked", check)
    monkeypatch.setattr(server, "_INLINE_BYTES", 0)
    worker = run.join()
    thread, replies = send_in_thread(worker, worker.play())
    assert is_checked.wait(20)
    assert worker.leave().status == 204
    may_return.set()
    thread.join(20)
    assert (replies[0].status, replies[0].code) == (410, "join_again")
    assert run.collect().chunks == []
    assert run.team.api.queue.size_bytes == 0


def test_rounds_larger_than_the_memory_for_bodies_are_refused_at_the_start():
    with (
        pytest.raises(ConfigError, match=r"collect=1000000 .*or more actors"),
        serving(steps=10**6),
    ):
        pass


def test_a_server_that_does_not_start_is_reported(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("understudy.workers.team._STOP_S", 0.01)
    run_unready = GatewayServer.run
    monkeypatch.setattr(GatewayServer, "run", lambda self, ready: run_unready(self, lambda: None))
    with pytest.raises(LearningFailed, match="did not start within"), serving():
        pass


# --- Weights, tasks, leases -----------------------------------------------------------------------


def test_weights_arrive_as_soon_as_they_are_published(run: Serving):
    worker = run.join()
    assert worker.weights(after=1).status == 204
    replies: list[Any] = []
    thread = threading.Thread(target=lambda: replies.append(worker.weights(1, wait_s=10)))
    thread.start()
    run.collect(2)
    thread.join(20)
    text, body = unpack(replies[0].raw)
    assert read_object(WeightsHead, text).version == 2
    assert bytes(body) == policy_of(2).encode()
    assert run.ask("GET", f"/v1/runs/{RUN}/weights?lease=none&after=0").status == 410


def test_an_annealed_epsilon_neither_packs_the_policy_again_nor_wakes_workers(run: Serving):
    policy = policy_of(2)
    run.team.collect(policy, STEPS, round_no=0, explore=0.9)
    assert run.join().joined.explore == 0.9
    packed = run.team.api._published.packed  # type: ignore[union-attr]
    news = run.team.api._news
    run.team.collect(policy, STEPS, round_no=1, explore=0.8)
    assert run.join().joined.explore == 0.8
    assert run.team.api._published.packed is packed  # type: ignore[union-attr]
    assert run.team.api._news is news


def test_every_epsilon_of_a_long_ladder_is_published():
    """NumPy shortens the text of more than 1,000 numbers."""
    ladder = np.linspace(0.1, 0.9, 2_000)
    other = ladder.copy()
    other[1_000] = 0.0
    policy = policy_of(1)
    with serving(plan=team_plan(num_envs=2_000, num_actors=2_000)) as run:
        for explore in (ladder, other):
            run.team.collect(policy, STEPS, round_no=0, explore=explore)
            assert run.team.api._published.explore[1_000] == [explore[1_000]]  # type: ignore[union-attr]


def test_the_share_of_evaluations_is_as_set_and_none_enters_the_replay():
    share = 0.3
    with serving(evaluate_share=share) as run:
        run.collect(1)
        worker = run.join()
        with run.learning():
            n_draws = 200
            n_evaluations = 0
            answer = worker.send(worker.play()).json
            seeds = []
            for _ in range(n_draws):
                if answer["task"] == "evaluate":
                    n_evaluations += 1
                    seeds += answer["seeds"]
                    returns = [1.0] * len(answer["seeds"])
                    answer = worker.results(version=1, seeds=answer["seeds"], returns=returns).json
                else:
                    assert answer["seeds"] == []
                    answer = worker.send(worker.play()).json
        deviation = 4 * (share * (1 - share) / n_draws) ** 0.5
        assert abs(n_evaluations / n_draws - share) < deviation
        assert len(set(seeds)) == len(seeds)
        assert min(seeds) >= 1 << 31  # no actor plays these
        assert run.steps == worker.number * 2 * STEPS
        evaluated = [each for part in run.rounds for each in part.evaluations]
        assert len(evaluated) == n_evaluations
        assert evaluated[0].returns == [1.0, 1.0]


def test_repeated_results_are_answered_as_before():
    with serving(evaluate_share=0.9) as run:
        run.collect(1)
        worker = run.join()
        with run.learning():
            answer = worker.send(worker.play()).json
            while answer["task"] != "evaluate":
                answer = worker.send(worker.play()).json
            results = {"version": 1, "seeds": answer["seeds"], "returns": [1.0, 2.0]}
            first = worker.results(**results)
            assert worker.results(**results).json == first.json
        assert len([each for part in run.rounds for each in part.evaluations]) == 1


def test_false_results_are_rejected(run: Serving):
    worker = run.join()
    assert worker.results(version=1, seeds=[1], returns=[1.0]).code == "out_of_order"
    with serving(evaluate_share=0.9) as other:
        other.collect(1)
        for facts, code in (
            ({"version": 1, "returns": [1.0]}, "bad_number"),
            ({"version": 1, "returns": [1.0, 1.7e308]}, "bad_number"),
            ({"version": 99, "returns": [1.0, 2.0]}, "bad_version"),
        ):
            liar = other.join()
            with other.learning():
                answer = liar.send(liar.play()).json
                while answer["task"] != "evaluate":
                    answer = liar.send(liar.play()).json
            assert liar.results(seeds=answer["seeds"], **facts).code == code
            assert liar.weights(0).status == 410
        assert not [each for part in other.rounds for each in part.evaluations]
        other.insert(other.collect())
        said = [text for part in other.rounds for text in part.replaced]
        assert sum("an evaluation of worker 0 was rejected" in text for text in said) == 3


def test_a_silent_worker_loses_its_place_and_is_told_to_join_again():
    clock = ManualClock()
    with serving(clock=clock, lease_s=30.0) as run:
        run.collect(1)
        worker = run.join()
        clock.advance(29.0)
        assert worker.weights(after=1).status == 204  # any message renews the lease
        clock.advance(29.0)
        assert worker.weights(after=1).status == 204
        clock.advance(31.0)
        wait_for(lambda: run.team.api.workers["train"] == 0)
        assert (worker.weights(after=0).status, worker.send(worker.play()).status) == (410, 410)
        assert "was silent for 30 s" in run.collect().replaced[0]
        assert run.join().joined.index == 0


def test_a_finished_run_says_so_to_everyone(run: Serving):
    worker = run.join()
    thread, replies = send_in_thread(worker, worker.play())
    wait_for(lambda: run.team.api.queue.size_bytes > 0)
    run.team.finish()
    thread.join(20)
    assert (replies[0].status, replies[0].code) == (410, "run_over")
    assert worker.weights(after=1, wait_s=10).code == "run_over"
    assert run.ask("POST", f"/v1/runs/{RUN}/join", run.join_request()).code == "run_over"


def test_metrics_show_arrivals_handling_load_lag_queue_and_workers(run: Serving):
    worker = run.join()
    with run.learning(lambda: 3):
        assert worker.weights(after=1, wait_s=10).status == 200  # version 3 is published
        assert worker.send(worker.play()).status == 200
        wait_for(lambda: any(part.report is not None for part in list(run.rounds)))
    text = metrics_of(run)
    for line in (
        "understudy_arrived_chunks_total",
        f"understudy_arrived_steps_total {2.0 * STEPS}",
        "understudy_handling_seconds_count 1.0",
        "understudy_lag_versions_sum 2.0",
        "understudy_learner_load 0.0",
        "understudy_queue_bytes 0.0",
        'understudy_workers{task="train"} 1.0',
        'understudy_workers{task="evaluate"} 0.0',
    ):
        assert line in text, line
    reports = [part.report for part in run.rounds if part.report is not None]
    assert sum(report.chunks_s for report in reports) > 0
    assert reports[-1].workers == {"train": 1, "evaluate": 0}


def test_the_team_has_no_state_and_refuses_a_policy_of_another_game(run: Serving):
    with pytest.raises(ConfigError, match="no state"):
        run.team.state()
    with pytest.raises(ConfigError, match="no state"):
        run.team.restore({}, {})
    policy = replace(policy_of(1), game=replace(SPEC, max_episode_steps=77))
    with pytest.raises(ConfigError, match="cannot collect with a policy"):
        run.team.collect(policy, STEPS, round_no=0)
    run.team.close()
    run.team.close()
