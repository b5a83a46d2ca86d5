"""A worker joins, plays, follows new weights, joins again when it must, and leaves."""

import contextlib
import http.server
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import gymnasium
import pytest

from tests.cli.platforms import wait_for
from tests.serve.test_server import certificate
from tests.workers.runs import (
    GAME,
    KEY,
    PLAY_KEY,
    RUN,
    SPEC,
    STEPS,
    Serving,
    policy_of,
    serving,
    team_plan,
)
from understudy.act.vector import game_of, make_envs
from understudy.core.errors import ConfigError, GameFailed
from understudy.workers.server import broadcast_of
from understudy.workers.team import WorkersConfig, worker_key
from understudy.workers.wire import RunInfo, read_key, worker_command
from understudy.workers.worker import Worked, Worker


@contextlib.contextmanager
def working(worker: Worker, stop: threading.Event | None = None) -> Iterator[list[Any]]:
    """The worker in a thread; yields a list that receives its result or its error."""
    stop = stop or threading.Event()
    ends: list[Any] = []

    def work() -> None:
        try:
            ends.append(worker.work(stop))
        except Exception as error:
            ends.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield ends
    finally:
        stop.set()
        thread.join(30)
        assert not thread.is_alive()


def versions_of(run: Serving) -> set[int]:
    return {
        int(version)
        for part in list(run.rounds)
        for chunk in part.chunks
        for version in chunk.columns["version"][:1]
    }


def test_workers_play_every_step_once_and_follow_new_weights_without_joining_again():
    version = 1
    with serving() as run, run.learning(lambda: version):
        workers = [Worker(run.team.url, key=KEY) for _ in range(2)]
        with working(workers[0]) as first, working(workers[1]) as second:
            for newest in (2, 5):
                version = newest
                wait_for(lambda newest=newest: newest in versions_of(run))  # type: ignore[misc]
            wait_for(lambda: len({session for session, _ in run.chunk_ids}) == 4)
        worked: list[Worked] = [*first, *second]
        assert [each.joins for each in worked] == [1, 1]
        assert {each.index for each in worked} == {0, 1}
        wait_for(lambda: run.team.api.workers["train"] == 0)  # they have left
    # Every step that was acknowledged is in the replay, once.
    assert run.steps == sum(each.steps for each in worked) > 0
    assert len(set(run.chunk_ids)) == len(run.chunk_ids)
    numbers: dict[Any, list[int]] = {}
    for session, number in run.chunk_ids:
        numbers.setdefault(session, []).append(number)
    assert all(each == list(range(len(each))) for each in numbers.values())


def test_a_worker_without_a_lease_joins_again_with_new_sessions():
    with serving(lease_s=30.0) as run, run.learning():
        with working(Worker(run.team.url, key=KEY)) as ends:
            wait_for(lambda: run.steps > 0)
            run.team.api._call(lambda: run.team.api._forget(lease_of(run)))
            wait_for(lambda: len({session for session, _ in run.chunk_ids}) == 4)
        assert ends[0].joins == 2
        assert len(set(run.chunk_ids)) == len(run.chunk_ids)


def lease_of(run: Serving) -> Any:
    (lease,) = run.team.api._leases._leases.values()
    return lease


def test_a_worker_waits_for_a_learner_that_is_away_and_joins_the_next_one():
    said: list[str] = []
    with serving() as run:
        port = int(run.team.url.rpartition(":")[2])
    stop = threading.Event()
    worker = Worker(f"http://127.0.0.1:{port}", key=KEY, on_message=said.append)
    with working(worker, stop) as ends:
        wait_for(lambda: bool(said))
        assert "is away" in said[0]
        with serving(port=port) as run, run.learning():
            wait_for(lambda: run.steps > 0)
        # The learner was restarted: another incarnation of the same run.
        with serving(port=port, plan=team_plan(incarnation=1)) as again, again.learning():
            wait_for(lambda: again.steps > 0)
            again.team.finish()
            wait_for(lambda: bool(ends))
    assert ends[0].is_over
    assert ends[0].joins == 2
    assert not set(run.chunk_ids) & set(again.chunk_ids)


