"""A PEER, never part of the product: the seed's learner protocol, rebuilt from its description.

One TCP connection per request: a 4-byte big-endian length, then a pickle of InitMsg, BufferMsg or
EvalResultsMsg; the answer is a pickled PolicyMsg. Any client of such a port can run code in the
learner, which is why our protocol is different. This file is only run as a program, on loopback, by
`bench/gateway.py` and `bench/scale.py`; nothing imports it.

    python bench/against/seed_tcp.py serve              prints one line of JSON with the port; ends
                                                        when its standard input closes
    python bench/against/seed_tcp.py load PORT COUNT    sends COUNT rollouts of 512 steps, eight
                                                        workers at a time
    python bench/against/seed_tcp.py fetch PORT COUNT   COUNT workers request the policy at once
    python -m bench.against.seed_tcp                    trains with workers, for `bench/scale.py`
    python -m bench.against.seed_tcp work PORT GAME SEED    one of these workers: plays an episode,
                                                        sends it and gets a policy, again and again
"""

import json
import pickle
import queue
import socket
import socketserver
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

STEPS = 512
WORKERS = 8
_LENGTH = struct.Struct(">I")


@dataclass
class InitMsg:
    """A worker has started."""


@dataclass
class BufferMsg:
    """A rollout: a replay buffer in the form of Tianshou."""

    buffer: dict[str, Any]


@dataclass
class EvalResultsMsg:
    """The result of an evaluation."""

    results: dict[str, float]


@dataclass
class PolicyMsg:
    """The answer to every message."""

    policy_id: int
    policy: dict[str, Any]
    is_train: bool


def policy() -> dict[str, Any]:
    """A state dict of about 20 KB: 4-64-64-2."""
    rng = np.random.default_rng(0)
    sizes = (4, 64, 64, 2)
    return {
        f"{at}.{name}": rng.normal(size=shape).astype(np.float32)
        for at, (rows, columns) in enumerate(pairwise(sizes))
        for name, shape in (("weight", (columns, rows)), ("bias", (columns,)))
    }


def rollout(seed: int) -> BufferMsg:
    obs = np.random.default_rng(seed).normal(0, 0.5, (STEPS + 1, 4)).astype(np.float32)
    ended = np.arange(STEPS) % 190 == 189
    return BufferMsg(
        {
            "obs": obs[:-1],
            "obs_next": obs[1:],
            "act": np.arange(STEPS) & 1,
            "rew": np.ones(STEPS),
            "done": ended,
        }
    )


def send(line: socket.socket, message: Any) -> None:
    raw = pickle.dumps(message)
    line.sendall(_LENGTH.pack(len(raw)) + raw)


def receive(line: socket.socket) -> Any:
    (length,) = _LENGTH.unpack(_exactly(line, _LENGTH.size))
    return pickle.loads(_exactly(line, length))


def _exactly(line: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        more = line.recv(min(65_536, count - len(parts)))
        if not more:
            raise ConnectionError("the connection was closed early")
        parts += more
    return bytes(parts)


class Learner(socketserver.ThreadingTCPServer):
    """Puts rollouts into an unbounded queue and answers with its policy."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.rollouts: queue.Queue[dict[str, Any]] = queue.Queue()
        self.answer = PolicyMsg(1, policy(), True)


class Handler(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        assert isinstance(self.server, Learner)
        message = receive(self.request)
        if isinstance(message, BufferMsg):
            self.server.rollouts.put(message.buffer)
        send(self.request, self.server.answer)


class Trainer:
    """A learner that trains while its workers play; requests are answered by other threads."""

    def __init__(self, request: dict[str, Any]) -> None:
        from bench.against.sleepy import GAMES
        from bench.against.torch_dqn import Dqn

        self._seconds = request["seconds"]
        self._dqn = Dqn(GAMES[request["game"]]())
        self._learner = Learner()
        self._learner.answer = PolicyMsg(0, self._dqn.weights(), True)
        threading.Thread(target=self._learner.serve_forever, daemon=True).start()
        command = [sys.executable, "-m", "bench.against.seed_tcp", "work"]
        port = str(self._learner.server_address[1])
        self._workers = [
            subprocess.Popen([*command, port, request["game"], str(seed)])
            for seed in range(request["envs"])
        ]

    def take(self) -> None:
        # The first rollout comes when 16 processes have imported torch, on two cores.
        self._dqn.insert(self._learner.rollouts.get(timeout=300.0))
        before = self._learner.answer.policy_id
        self._learner.answer = PolicyMsg(before + 1, self._dqn.weights(), True)

    def run(self) -> dict[str, Any]:
        from bench.against.torch_dqn import measured

        try:
            return measured(self._dqn, self.take, seconds=self._seconds)
        finally:
            for worker in self._workers:
                worker.kill()
                worker.wait()


def train() -> None:
    from bench.against.link import serve

    serve(["torch", "gymnasium", "numpy"], {"scale": lambda _link, request: Trainer(request).run})


def work(port: int, game: str, seed: int) -> None:
    from bench.against.sleepy import GAMES
    from bench.against.torch_dqn import Player

    player = Player(GAMES[game](), seed=seed)
    message: Any = InitMsg()
    while True:
        player.load(ask(port, message).policy)
        message = BufferMsg(player.episode())


def ask(port: int, message: Any) -> PolicyMsg:
    with socket.create_connection(("127.0.0.1", port)) as line:
        send(line, message)
        answer = receive(line)
    assert isinstance(answer, PolicyMsg)
    return answer


def serve() -> None:
    with Learner() as learner:
        threading.Thread(target=learner.serve_forever, daemon=True).start()
        print(json.dumps({"port": learner.server_address[1]}), flush=True)
        sys.stdin.read()
        print(
            json.dumps({"steps": sum(len(buffer["rew"]) for buffer in learner.rollouts.queue)}),
            flush=True,
        )
        learner.shutdown()


def load(port: int, count: int) -> None:
    rollouts = [rollout(at) for at in range(count)]
    began_s = time.perf_counter()
    with ThreadPoolExecutor(WORKERS) as workers:
        list(workers.map(lambda message: ask(port, message), rollouts))
    print(json.dumps({"wall_s": time.perf_counter() - began_s}))


def fetch(port: int, count: int) -> None:
    barrier = threading.Barrier(count)

    def worker(_: int) -> float:
        barrier.wait()
        began_s = time.perf_counter()
        ask(port, InitMsg())
        return time.perf_counter() - began_s

    with ThreadPoolExecutor(count) as workers:
        print(json.dumps({"took_s": list(workers.map(worker, range(count)))}))


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve"]:
            serve()
        case ["load", port, count]:
            load(int(port), int(count))
        case ["fetch", port, count]:
            fetch(int(port), int(count))
        case []:
            train()
        case ["work", port, game, seed]:
            work(int(port), game, int(seed))
        case _:
            sys.exit(__doc__)
