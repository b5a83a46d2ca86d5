"""Nine games and their scripted people, and what bots learn from them through the whole platform.

    python bench/players.py people                  measure random play and the five people of each
                                                    game over 500 episodes, in some minutes; writes
                                                    bench/results/people.json
    python bench/players.py people --game vault     one game only; writes nothing unless --out is
                                                    given
    python bench/players.py people --quick          20 episodes each; writes nothing unless --out is
                                                    given
    python bench/players.py loop                    let the people of each game play 30,000 steps
                                                    through a platform, then measure its champion
                                                    over 1,000 episodes; 3 seeds; writes
                                                    bench/results/players.json after each run
    python bench/players.py loop --game vault --steps 300000 --seeds 1
    python bench/players.py loop --quick            3,000 steps, 50 episodes, 1 seed; writes nothing
                                                    unless --out is given

`people`: on the scale on which random play is 0 and the best person is 1, the average person of
each game is at 0.5 ± 0.05. The faults of the people were chosen with seed 0; the result is measured
with seed 1. Random play and all people of a game play the same seeds.

`loop`: every part is the real one, with its default settings, in processes of its own: client,
gateway, stream, ingest, store, learner and gate. The people play in turn, and leave half of their
episodes to the bot once there is one. Every 1,000 steps they wait until the learner has nothing to
do. On the scale on which the average person is 0 and the best one is 1, as people.json has them,
the champion should be at 0 or above after 30,000 steps of people and at 0.8 after 300,000, and no
promoted bot below random play, nor below the champion before it by more than the error. A second
call measures only what is missing: runs of other commits are measured again unless --keep is given.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import math
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

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
from bench.rows import kept_rows, read_rows, write_rows  # noqa: E402
from understudy.backends.data import DataFolder  # noqa: E402
from understudy.backends.deployment import open_deployment  # noqa: E402
from understudy.cli.interrupts import Interrupts  # noqa: E402
from understudy.client.connect import Address, ClientConfig, Game, connect  # noqa: E402
from understudy.client.http import HttpLink  # noqa: E402
from understudy.core.errors import UnderstudyError  # noqa: E402
from understudy.models.manifest import model_name  # noqa: E402
from understudy.models.registry import Registry  # noqa: E402
from understudy.nn.policy import Policy  # noqa: E402
from understudy.platform.children import end_children, kill_children  # noqa: E402
from understudy.platform.config import Config, GatewaySection, LearnerSection  # noqa: E402
from understudy.platform.platform import Platform  # noqa: E402
from understudy.simulation.ledger import LedgerLink  # noqa: E402
from understudy.simulation.people import BOT_SHARE  # noqa: E402
from understudy.simulation.verify import Verification, verify  # noqa: E402

RESULT = ROOT / "bench" / "results" / "people.json"
LOOPS = ROOT / "bench" / "results" / "players.json"
EPISODES = 500
QUICK_EPISODES = 20
CALIBRATION_SEED = 0
SEED = 1
MIDWAY = 0.5
TOLERANCE = 0.05

STEPS = 30_000
QUICK_STEPS = 3_000
TRUE_EPISODES = 1_000
QUICK_TRUE_EPISODES = 50
WAIT_EVERY_STEPS = 1_000
"""Steps, of people and bots, after which people wait for the learner."""
_PLAYING = 1
_SHARING = 2
_TRUTH = 3
"""The last parts of the loop's seeds; those of `people` have none, which is the same as 0."""
_TICK_S = 0.05
_QUIET_S = 3.0
"""How long the learner must have had nothing to do before a run ends: while it checks a candidate,
its status is that of before."""
_STUCK_S = 600.0
"""A learner without any progress for this long ends the run with an error."""


