"""Our bc and iql beside d3rlpy's algorithms, on the same recorded steps of scripted people.

    python bench/offline_peers.py                   four games, 3 seeds, 3 minutes of training each,
                                                    then the speed of updates; about 3 hours; writes
                                                    bench/results/offline-peers.json after each row
    python bench/offline_peers.py returns --game vault --seeds 1
                                                    one game; --game may be repeated
    python bench/offline_peers.py rates             the speed only, in minutes
    python bench/offline_peers.py --quick           5 seconds of training, 20 episodes, 1 seed;
                                                    writes nothing unless --out is given

`returns`: the people of a game (`bench/people.py`) play 30,000 steps once for each seed, and both
sides learn from these rows. Equal for all are the seconds of each training (wall clock, compilation
included), the threads and cores (one unless --threads is given), the batch of 256, and two layers
of 256 units (for a grid, a convolution of 16 channels, 3 x 3, before them; d3rlpy's pixel encoder
has one layer after it). Everything else is each side's default.

* Ours: the learner of the service with its presets and schedules. It stops at the service's number
  of updates, or earlier when the seconds are over; schedules then end with the seconds, which
  include the choice of mirror images. Bots play
  at the service's temperature. `released` is what the service would release: the first of bc and
  iql in the ranking by recorded steps where games are ranked, else iql. Its seconds are those of
  both trainings and of the ranking.
* d3rlpy: DiscreteBC, DiscreteCQL and DiscreteBCQ, or BC and IQL for continuous actions (with an
  action scaler, because its policies end in tanh). It trains until the seconds are over, and plays
  greedily. Observations of several parts become one vector, codes and discrete values one-hot; a
  game with a single grid is an image for it (`inputs` in the result). It has no action masks: the
  best valid action is played.

On the scale of the result the average person is 0 and the best one is 1. In three of four games
`released` should not be below the best of d3rlpy's algorithms, means over all seeds.

`rates`: updates per second, ours and theirs in turn, five rounds of five seconds; sampling of the
batches is included, compilation is not. On a busy machine the rates by processor time, which the
result has too, say more (`others_cores`: the cores that other processes used). Goals apply where
both sides train the same algorithm; DiscreteCQL trains one network, and our iql four.

d3rlpy and torch are used from the current interpreter if they can be imported there; otherwise they
are installed into bench/.peers. Both sides run on the processor. A second call measures only what
is missing: rows of other commits are measured again unless --keep is given.
"""

import argparse
import dataclasses
import importlib.util
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # Run as a file, sys.path starts with bench/; replace it with the folder that contains bench/.
    sys.path[0] = str(ROOT)
    os.environ["JAX_PLATFORMS"] = "cpu"

import numpy as np  # noqa: E402
from rich.table import Table  # noqa: E402

from bench import guard  # noqa: E402
from bench.against.link import pack, unpack  # noqa: E402
from bench.bootstrap import times_better  # noqa: E402
from bench.contest import on_cores  # noqa: E402
from bench.contestants import Contestant, ContestantError, Process  # noqa: E402
from bench.figures import significant  # noqa: E402
from bench.machine import commit, load_average, machine  # noqa: E402
from bench.offline import (  # noqa: E402
    Row,
    Sent,
    batch_of,
    chunk_of,
    learner_of,
    recorded_episodes,
    returns_at_once,
    with_view,
)
from bench.people import GAMES, PeopleGame  # noqa: E402
from bench.players import print_wide, scale_of, true_returns, truth_chances  # noqa: E402
from understudy.algorithm import Batch  # noqa: E402
from understudy.core.errors import UnderstudyError  # noqa: E402
from understudy.core.names import new_session  # noqa: E402
from understudy.core.tensors import Array  # noqa: E402
from understudy.experience.game import GameSpec  # noqa: E402
from understudy.experience.spaces import Box, Discrete, Space  # noqa: E402
from understudy.learn.architecture import GRID, cell_codes, grid_channel  # noqa: E402
from understudy.learn.centre import may_have_centre  # noqa: E402
from understudy.learn.learner import Learner  # noqa: E402
from understudy.release.candidate_ranking import CandidateRanking, may_rank  # noqa: E402
from understudy.release.schedule import LearningSchedule  # noqa: E402
from understudy.training.settings import RunSettings  # noqa: E402
from understudy.training.train_request import TrainRequest, resolve  # noqa: E402

