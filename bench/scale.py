"""Measures how training grows with actors, alone and beside other libraries.

    python bench/scale.py              about 25 minutes on two cores; writes
                                       bench/results/scale.json
    python bench/scale.py --quick      fewer actors; writes nothing unless --out is given

The slow game waits five milliseconds in every step, and each of its envs has a process; the fast
one is CartPole. The learner updates while they play (dqn, asynchronous). Each measurement is a
process of its own. Steps count once they are in the replay.

All peers train a DQN with the same network (64-64), one update of 64 rows per 8 steps and as many
envs; each process has one thread, and none uses a cache of compiled programs. A peer that updates
more often than that is skipped, because its learner has more to do. SB3 plays one env per process;
RLlib has as many env runners as we have processes. The others are the seeds' ways, rebuilt from
their descriptions, with a learner in torch.
"""

import contextlib
import functools
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # Run as a file, sys.path starts with bench/; replace it with the folder that contains bench/.
    sys.path[0] = str(ROOT)

import numpy as np  # noqa: E402

from bench.against.sleepy import GAMES, slow  # noqa: E402
from bench.contestants import (  # noqa: E402
    Contestant,
    ContestantError,
    Process,
    limited_environment,
)
from bench.figures import Figure, Findings, Gate, Ratio, all_of, in_turn  # noqa: E402
from bench.one_pass import run_once  # noqa: E402
from understudy.act.evaluate import evaluate  # noqa: E402
from understudy.act.process_team import process_team  # noqa: E402
from understudy.act.team import TeamPlan  # noqa: E402
from understudy.act.vector import game_of, make_envs  # noqa: E402

_WARM_UP_STEPS = 64
_SAMPLES_PER_STEP = 8.0
_STEPS_PER_UPDATE = 8
"""In the peers' part."""
_SCHEDULE_STEPS = 100_000
_DEADLINE_S = 600.0
_EFFICIENCY_GOAL = 0.9
_MEMORY_GOAL_MB = 80.0
_START_GOAL_S = 2.0
_WEIGHTS_GOAL_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """How a game is measured beside peers, and what its policy must have learned."""

    processes: int | None
    """Ours and RLlib's; None: one for each env."""
    goal: float
    """How many times a peer's steps per second."""
    learning_steps: int
    episodes: int
    min_return: float


