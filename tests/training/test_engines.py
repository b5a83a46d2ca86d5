"""Runs whose actors play in processes of their own end as runs in one process do."""

import contextlib
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.act.policies import random_policy
from tests.faults.profiles import sizes
from understudy.act.actor import Actor
from understudy.core.clock import SystemClock
from understudy.core.errors import ConfigError, MissingExtra
from understudy.experience.game import GameSpec
from understudy.stores.view import StoreView
from understudy.training.env_info import GameChoice, inspect_env
from understudy.training.events import Event, Guarded, Stop, Update
from understudy.training.run_store import RunStore
from understudy.training.train import Run, TrainOptions, train
from understudy.training.train_request import TrainRequest

SETTINGS = {
    "dqn": {
        "envs": 4,
        "actors": 2,
        "min_inserts": 200,
        "checkpoint_every": 500,
        "eval_episodes": 20,
        "ladder": True,
    },
    "ppo": {"envs": 4, "rollout": 64, "actors": 2, "eval_episodes": 20},
}


def actor_pids() -> list[int]:
    """The processes of actors that this process has started."""
    pids = []
    for child in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        for pid in child.read_text().split():
            with contextlib.suppress(FileNotFoundError):  # it has ended
                arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if b"understudy.act.process_team" in arguments and b"actor" in arguments:
                    pids.append(int(pid))
    return pids


def run(out: Path, algorithm: str, engine: str | None, **arguments: Any) -> Run:
    return train(
        "CartPole-v1",
        algorithm=algorithm,
        steps=arguments.pop("steps", 3_000),
        until=float("inf"),
        settings=SETTINGS[algorithm],
        seed=4,
        out=out,
        options=TrainOptions(engine=engine),
        **arguments,
    )