RESULT = ROOT / "bench" / "results" / "offline-peers.json"
MEASURES = ("returns", "rates")
FOUR = ("lander", "vault", "breakout", "pendulum")
"""The games that are measured unless --game is given."""
OURS = ("bc", "iql", "released")
PEERS = {True: ("DiscreteBC", "DiscreteCQL", "DiscreteBCQ"), False: ("BC", "IQL")}
"""d3rlpy's algorithms, for discrete and for continuous actions."""
STEPS = 30_000
WIDTHS = (256, 256)
BATCH = 256
"""Those of the service's presets."""
N_PLAYERS = 5
MIN_GAMES = 3
"""Games in which `released` should be the best."""
_SLACK_S = 300.0
"""How much longer than its training a peer may take to answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """An algorithm of ours and one of d3rlpy whose updates are counted."""

    game: str
    ours: str
    peer: str
    widths: tuple[int, ...]
    batch: int
    goal: float | None = None
    """How many times as many updates ours should do; None: only reported."""


PAIRS = (
    *(
        Pair(game=game, ours=ours, peer=peer, widths=widths, batch=batch, goal=goal)
        for widths, batch, times in (((64, 64), 64, 8.0), ((128, 128), 256, 1.5))
        for game, ours, peer, goal in (
            ("lander", "bc", "DiscreteBC", times),
            ("lander", "iql", "DiscreteCQL", None),
            ("pendulum", "bc", "BC", times),
            ("pendulum", "iql", "IQL", times),
        )
    ),
    # One layer after the convolution, as d3rlpy's pixel encoder has it.
    Pair(game="breakout", ours="bc", peer="DiscreteBC", widths=(256,), batch=256),
    Pair(game="breakout", ours="iql", peer="DiscreteCQL", widths=(256,), batch=256),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure what is missing; 0 unless a full run misses what it should show."""
    options = _options(arguments)
    out = options.out or (None if options.quick else RESULT)
    result = _read(out) if out else {"rows": [], "rates": []}
    here = commit()
    is_changed = here.endswith("(changed)")

    def is_kept(row: Mapping[str, Any]) -> bool:
        return bool(options.keep or (row["commit"] == here and not is_changed))

    def add(kind: str, row: dict[str, Any]) -> None:
        key = _KEYS[kind]
        others = [other for other in result[kind] if key(other) != key(row)]
        stamp = {"commit": here, "date": datetime.now(UTC).isoformat(timespec="seconds")}
        result[kind] = [*others, row | stamp]
        if out:
            _write(out, result)

    with on_cores(options.threads):
        if "returns" in options.measures:
            kept = {_row_key(row) for row in result["rows"] if is_kept(row)}
            _measure_returns(options, kept, lambda row: add("rows", row))
        if "rates" in options.measures:
            kept = {_rate_key(row) for row in result["rates"] if is_kept(row)}
            _measure_rates(options, kept, lambda row: add("rates", row))
    rows = [row for row in result["rows"] if _row_key(row) in _asked_rows(options)]
    rates = [row for row in result["rates"] if _rate_key(row) in _asked_rates(options)]
    verdicts = places(rows)
    _show(rows, verdicts, rates)
    missed = misses(verdicts, rates)
    for text in missed:
        print(f"missed: {text}")
    is_record = not options.quick and tuple(options.game) == FOUR
    return 1 if is_record and missed else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "measures", nargs="*", metavar="MEASURE", help=f"{' or '.join(MEASURES)}; default: both"
    )
    parser.add_argument(
        "--game", action="append", choices=sorted(GAMES), help=f"default: {', '.join(FOUR)}"
    )
    parser.add_argument("--seeds", type=int, help="default: 3; quick: 1")
    parser.add_argument("--seed", type=int, help="only this one, counted from 0")
    parser.add_argument("--seconds", type=float, help="of each training; default: 180; quick: 5")
    parser.add_argument("--episodes", type=int, help="of each bot; default: 200; quick: 20")
    parser.add_argument(
        "--threads", type=int, default=1, help="of each side, on as many cores; default: 1"
    )
    parser.add_argument("--quick", action="store_true", help="a short run, which writes nothing")
    parser.add_argument("--keep", action="store_true", help="keep rows of other commits")
    parser.add_argument("--out", type=Path, help="file for the result")
    options = parser.parse_args(arguments)
    for measure in options.measures:
        if measure not in MEASURES:
            parser.error(f"unknown measure {measure!r}; give {' or '.join(MEASURES)}")
    options.measures = options.measures or MEASURES
    options.game = tuple(dict.fromkeys(options.game or FOUR))
    for name, default, quick in (("seeds", 3, 1), ("seconds", 180.0, 5.0), ("episodes", 200, 20)):
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else default)
    if options.seed is not None and options.seed < 0:
        parser.error(f"--seed is {options.seed}; pass a number of at least 0")
    for name, lowest in (("seeds", 1), ("seconds", 1), ("episodes", 2), ("threads", 1)):
        number = getattr(options, name)
        if not lowest <= number < 10**6:
            parser.error(f"--{name} is {number}; pass a number of at least {lowest}")
    return options