def main() -> int:
    """Run the command; 0 unless a full run misses what it should show."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    people, loop = (
        commands.add_parser(
            name,
            help=text,
            description=__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for name, text in (
            ("people", "measure random play and the people of each game"),
            ("loop", "let people play through a platform, and measure its champion"),
        )
    )
    for command in (people, loop):
        command.add_argument("--game", choices=sorted(GAMES), help="measure only this game")
        command.add_argument("--out", type=Path, help="file for the result")
    people.add_argument("--quick", action="store_true", help=f"{QUICK_EPISODES} episodes each")
    people.add_argument("--seed", type=int, default=SEED, help=f"default: {SEED}")
    loop.add_argument(
        "--quick",
        action="store_true",
        help=f"{QUICK_STEPS} steps, {QUICK_TRUE_EPISODES} episodes, 1 seed",
    )
    loop.add_argument("--steps", type=int, help=f"steps of people; default: {STEPS}")
    loop.add_argument("--seeds", type=int, help="runs of each game; default: 3")
    loop.add_argument("--seed", type=int, help="only this run of each game, counted from 0")
    loop.add_argument("--keep", action="store_true", help="keep runs of other commits")
    options = parser.parse_args()
    games = [GAMES[options.game]] if options.game else list(GAMES.values())
    if options.command == "people":
        if options.seed < 0:
            parser.error(f"--seed is {options.seed}; pass a number of at least 0")
        return _measure_people(games, options)
    for name, lowest in (("steps", WAIT_EVERY_STEPS), ("seeds", 1), ("seed", 0)):
        number = getattr(options, name)
        if number is not None and number < lowest:
            parser.error(f"--{name} is {number}; pass a number of at least {lowest}")
    return _measure_loops(games, options)


# --- People ---------------------------------------------------------------------------------------


def _measure_people(games: Sequence[PeopleGame], options: argparse.Namespace) -> int:
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
    print_wide(table)


# --- The loop -------------------------------------------------------------------------------------


class Scale(NamedTuple):
    """Mean returns of a game that place a bot: the average person is at 0, the best one at 1."""

    average: float
    best: float
    random: float

    def place(self, mean: float) -> float:
        return round((mean - self.average) / (self.best - self.average), 4)


def scale_of(game: str) -> Scale:
    """The scale of a game, as `people` measured it."""
    row = json.loads(RESULT.read_text())["games"][game]
    return Scale(row["average"], row["best"], row["random"]["mean"])


class Bot:
    """Plays a model outside the platform as clients play it: its own chances decide."""

    def __init__(self, policy: Policy) -> None:
        self._player = policy.player()

    def reset(self) -> None:
        self._player.reset()

    def act(self, obs: Any, rng: np.random.Generator, *, action_mask: Any = None) -> Any:
        return self._player.act(obs, action_mask=action_mask, deterministic=False, rng=rng)


def true_returns(game: PeopleGame, policy: Policy, *, episodes: int) -> list[float]:
    """Returns of a model in the game itself, in the same episodes for every model."""
    env = game.make()
    bot = Bot(policy)
    try:
        return [play(env, bot, truth_chances(number)).total for number in range(episodes)]
    finally:
        env.close()


def truth_chances(number: int) -> np.random.Generator:
    """All chances of a true episode; the first number drawn is its seed."""
    return np.random.default_rng([0, number, _TRUTH])


Show = Callable[[int, str], None]
"""Called with the steps of people so far, and what the platform does."""


class Loop:
    """One game, played by its people and bots through a platform on an empty folder."""

    def __init__(
        self,
        game: PeopleGame,
        *,
        seed: int,
        folder: Path,
        show: Show,
        learner: LearnerSection | None = None,
    ) -> None:
        self.game = game
        self.people_steps = 0
        self.bot_steps = 0
        self.bot_episodes = 0
        self.promoted_after: dict[int, int] = {}
        """Steps of people when each champion was first seen."""
        self.decisions: list[dict[str, str]] = []
        """Decisions of the gate, in order, as the learner logged them."""
        self.restarts = 0
        self._seed = seed
        self._data = DataFolder(folder)
        self._show = show
        self._config = Config(
            data=str(folder), gateway=GatewaySection(port=0), learner=learner or LearnerSection()
        )
        self._people = [Person(game, skill) for skill in game.people]
        self._chances = np.random.default_rng([seed, 0, _SHARING])
        self._n_episodes = 0
        self._live = (0, 0)
        """The champion and the canary when people last waited for the learner."""

    def run(self, steps: int) -> Verification:
        """Play until people have recorded this many steps; verify the store, platform stopped."""
        with (
            Platform(self._config, on_state_change=lambda *_: None, log=self._collect) as platform,
            contextlib.closing(self.game.make()) as env,
        ):
            self._wait(platform, lambda: platform.supervisor.is_ready, "the platform to start")
            assert platform.keys is not None
            assert platform.url is not None
            link = HttpLink(Address(platform.url, platform.keys.key), self.game.name)
            config = ClientConfig(
                link=LedgerLink(link, self._data.ledger),
                spool=self._data.spool,
                strict=True,
                rng=random.Random(self._seed),
            )
            with connect(self.game.spec(), consent="granted", config=config) as client:
                self._play(platform, client, env, steps)
            platform.supervisor.stop()
            self.restarts = sum(role.restarts for role in platform.supervisor.statuses.values())
        return verify(self._data, config=self._config)

    @property
    def registry(self) -> Registry:
        return open_deployment(self._data).registry

    def _play(self, platform: Platform, client: Game, env: Any, steps: int) -> None:
        waited_at = 0
        while self.people_steps < steps:
            at = self._n_episodes
            is_bots = bool(self._live[0]) and bool(self._chances.random() < BOT_SHARE)
            rng = np.random.default_rng([self._seed, at, _PLAYING])
            person = at % len(self._people)
            outcome = play(
                env,
                None if is_bots else self._people[person],
                rng,
                episode=client.episode(f"person-{person}"),
            )
            self._n_episodes += 1
            if is_bots:
                self.bot_steps += outcome.n_steps
                self.bot_episodes += 1
            else:
                self.people_steps += outcome.n_steps
            platform.supervisor.step()
            if self.people_steps + self.bot_steps >= waited_at + WAIT_EVERY_STEPS:
                waited_at = self.people_steps + self.bot_steps
                self._wait_for_learner(platform, client)
        self._wait_for_learner(platform, client, quiet_s=_QUIET_S)

    def _wait_for_learner(self, platform: Platform, client: Game, *, quiet_s: float = 0.0) -> None:
        """Wait until the learner has read every step and has nothing to do for `quiet_s`."""
        if not client.flush(_STUCK_S):
            raise UnderstudyError(
                f"steps of {self.game.name} were not acknowledged within {_STUCK_S:.0f} s: "
                f"{client.stats().last_error or 'no error was reported'}"
            )
        stats = client.stats()
        if stats.acked_steps != self.people_steps + self.bot_steps:
            raise UnderstudyError(
                f"{self.people_steps + self.bot_steps} steps were played and {stats.acked_steps} "
                f"acknowledged: {stats.last_bad_input or stats.last_error}"
            )
        idle_since_s = math.inf

        def is_idle() -> bool:
            nonlocal idle_since_s
            report = platform.supervisor.statuses["learner"].report
            status = report.get("games", {}).get(self.game.name, {})
            self._show(self.people_steps, status.get("why", "") or "the learner is starting")
            has_read = report.get("read_steps", 0) >= stats.acked_steps
            has_begun = bool(status.get("phase"))
            if not has_read or not has_begun or status["doing"] != "wait" or status["error"]:
                idle_since_s = math.inf
                return False
            idle_since_s = min(idle_since_s, time.monotonic())
            return time.monotonic() >= idle_since_s + quiet_s

        self._wait(platform, is_idle, "the learner")
        now = self.registry.catalogue(self.game.name)
        live = (now.model_of("champion"), now.model_of("canary"))
        if live != self._live:
            self._live = live
            self.promoted_after.setdefault(live[0], self.people_steps)
            name = model_name(self.game.name, live[0])
            client.wait_for_bot()
            self._wait(platform, lambda: client.stats().bot == name, f"clients to receive {name}")
            # A canary is not named by the client; it arrives as fast as a champion.
            time.sleep(0.5)

    def _wait(self, platform: Platform, is_true: Callable[[], bool], what: str) -> None:
        """Wait for something; UnderstudyError if the learner made no progress for long."""
        before: object = None
        since_s = time.monotonic()
        while not is_true():
            platform.supervisor.step()
            report = platform.supervisor.statuses["learner"].report
            progress = (report.get("updates"), report.get("read_steps"), len(self.decisions))
            if progress != before:
                before = progress
                since_s = time.monotonic()
            if time.monotonic() - since_s > _STUCK_S:
                errors = [
                    *(status.last_error for status in platform.supervisor.statuses.values()),
                    report.get("games", {}).get(self.game.name, {}).get("error", ""),
                ]
                raise UnderstudyError(
                    f"{self.game.name} waited {_STUCK_S:.0f} s for {what} without progress: "
                    f"{'; '.join(filter(None, errors)) or 'no error was reported'}"
                )
            time.sleep(_TICK_S)

    def _collect(self, role: str, line: str) -> None:
        if role == "learner" and '"decision"' in line:
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if event.get("event") == "decision":
                    fields = ("model", "decision", "why")
                    self.decisions.append({name: event[name] for name in fields})


def run_loop(
    game: PeopleGame,
    *,
    steps: int,
    seed: int,
    episodes: int,
    folder: Path,
    show: Show,
    learner: LearnerSection | None = None,
) -> dict[str, Any]:
    """Play one game to this many steps of people; measure each champion, and the last canary."""
    code = commit()
    began_s = time.monotonic()
    began_cpu_s = _processor_s()
    loop = Loop(game, seed=seed, folder=folder, show=show, learner=learner)
    verification = loop.run(steps)
    played_minutes = (time.monotonic() - began_s) / 60
    cpu_minutes = (_processor_s() - began_cpu_s) / 60
    scale = scale_of(game.name)
    registry = loop.registry
    catalogue = registry.catalogue(game.name)

    def measured(number: int) -> dict[str, Any]:
        show(loop.people_steps, f"measuring {model_name(game.name, number)}")
        policy = registry.policy(game.name, number)
        returns = np.array(true_returns(game, policy, episodes=episodes))
        return {
            "model": number,
            "algorithm": catalogue.models[number].lineage.algorithm,
            "people_steps": loop.promoted_after.get(number),
            "mean": round(float(returns.mean()), 4),
            "standard_error": round(float(returns.std(ddof=1) / np.sqrt(episodes)), 4),
            "on_scale": scale.place(float(returns.mean())),
        }

    champions = dict.fromkeys(alias.model_no for alias in catalogue.history if alias.model_no)
    promotions = [measured(number) for number in champions]
    canary = catalogue.model_of("canary")
    champion = catalogue.model_of("champion")
    row: dict[str, Any] = {
        "game": game.name,
        "seed": seed,
        "steps": steps,
        "episodes": episodes,
        "commit": code,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "champion": next((bot for bot in promotions if bot["model"] == champion), None),
        "random_on_scale": scale.place(scale.random),
        "promotions": promotions,
        "canary": measured(canary) if canary else None,
        "candidates": len(catalogue.models),
        "decisions": loop.decisions,
        "people_steps": loop.people_steps,
        "bot_steps": loop.bot_steps,
        "bot_episodes": loop.bot_episodes,
        "stored_steps": verification.steps,
        "lost_steps": verification.lost_steps,
        "duplicate_steps": verification.duplicate_steps,
        "restarts": loop.restarts,
        "play_minutes": round(played_minutes, 2),
        "play_cpu_minutes": round(cpu_minutes, 2),
        "minutes": round((time.monotonic() - began_s) / 60, 2),
    }
    return row | {"missed": misses(row)}


def _processor_s() -> float:
    """Processor time of this process and of children that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def misses(row: Mapping[str, Any]) -> list[str]:
    """What a run should have shown and did not."""
    missed = []
    if row["lost_steps"] or row["duplicate_steps"]:
        missed.append("steps were lost or stored twice")
    goal = 0.8 if row["steps"] >= 10 * STEPS else 0.0
    if row["champion"] is None:
        missed.append("no champion")
    elif row["champion"]["on_scale"] < goal:
        missed.append(f"champion below {goal:g}")
    if any(bot["on_scale"] < row["random_on_scale"] for bot in row["promotions"]):
        missed.append("promoted below random play")
    for before, after in itertools.pairwise(row["promotions"]):
        if is_lowered(before, after):
            missed.append(f"model {after['model']} lowered the champion's return")
    return missed


