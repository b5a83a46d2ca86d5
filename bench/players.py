"""Nine games and their scripted people, from whom bots are to learn.

    python bench/players.py people                  measure random play and the five people of each
                                                    game over 500 episodes, in some minutes; writes
                                                    bench/results/people.json
    python bench/players.py people --game vault     one game only; writes nothing unless --out is
                                                    given
    python bench/players.py people --quick          20 episodes each; writes nothing unless --out is
                                                    given

On the scale on which random play is 0 and the best person is 1, the average person of each game is
at 0.5 ± 0.05. The faults of the people were chosen with seed 0; the result is measured with seed 1.
Random play and all people of a game play the same seeds.
"""

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
if __name__ == "__main__":
    # Run as a file, sys.path starts with bench/; replace it with the folder that contains bench/.
    sys.path[0] = str(ROOT)

from bench.machine import commit, machine  # noqa: E402
from bench.people import FAULTLESS, GAMES, RANDOM, PeopleGame, Person, Skill, play  # noqa: E402

RESULT = ROOT / "bench" / "results" / "people.json"
EPISODES = 500
QUICK_EPISODES = 20
CALIBRATION_SEED = 0
SEED = 1
MIDWAY = 0.5
TOLERANCE = 0.05


def main() -> int:
    """Run the command; 0 unless an average person of a full run is not midway."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    people = commands.add_parser(
        "people",
        help="measure random play and the people of each game",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    people.add_argument("--game", choices=sorted(GAMES), help="measure only this game")
    people.add_argument("--quick", action="store_true", help=f"{QUICK_EPISODES} episodes each")
    people.add_argument("--seed", type=int, default=SEED, help=f"default: {SEED}")
    people.add_argument("--out", type=Path, help="file for the result")
    options = parser.parse_args()
    if options.seed < 0:
        parser.error(f"--seed is {options.seed}; pass a number of at least 0")
    games = [GAMES[options.game]] if options.game else list(GAMES.values())
    episodes = QUICK_EPISODES if options.quick else EPISODES
    began_s = time.monotonic()
    rows = {}
    with Progress(console=Console(stderr=True)) as progress:
        bar = progress.add_task("people", total=len(games) * 7)
        for game in games:
            progress.update(bar, description=game.name)
            rows[game.name] = measure(
                game, episodes=episodes, seed=options.seed, each=lambda: progress.advance(bar)
            )
            # A line for each game, since a bar is not drawn where the output is not a terminal.
            progress.console.print(
                f"{game.name} measured after {time.monotonic() - began_s:.0f} s", highlight=False
            )
    minutes = (time.monotonic() - began_s) / 60
    result = {
        "format": 1,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        "seed": options.seed,
        "calibration_seed": CALIBRATION_SEED,
        "episodes": episodes,
        "minutes": round(minutes, 1),
        "games": rows,
    }
    is_record = not options.game and not options.quick and options.seed == SEED
    out = options.out or (RESULT if is_record else None)
    if out is not None:
        out.write_text(json.dumps(result, indent=1) + "\n")
    _show(rows)
    print(f"{episodes} episodes each, seed {options.seed}, {minutes:.1f} minutes")
    return 0 if options.quick or all(row["is_midway"] for row in rows.values()) else 1


def measure(
    game: PeopleGame, *, episodes: int, seed: int, each: Callable[[], None]
) -> dict[str, Any]:
    """Measure random play, the people and the expert without faults; calls `each` after each."""

    def returns(skill: Skill) -> dict[str, Any]:
        env = game.make()
        person = Person(game, skill)
        played = [
            play(env, person, np.random.default_rng([seed, episode])) for episode in range(episodes)
        ]
        env.close()
        each()
        totals = np.array([outcome.total for outcome in played])
        return {
            "mean": round(float(totals.mean()), 4),
            "standard_error": round(float(totals.std(ddof=1) / np.sqrt(episodes)), 4),
            "mean_steps": round(float(np.mean([outcome.n_steps for outcome in played])), 1),
        }

    random = returns(RANDOM)
    people = [dataclasses.asdict(skill) | returns(skill) for skill in game.people]
    means = [person["mean"] for person in people]
    average = sum(means) / len(means)
    best = max(means)
    scaled = (average - random["mean"]) / (best - random["mean"])
    return {
        "random": random,
        "people": people,
        "faultless": returns(FAULTLESS),
        "average": round(average, 4),
        "best": best,
        "average_on_scale": round(scaled, 4),
        "is_midway": abs(scaled - MIDWAY) <= TOLERANCE,
    }


def _show(rows: dict[str, dict[str, Any]]) -> None:
    table = Table("game", title="Mean returns", title_justify="left")
    people = ("novice", "2", "3", "4", "expert")
    for heading in ("random", *people, "average", "best", "average on scale", "without faults"):
        table.add_column(heading, justify="right")
    for name, row in rows.items():
        means = [row["random"], *row["people"]]
        numbers = [*(measured["mean"] for measured in means), row["average"], row["best"]]
        verdict = "" if row["is_midway"] else " (not midway)"
        table.add_row(
            name,
            *(f"{number:.4g}" for number in numbers),
            f"{row['average_on_scale']:.3f}{verdict}",
            f"{row['faultless']['mean']:.4g}",
        )
    console = Console()
    if not console.is_terminal:
        console.width = 140
    console.print(table)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