# --- The result file ------------------------------------------------------------------------------

Key = tuple[Any, ...]


def _row_key(row: Mapping[str, Any]) -> Key:
    names = ("game", "algorithm", "seed", "seconds_allowed", "episodes", "threads")
    return tuple(row[name] for name in names)


def _rate_key(row: Mapping[str, Any]) -> Key:
    widths = tuple(row["widths"])
    return row["game"], row["ours"], row["peer"], widths, row["batch"], row["threads"]


_KEYS: Mapping[str, Callable[[Mapping[str, Any]], Key]] = {"rows": _row_key, "rates": _rate_key}


def _asked_rows(options: argparse.Namespace) -> list[Key]:
    if "returns" not in options.measures:
        return []
    return [
        (game, algorithm, seed, options.seconds, options.episodes, options.threads)
        for game in options.game
        for algorithm in (*OURS, *_peers_of(game))
        for seed in _seeds(options)
    ]


def _seeds(options: argparse.Namespace) -> Sequence[int]:
    return range(options.seeds) if options.seed is None else (options.seed,)


def _peers_of(game: str) -> tuple[str, ...]:
    return PEERS[GAMES[game].spec().discrete is not None]


def _asked_rates(options: argparse.Namespace) -> list[Key]:
    if "rates" not in options.measures:
        return []
    return [
        _rate_key(dataclasses.asdict(pair) | {"threads": options.threads})
        for pair in PAIRS
        if pair.game in options.game
    ]


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {"rows": [], "rates": []}
    try:
        result = json.loads(path.read_text())
        for kind, key in _KEYS.items():
            for row in result[kind]:
                hash((key(row), row["commit"]))  # raises if a field is missing
    except (ValueError, KeyError, TypeError) as error:
        raise UnderstudyError(
            f"{path} is not a result of this command ({error!r}); move it away, or pass another "
            "--out"
        ) from None
    return {kind: result[kind] for kind in _KEYS}


def _write(path: Path, result: Mapping[str, Any]) -> None:
    text = json.dumps({"format": 1, "machine": machine(), **result}, indent=1)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text + "\n")
    temporary.replace(path)


# --- Rows -----------------------------------------------------------------------------------------


def peer_inputs(spec: GameSpec, columns: Mapping[str, Any]) -> Array:
    """Observations as d3rlpy accepts them: float32[rows, numbers], or channels first for one grid.

    Discrete values and codes of cells are one-hot, as in our own networks.
    """
    encoded = [
        _encoded(space, np.asarray(columns[name])) for name, space in spec.obs_columns.items()
    ]
    channel = grid_channel(next(iter(spec.obs_columns.values())))
    if len(encoded) == 1 and channel is not None:
        return np.ascontiguousarray(np.moveaxis(encoded[0], channel + 1, 1))
    return np.concatenate([values.reshape(len(values), -1) for values in encoded], axis=1)