def test_a_stopped_worker_ends_although_the_learner_inserts_nothing():
    stop = threading.Event()
    with serving() as run:
        run.collect(1)
        with working(Worker(run.team.url, key=KEY), stop) as ends:
            wait_for(lambda: run.team.api.queue.size_bytes > 0)
            stop.set()
            wait_for(lambda: bool(ends))
        assert (ends[0].rounds, ends[0].joins) == (0, 1)


def test_a_worker_evaluates_greedily_on_the_seeds_of_its_task():
    with serving(evaluate_share=0.5) as run, run.learning():
        with working(Worker(run.team.url, key=KEY)) as ends:
            wait_for(lambda: len(evaluations_of(run)) >= 3)
        assert ends[0].evaluations >= 3
        assert all(
            len(each.returns) == 2 and min(each.returns) >= 1 for each in evaluations_of(run)
        )
        assert run.steps == ends[0].steps  # no step of an evaluation is in the replay


class NanAtSeeds(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Rewards are not numbers in the episodes of evaluations, whose seeds are held out."""

    is_held_out = False

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.is_held_out = (seed or 0) >= 1 << 31
        return self.env.reset(seed=seed, options=options)

    def step(self, action: Any) -> Any:
        obs, reward, *rest = self.env.step(action)
        return obs, float("nan") if self.is_held_out else reward, *rest


def test_an_evaluation_that_is_not_finite_is_reported_and_the_worker_plays_on():
    said: list[str] = []
    with serving(evaluate_share=0.5) as run, run.learning():
        game = lambda: NanAtSeeds(gymnasium.make(GAME))  # noqa: E731
        worker = Worker(run.team.url, key=KEY, game=game, on_message=said.append)
        with working(worker) as ends:
            wait_for(lambda: any("cannot evaluate" in text for text in said))
            steps = run.steps
            wait_for(lambda: run.steps > steps + 4 * 2 * STEPS)
        assert (ends[0].joins, ends[0].evaluations) == (1, 0)
        assert any("episodes returned nan" in text for text in said)
        assert not evaluations_of(run)


def evaluations_of(run: Serving) -> list[Any]:
    return [each for part in list(run.rounds) for each in part.evaluations]


def test_a_learner_that_inserts_nothing_for_longer_than_a_lease_loses_no_worker():
    """As during a long evaluation: the same round is sent again until it is in the replay."""
    with serving(lease_s=0.6) as run:
        run.collect(1)
        with working(Worker(run.team.url, key=KEY)) as worked:
            wait_for(lambda: run.team.api.queue.size_bytes > 0)
            held = run.collect()
            until_s = time.monotonic() + 2.0
            wait_for(lambda: time.monotonic() > until_s)
            run.insert(held)
            with run.learning():
                wait_for(lambda: run.steps > 10 * 2 * STEPS)
        assert worked[0].joins == 1
        assert worked[0].steps == run.steps
        assert len(set(run.chunk_ids)) == len(run.chunk_ids)


def test_a_proxys_answer_for_an_absent_learner_is_waited_out():
    class Proxy(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_error(502)

        def log_message(self, *arguments: Any) -> None:
            pass

    said: list[str] = []
    with http.server.HTTPServer(("127.0.0.1", 0), Proxy) as proxy:
        threading.Thread(target=proxy.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{proxy.server_address[1]}"
        with working(Worker(url, key=KEY, on_message=said.append)) as worked:
            wait_for(lambda: bool(said))
        proxy.shutdown()
    assert "502" in said[0]
    assert said[0].endswith("trying again")
    assert worked[0].joins == 0


def test_the_envs_of_evaluations_are_those_of_the_present_run():
    worker = Worker("http://127.0.0.1:1", key=KEY)
    returns = []
    for kwargs in ({}, {"sutton_barto_reward": True}):
        info = RunInfo(run=RUN, game=GAME, name=GAME, num_envs=2, env_kwargs=kwargs)
        worker._make_envs(info)
        returns.append(worker._evaluate(policy_of(1), info, seeds=[1, 2], max_steps=500))
    worker._close_envs()
    assert min(returns[0]) > 1.0
    assert returns[1] == [-1.0, -1.0]


def test_tls_needs_a_trusted_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    crt, private = certificate(tmp_path)
    config = WorkersConfig(port=0, certificate=crt, certificate_key=private)
    with serving(config=config) as run, run.learning():
        url = run.team.url.replace("https://127.0.0.1", "https://localhost")
        with pytest.raises(ConfigError, match=r"is not trusted here.*SSL_CERT_FILE"):
            Worker(url, key=KEY).work()
        monkeypatch.setenv("SSL_CERT_FILE", str(crt))
        with pytest.raises(ConfigError, match=r"is not trusted here.*127\.0\.0\.1"):
            Worker(run.team.url, key=KEY).work()
        with working(Worker(url, key=KEY)):
            wait_for(lambda: run.steps > 0)


class NanAt(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Some rewards are not numbers."""

    def __init__(self, bad_steps: range) -> None:
        super().__init__(gymnasium.make(GAME))
        self.bad_steps = bad_steps
        self.n_steps = 0

    def step(self, action: Any) -> Any:
        obs, reward, *rest = self.env.step(action)
        self.n_steps += 1
        return obs, float("nan") if self.n_steps in self.bad_steps else reward, *rest


def test_a_worker_whose_round_was_rejected_joins_again():
    said: list[str] = []
    plan = team_plan(num_envs=2)
    with serving(plan=plan) as run, run.learning():
        game = lambda: NanAt(range(40, 41))  # noqa: E731
        worker = Worker(run.team.url, key=KEY, game=game, on_message=said.append)
        with working(worker) as ends:
            wait_for(lambda: worker._worked.joins == 2)
            steps = run.steps
            wait_for(lambda: run.steps > steps + 4 * STEPS)
        assert ends[0].joins == 2
        assert any("(not_finite)" in text and "joining again" in text for text in said)
        assert len(set(run.chunk_ids)) == len(run.chunk_ids)


def test_a_worker_whose_rounds_are_all_rejected_ends_and_says_why():
    with serving() as run, run.learning():
        worker = Worker(run.team.url, key=KEY, game=lambda: NanAt(range(10**9)))
        with pytest.raises(ConfigError, match=r"rejects this worker \(not_finite\)"):
            worker.work()
        assert worker._worked.joins == 3
        wait_for(lambda: run.team.api.workers["train"] == 0)


@pytest.mark.parametrize("publishes", [False, True])
def test_a_run_that_ends_while_a_worker_plays_ends_that_worker(publishes: bool):
    """Its next message finds no learner any more, but its thread for weights was told.

    That thread waits for weights, or has received some that do not play yet.
    """
    may_step = threading.Event()
    may_step.set()
    is_stopped = threading.Event()
    n_steps = 0

    class Gated(gymnasium.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            nonlocal n_steps
            if not may_step.is_set():
                is_stopped.set()
                may_step.wait(60)
            n_steps += 1
            return self.env.step(action)

    with contextlib.ExitStack() as stack:
        with serving() as run, run.learning(lambda: 1 + publishes * len(run.rounds)):
            worker = Worker(run.team.url, key=KEY, game=lambda: Gated(gymnasium.make(GAME)))
            ends = stack.enter_context(working(worker))
            stack.callback(may_step.set)
            wait_for(lambda: run.steps > 0)
            may_step.clear()
            wait_for(is_stopped.is_set)
            # Every round has its ack.
            wait_for(lambda: run.steps == n_steps // (2 * STEPS) * 2 * STEPS)
            wait_for(lambda: all(answer.done() for answer in run.team.api._in_flight.values()))
            run.team.finish()
        may_step.set()
        wait_for(lambda: bool(ends))
    assert ends[0].is_over


def test_an_error_of_on_message_in_the_senders_thread_ends_the_worker():
    threads: list[str] = []

    def say(text: str) -> None:
        if text.endswith("trying again"):
            threads.append(threading.current_thread().name)
            raise BrokenPipeError("nobody reads")

    with contextlib.ExitStack() as stack:
        with serving() as run, run.learning():
            worker = Worker(run.team.url, key=KEY, on_message=say)
            ends = stack.enter_context(working(worker))
            wait_for(lambda: run.steps > 0)
        wait_for(lambda: bool(ends))
    assert isinstance(ends[0], BrokenPipeError)
    assert threads == ["sender"]


def test_an_error_of_on_message_frees_the_workers_place():
    def say(text: str) -> None:
        raise BrokenPipeError("nobody reads")

    with serving() as run:
        run.collect(1)
        with pytest.raises(BrokenPipeError):
            Worker(run.team.url, key=KEY, on_message=say).work()
        assert run.team.api.workers["train"] == 0


def test_weights_that_cannot_be_read_end_the_worker():
    with serving() as run:
        run.collect(1)
        worker = Worker(run.team.url, key=KEY)
        with working(worker) as ends:
            wait_for(lambda: run.team.api.queue.size_bytes > 0)
            run.team.api.publish(broadcast_of(b"no policy", 2, None, team_plan()))
            wait_for(lambda: bool(ends))
        assert isinstance(ends[0], ConfigError)
        assert "does not answer as a learner of understudy" in str(ends[0])


@pytest.mark.parametrize("page", [b"<html>hello</html>", b"[]", b'{"hello":1}'])
def test_an_address_of_something_else_is_reported_in_one_line(page: bytes):
    class Page(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("content-length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *arguments: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Page) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{other.server_address[1]}"
        with pytest.raises(ConfigError, match="does not answer as a learner of understudy"):
            Worker(url, key=KEY).work()
        other.shutdown()


# --- What ends a worker ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("uk_000000000000_" + "a" * 43, "rejects this worker's key: this is not a worker key"),
        (PLAY_KEY, r"rejects this worker's key.*use a key with scope work"),
    ],
    ids=["unknown", "play key"],  # not the keys, which differ between processes
)
def test_a_wrong_key_is_reported_in_one_line(key: str, message: str):
    with serving() as run:
        run.collect(1)
        with pytest.raises(ConfigError, match=message) as caught:
            Worker(run.team.url, key=key).work()
        assert "\n" not in str(caught.value)


def test_a_missing_key_an_invalid_address_and_plain_http_elsewhere_are_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
):
    monkeypatch.delenv("UNDERSTUDY_WORKER_KEY", raising=False)
    with pytest.raises(ConfigError, match="set UNDERSTUDY_WORKER_KEY to the key"):
        Worker("http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="not a platform's URL"):
        Worker("127.0.0.1:4444")  # the address is checked first
    with pytest.raises(ConfigError, match=r"unencrypted.*the option insecure"):
        Worker("http://learner.example:4444", key=KEY)
    with pytest.raises(
        ConfigError, match=r"omit what follows the port, such as http://127\.0\.0\.1:4444"
    ):
        Worker("http://127.0.0.1:4444/runs", key=KEY)
    with pytest.raises(ConfigError, match="the key is a int"):
        Worker("http://127.0.0.1:4444", key=cast(str, 5))
    with pytest.raises(ConfigError, match="with a port from 1 to 65535"):
        Worker("http://127.0.0.1:0", key=KEY)
    with pytest.raises(ConfigError, match="characters that keys do not have"):
        Worker("http://127.0.0.1:4444", key="ключ")
    for content, reason in ((b"\n", "is empty"), (b"\xff", "it is not text")):
        (tmp_path / "key").write_bytes(content)
        with pytest.raises(ConfigError, match=reason):
            read_key(tmp_path / "key")
    (tmp_path / "key").write_text(KEY + "\n")
    monkeypatch.setenv("UNDERSTUDY_WORKER_KEY_FILE", str(tmp_path / "key"))
    with serving() as run, run.learning(), working(Worker(run.team.url)):
        wait_for(lambda: run.steps > 0)
    # The learner reads the same variables, and creates no other key.
    place = str(tmp_path / "key")
    assert worker_key(WorkersConfig(), tmp_path / "own", os.environ) == (KEY, place)
    assert not (tmp_path / "own").exists()


def test_another_game_is_rejected_by_name():
    with serving() as run:
        run.collect(1)
        with pytest.raises(ConfigError, match=r"other_game.*of the worker's game"):
            Worker(run.team.url, key=KEY, game="Acrobot-v1").work()


class Flipped(gymnasium.RewardWrapper[Any, Any]):
    def reward(self, reward: Any) -> float:
        return -float(reward)


def make_cart() -> gymnasium.Env[Any, Any]:
    return gymnasium.make(GAME)


def broken() -> gymnasium.Env[Any, Any]:
    class Broken(gymnasium.Wrapper[Any, Any, Any, Any]):
        def step(self, action: Any) -> Any:
            raise RuntimeError("the wheel came off")

    return Broken(gymnasium.make(GAME))


def test_a_learner_cannot_make_a_worker_import_a_module():
    """Only the worker's own arguments name modules; a learner's names are refused."""
    for info, wanted in (
        (RunInfo(run=RUN, game="os:abort", name="x", num_envs=2), "game=os:abort"),
        (RunInfo(run=RUN, game=None, name="x", num_envs=2), "game=MODULE:FUNCTION"),
        (
            RunInfo(run=RUN, game=GAME, name="x", num_envs=2, wrappers=["os:abort"]),
            "env_wrapper=os:abort",
        ),
    ):
        with serving(info=info) as run:
            run.collect(1)
            with pytest.raises(ConfigError, match="does not import by itself; add") as caught:
                Worker(run.team.url, key=KEY).work()
            assert wanted in str(caught.value)


def test_a_worker_with_other_wrappers_is_rejected_by_name():
    path = f"{Flipped.__module__}:{Flipped.__name__}"
    for learners, workers in (
        ([], [Flipped]),
        ([path], ["gymnasium.wrappers:FlattenObservation"]),
        ([f"train:{path}"], [path]),
    ):
        info = RunInfo(run=RUN, game=GAME, name=GAME, num_envs=2, wrappers=learners)
        with serving(info=info) as run:
            run.collect(1)
            with pytest.raises(ConfigError, match=r"the worker's wrappers are .* the learner's"):
                Worker(run.team.url, key=KEY, env_wrapper=workers).work()
            assert run.team.api.workers["train"] == 0


def test_a_worker_plays_its_own_game_and_wrappers():
    path = f"{Flipped.__module__}:{Flipped.__name__}"
    info = RunInfo(run=RUN, game=None, name=GAME, num_envs=2, wrappers=[path])
    assert game_of(make_envs(make_cart, 1)).schema == SPEC.schema
    with serving(info=info) as run, run.learning():
        worker = Worker(run.team.url, key=KEY, game=make_cart, env_wrapper=Flipped)
        with working(worker):
            wait_for(lambda: run.steps > 0)
        rewards = {float(chunk.columns["reward"][0]) for chunk in run.rounds[-1].chunks}
        rewards |= {float(c.columns["reward"][0]) for part in run.rounds for c in part.chunks}
        assert rewards == {-1.0}
        # Returns are the game's own.
        assert all(e.return_ == e.length for part in run.rounds for e in part.episodes)


def test_a_game_that_fails_ends_its_worker_and_frees_its_place():
    with serving() as run, run.learning():
        with pytest.raises(GameFailed, match="RuntimeError: the wheel came off"):
            Worker(run.team.url, key=KEY, game=broken).work()
        wait_for(lambda: run.team.api.workers["train"] == 0)


def test_the_command_names_what_a_worker_must_import():
    url = "http://127.0.0.1:4444"
    assert worker_command(url, game=GAME, wrappers=[]) == f"understudy worker {url}"
    assert worker_command(url, game="mygame:Race-v0", wrappers=["enc:E"]) == (
        f"understudy worker {url} --game mygame:Race-v0 --env-wrapper enc:E"
    )
    command = worker_command(url, game=GAME, wrappers=["enc:f.<locals>.E"])
    assert command.endswith("--env-wrapper 'enc:f.<locals>.E'")


def test_a_worker_needs_neither_jax_nor_the_platforms_packages():
    code = (
        "import sys; from understudy import Worker\n"
        "worked = Worker(sys.argv[1]).work()\n"
        "assert worked.is_over and worked.steps, worked\n"
        "heavy = {'jax', 'starlette', 'uvicorn', 'msgspec', 'click', 'rich', 'cloudpickle',"
        " 'numba', 'structlog', 'prometheus_client', 'matplotlib'}\n"
        "print(sorted(heavy & sys.modules.keys()))\n"
    )
    with serving() as run, run.learning():
        process = subprocess.Popen(
            [sys.executable, "-c", code, run.team.url],
            env={**os.environ, "UNDERSTUDY_WORKER_KEY": KEY},
            stdout=subprocess.PIPE,
            text=True,
        )
        wait_for(lambda: run.steps > 4 * STEPS)
        run.team.finish()
        assert process.communicate(timeout=30)[0] == "[]\n"
        assert process.returncode == 0
