"""understudy train."""

import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape

from understudy.cli.interrupts import Interrupts
from understudy.cli.options import console, count, examples, finish, json_object, json_option
from understudy.cli.training_view import Progress, duration, watching_run
from understudy.core.errors import ConfigError, StorageFailed, StorageFull
from understudy.core.events import Event

_PATH = click.Path(path_type=Path)
_STEPS = "Env steps, at least: the round in which they are reached is finished. Updates, with --from-store."
_UNTIL = (
    "Solved at this return; inf: no goal (default: the preset's, else none where --steps or --from-store is given, "
    "else what the game says)."
)


@click.command(
    epilog=examples(
        "understudy train CartPole-v1",
        "understudy train CartPole-v1 --algorithm dqn --seed 0 --until 475 --out R --json",
        "understudy train Pendulum-v1 --set learning_rate=3e-4 --network 256,256 --steps 200000",
        "understudy train CartPole-v1 --algorithm bc --from-store D --steps 5000",
        "understudy train --resume --out R",
        "understudy train --list --algorithm dqn",
    )
)
@click.argument("game", required=False)
@click.option("--algorithm", help="dqn, ppo, bc, or your own as module:Class (default: the preset's, else ppo).")
@click.option("--preset", help="A preset by name or file (default: the one for the algorithm and kind of game).")
@click.option("--config", type=_PATH, metavar="FILE", help="A TOML file of settings, written like a preset.")
@click.option("--set", "sets", multiple=True, metavar="NAME=VALUE", help="One setting; again for more (see --list).")
@click.option("--network", metavar="WIDTHS", help="Widths of the network's layers, such as 64,64.")
@click.option("--wrapper", multiple=True, metavar="MODULE:CLASS", help="A wrapper around each env; again for more.")
@click.option("--env-kwargs", default="{}", metavar="JSON", help="Keywords for gymnasium.make, as a JSON object.")
@click.option("--frame-skip", default=1, metavar="K", help="Repeat each action for K frames.")
@click.option("--seed", type=int, help="Seed of everything (default 0).")
@click.option("--seeds", type=int, metavar="N", help="N runs with seeds from --seed on, in OUT/seed-S, and a summary.")
@click.option("--until", type=float, metavar="RETURN", help=_UNTIL)
@click.option("--steps", type=int, metavar="N", help=_STEPS)
@click.option("--eval-every", type=int, metavar="N", help="Env steps between two evaluations.")
@click.option("--init-from", type=_PATH, metavar="RUN", help="Start from the best policy of another run.")
@click.option("--from-store", type=_PATH, metavar="DIR", help="Learn from a data folder; the game is not played.")
@click.option("--out", type=_PATH, metavar="DIR", help="The run's folder (default: runs/GAME-ALGORITHM-N).")
@click.option("--resume", is_flag=True, help="Go on with the run in --out; past its end with more --steps or --until.")
@click.option("--video", default=0, metavar="N", help="Film N episodes of the best policy into RUN/videos.")
@click.option("--log", default="", metavar="NAMES", help="Also log to tensorboard, wandb, mlflow (with commas).")
@click.option("--list", "is_list", is_flag=True, help="Show algorithms with their settings, defaults and ranges.")
@json_option
def train(game: str | None, sets: Sequence[str], env_kwargs: str, is_list: bool, as_json: bool, **asked: Any) -> int:
    """Train a policy on GAME (any Gymnasium id) until it is solved or its steps are done.

    The run's folder holds the settings, checkpoints, the curve as CSV and PNG, and the best and the last policy. It may
    be killed at any moment and go on with --resume.
    """
    import_from_here()
    if is_list:
        return _list(asked["algorithm"], as_json=as_json)
    if game is None and not asked["resume"]:
        raise ConfigError("which game? give a Gymnasium id: understudy train CartPole-v1 (or see --help)")
    asked |= {"settings": dict(map(_pair, sets)), "env_kwargs": json_object(env_kwargs, "--env-kwargs")}
    out, progress = console(as_json=as_json), Progress()
    try:
        with Interrupts() as interrupts:
            result = _trained(out, progress, game, asked, interrupts)
    except (KeyboardInterrupt, StorageFull, StorageFailed, OSError):
        if stopped := _stopped(progress, asked["seeds"]):
            print(stopped.pop("said"), file=sys.stderr)
            finish(stopped, as_json=as_json)
        raise
    if not as_json:
        _print(out, result, seeds=asked["seeds"])
    return finish(result, as_json=as_json, code=1 if _has_learned_nothing(result) else 0)


def import_from_here() -> None:
    """Let `module:Class` name what lies in the folder the command was called in."""
    if not {"", os.getcwd()} & set(sys.path):
        sys.path.insert(0, os.getcwd())