def _encoded(space: Space, values: Array) -> Array:
    codes = cell_codes(space)
    first, count = (codes.start, codes.n) if codes is not None else (0, 0)
    if isinstance(space, Discrete):
        first, count = space.start, space.n
    if count:
        return np.asarray(values[..., None] - first == np.arange(count), np.float32)
    return values.astype(np.float32)


def peer_rows(spec: GameSpec, episodes: Iterable[Sequence[Row]]) -> dict[str, Array]:
    """All episodes one after the other, in d3rlpy's form; `ends`: the row after each of them.

    d3rlpy reads the next observation of a step from the next row, and drops the last step of an
    episode that was truncated. Such an episode therefore has one more row with its last
    observation, so that d3rlpy learns from all steps: the same ones as we do.
    """
    observations = []
    actions = []
    rewards = []
    ends = []
    terminated = []
    n_rows = 0
    for rows in episodes:
        batch = batch_of(spec, rows)
        is_terminated = float(batch.discount[-1]) == 0
        obs = peer_inputs(spec, batch.obs)
        action = batch.action.reshape(len(rows), -1)
        reward = batch.reward[:, None]
        if not is_terminated:
            last = {name: column[-1:] for name, column in batch.next_obs.items()}
            obs = np.concatenate([obs, peer_inputs(spec, last)])
            action = np.concatenate([action, np.zeros_like(action[:1])])
            reward = np.concatenate([reward, np.zeros_like(reward[:1])])
        observations.append(obs)
        actions.append(action)
        rewards.append(reward)
        n_rows += len(obs)
        ends.append(n_rows)
        terminated.append(is_terminated)
    return {
        "observations": np.concatenate(observations),
        "actions": np.concatenate(actions),
        "rewards": np.concatenate(rewards),
        "ends": np.array(ends),
        "terminated": np.array(terminated),
    }


def sent_of(spec: GameSpec, episodes: Iterable[Sequence[Row]], *, seed: int) -> list[Sent]:
    """The same episodes as chunks of five players, for our learner."""
    sessions = [
        new_session(0, np.random.default_rng([seed, at]).bytes(10)) for at in range(N_PLAYERS)
    ]
    counts = [[0, 0] for _ in sessions]  # chunks and steps of each session
    sent: list[Sent] = []
    for number, rows in enumerate(episodes):
        at = number % N_PLAYERS
        n_chunks, first_step = counts[at]
        chunk = chunk_of(spec, rows, sessions[at], n_chunks, first_step=first_step)
        counts[at] = [n_chunks + 1, first_step + chunk.meta.n_steps]
        sent.append((at.to_bytes(16, "big"), chunk))
    return sent


class Recorded:
    """The steps of a game's people for one seed, in the forms that both sides need."""

    def __init__(self, game: PeopleGame, folder: Path, *, seed: int) -> None:
        self.game = game
        self.spec = game.spec()
        self.seed = seed
        episodes = recorded_episodes(game, self.spec, STEPS, seed=seed)
        self.sent = sent_of(self.spec, episodes, seed=seed)
        self.steps: Batch = batch_of(self.spec, itertools.chain(*episodes))
        rows = peer_rows(self.spec, episodes)
        self.inputs = "image" if rows["observations"].ndim == 4 else "vector"
        self.file = folder / f"{game.name}-{seed}.npz"
        np.savez(self.file, allow_pickle=False, **rows)

    def settings(self, algorithm: str, changes: Mapping[str, Any]) -> RunSettings:
        """The service's settings, with the centre and the mirror images that it would find."""
        preset = f"{algorithm}-people"
        request = TrainRequest(algorithm=algorithm, preset=preset, settings=dict(changes))
        settings = resolve(request, self.spec)
        if not may_have_centre(self.spec):
            return settings
        return with_view(self.spec, settings, self.steps)

    def peer_request(self, algorithm: str, **fields: Any) -> dict[str, Any]:
        """What d3rlpy's process needs to know."""
        action = next(iter(self.spec.action_columns.values()))
        low, high = action.ends() if isinstance(action, Box) else (np.zeros(0), np.zeros(0))
        return {
            "algorithm": algorithm,
            "rows": str(self.file),
            "n_actions": self.spec.discrete.n if self.spec.discrete is not None else 0,
            "low": low.ravel().tolist(),
            "high": high.ravel().tolist(),
            "filters": [[conv.channels, conv.kernel, conv.stride] for conv in GRID],
            "seed": self.seed,
            **fields,
        }


