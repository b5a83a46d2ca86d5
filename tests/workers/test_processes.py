"""Real processes: a learner and workers that are started, stopped and killed as users do."""

import contextlib
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import understudy
from tests.cli.platforms import wait_for
from understudy.core.errors import ConfigError
from understudy.models.keys import new_key_text
from understudy.stores.view import StoreView
from understudy.training.events import Event, WorkerEvaluation, WorkersReport
from understudy.training.train import TrainOptions, train
from understudy.workers.team import WorkersConfig, parse_listen

SETTINGS = (
    *("--set", "min_inserts=200", "--set", "checkpoint_every=1000"),
    *("--set", "envs=4", "--set", "eval_episodes=5"),
)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def start(folder: Path, *words: str, **environ: str) -> "subprocess.Popen[str]":
    """An `understudy` command, whose output is in a file of the folder."""
    with (folder / f"out-{len(list(folder.glob('out-*')))}").open("w") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "understudy.cli.main", *words],
            cwd=folder,
            env={**os.environ, **environ},
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
        )


@contextlib.contextmanager
def ended(*processes: "subprocess.Popen[str]") -> Iterator[None]:
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def output(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.glob("out-*")))


def learner_words(port: int, *more: str) -> tuple[str, ...]:
    listen = ("--engine", "workers", "--listen", f"127.0.0.1:{port}", "--out", "R", "--json")
    return ("train", "CartPole-v1", "--algorithm", "dqn", *listen, *SETTINGS, *more)


def worker_words(port: int) -> tuple[str, ...]:
    return ("worker", f"http://127.0.0.1:{port}", "--key-file", "R/worker.key", "--json")


def saved_steps(folder: Path) -> int:
    names = [path.stem for path in (folder / "R" / "checkpoints").glob("*") if path.stem.isdigit()]
    return max(map(int, names), default=0)


def test_workers_train_a_policy_and_one_that_is_killed_is_replaced(tmp_path: Path):
    port = free_port()
    learner = start(tmp_path, *learner_words(port, "--steps", "3000", "--set", "lease_s=1"))
    with ended(learner):
        wait_for(lambda: (tmp_path / "R" / "worker.key").exists() or learner.poll() is not None)
        assert stat.S_IMODE((tmp_path / "R" / "worker.key").stat().st_mode) == 0o600
        wait_for(lambda: "waiting for workers" in output(tmp_path) or learner.poll() is not None)
        victim = start(tmp_path, *worker_words(port))
        others = [start(tmp_path, *worker_words(port)) for _ in range(2)]
        with ended(victim, *others):
            wait_for(lambda: "joined" in output(tmp_path))
            victim.kill()
            assert learner.wait(100) == 0, output(tmp_path)
            assert [other.wait(30) for other in others] == [0, 0], output(tmp_path)
    result = json.loads((tmp_path / "R" / "result.json").read_text())
    assert result["env_steps"] >= 3_000
    assert result["updates"] > 0
    assert result["train_episodes"] > 0
    text = output(tmp_path)
    assert f"workers join with: understudy worker http://127.0.0.1:{port}" in text
    assert "their key is in R/worker.key" in text
    assert "handling" in text  # the live line
    worked = [json.loads(line) for line in text.splitlines() if line.startswith('{"rounds"')]
    assert [each["is_over"] for each in worked] == [True, True]
    assert sum(each["steps"] for each in worked) <= result["env_steps"]


def test_a_learner_that_is_killed_resumes_and_its_workers_continue(tmp_path: Path):
    port = free_port()
    learner = start(tmp_path, *learner_words(port, "--steps", "1000000"))
    with ended(learner):
        wait_for(lambda: (tmp_path / "R" / "worker.key").exists() or learner.poll() is not None)
        worker = start(tmp_path, *worker_words(port))
        with ended(worker):
            wait_for(lambda: saved_steps(tmp_path) > 1_000)
            learner.kill()
            learner.wait()
            wait_for(lambda: "is away" in output(tmp_path))
            saved = saved_steps(tmp_path)
            # The address stays, since only the key is given.
            words = ("--out", "R", "--key-file", "R/worker.key", "--json")
            again = start(tmp_path, "train", "--resume", *words)
            with ended(again):
                wait_for(lambda: "resumed at step" in output(tmp_path))
                came_back_s = time.monotonic()
                wait_for(lambda: output(tmp_path).count("joined CartPole-v1") == 2)
                print(f"the worker joined again after {time.monotonic() - came_back_s:.1f} s")
                wait_for(lambda: saved_steps(tmp_path) > saved)
                # SIGTERM: the worker leaves, and the learner stops and says how to resume.
                worker.send_signal(signal.SIGTERM)
                assert worker.wait(30) == 0
                again.send_signal(signal.SIGTERM)
                assert again.wait(60) == 130
    text = output(tmp_path)
    assert "understudy train --resume --out R" in text
    worked = next(json.loads(line) for line in text.splitlines() if line.startswith('{"rounds"'))
    assert (worked["joins"], worked["is_over"]) == (2, False)
    with StoreView(tmp_path / "R" / "store") as view:
        assert view.specs("CartPole-v1")