def _trained(
    out: Console, progress: Progress, game: str | None, asked: Mapping[str, Any], interrupts: Interrupts
) -> Mapping[str, Any]:
    began_s = time.perf_counter() - process_age_s()
    with watching_run(out, progress) as hear:
        from understudy.app.runs.train import train as train_one  # imported late: JAX takes a while
        from understudy.app.runs.train import train_seeds

        def on_event(event: Event) -> None:
            hear(event)
            interrupts.check()

        complain = lambda text: out.print(f"[yellow]{escape(text)}[/]", soft_wrap=True)  # noqa: E731
        common = {**asked, "on_event": on_event, "on_complaint": complain, "began_s": began_s}
        seeds = common.pop("seeds")
        return train_one(game, **common).result if seeds is None else train_seeds(game, seeds=seeds, **common).result


def process_age_s() -> float:
    """Seconds since this process was started, interpreter and all; 0 where the system does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)
    except (OSError, ValueError, IndexError, AttributeError):
        return max(0.0, time.process_time())


def _pair(text: str) -> tuple[str, Any]:
    from understudy.app.runs.settings import parse_value

    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise ConfigError(f"--set is {text!r}; give NAME=VALUE, such as learning_rate=0.001")
    return name.strip(), parse_value(value)


def _list(algorithm: str | None, *, as_json: bool) -> int:
    from understudy.cli.knobs import listed, show

    fields = listed(algorithm)
    if not as_json:
        show(console(), fields)
    return finish(fields, as_json=as_json)


def _has_learned_nothing(result: Mapping[str, Any]) -> bool:
    """Whether all that was played had to be refused; too few steps for an update are no failure."""
    return bool(result["updates"] == 0 and result.get("guarded_chunks", 0) > 0)


def _stopped(progress: Progress, seeds: int | None) -> dict[str, Any]:
    """Where a run stands that was stopped, and how it goes on; empty before it has begun."""
    run = progress.started
    if run is None:
        return {}
    command = f"understudy train --resume --out {shlex.quote(run.run)}"
    if seeds is not None:
        words = [word for word in sys.argv[1:] if word != "--resume"]
        has_out = any(word == "--out" or word.startswith("--out=") for word in words)
        words += [] if has_out else ["--out", str(Path(run.run).parent)]
        command = shlex.join(["understudy", *words, "--resume"])
    from understudy.app.runs.folder import RunFolder

    # From the disk: whoever stops a run between a checkpoint and its event has it all the same.
    unit, saved = progress.unit.removesuffix("s"), RunFolder(Path(run.run)).saved_steps()
    where = "there is no checkpoint yet" if saved is None else f"the last checkpoint is at {unit} {saved}"
    stopped_at = max(progress.steps, saved or 0)
    return {
        "stopped": True, "run": run.run, "stopped_at_step": stopped_at, "saved_at_step": saved, "next": command,
        "said": f"stopped at {unit} {stopped_at}, {where}; go on with: {command}",
    }  # fmt: skip


def _print(out: Console, result: Mapping[str, Any], *, seeds: int | None) -> None:
    run = escape(shlex.quote(result["run"]))
    work = f"{count(result['updates'])} update{'' if result['updates'] == 1 else 's'}"
    if result["env_steps"]:
        work = f"{count(result['env_steps'])} steps and {work}"
    lines = [
        _outcome(result) if seeds is None else _outcome_of_seeds(result),
        f"{work} in {duration(result['train_s'])}, compiling took {result['compile_s']:.1f} s",
    ]
    if seeds is None:
        lines.append(f"policy  {escape(result['policy'])}")
    lines.append(f"run     {escape(result['run'])}")
    lines += [f"video   {escape(path)}" for path in result.get("videos", ())]
    if result["updates"] == 0:
        refused = result.get("guarded_chunks", 0)
        why = f"{count(refused)} chunks were refused" if refused else "the steps were too few for a first update"
        lines.insert(1, f"[bold red]nothing was learned[/]: {why}")
    if result["return_mean"] is not None:
        lines.append(f"next: understudy evaluate {run} --episodes 100 --seeds 10")
    if seeds is None and not result["solved"] and result["env_steps"]:
        lines.append(f"      understudy train --resume --out {run} --steps {2 * result['env_steps']}")
    out.print("\n".join(lines), soft_wrap=True)


def _outcome(result: Mapping[str, Any]) -> str:
    if result["return_mean"] is None:
        return "trained; no return: the game is not installed here, or says returns that are not finite"
    played = f"return {result['return_mean']:.1f} over {result['episodes']} held-out episodes"
    if result["solved"]:
        return f"[bold green]solved[/]: {played}, goal {result['until']:g}"
    return played if result["until"] is None else f"[bold]not solved[/]: {played}, goal {result['until']:g}"


def _outcome_of_seeds(result: Mapping[str, Any]) -> str:
    if result["return_iqm"] is None:
        return (
            f"trained {result['seeds']} seeds; no returns: the game is not installed here, or says none that is finite"
        )
    low, high = result["return_low"], result["return_high"]
    interval = "no interval below 5 seeds" if low is None else f"95 % interval {low:.1f} to {high:.1f}"
    return (
        f"[bold]{result['solved_seeds']} of {result['seeds']} seeds solved[/]: IQM of returns "
        f"{result['return_iqm']:.1f}, {interval}"
    )