# --- Returns --------------------------------------------------------------------------------------


def _measure_returns(
    options: argparse.Namespace, kept: set[Key], add: Callable[[dict[str, Any]], None]
) -> None:
    for name in options.game:
        for seed in _seeds(options):
            fixed = {
                "game": name,
                "seed": seed,
                "seconds_allowed": options.seconds,
                "episodes": options.episodes,
                "threads": options.threads,
            }
            missing = [
                algorithm
                for algorithm in (*OURS, *_peers_of(name))
                if _row_key(fixed | {"algorithm": algorithm}) not in kept
            ]
            if not missing:
                print(f"{name} seed {seed}: kept", flush=True)
                continue
            with tempfile.TemporaryDirectory(prefix="understudy-offline-") as folder:
                data = Recorded(GAMES[name], Path(folder), seed=seed)
                rows: Iterable[dict[str, Any]] = (
                    measure_peer(data, algorithm, options)
                    for algorithm in missing
                    if algorithm not in OURS
                )
                if set(missing) & set(OURS):
                    rows = itertools.chain(measure_ours(data, options), rows)
                for row in rows:
                    row = fixed | row
                    add(row)
                    print(_line(row), flush=True)


def _line(row: Mapping[str, Any]) -> str:
    return (
        f"{row['game']} seed {row['seed']} {row['algorithm']}: {row['on_scale']:.2f} after "
        f"{row['updates']} updates in {row['seconds']:.0f} s"
    )


def measure_ours(data: Recorded, options: argparse.Namespace) -> Iterable[dict[str, Any]]:
    """Rows of bc, of iql and of what the service would release."""
    schedule = LearningSchedule()
    usual = f"iql at {schedule.temperature:g}"
    policies = {}
    rows = {}
    for algorithm in ("bc", "iql"):
        updates = getattr(schedule, f"{algorithm}_updates")
        changes = {"steps": updates, "horizon": updates}
        load = load_average()
        began_s = time.monotonic()
        settings = data.settings(algorithm, changes)
        chosen_s = time.monotonic() - began_s
        learner = learner_of(data.spec, settings, data.sent, seed=data.seed)
        seconds = max(1.0, options.seconds - chosen_s)
        seconds = chosen_s + train(learner, updates=updates, seconds=seconds)
        policies[algorithm] = learner.current()
        bot = policies[algorithm].at_temperature(schedule.temperature)
        rows[algorithm] = {
            "algorithm": algorithm,
            "updates": learner.counts.updates,
            "seconds": round(seconds, 2),
            "inputs": "columns",
            "load_average": load,
            **_truth(data.game, true_returns(data.game, bot, episodes=options.episodes)),
        }
        yield rows[algorithm]
    if not may_rank(data.spec, stack=1):
        yield rows["iql"] | {"algorithm": "released", "released": usual}
        return
    began_s = time.monotonic()
    discounted = data.steps._replace(discount=data.steps.discount * np.float32(0.99))
    ranking = CandidateRanking(
        policies,
        discounted,
        temperature=schedule.temperature,
        updates=64 if options.quick else schedule.ranking_updates,
        seed=data.seed,
    )
    while ranking.step():
        pass
    best = ranking.best()
    bot = policies["iql"].at_temperature(schedule.temperature) if best is None else best.policy
    name = usual if best is None else f"{best.algorithm} at {best.temperature:g}"
    took_s = time.monotonic() - began_s + sum(row["seconds"] for row in rows.values())
    yield {
        "algorithm": "released",
        "released": name,
        "updates": sum(row["updates"] for row in rows.values()),
        "seconds": round(took_s, 2),
        "inputs": "columns",
        "load_average": load_average(),
        **_truth(data.game, true_returns(data.game, bot, episodes=options.episodes)),
    }