def test_learner_and_worker_are_as_small_in_python(tmp_path: Path):
    port = free_port()
    reports: list[WorkersReport] = []
    evaluations: list[WorkerEvaluation] = []

    def on_event(event: Event) -> None:
        match event:
            case WorkersReport():
                reports.append(event)
            case WorkerEvaluation():
                evaluations.append(event)

    node = understudy.LearnerNode(
        "CartPole-v1",
        algorithm="dqn",
        listen=f"127.0.0.1:{port}",
        steps=2_000,
        settings={"envs": 4, "min_inserts": 200, "evaluate_share": 0.2},
        out=tmp_path / "R",
        on_event=on_event,
    )
    worked: list[Any] = []

    def work() -> None:
        key_file = tmp_path / "R" / "worker.key"
        wait_for(key_file.exists)
        url = f"http://127.0.0.1:{port}"
        worked.append(understudy.Worker(url, key=key_file.read_text().strip()).work())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    run = node.serve()
    thread.join(30)
    assert worked[0].is_over
    assert run.result["env_steps"] >= 2_000
    assert worked[0].evaluations >= len(evaluations) > 0
    assert all(len(event.returns) == 4 for event in evaluations)
    assert reports


def refused(tmp_path: Path, **facts: Any) -> str:
    options = facts.pop("options", {})
    with pytest.raises(ConfigError) as caught:
        train(
            "CartPole-v1",
            out=tmp_path / "R",
            steps=100,
            options=TrainOptions(**{"engine": "workers", "listen": "127.0.0.1:0", **options}),
            **facts,
        )
    assert not (tmp_path / "R").exists()
    return str(caught.value)


def test_workers_are_always_asynchronous_whatever_a_file_or_a_variable_sets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = tmp_path / "lock-step.toml"
    path.write_text("[run]\nasynchronous = false\n")
    assert "always asynchronous" in refused(tmp_path, algorithm="dqn", options={"config": path})
    monkeypatch.setenv("UNDERSTUDY_TRAIN_ASYNCHRONOUS", "false")
    assert "always asynchronous" in refused(tmp_path, algorithm="dqn")


def test_a_learner_node_refuses_other_engines_and_two_addresses():
    with pytest.raises(ConfigError, match=r"engine is 'ray', but the actors .* are workers"):
        understudy.LearnerNode("CartPole-v1", options=TrainOptions(engine="ray"))
    options = TrainOptions(engine="workers", listen="127.0.0.1:0")
    with pytest.raises(ConfigError, match="listen is set twice"):
        understudy.LearnerNode("CartPole-v1", listen="127.0.0.1:1", options=options)


def test_a_resumed_run_keeps_what_is_not_given_of_its_address(tmp_path: Path):
    def interrupt(event: Event) -> None:
        raise KeyboardInterrupt

    def listen_after(listen: Any, **arguments: Any) -> Any:
        options = TrainOptions(engine="workers", listen=listen)
        with pytest.raises(KeyboardInterrupt):
            train(out=tmp_path / "R", on_event=interrupt, options=options, **arguments)
        return json.loads((tmp_path / "R" / "run.json").read_text())["listen"]

    key = tmp_path / "key"
    key.write_text(new_key_text())
    address = WorkersConfig(host="localhost", port=0, insecure=True)
    first = listen_after(address, game="CartPole-v1", algorithm="dqn")
    assert first == address.to_json()
    second = listen_after({"key_file": key}, resume=True)
    assert second == {**first, "key_file": str(key)}
    assert listen_after("127.0.0.1:0", resume=True) == {**second, "host": "127.0.0.1"}
    with pytest.raises(ConfigError, match="pass HOST:PORT, a WorkersConfig, or some of its fields"):
        train(out=tmp_path / "R", resume=True, options=TrainOptions(listen={"hots": "localhost"}))


def test_what_workers_cannot_do_is_refused_by_name(tmp_path: Path):
    assert "ppo is on-policy" in refused(tmp_path, algorithm="ppo")
    lock_step = {"asynchronous": False}
    assert "always asynchronous" in refused(tmp_path, algorithm="dqn", settings=lock_step)
    open_to_all = {"listen": "0.0.0.0:0"}
    assert "plain HTTP on 0.0.0.0" in refused(tmp_path, algorithm="dqn", options=open_to_all)
    with_scheme = {"listen": "http://127.0.0.1:4444"}
    assert "without a scheme" in refused(tmp_path, algorithm="dqn", options=with_scheme)
    nowhere = {"listen": "localhost:x"}
    assert "pass HOST:PORT" in refused(tmp_path, algorithm="dqn", options=nowhere)
    other = {"engine": "process"}
    assert "a key for workers is set, but engine is 'process'" in refused(
        tmp_path, algorithm="dqn", options=other
    )
    no_engine = {"engine": None}
    assert "use engine='workers'" in refused(tmp_path, algorithm="dqn", options=no_engine)


def test_the_port_is_4444_unless_another_is_given():
    assert WorkersConfig().port == 4444
    assert parse_listen("0.0.0.0") == ("0.0.0.0", 4444)
    assert parse_listen("0.0.0.0:4445") == ("0.0.0.0", 4445)
    for invalid in ("", "[::1]:0:5", "::1"):
        with pytest.raises(ConfigError, match="pass HOST:PORT"):
            parse_listen(invalid)


def test_the_help_of_a_worker_has_examples_and_its_errors_are_one_line(tmp_path: Path):
    helped = start(tmp_path, "worker", "--help")
    assert helped.wait(30) == 0
    assert "Examples:" in output(tmp_path)
    wrong = start(tmp_path, "worker", "http://127.0.0.1:1", UNDERSTUDY_WORKER_KEY="")
    assert wrong.wait(30) == 2
    assert "understudy: no key was given" in output(tmp_path)