@pytest.fixture(scope="module")
def inline_dqn(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of dqn that nothing interrupted."""
    return run(tmp_path_factory.mktemp("inline") / "run", "dqn", "inline")


@pytest.mark.parametrize("algorithm", ["dqn", "ppo"])
def test_both_engines_end_with_the_same_bits_also_if_actors_are_killed(
    tmp_path: Path, algorithm: str, inline_dqn: Run
):
    guarded: list[Guarded] = []
    rounds = 0

    def kill(event: Event) -> None:
        nonlocal rounds
        if isinstance(event, Guarded):
            guarded.append(event)
        if isinstance(event, Update):
            rounds += 1
            if rounds % 4 == 0:
                os.kill(actor_pids()[rounds // 4 % 2], signal.SIGKILL)

    inline = inline_dqn
    if algorithm != "dqn":
        inline = run(tmp_path / "inline", algorithm, "inline")
    process = run(tmp_path / "process", algorithm, "process", on_event=kill)
    assert process.policy.encode() == inline.policy.encode()
    for name in ("env_steps", "updates", "train_episodes", "return_mean"):
        assert process.result[name] == inline.result[name]
    assert 1 < len(guarded) in (rounds // 4, rounds // 4 - 1)  # the last round may be over
    assert all("was replaced" in event.what for event in guarded)
    assert not actor_pids()


def test_a_run_is_resumed_with_another_engine(tmp_path: Path, inline_dqn: Run):
    def stop(event: Event) -> None:
        if event.env_steps > 1_500:
            raise KeyboardInterrupt

    for engine, other in (("inline", "process"), ("process", "inline")):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / engine, "dqn", engine, on_event=stop)
        resumed = run(tmp_path / engine, "dqn", other, resume=True)
        assert resumed.result["resumed_at_step"] > 0
        assert resumed.policy.encode() == inline_dqn.policy.encode()
    assert not actor_pids()


@sizes("steps", short=6_000, full=30_000)
def test_an_asynchronous_run_continues_while_actors_are_killed_and_stores_every_step_once(
    tmp_path: Path, steps: int
):
    replaced = 0
    updates = 0

    def kill(event: Event) -> None:
        nonlocal replaced, updates
        replaced += isinstance(event, Guarded)
        if isinstance(event, Update):
            updates += 1
            if updates % 4 == 0:
                for pid in actor_pids()[:1]:
                    os.kill(pid, signal.SIGKILL)

    result = train(
        "CartPole-v1",
        algorithm="dqn",
        steps=steps,
        settings=SETTINGS["dqn"] | {"envs": 8, "asynchronous": True, "keep_history": True},
        seed=1,
        until=float("inf"),
        out=tmp_path / "run",
        on_event=kill,
        options=TrainOptions(engine="process"),
    ).result
    assert replaced > 1
    assert result["updates"] > min(steps // 12, 1_000)
    with StoreView(tmp_path / "run" / "store") as view:
        chunks = [item.chunk for item in view.tail(None, max_items=100_000, wait_s=0.0).items]  # type: ignore[union-attr]
    assert sum(chunk.meta.n_steps for chunk in chunks if chunk) == result["env_steps"] >= steps


@pytest.mark.parametrize(
    ("algorithm", "settings", "said"),
    [
        ("ppo", {"replay": "device"}, "replay is 'device', but ppo is on-policy and has no replay"),
        ("ppo", {"ladder": True}, "ladder is True, but ppo is on-policy"),
        ("ppo", {"capacity": 4_096}, "capacity is 4096, but ppo is on-policy"),
        ("ppo", {"collect": 8}, "collect is 8, but ppo is on-policy"),
        ("ppo", {"keep_history": True}, "keep_history is True, but ppo is on-policy"),
        ("iql", {"ladder": True}, "ladder is True, but iql does not explore by epsilon"),
        ("dqn", {"ladder": True, "epsilon": 0.5}, "epsilon is 0.5, but each env has its own"),
        ("dqn", {"evaluate_share": 0.5}, "evaluate_share is 0.5, but it is for engine='workers'"),
        ("ppo", {"lease_s": 5.0}, "lease_s is 5.0, but it is for engine='workers'"),
        ("dqn", {"prioritised": False, "alpha": 0.3}, "alpha is 0.3, but .* not draw by priority"),
    ],
)
def test_settings_without_an_effect_are_refused(
    tmp_path: Path, algorithm: str, settings: dict[str, Any], said: str
):
    with pytest.raises(ConfigError, match=rf"{said}.*; omit it"):
        train("CartPole-v1", algorithm=algorithm, settings=settings, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_epsilon_is_refused_where_the_preset_sets_one_for_each_env(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"epsilon is 0.5, but each env has its own"):
        train(
            "CartPole-v1",
            settings={"epsilon": 0.5},
            out=tmp_path / "run",
            options=TrainOptions(preset="apex"),
        )


def test_an_on_policy_algorithm_that_shall_be_asynchronous_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="ppo is on-policy and learns only from its newest"):
        train(
            "CartPole-v1",
            algorithm="ppo",
            settings={"asynchronous": True},
            out=tmp_path / "run",
        )
    assert not (tmp_path / "run").exists()


def test_settings_of_actors_are_refused_by_runs_from_a_store(tmp_path: Path):
    store = tmp_path / "store"
    spec = inspect_env(GameChoice(game="CartPole-v1")).spec
    RunStore(store, spec, clock=SystemClock()).close()
    options = TrainOptions(from_store=store)
    with pytest.raises(ConfigError, match="has no experience of CartPole-v1"):
        train("CartPole-v1", options=options, out=tmp_path / "run")
    add_chunks(store, spec)
    for name, value in {
        "actors": 2,
        "envs": 4,
        "collect": 8,
        "ladder": True,
        "asynchronous": True,
        "keep_history": True,
        "min_inserts": 10,
        "samples_per_insert": 2.0,
        "max_lag_versions": 3,
    }.items():
        with pytest.raises(ConfigError, match=f"{name} is {value}, but a run from a store plays"):
            train("CartPole-v1", settings={name: value}, options=options, out=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"epsilon is 0.5, but a run from a store plays"):
        train(
            "CartPole-v1",
            algorithm="dqn",
            settings={"epsilon": 0.5},
            options=options,
            out=tmp_path / "run",
        )
    # The defaults are what such a run has anyway.
    same = {"actors": 1, "ladder": False, "eval_episodes": 2, "updates_per_call": 4, "batch": 8}
    options = replace(options, engine="inline")
    run = train("CartPole-v1", settings=same, steps=4, options=options, out=tmp_path / "run")
    assert run.result["updates"] == 4
    before = (run.folder / "run.json").read_bytes()
    with pytest.raises(ConfigError, match="engine is 'process', but a run from a store plays"):
        train(out=run.folder, resume=True, steps=8, options=TrainOptions(engine="process"))
    assert (run.folder / "run.json").read_bytes() == before
    assert train(out=run.folder, resume=True, steps=8).result["updates"] == 8


def test_a_replay_that_cannot_train_from_a_store_leaves_no_folder_and_no_open_file(tmp_path: Path):
    store = tmp_path / "store"
    spec = inspect_env(GameChoice(game="CartPole-v1")).spec
    RunStore(store, spec, clock=SystemClock()).close()
    add_chunks(store, spec)
    with pytest.raises(ConfigError, match="cannot train from a store") as caught:
        train(
            "CartPole-v1",
            algorithm="dqn",
            settings={"replay": "device"},
            options=TrainOptions(from_store=store),
            out=tmp_path / "run",
        )
    opened = [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]
    # The error holds the frames, and thereby what these have opened.
    assert caught.value.__traceback__ is not None
    assert not [path for path in opened if path.startswith(str(store.resolve()))]
    assert not (tmp_path / "run").exists()


def add_chunks(folder: Path, spec: GameSpec) -> None:
    """Store a round that an actor played."""
    envs = GameChoice(game="CartPole-v1").make(2)
    actor = Actor(envs, spec, root_seed=0, created_ms=1_700_000_000_000)
    store = RunStore(folder, spec, clock=SystemClock())
    store.add(actor.collect(random_policy(spec, "categorical"), 64, round_no=0).chunks)
    store.flush()
    store.close()


def test_an_address_of_workers_is_refused_when_another_engine_resumes(tmp_path: Path):
    def stop(event: Event) -> object:
        return Stop if isinstance(event, Update) else None

    root = run(tmp_path / "run", "dqn", None, on_event=stop).folder
    before = (root / "run.json").read_bytes()
    options = TrainOptions(listen="127.0.0.1:0")
    with pytest.raises(ConfigError, match=r"a key for workers is set, but engine is 'inline'"):
        train(out=root, resume=True, steps=6_000, options=options)
    assert (root / "run.json").read_bytes() == before


def test_settings_that_do_not_fit_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="give one of inline, process, ray and workers"):
        TrainRequest(engine="dask", listen={"port": 0})
    with pytest.raises(ConfigError, match=r"address is 'auto'.*engine='ray'"):
        TrainRequest(engine="process", address="auto")
    with pytest.raises(ConfigError, match="a run from a store plays no game"):
        train("CartPole-v1", options=TrainOptions(from_store=tmp_path, engine="process"))
    with pytest.raises(ConfigError, match="8 envs cannot be divided among 3 actors"):
        train("CartPole-v1", algorithm="dqn", settings={"actors": 3}, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_engine_ray_without_ray_names_the_install_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(
        MissingExtra, match=r"needs the package ray.*pip install 'understudy\[ray\]'"
    ):
        run(tmp_path / "run", "dqn", "ray")
    assert not (tmp_path / "run").exists()


def interrupted(event: Event) -> None:
    if event.env_steps > 500:
        raise KeyboardInterrupt


def test_an_engine_that_does_not_start_leaves_the_run_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", "dqn", "inline", on_event=interrupted)
    before = (tmp_path / "run" / "run.json").read_bytes()
    monkeypatch.setitem(sys.modules, "ray", None)
    options = TrainOptions(engine="ray", address="127.0.0.1:1")
    with pytest.raises(MissingExtra):
        train(out=tmp_path / "run", resume=True, options=options)
    assert (tmp_path / "run" / "run.json").read_bytes() == before
    assert train(out=tmp_path / "run", resume=True).result["env_steps"] >= 3_000


def test_a_ppo_run_of_an_earlier_version_resumes(tmp_path: Path):
    """Its preset lacks keep_history, which is then assumed."""
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", "ppo", "inline", steps=1_000, on_event=interrupted)
    preset = tmp_path / "run" / "preset.toml"
    lines = preset.read_text().splitlines(keepends=True)
    preset.write_text("".join(line for line in lines if not line.startswith("keep_history")))
    assert train(out=tmp_path / "run", resume=True).result["env_steps"] >= 1_000
