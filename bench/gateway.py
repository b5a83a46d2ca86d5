"""Measures the gateway: a thousand players during training, the cost of a frame, policy updates.

    python bench/gateway.py            about three minutes on two cores; writes
                                       bench/results/gateway.json
    python bench/gateway.py --quick    fewer players; writes nothing unless --out is given

This is the real platform in its own processes, on two cores. The peer is the pickle-over-TCP
protocol of an earlier design (seed b of docs/seeds.md), rebuilt from its description as a separate
program (`bench/against/seed_tcp.py`).
"""

import asyncio
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # Run as a file, sys.path starts with bench/; replace it with the folder that contains bench/.
    sys.path[0] = str(ROOT)

import numpy as np  # noqa: E402

from bench.figures import Figure, Findings, Gate, Ratio, Took, all_of, rate_ratios  # noqa: E402
from bench.games import CART, person_frames  # noqa: E402
from bench.load import Endpoint, lines, play_all  # noqa: E402
from bench.one_pass import run_once  # noqa: E402
from bench.served import ask_peer, memory_mib, processor_s, seed_server, served, stop_peer  # noqa: E402
from understudy.backends.deployment import Deployment  # noqa: E402
from understudy.client.sender import SenderConfig  # noqa: E402
from understudy.models.manifest import Lineage  # noqa: E402
from understudy.nn.heads import head_for  # noqa: E402
from understudy.nn.network import Activation, Dense, Input, NetworkSpec  # noqa: E402
from understudy.nn.policy import Policy  # noqa: E402
from understudy.simulation.ledger import Ledger  # noqa: E402
from understudy.simulation.verify import verify  # noqa: E402

PEER_NAME = "the seed's pickle over TCP"
STEPS_S = 20
CORES = 2
BATCH_FRAMES = 16
CONNECTIONS = 8
WORKERS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How large a run is."""

    name: str
    players: int
    seconds: int
    frames: int
    """512-step frames in one round."""
    rounds: int


SIZES = {
    size.name: size
    for size in (
        Size(name="full", players=1_000, seconds=60, frames=2_048, rounds=5),
        Size(name="quick", players=100, seconds=10, frames=1_024, rounds=2),
        Size(name="tiny", players=10, seconds=3, frames=128, rounds=1),
    )
}


def main() -> int:
    """Run all three parts; 0 if every gate passed."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:CORES])
    parts = {"players": players, "cost": cost, "news": news}
    return run_once("gateway", about=__doc__, sizes=SIZES, parts=parts)


# --- A thousand players while the learner trains --------------------------------------------------