PLAYED = {
    # Bound by the cores, so two processes share its envs.
    "fast": Played(processes=2, goal=3.0, learning_steps=200_000, episodes=20, min_return=475.0),
    "slow": Played(processes=None, goal=0.95, learning_steps=20_000, episodes=4, min_return=150.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large a run is."""

    name: str
    actors: int
    """Processes, and envs of either game."""
    workers: int
    seconds: float
    rounds: int
    has_peers: bool = True
    updates_per_call: int = 128
    """As in the preset; a call takes 8 steps for each."""
    width: int = 1_300
    """Of the two layers of the network whose weights are spread."""
    has_own_processes: bool = True
    """Whether each training is measured in a process of its own."""


SIZES = {
    size.name: size
    for size in (
        Size(name="full", actors=16, workers=64, seconds=10.0, rounds=3),
        Size(name="quick", actors=4, workers=8, seconds=5.0, rounds=1),
        Size(
            name="tiny",
            actors=2,
            workers=2,
            seconds=1.0,
            rounds=1,
            has_peers=False,
            updates_per_call=1,
            width=300,
            has_own_processes=False,
        ),
    )
}


PEERS = (
    Contestant(name="SB3's SubprocVecEnv", module="bench.against.sb3", environment="sb3"),
    Contestant(name="RLlib's env runners", module="bench.against.rllib", environment="rllib"),
    Contestant(name="pickle over TCP", module="bench.against.seed_tcp", environment="sb3"),
    Contestant(
        name="Ray actors, a step a call", module="bench.against.seed_ray", environment="rllib"
    ),
)


def main() -> int:
    """Measure each part; 0 if every gate passed."""
    parts = {"processes": _processes, "workers": _workers, "peers": _peers}
    return run_once("scale", about=__doc__, sizes=SIZES, parts=parts)


def _processes(_: Path, size: Size, findings: Findings) -> None:
    measured = in_turn(
        size.rounds,
        {
            name: functools.partial(
                _child if size.has_own_processes else _here,
                "processes",
                game="slow",
                envs=actors,
                actors=actors,
                seconds=size.seconds,
                updates_per_call=size.updates_per_call,
            )
            for name, actors in (("alone", 1), ("together", size.actors))
        },
    )
    alone = measured["alone"]
    together = measured["together"]
    gate = all_of(
        ("the learner updated", all(fields["updates_per_s"] > 0 for fields in (*alone, *together))),
        (
            "every collected step is in the replay",
            all(fields["inserted"] == fields["collected"] for fields in (*alone, *together)),
        ),
    )
    what = f"{size.actors} processes, steps of 5 ms"
    findings.figures += _growth(what, size.actors, alone, together, gate)
    start_s = [fields["start_s"] for fields in together]
    findings.figures.append(
        Figure(
            name=f"{what}: start of all until the first round is in",
            unit="s",
            values=start_s,
            more_is_better=False,
            gate=gate,
        )
    )


def _workers(_: Path, size: Size, findings: Findings) -> None:
    measured = in_turn(
        size.rounds,
        {
            name: functools.partial(
                _child if size.has_own_processes else _here,
                "workers",
                workers=workers,
                seconds=size.seconds,
                updates_per_call=size.updates_per_call,
            )
            for name, workers in (("alone", 1), ("together", size.workers))
        },
    )
    alone = measured["alone"]
    together = measured["together"]
    gate = all_of(
        ("the learner updated", all(fields["updates_per_s"] > 0 for fields in (*alone, *together))),
        ("no worker was lost", all(fields["lost"] == 0 for fields in (*alone, *together))),
    )
    what = f"{size.workers} workers, steps of 5 ms"
    findings.figures += _growth(what, size.workers, alone, together, gate)
    findings.figures.append(
        Figure(
            name="one worker: start until its first round is in the replay",
            unit="s",
            values=[fields["start_s"] for fields in alone],
            goal=_START_GOAL_S,
            more_is_better=False,
            gate=gate,
            bound_by="the start of Python, its imports and the steps of the first round",
        )
    )
    received = _child("weights", workers=size.workers, versions=size.rounds * 2, width=size.width)
    findings.figures.append(
        Figure(
            name=f"weights of {received['size_mb']:.1f} MB to {size.workers} workers: p99",
            unit="s",
            values=received["p99_s"],
            goal=_WEIGHTS_GOAL_S,
            more_is_better=False,
            gate=all_of(("every worker got every version", received["is_complete"])),
            bound_by="two cores for the server and one process with all receivers",
        )
    )


def _growth(
    what: str,
    times: int,
    alone: Sequence[dict[str, Any]],
    together: Sequence[dict[str, Any]],
    gate: Gate,
) -> list[Figure]:
    rows = (
        (
            "steps/s, of as many times those of one",
            "",
            [
                of_all["steps_per_s"] / (times * of_single["steps_per_s"])
                for of_all, of_single in zip(together, alone, strict=True)
            ],
            _EFFICIENCY_GOAL,
            True,
        ),
        ("steps", "steps/s", [fields["steps_per_s"] for fields in together], None, True),
        ("updates", "updates/s", [fields["updates_per_s"] for fields in together], None, True),
        ("most memory of one", "MB", [f["memory_mb"] for f in together], _MEMORY_GOAL_MB, False),
        ("largest lag", "versions", [fields["lag"] for fields in together], None, False),
    )
    return [
        Figure(
            name=f"{what}: {label}",
            unit=unit,
            values=values,
            goal=goal,
            more_is_better=more_is_better,
            gate=gate,
            bound_by="two cores for the learner and all others",
        )
        for label, unit, values, goal, more_is_better in rows
    ]


def _peers(_: Path, size: Size, findings: Findings) -> None:
    if not size.has_peers:
        findings.skipped.append("every peer: a run for the smoke test")
        return
    for game, played in PLAYED.items():
        actors = played.processes or size.actors
        request: dict[str, Any] = {
            "game": game,
            "envs": size.actors,
            "actors": actors,
            "seconds": size.seconds,
        }
        rounds: dict[str, Callable[[], dict[str, Any]]] = {
            "ours": functools.partial(
                _child,
                "processes",
                limited_environment(1),
                updates_per_call=size.updates_per_call,
                learns=True,
                **request,
            )
        }
        for peer in PEERS:
            rounds[peer.name] = functools.partial(_theirs, peer, {"do": "scale", **request})
        measured = in_turn(size.rounds, rounds)
        ours = measured.pop("ours")
        for name, theirs in measured.items():
            if reason := why_skipped(theirs):
                findings.skipped.append(f"{name}, {game} game: {reason}")
                continue
            findings.ratios.append(
                Ratio(
                    name=f"steps/s, {game} game, {size.actors} envs (goal {played.goal:g})",
                    peer=name,
                    unit="steps/s",
                    ours=[fields["steps_per_s"] for fields in ours],
                    theirs=[fields["steps_per_s"] for fields in theirs],
                    gate=_learned(game, ours, theirs),
                )
            )


def why_skipped(theirs: Sequence[dict[str, Any]]) -> str | None:
    """Why a peer's rounds are not comparable: it failed, or its learner had more to do."""
    for fields in theirs:
        if "failed" in fields:
            return str(fields["failed"])
        if fields["updates_per_s"] > 1.1 * fields["steps_per_s"] / _STEPS_PER_UPDATE:
            steps = fields["steps_per_s"] / fields["updates_per_s"]
            return f"one update per {steps:.1f} steps instead of {_STEPS_PER_UPDATE}"
    return None


def _learned(game: str, ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> Gate:
    """Both updated, we at least as often per step as one update of 64 rows per 8, and learned."""
    return all_of(
        ("the peer updated", all(fields["updates_per_s"] > 0 for fields in theirs)),
        (
            f"one update per {_STEPS_PER_UPDATE} steps",
            all(
                fields["updates_per_s"] > 0.95 * fields["steps_per_s"] / _STEPS_PER_UPDATE
                for fields in ours
            ),
        ),
        (
            "every collected step is in the replay",
            all(fields["inserted"] == fields["collected"] for fields in ours),
        ),
        (
            f"a greedy return of {PLAYED[game].min_return:g}",
            all(fields["return"] >= PLAYED[game].min_return for fields in ours),
        ),
    )


def _child(
    measure: str, environment: Mapping[str, str] | None = None, **request: Any
) -> dict[str, Any]:
    """The result of a function of `_MEASURES` in a process of its own."""
    child = subprocess.run(
        [sys.executable, __file__, "child", measure, json.dumps(request)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=_DEADLINE_S,
    )
    fields: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return fields


def _here(measure: str, **request: Any) -> dict[str, Any]:
    """The same in this process."""
    return _MEASURES[measure](**request)


def _theirs(peer: Contestant, request: dict[str, Any]) -> dict[str, Any]:
    """A peer's rates, or `failed` with the reason."""
    try:
        with Process(peer, request) as process:
            return process.ask()
    except ContestantError as error:
        return {"failed": str(error)}


# --- The measured process -------------------------------------------------------------------------


def train_for(
    game: str,
    *,
    envs: int,
    actors: int,
    seconds: float,
    updates_per_call: int,
    learns: bool = False,
) -> dict[str, Any]:
    """Train with this many actors, and report what happened in `seconds` after the warm-up.

    If it `learns`, it then trains on for the game's `learning_steps` and evaluates the policy.
    """
    # Imported here: JAX takes seconds, and the process that compares needs none.
    from understudy.learn.compile_cache import use_compile_cache
    from understudy.learn.learner import Learner
    from understudy.training.events import Event, Update
    from understudy.training.inline import Inline, InlineConfig
    from understudy.training.train_request import TrainRequest, resolve

    use_compile_cache()
    make_env = GAMES[game]
    spec = game_of(make_envs(make_env, 1))
    settings = resolve(
        TrainRequest(
            algorithm="dqn",
            settings={
                "updates_per_call": updates_per_call,
                "min_inserts": _WARM_UP_STEPS // 2,
                "samples_per_insert": _SAMPLES_PER_STEP,
                "learning_rate": 1e-3,
                "steps": _SCHEDULE_STEPS,
            },
        ),
        spec,
    )
    learner = Learner(
        settings.algorithm_type(spec, settings.config),
        settings.knobs,
        root_seed=0,
        config=settings.learner_config(),
    )
    plan = TeamPlan(
        make_envs=functools.partial(make_envs, make_env),
        game=spec,
        root_seed=0,
        created_ms=1_700_000_000_000,
        num_envs=envs,
        num_actors=actors,
    )
    lags = [0]

    def on_event(event: Event) -> None:
        if isinstance(event, Update):
            lags.append(event.lag_versions)

    began_s = time.perf_counter()
    with contextlib.closing(process_team(plan, is_asynchronous=True)) as team:
        config = InlineConfig(
            steps=10**9, horizon=_SCHEDULE_STEPS, collect=32, is_asynchronous=True
        )
        engine = Inline(learner, team, config=config, history=None, on_event=on_event)
        with contextlib.closing(engine):
            engine.step()
            start_s = time.perf_counter() - began_s
            while engine.steps < _WARM_UP_STEPS * envs or not learner.counts.updates:
                engine.step()
            steps = engine.steps
            updates = learner.counts.updates
            began_s = time.perf_counter()
            while time.perf_counter() < began_s + seconds:
                engine.step()
            took_s = time.perf_counter() - began_s
            n_steps = engine.steps - steps
            n_updates = learner.counts.updates - updates
            memory_mb = max(map(_peak_memory_mb, team.pids))
            collected = engine.steps
            inserted = learner.counts.inserted_steps
            # What the policy learned does not depend on the seconds that were measured.
            while learns and engine.steps < PLAYED[game].learning_steps:
                engine.step()
            policy = engine.policy
    measured = {
        "steps_per_s": n_steps / took_s,
        "updates_per_s": n_updates / took_s,
        "collected": collected,
        "inserted": inserted,
        "memory_mb": memory_mb,
        "start_s": start_s,
        "lag": max(lags),
    }
    if learns:
        n = PLAYED[game].episodes
        with contextlib.closing(make_envs(make_env, n)) as evaluated:
            returns = evaluate(policy, evaluated, seeds=range(1_000, 1_000 + n)).returns
        measured["return"] = float(returns.mean())
    return measured


class _Measured(Exception):
    """Ends a run, without its last evaluations."""


def work_for(workers: int, *, seconds: float, updates_per_call: int) -> dict[str, Any]:
    """Train with workers, and report what happened in `seconds` once all have joined."""
    import understudy
    from understudy import events
    from understudy.models.keys import new_key_text

    key = new_key_text()
    os.environ["UNDERSTUDY_WORKER_KEY"] = key
    port = _free_port()
    command = [sys.executable, "-m", "understudy.cli.main", "worker", f"http://127.0.0.1:{port}"]
    command += ["--game", "bench.against.sleepy:slow"]
    started: list[subprocess.Popen[bytes]] = []
    started_s = 0.0
    arrival = ThreadPoolExecutor(1)
    arrived_s: Future[float] | None = None
    lags = [0]
    lost = 0
    first: tuple[float, int, int] | None = None
    last: tuple[float, int, int] | None = None
    memory_mb = 0.0

    def on_event(event: events.Event) -> None:
        nonlocal started_s, arrived_s, first, last, memory_mb, lost
        now_s = time.perf_counter()
        lost += isinstance(event, events.Guarded)
        if isinstance(event, events.WorkersReport):
            if not started:  # the server listens
                started_s = now_s
                started.extend(
                    subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
                    for _ in range(workers)
                )
                arrived_s = arrival.submit(_first_arrival_s, port, key)
            has_all = sum(event.report.workers.values()) >= workers
            if has_all and first is None and last is not None:
                first = last
        if isinstance(event, events.Update):
            last = (now_s, event.env_steps, event.updates)
            lags.append(event.lag_versions)
            if first is not None and now_s - first[0] >= seconds:
                memory_mb = max(_peak_memory_mb(process.pid) for process in started)
                raise _Measured

    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(_Measured):
        try:
            understudy.train(
                slow,
                algorithm="dqn",
                seed=0,
                steps=10**9,
                until=float("inf"),
                settings={
                    "envs": workers,
                    "actors": workers,
                    "updates_per_call": updates_per_call,
                    "min_inserts": _WARM_UP_STEPS // 2,
                    "samples_per_insert": _SAMPLES_PER_STEP,
                    "horizon": _SCHEDULE_STEPS,
                    "eval_every": 10**9,
                },
                out=Path(folder) / "run",
                on_event=on_event,
                options=understudy.TrainOptions(engine="workers", listen=f"127.0.0.1:{port}"),
            )
        finally:
            for process in started:
                process.terminate()
            for process in started:
                process.wait()
    assert arrived_s is not None
    assert first is not None
    assert last is not None
    took_s = last[0] - first[0]
    return {
        "steps_per_s": (last[1] - first[1]) / took_s,
        "updates_per_s": (last[2] - first[2]) / took_s,
        "memory_mb": memory_mb,
        "start_s": arrived_s.result() - started_s,
        "lag": max(lags),
        "lost": lost,
    }


def _first_arrival_s(port: int, key: str) -> float:
    """When the run's metrics first show steps in the replay, up to 10 ms late."""
    from understudy.client.http import Connection, parse_url

    address, host, port, is_tls = parse_url(f"http://127.0.0.1:{port}", insecure=False)
    connection = Connection(address, host, port, is_tls=is_tls, key=key, timeout_s=10.0)
    with contextlib.closing(connection):
        while b"understudy_arrived_steps_total 0.0" in connection.request("GET", "/metrics")[1]:
            time.sleep(0.01)
    return time.perf_counter()


def spread_weights(workers: int, *, versions: int, width: int) -> dict[str, Any]:
    """Publish new weights, and report when each of the workers has received them."""
    from understudy.models.keys import new_key_text
    from understudy.training.train_request import TrainRequest, resolve
    from understudy.workers.team import RunPlan, WorkersConfig, WorkerTeam
    from understudy.workers.wire import RunInfo

    spec = game_of(make_envs(GAMES["slow"], 1))
    request = TrainRequest(algorithm="dqn", settings={"widths": [width, width]})
    settings = resolve(request, spec)
    algorithm = settings.algorithm_type(spec, settings.config)
    import jax

    policy = algorithm.policy(algorithm.init(jax.random.PRNGKey(0), None))
    key = new_key_text()
    plan = TeamPlan(
        make_envs=functools.partial(make_envs, GAMES["slow"]),
        game=spec,
        root_seed=0,
        created_ms=1_700_000_000_000,
        num_envs=workers,
        num_actors=workers,
    )
    run = RunPlan(
        info=RunInfo(run="bench", game=None, name="slow"),
        steps=32,
        seeds=lambda n, k: [],
        wait_s=0.01,
    )
    p99_s = []
    is_complete = True
    with contextlib.closing(WorkerTeam(plan, run, WorkersConfig(port=0), key=key)) as team:
        team.collect(policy, 32, round_no=0)
        words = ["child", "receive", json.dumps({"url": team.url, "key": key, "workers": workers})]
        with subprocess.Popen(
            [sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True
        ) as receivers:
            assert receivers.stdout is not None
            receivers.stdout.readline()  # all have joined
            for version in range(1, versions + 1):
                began_s = time.monotonic()
                team.collect(replace(policy, version=version), 32, round_no=version)
                got = json.loads(receivers.stdout.readline())
                is_complete &= got["versions"] == [version] * workers
                p99_s.append(float(np.quantile(np.array(got["at_s"]) - began_s, 0.99)))
            receivers.kill()
    return {"p99_s": p99_s, "is_complete": is_complete, "size_mb": len(policy.encode()) / 1e6}


def receive(url: str, key: str, workers: int) -> dict[str, Any]:
    """Join as so many workers, and print when they have received each version; never ends."""
    from understudy.client.http import Connection, parse_url
    from understudy.workers import wire

    address, host, port, is_tls = parse_url(url, insecure=False)
    spec = game_of(make_envs(GAMES["slow"], 1)).to_json().decode()
    request = wire.JoinRequest(protocol=wire.PROTOCOL, understudy=understudy_version(), spec=spec)

    def join(_: int) -> tuple[Any, str]:
        connection = Connection(address, host, port, is_tls=is_tls, key=key, timeout_s=30.0)
        raw = connection.request(
            "POST",
            "/v1/runs/bench/join",
            json.dumps(asdict(request)).encode(),
            kind="application/json",
            max_bytes=wire.MAX_POLICY_BYTES,
        )[1]
        return connection, wire.read_object(wire.JoinAnswer, wire.unpack(raw)[0]).lease

    def wait(joined: tuple[Any, str], after: int) -> tuple[float, int]:
        connection, lease = joined
        path = f"/v1/runs/bench/weights?lease={lease}&after={after}&wait_s=10"
        raw = connection.request("GET", path, wait_s=30.0, max_bytes=wire.MAX_POLICY_BYTES)[1]
        return time.monotonic(), wire.read_object(wire.WeightsHead, wire.unpack(raw)[0]).version

    with ThreadPoolExecutor(workers) as threads:
        all_joined = list(threads.map(join, range(workers)))
        print("{}", flush=True)
        for after in range(1_000_000):
            got = list(threads.map(wait, all_joined, [after] * workers))
            at_s, versions = zip(*got, strict=True)
            print(json.dumps({"at_s": at_s, "versions": versions}), flush=True)
    return {}


def understudy_version() -> str:
    import understudy

    return understudy.__version__


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _peak_memory_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


_MEASURES: dict[str, Callable[..., dict[str, Any]]] = {
    "processes": train_for,
    "workers": work_for,
    "weights": spread_weights,
    "receive": receive,
}

if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        print(json.dumps(_MEASURES[sys.argv[2]](**json.loads(sys.argv[3]))))
    else:
        sys.exit(main())
