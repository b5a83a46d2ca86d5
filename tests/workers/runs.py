"""A team that serves workers, and a worker that a test plays step by step."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import urllib3

import understudy
from tests.act.policies import random_policy
from tests.serve.gateways import Reply
from understudy.act.actor import Actor
from understudy.act.team import TeamPlan, encode_collected
from understudy.act.vector import game_of, make_envs
from understudy.core.canonical import canonical_json
from understudy.models.keys import new_key_text
from understudy.nn.policy import Policy, decode_policy
from understudy.ports import Collected
from understudy.workers.server import RunKeys, RunLimits
from understudy.workers.team import RunPlan, WorkersConfig, WorkerTeam
from understudy.workers.wire import (
    PROTOCOL,
    JoinAnswer,
    RoundHead,
    RunInfo,
    pack,
    read_object,
    unpack,
)

GAME = "CartPole-v1"
RUN = "0123456789abcdef"
KEY = new_key_text()
PLAY_KEY = new_key_text()
SPEC = game_of(make_envs(GAME, 1))
STEPS = 8


def seeds_of(count: int, number: int) -> list[int]:
    first = (1 << 31) + number * count
    return list(range(first, first + count))


def team_plan(**changes: Any) -> TeamPlan:
    facts = {
        "make_envs": functools.partial(make_envs, GAME),
        "game": SPEC,
        "root_seed": 5,
        "created_ms": 1_700_000_000_000,
        "num_envs": 4,
        "num_actors": 2,
    }
    return TeamPlan(**{**facts, **changes})


def policy_of(version: int) -> Policy:
    return random_policy(SPEC, "epsilon_greedy", seed=version, version=version)


@contextlib.contextmanager
def serving(
    *,
    plan: TeamPlan | None = None,
    port: int = 0,
    clock: Any = None,
    config: WorkersConfig | None = None,
    **changes: Any,
) -> Iterator["Serving"]:
    """A team whose server listens on a free port; nothing is published yet."""
    plan = plan or team_plan()
    names = ("queue_bytes", "lease_s", "evaluate_share")
    limits = {name: changes.pop(name) for name in names if name in changes}
    facts = {
        "info": RunInfo(run=RUN, game=GAME, name=GAME, num_envs=plan.num_envs // plan.num_actors),
        "steps": STEPS,
        "seeds": seeds_of,
        "wait_s": 0.02,
        "limits": RunLimits(**limits),
    }
    team = WorkerTeam(
        plan,
        RunPlan(**{**facts, **changes}),
        config or WorkersConfig(port=port),
        key=KEY,
        clock=clock,
    )
    team._state.keys = RunKeys({KEY: ("work",), PLAY_KEY: ("play",)})
    with contextlib.closing(team):
        yield Serving(team)


@dataclass
class Serving:
    """A team, with a learner's thread that a test may start."""

    team: WorkerTeam
    rounds: list[Collected] = field(default_factory=list)
    """What the learner has inserted."""
    pool: urllib3.PoolManager = field(
        default_factory=lambda: urllib3.PoolManager(maxsize=64, retries=False)
    )

    def collect(self, version: int = 1, explore: Any = 0.5) -> Collected:
        return self.team.collect(policy_of(version), STEPS, round_no=0, explore=explore)

    def insert(self, collected: Collected) -> None:
        self.rounds.append(collected)
        assert collected.on_inserted is not None
        collected.on_inserted(0.0)

    @contextlib.contextmanager
    def learning(self, version: Callable[[], int] = lambda: 1) -> Iterator[None]:
        """A learner's thread that inserts everything."""
        stop = threading.Event()

        def run() -> None:
            while not stop.is_set():
                self.insert(self.collect(version()))

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join(20)

    @property
    def chunk_ids(self) -> list[Any]:
        return [chunk.meta.id for part in list(self.rounds) for chunk in part.chunks]

    @property
    def steps(self) -> int:
        return sum(part.env_steps for part in list(self.rounds))

    def ask(
        self, method: str, path: str, body: bytes | None = None, *, key: str | None = KEY
    ) -> Reply:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        got = self.pool.request(
            method, self.team.url + path, body=body, headers=headers, timeout=30.0
        )
        return Reply(got.status, got.data, got.headers)

    def join_request(self, **changes: Any) -> bytes:
        facts = {
            "protocol": PROTOCOL,
            "understudy": understudy.__version__,
            "spec": SPEC.to_json().decode(),
        }
        return canonical_json({**facts, **changes})

    def join(self) -> "Scripted":
        reply = self.ask("POST", f"/v1/runs/{RUN}/join", self.join_request())
        assert reply.status == 200, reply.raw
        text, body = unpack(reply.raw)
        return Scripted(self, read_object(JoinAnswer, text), decode_policy(body))


class Scripted:
    """A worker that plays and sends a round when a test says so."""

    def __init__(self, run: Serving, joined: JoinAnswer, policy: Policy) -> None:
        self.run = run
        self.joined = joined
        self.policy = policy
        self.number = 0
        self.actor = Actor(
            make_envs(GAME, joined.num_envs),
            SPEC,
            root_seed=joined.root_seed,
            created_ms=joined.created_ms,
            env_index0=joined.first_env,
            incarnation=joined.incarnation,
        )

    def play(self) -> Collected:
        explore = self.joined.explore
        return self.actor.collect(
            self.policy,
            self.joined.steps,
            round_no=self.number,
            explore=np.array(explore) if isinstance(explore, list) else explore,
        )

    def send(self, collected: Collected | bytes, *, number: int | None = None) -> Reply:
        if isinstance(collected, Collected):
            collected = encode_collected(collected)
        head = RoundHead(lease=self.joined.lease, number=self.number if number is None else number)
        if number is None:
            self.number += 1
        return self.run.ask("POST", f"/v1/runs/{RUN}/chunks", pack(head, collected))

    def results(self, **facts: Any) -> Reply:
        body = canonical_json({"lease": self.joined.lease, **facts})
        return self.run.ask("POST", f"/v1/runs/{RUN}/results", body)

    def weights(self, after: int, wait_s: float = 0.0) -> Reply:
        query = f"lease={self.joined.lease}&after={after}&wait_s={wait_s}"
        return self.run.ask("GET", f"/v1/runs/{RUN}/weights?{query}")

    def leave(self) -> Reply:
        body = canonical_json({"lease": self.joined.lease})
        return self.run.ask("POST", f"/v1/runs/{RUN}/leave", body)
