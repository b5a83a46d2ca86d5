"""Whether held-out players should stop the training of a clone, without the platform.

    python bench/held_out_stop.py                       six games, three sizes, three seeds
    python bench/held_out_stop.py poker --steps 1000    one game and size
    python bench/held_out_stop.py --merge A.json B.json   one result file of several

Thirty players, six of each of the game's people, record steps as in `bench/offline.py`. Players
with a fifth of the steps are held out. While a clone learns from the rest, the likelihood of the
held-out actions is measured every 64 updates. True returns, on the scale of `bench/players.py`
(average person = 0, best one = 1), of the clones:

    all        2,048 updates on all steps, as without stopping
    rest       2,048 updates without the held-out players
    stopped    on the rest: the weights with the highest mean log-likelihood of held-out actions
    chosen     on the rest: those with the highest mean probability at the temperature of bots
    refitted   so many updates as `stopped`, on all steps, with schedules as of 2,048
    rechosen   the same, so many as `chosen`
    shortened  as `refitted`, with schedules of that length
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # Run as a file, sys.path starts with bench/; replace it with the folder that contains bench/.
    sys.path[0] = str(ROOT)

import numpy as np  # noqa: E402

from bench.machine import commit, load_average, machine  # noqa: E402
from bench.offline import batch_of, policies_of, recorded_episodes  # noqa: E402
from bench.people import GAMES  # noqa: E402
from bench.players import scale_of, true_returns  # noqa: E402
from understudy.algorithm import Batch  # noqa: E402
from understudy.learn import networks  # noqa: E402
from understudy.nn.policy import Policy  # noqa: E402
from understudy.release.schedule import LearningSchedule  # noqa: E402
from understudy.training.train_request import TrainRequest, resolve  # noqa: E402

N_PLAYERS = 30
EVERY = 64
"""Updates between two measures."""
SIZES = (1_000, 3_000, 12_000)
CHOSEN_GAMES = ("cartpole", "acrobot", "lander", "rally", "poker", "pendulum")
RESULT = ROOT / "bench" / "results" / "held-out-stop.json"


def main() -> int:
    """Measure each game, size and seed, and write the result after each of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("games", nargs="*", default=CHOSEN_GAMES)
    parser.add_argument("--steps", type=int, action="append", help="may be repeated")
    parser.add_argument("--seeds", type=int, action="append", help="a seed; may be repeated")
    parser.add_argument("--episodes", type=int, default=200, help="true episodes of each clone")
    parser.add_argument("--merge", type=Path, nargs="+", help="results to write as one")
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    began_s = time.monotonic()
    rows: list[Mapping[str, Any]] = []
    parts = [json.loads(path.read_text()) for path in options.merge or ()]
    if parts:
        rows = list(itertools.chain(*(part["rows"] for part in parts)))
        commits = sorted({part["commit"] for part in parts})
        _write(options, rows, commits=", ".join(commits), minutes=None)
        return 0
    cells = itertools.product(options.seeds or (0, 1, 2), options.steps or SIZES, options.games)
    for seed, n_steps, game in cells:
        row = measured(game, n_steps, seed=seed, episodes=options.episodes)
        rows.append(row)
        print(json.dumps(row), flush=True)
        _write(options, rows, commits=commit(), minutes=(time.monotonic() - began_s) / 60)
    return 0


def _write(
    options: argparse.Namespace,
    rows: Sequence[Mapping[str, Any]],
    *,
    commits: str,
    minutes: float | None,
) -> None:
    rows = sorted(rows, key=lambda row: (row["game"], row["steps"], row["seed"]))
    head = {
        "format": 1,
        "commit": commits,
        "machine": machine(),
        "load": load_average(),
        "episodes": options.episodes,
        "scale": "average person = 0, best person = 1",
        "minutes": None if minutes is None else round(minutes, 1),
    }
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    text = json.dumps(head, indent=1)[:-2]
    options.out.write_text(f'{text},\n "rows": [\n  {lines}\n ]\n}}\n')


def measured(name: str, n_steps: int, *, seed: int, episodes: int) -> dict[str, Any]:
    """The true returns of the clones of one set of recorded steps."""
    game = GAMES[name]
    spec = game.spec()
    schedule = LearningSchedule()
    updates = schedule.bc_updates
    settings = resolve(
        TrainRequest(
            algorithm="bc", preset="bc-people", settings={"steps": updates, "horizon": updates}
        ),
        spec,
    )
    recorded = recorded_episodes(game, spec, n_steps, seed=seed)
    held_out = held_out_episodes([len(rows) for rows in recorded], seed=seed)
    every_step = batch_of(spec, itertools.chain(*recorded))
    rest = batch_of(
        spec, itertools.chain(*(rows for at, rows in enumerate(recorded) if at not in held_out))
    )
    test = batch_of(spec, itertools.chain(*(recorded[at] for at in sorted(held_out))))
    stopped = list(policies_of(spec, settings, rest, updates=updates, seed=seed, every=EVERY))
    likelihood = [float(log_likelihoods(policy, test).mean()) for policy in stopped]
    chance = [
        float(np.exp(log_likelihoods(policy.at_temperature(schedule.temperature), test)).mean())
        for policy in stopped
    ]
    best = int(np.argmax(likelihood))
    chosen = int(np.argmax(chance))
    n_best = (best + 1) * EVERY
    whole = list(policies_of(spec, settings, every_step, updates=updates, seed=seed, every=EVERY))
    shortened = whole[-1]
    if n_best < updates:
        *_, shortened = policies_of(spec, settings, every_step, updates=n_best, seed=seed)
    scale = scale_of(name)
    places: dict[int, float] = {}

    def place(policy: Policy) -> float:
        if id(policy) not in places:
            bot = policy.at_temperature(schedule.temperature)
            mean = float(np.mean(true_returns(game, bot, episodes=episodes)))
            places[id(policy)] = round(scale.place(mean), 3)
        return places[id(policy)]

    return {
        "game": name,
        "steps": n_steps,
        "seed": seed,
        "episodes": len(recorded),
        "held_out_steps": len(test.action),
        "stopped_at": n_best,
        "chosen_at": (chosen + 1) * EVERY,
        "all": place(whole[-1]),
        "rest": place(stopped[-1]),
        "stopped": place(stopped[best]),
        "chosen": place(stopped[chosen]),
        "refitted": place(whole[best]),
        "rechosen": place(whole[chosen]),
        "shortened": place(shortened),
        "likelihood": [round(value, 4) for value in likelihood],
        "chance": [round(value, 4) for value in chance],
    }


def held_out_episodes(lengths: Sequence[int], *, seed: int) -> set[int]:
    """The episodes of players with a fifth of the steps; episode n is of player n mod 30."""
    held_out: set[int] = set()
    for player in np.random.default_rng([seed, 2]).permutation(N_PLAYERS):
        if sum(lengths[at] for at in held_out) >= sum(lengths) / 5:
            break
        held_out |= set(range(int(player), len(lengths), N_PLAYERS))
    return held_out


def log_likelihoods(policy: Policy, steps: Batch) -> np.ndarray[Any, Any]:
    """Log-probabilities (densities, if actions are continuous) of the recorded actions."""
    action = steps.action
    if not policy.head.is_discrete:
        action = networks.raw_of(policy.head, action)
    outputs = policy.outputs(steps.obs)
    return np.asarray(networks.logp(policy.head, outputs, action, steps.action_mask))


if __name__ == "__main__":
    sys.exit(main())