def train(
    learner: Learner,
    *,
    updates: int,
    seconds: float,
    clock: Callable[[], float] = time.monotonic,
) -> float:
    """Train to so many updates or seconds, whichever is first; returns the seconds."""
    began_s = clock()
    progress = 0.0
    while progress < 1:
        report = learner.step(progress)
        assert not report.must_restore, "too many updates were not finite"
        progress = max(learner.counts.updates / updates, (clock() - began_s) / seconds)
    return clock() - began_s


def measure_peer(data: Recorded, algorithm: str, options: argparse.Namespace) -> dict[str, Any]:
    """The row of one algorithm of d3rlpy."""
    request = data.peer_request(
        algorithm, do="play", widths=list(WIDTHS), batch=BATCH, seconds=options.seconds
    )
    load = load_average()
    with Process(peer_contestant(options.threads), request) as process:
        process.answer({})
        trained = process.line(options.seconds + _SLACK_S)

        def choose(obs: Any, mask: Any) -> Any:
            packed = "" if mask is None else pack(mask)
            process.answer({"obs": pack(peer_inputs(data.spec, obs)), "mask": packed})
            return unpack(process.line()["actions"])

        seeds = [int(truth_chances(number).integers(1 << 31)) for number in range(options.episodes)]
        returns = returns_at_once(data.game, choose, seeds)
        return {
            "algorithm": algorithm,
            "updates": trained["updates"],
            "seconds": round(trained["seconds"], 2),
            "inputs": data.inputs,
            "load_average": load,
            "versions": process.versions,
            **_truth(data.game, returns),
        }


def peer_contestant(threads: int) -> Contestant:
    """d3rlpy in this interpreter's environment if it is there, else in its own."""
    is_here = all(importlib.util.find_spec(name) for name in ("d3rlpy", "torch"))
    return Contestant(
        name="d3rlpy",
        module="bench.against.d3rlpy",
        environment="" if is_here else "d3rlpy",
        threads=threads,
    )


def _truth(game: PeopleGame, returns: Sequence[float]) -> dict[str, Any]:
    values = np.asarray(returns)
    return {
        "mean": round(float(values.mean()), 4),
        "standard_error": round(float(values.std(ddof=1) / np.sqrt(len(values))), 4),
        "on_scale": scale_of(game.name).place(float(values.mean())),
    }