def is_lowered(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether a bot's mean return is below that of the one before it by more than the error."""
    error = math.hypot(before["standard_error"], after["standard_error"])
    return bool(after["mean"] < before["mean"] - 1.96 * error)


def _measure_loops(games: Sequence[PeopleGame], options: argparse.Namespace) -> int:
    steps = options.steps or (QUICK_STEPS if options.quick else STEPS)
    seeds = range(options.seeds or (1 if options.quick else 3))
    if options.seed is not None:
        seeds = range(options.seed, options.seed + 1)
    episodes = QUICK_TRUE_EPISODES if options.quick else TRUE_EPISODES
    out = options.out or (None if options.quick else LOOPS)
    rows = read_rows(out, _run_of) if out else []
    asked = [(game.name, seed, steps, episodes) for game in games for seed in seeds]
    done = {_run_of(row) for row in kept_rows(rows, every=options.keep)}
    console = Console(stderr=True)
    with Interrupts(hurry=kill_children), Progress(console=console) as progress:
        for run in asked:
            if run in done:
                progress.console.print(f"{run[0]} seed {run[1]}: kept", highlight=False)
                continue
            row = _measure_loop(run, progress)
            rows = [*(other for other in rows if _run_of(other) != run), row]
            rows.sort(key=lambda row: (list(GAMES).index(row["game"]), row["steps"], row["seed"]))
            if out:
                write_rows(out, rows)
            progress.console.print(_line(row), highlight=False)
    shown = [row for row in rows if _run_of(row) in asked]
    _show_loops(shown)
    print(f"{sum(row['minutes'] for row in shown):.1f} minutes")
    return 0 if options.quick or not any(row["missed"] for row in shown) else 1


def _run_of(row: Mapping[str, Any]) -> tuple[str, int, int, int]:
    return row["game"], row["seed"], row["steps"], row["episodes"]


def _measure_loop(run: tuple[str, int, int, int], progress: Progress) -> dict[str, Any]:
    name, seed, steps, episodes = run
    bar = progress.add_task(f"{name} seed {seed}", total=steps)

    def show(done: int, why: str) -> None:
        progress.update(bar, completed=done, description=f"{name} seed {seed}: {why[:60]}")

    with tempfile.TemporaryDirectory(prefix="understudy-players-") as folder:
        try:
            return run_loop(
                GAMES[name],
                steps=steps,
                seed=seed,
                episodes=episodes,
                folder=Path(folder) / "data",
                show=show,
            )
        finally:
            end_children()
            progress.remove_task(bar)


def _line(row: Mapping[str, Any]) -> str:
    champion = row["champion"]
    place = "no champion" if champion is None else f"champion at {champion['on_scale']:.2f}"
    return (
        f"{row['game']} seed {row['seed']}: {place} after {row['people_steps']} steps of people, "
        f"{row['minutes']:.1f} minutes"
    )


def _show_loops(rows: Sequence[Mapping[str, Any]]) -> None:
    table = Table(
        "game", title="Champions (average person = 0, best person = 1)", title_justify="left"
    )
    headings = ("seed", "steps", "champion", "return", "random", "lowest promoted", "promoted")
    for heading in (*headings, "candidates", "minutes", "CPU minutes"):
        table.add_column(heading, justify="right")
    table.add_column("missed")
    for row in rows:
        champion = row["champion"]
        places = [bot["on_scale"] for bot in row["promotions"]]
        table.add_row(
            row["game"],
            str(row["seed"]),
            str(row["steps"]),
            "none" if champion is None else f"{champion['on_scale']:.3f}",
            ""
            if champion is None
            else f"{champion['mean']:.4g} ± {champion['standard_error']:.2g}",
            f"{row['random_on_scale']:.2f}",
            f"{min(places):.3f}" if places else "",
            str(len(places)),
            str(row["candidates"]),
            f"{row['minutes']:.1f}",
            f"{row['play_cpu_minutes']:.1f}",
            ", ".join(row["missed"]),
        )
    print_wide(table)


def print_wide(table: Table) -> None:
    """Print a table; its columns are not cut where the output is a file."""
    console = Console()
    if not console.is_terminal:
        console.width = 140
    console.print(table)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UnderstudyError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(130)