def players(folder: Path, size: Size, findings: Findings) -> None:
    """Latency of acks and memory of the gateway; every ack is verified against the store."""
    linger_s = SenderConfig().linger_s
    steps = int(STEPS_S * linger_s)
    played = [
        person_frames(int(size.seconds / linger_s), steps=steps, seed=at)
        for at in range(size.players)
    ]
    with served(folder, "gateway", "ingest", "learner") as server:
        memory: list[float] = []
        updates: list[int] = []

        def learner_updates() -> int:
            return int(server.platform.supervisor.statuses["learner"].report.get("updates", 0))

        def look() -> None:
            server.platform.supervisor.step()
            memory.append(memory_mib(server.gateway))
            updates.append(learner_updates())

        first = person_frames(8, steps=512, seed=size.players)
        asyncio.run(_batches(server.endpoint, [first]))
        # Enough for a first clone, so that the learner is training when the players connect.
        server.step_until(lambda: learner_updates() > 0)
        began_s = time.monotonic()
        cpu_s = processor_s(server.gateway)
        answers = asyncio.run(
            play_all(server.endpoint, played, linger_s=linger_s, rng=random.Random(0), each=look)
        )
        took_s = time.monotonic() - began_s
        cpu_s = processor_s(server.gateway) - cpu_s
        server.platform.supervisor.stop()
    ledger = Ledger(server.platform.data.ledger)
    ledger.note([*first, *answers.acked])
    ledger.close()
    verification = verify(server.platform.data)
    frames = sum(len(each) for each in played)
    gate = all_of(
        (f"{frames} frames acknowledged", len(answers.acked) == frames),
        (
            "0 lost, 0 stored twice, ledger against store",
            not (verification.lost_steps or verification.duplicate_steps),
        ),
        ("nothing damaged", verification.exit_code == 0),
        ("the learner trained meanwhile", len(set(updates)) > 1),
    )
    quarter = max(1, len(memory) // 4)
    growth = (
        statistics.median(memory[-quarter:])
        / statistics.median(memory[quarter : 2 * quarter] or memory)
        - 1
    )
    what = f"{size.players} players, {STEPS_S} steps/s each, learner training"
    bound = "gateway, ingest, learner and the players themselves share two cores"
    low, high = np.percentile(answers.took_s, [50, 99]) * 1e3
    late_ms = float(np.percentile(answers.late_s, 99)) * 1e3
    findings.figures += [
        _figure(f"{what}: p50 ack", "ms", [low], gate),
        _figure(f"{what}: p99 ack", "ms", [high], gate, goal=250.0, bound_by=bound),
        _figure("memory of the gateway: growth", "%", [max(0.0, growth * 100)], gate, goal=10.0),
        _figure(
            "gateway CPU per step of such players",
            "µs",
            [cpu_s / max(1, verification.ledger_steps) * 1e6],
            gate,
        ),
    ]
    findings.notes.append(
        f"players: {verification.ledger_steps} steps acknowledged in {took_s:.0f} s, "
        f"{verification.lost_steps} lost, {answers.again} batches sent again; the players "
        f"themselves were up to {late_ms:.0f} ms late (p99), which is included in the acks; "
        f"gateway {statistics.median(memory):.0f} MiB"
    )


# --- What a frame costs ---------------------------------------------------------------------------


def cost(folder: Path, size: Size, findings: Findings) -> None:
    """The gateway's CPU time per frame of 512 steps, and the same steps sent to the peer."""
    ours: list[Took] = []
    theirs: list[Took] = []
    acked = 0
    with served(folder, "gateway") as server, seed_server() as (peer, port):
        for turn in range(size.rounds):
            sent = [
                person_frames(size.frames // CONNECTIONS, steps=512, seed=turn * CONNECTIONS + at)
                for at in range(CONNECTIONS)
            ]
            cpu_s = processor_s(server.gateway)
            wall_s, accepted = asyncio.run(_batches(server.endpoint, sent))
            ours.append(Took(processor_s(server.gateway) - cpu_s, wall_s))
            acked += accepted
            cpu_s = processor_s(peer.pid)
            wall_s = float(ask_peer("load", port, size.frames)["wall_s"])
            theirs.append(Took(processor_s(peer.pid) - cpu_s, wall_s))
        peer_steps = stop_peer(peer)["steps"]
    expected = size.frames * size.rounds
    gate = all_of(
        (f"{expected} frames acknowledged", acked == expected),
        ("the peer received as many steps", peer_steps == expected * 512),
    )
    microseconds = [took.cpu_s / size.frames * 1e6 for took in ours]
    bound = "checksum, checks, the stream's checksum and write, HTTP"
    name = "a frame of 512 steps, 16 a batch: gateway CPU"
    findings.figures.append(_figure(name, "µs", microseconds, gate, goal=250.0, bound_by=bound))
    findings.ratios += rate_ratios(
        "rollouts of 512 steps received",
        PEER_NAME,
        size.frames,
        ours,
        theirs,
        unit="rollouts/s",
        gate=gate,
    )
    findings.notes.append(
        "the peer unpickles a rollout into a list in memory and answers with its policy; it checks "
        "nothing, stores nothing and executes any code it receives; ours are checked, acknowledged "
        "and synced to disk before the ack"
    )


async def _batches(endpoint: Endpoint, sent: Sequence[Sequence[Any]]) -> tuple[float, int]:
    opened = await lines(endpoint, len(sent))
    requests = [
        [
            endpoint.frame_batch(frames[first : first + BATCH_FRAMES], f"p-{at}")
            for first in range(0, len(frames), BATCH_FRAMES)
        ]
        for at, frames in enumerate(sent)
    ]
    answers: list[bytes] = []

    async def send(at: int) -> None:
        for request in requests[at]:
            _, body = await opened[at].ask(request)
            answers.append(body)

    began_s = time.perf_counter()
    await asyncio.gather(*(send(at) for at in range(len(opened))))
    took_s = time.perf_counter() - began_s
    for line in opened:
        line.close()
    return took_s, sum(body.count(b'"accepted":true') for body in answers)


# --- New policies for waiting workers -------------------------------------------------------------


def news(folder: Path, size: Size, findings: Findings) -> None:
    """The time from a promotion, including its sync to disk, until each waiting worker has it."""
    ours: list[float] = []
    theirs: list[float] = []
    is_right = True
    with served(folder, "gateway") as server, seed_server() as (peer, port):
        registry = server.opened.registry
        epoch = registry.takeover(CART.game, owner="bench")
        for turn in range(size.rounds):
            number = registry.catalogue(CART.game).number
            took_s, bodies, raw = asyncio.run(
                _news(server.endpoint, server.opened, epoch, number, turn)
            )
            is_right &= bodies == [raw] * WORKERS
            ours.append(float(np.percentile(took_s, 99)) * 1e3)
            theirs.append(
                float(np.percentile(ask_peer("fetch", port, WORKERS)["took_s"], 99)) * 1e3
            )
        stop_peer(peer)
    gate = Gate(is_right, f"{WORKERS} workers received the {len(raw)} signed bytes every time")
    name = f"a new policy of {len(raw) / 1e3:.0f} KB to {WORKERS} waiting workers: p99"
    findings.figures.append(
        _figure(name, "ms", ours, gate, goal=100.0, bound_by="how often the registry is polled")
    )
    findings.ratios.append(
        Ratio(
            name=f"policy to {WORKERS} workers, p99",
            peer=f"{PEER_NAME} (polled, not pushed)",
            unit="ms",
            ours=ours,
            theirs=theirs,
            gate=gate,
            more_is_better=False,
        )
    )


async def _news(
    endpoint: Endpoint, opened: Deployment, epoch: int, after: int, turn: int
) -> tuple[list[float], list[bytes], bytes]:
    workers = await lines(endpoint, WORKERS)
    loop = asyncio.get_running_loop()
    policy = _policy(turn)
    manifest = opened.registry.release(policy, Lineage(algorithm="bc"), epoch=epoch)
    received_s: list[float] = []
    answers = [worker.ask(endpoint.weights(after + 1, 30.0)) for worker in workers]
    for answer in answers:
        answer.add_done_callback(lambda _: received_s.append(loop.time()))
    await asyncio.sleep(0.5)  # by then all workers are waiting
    promoted_s = loop.time()
    await asyncio.to_thread(
        opened.registry.set_alias, CART.game, "champion", manifest.model_no, why="bench"
    )
    bodies = [body for _, body in await asyncio.wait_for(asyncio.gather(*answers), 30.0)]
    for worker in workers:
        worker.close()
    return [at_s - promoted_s for at_s in received_s], bodies, policy.encode()


def _policy(seed: int) -> Policy:
    """A policy of about 20 KB: layers 4-64-64-2."""
    head = head_for(CART, "categorical")
    hidden = (Dense(64), Activation("tanh"), Dense(64), Activation("tanh"))
    columns = {
        name: Input(space.shape, space.dtype, ()) for name, space in CART.obs_columns.items()
    }
    network = NetworkSpec(columns, hidden, {name: (Dense(head.size),) for name in head.outputs})
    rng = np.random.default_rng(seed)
    weights = {
        name: rng.normal(0, 0.1, shape).astype(np.float32)
        for name, shape in network.shapes().items()
    }
    return Policy(CART, network, weights, head)


def _figure(
    name: str,
    unit: str,
    values: Sequence[float],
    gate: Gate,
    *,
    goal: float | None = None,
    bound_by: str = "",
) -> Figure:
    return Figure(
        name=name,
        unit=unit,
        values=[float(value) for value in values],
        gate=gate,
        goal=goal,
        more_is_better=False,
        bound_by=bound_by,
    )


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