def places(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """The mean place of each algorithm over all seeds, by game and algorithm."""
    found: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        found.setdefault(row["game"], {}).setdefault(row["algorithm"], []).append(row["on_scale"])
    return {
        game: {algorithm: float(np.mean(values)) for algorithm, values in by_algorithm.items()}
        for game, by_algorithm in found.items()
    }


def misses(
    means: Mapping[str, Mapping[str, float]], rates: Iterable[Mapping[str, Any]]
) -> list[str]:
    """What the rows should have shown and did not."""
    missed = []
    below = [
        game
        for game, by_algorithm in means.items()
        if by_algorithm["released"]
        < max(mean for name, mean in by_algorithm.items() if name not in OURS)
    ]
    if len(below) > max(0, len(means) - MIN_GAMES):
        missed.append(f"below the best of d3rlpy in {', '.join(below)}")
    for row in rates:
        if row["goal"] is not None and row["low"] < row["goal"]:
            missed.append(
                f"{_pair_text(row)}: {row['ratio']:.3g} times, the goal is {row['goal']:g}"
            )
    return missed


# --- Updates per second ---------------------------------------------------------------------------


def _measure_rates(
    options: argparse.Namespace, kept: set[Key], add: Callable[[dict[str, Any]], None]
) -> None:
    seconds, rounds = (1.0, 2) if options.quick else (5.0, 5)
    for pair in PAIRS:
        if pair.game not in options.game:
            continue
        fixed = dataclasses.asdict(pair) | {"threads": options.threads}
        if _rate_key(fixed) in kept:
            print(f"{_pair_text(fixed)}: kept", flush=True)
            continue
        row = fixed | measure_rates(pair, options.threads, seconds=seconds, rounds=rounds)
        add(row)
        print(_rate_line(row), flush=True)


def measure_rates(pair: Pair, threads: int, *, seconds: float, rounds: int) -> dict[str, Any]:
    """Updates per second of both sides in turn, and how many times as many ours does."""
    load = load_average()
    changes = {"widths": list(pair.widths), "batch": pair.batch}
    with tempfile.TemporaryDirectory(prefix="understudy-offline-") as folder:
        data = Recorded(GAMES[pair.game], Path(folder), seed=0)
        learner = learner_of(data.spec, data.settings(pair.ours, changes), data.sent, seed=0)
        learner.step(0.0)  # compiles
        request = data.peer_request(pair.peer, do="rate", seconds=seconds, **changes)
        rates: dict[str, list[float]] = {}

        def note(side: str, updates: int, *, seconds: float, cpu_s: float) -> None:
            rates.setdefault(f"{side}_per_s", []).append(round(updates / seconds, 1))
            rates.setdefault(f"{side}_per_cpu_s", []).append(round(updates / cpu_s, 1))

        others = guard.Others()
        with Process(peer_contestant(threads), request) as process:
            for _ in range(rounds):
                before = learner.counts.updates
                began_cpu_s = time.process_time()
                took_s = train(learner, updates=1 << 62, seconds=seconds)
                cpu_s = time.process_time() - began_cpu_s
                note("ours", learner.counts.updates - before, seconds=took_s, cpu_s=cpu_s)
                done = process.ask()
                note("peer", done["updates"], seconds=done["seconds"], cpu_s=done["cpu_s"])
            versions = process.versions
    times = times_better(rates["ours_per_s"], rates["peer_per_s"], more_is_better=True)
    return {
        **rates,
        "ratio": significant(times.ratio),
        "low": significant(times.low),
        "high": significant(times.high),
        "load_average": load,
        "others_cores": others.cores(),
        "versions": versions,
    }


def _pair_text(row: Mapping[str, Any]) -> str:
    widths = "-".join(str(width) for width in row["widths"])
    return f"{row['game']} {row['ours']} and {row['peer']}, {widths}, batch {row['batch']}"


def _rate_line(row: Mapping[str, Any]) -> str:
    return (
        f"{_pair_text(row)}: {np.median(row['ours_per_s']):.0f} and "
        f"{np.median(row['peer_per_s']):.0f} updates/s, {row['ratio']:.3g} times"
    )


# --- Tables ---------------------------------------------------------------------------------------


def _show(
    rows: Sequence[Mapping[str, Any]],
    means: Mapping[str, Mapping[str, float]],
    rates: Sequence[Mapping[str, Any]],
) -> None:
    if rows:
        title = "Returns (average person = 0, best person = 1)"
        table = Table("game", "algorithm", title=title, title_justify="left")
        for heading in ("mean place", "each seed", "updates", "seconds"):
            table.add_column(heading, justify="right")
        table.add_column("inputs")
        for game, by_algorithm in means.items():
            for algorithm, mean in by_algorithm.items():
                own = [row for row in rows if (row["game"], row["algorithm"]) == (game, algorithm)]
                table.add_row(
                    game,
                    algorithm,
                    f"{mean:.3f}",
                    " ".join(f"{row['on_scale']:.2f}" for row in own),
                    f"{np.mean([row['updates'] for row in own]):.0f}",
                    f"{np.mean([row['seconds'] for row in own]):.0f}",
                    ", ".join(sorted({row.get("released", row["inputs"]) for row in own})),
                )
        print_wide(table)
    if rates:
        table = Table("updates per second", title="Speed", title_justify="left")
        for heading in ("ours", "d3rlpy", "ratio", "95 % interval", "goal"):
            table.add_column(heading, justify="right")
        for row in rates:
            table.add_row(
                _pair_text(row),
                f"{np.median(row['ours_per_s']):.0f}",
                f"{np.median(row['peer_per_s']):.0f}",
                f"{row['ratio']:.3g}",
                f"{row['low']:.3g} to {row['high']:.3g}",
                "" if row["goal"] is None else f"{row['goal']:g}",
            )
        print_wide(table)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (UnderstudyError, ContestantError) as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
