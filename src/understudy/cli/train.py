"""understudy train and understudy evaluate."""

import dataclasses
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

from understudy.algorithm import Range, Schedule
from understudy.cli.interrupts import Interrupts
from understudy.cli.options import (
    PATH,
    console,
    count_of,
    examples,
    finish,
    format_count,
    import_from_here,
    json_object,
    json_option,
    results,
    setting_pairs,
)
from understudy.cli.training_view import RunProgress, format_duration, run_view
from understudy.core.errors import ConfigError, StorageFailed, StorageFull
from understudy.nn.network import ACTIVATIONS
from understudy.replay import REPLAYS
from understudy.training.events import Event

_STEPS = (
    "Env steps to train for; slightly more may be played, because the last round is completed. "
    "With --from-store: number of updates. Schedules keep the preset's length if it is longer "
    "(--set horizon=N)."
)
_UNTIL = (
    "Stop when the mean return reaches this; `inf`: never. Default: the preset's goal, else the "
    "game's reward threshold (not with --steps or --from-store)."
)


@click.command(
    epilog=examples(
        "understudy train CartPole-v1",
        "understudy train CartPole-v1 --algorithm dqn --seed 0 --until 475 --out R --json",
        "understudy train Pendulum-v1 --set learning_rate=3e-4 --network 256,256 --steps 200000",
        "understudy train CartPole-v1 --algorithm dqn --engine process --actors 2",
        "understudy train CartPole-v1 --algorithm dqn --engine ray --actors 2 --address auto",
        "understudy train CartPole-v1 --algorithm dqn --engine workers --listen 127.0.0.1:4444",
        "understudy train Pendulum-v1 --wrapper gymnasium.wrappers:NormalizeReward",
        "understudy train CartPole-v1 --algorithm iql --from-store D",
        "understudy train --resume --out R",
        "understudy train --list --algorithm dqn",
    )
)
@click.argument("game", required=False)
@click.option(
    "--algorithm",
    help="dqn, ppo, bc, iql, or your own as module:Class (default: the preset's, else ppo; with "
    "--from-store bc).",
)
@click.option(
    "--preset",
    help="Name or file of a preset, or the folder of a study of `understudy tune`: the settings of "
    "its best trial (default: the preset for the algorithm and kind of game).",
)
@click.option(
    "--config",
    type=PATH,
    metavar="FILE",
    help="A TOML file of settings, in the format of a preset.",
)
@click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="NAME=VALUE",
    help="Change one setting (--list shows all); repeatable.",
)
@click.option("--network", metavar="WIDTHS", help="Widths of the network layers, such as 64,64.")
@click.option(
    "--wrapper",
    multiple=True,
    metavar="MODULE:CLASS",
    help="A wrapper around each env; repeatable. train:MODULE:CLASS wraps only the envs of "
    "training. Returns are measured below all of them.",
)
@click.option(
    "--env-kwargs",
    default="{}",
    metavar="JSON",
    help="Keyword arguments for gymnasium.make, as a JSON object.",
)
@click.option("--frame-skip", default=1, metavar="K", help="Repeat each action for K frames.")
@click.option("--seed", type=int, help="Random seed of envs, weights and sampling (default 0).")
@click.option(
    "--seeds",
    type=int,
    metavar="N",
    help="Train N runs with consecutive seeds from --seed, in OUT/seed-S, and summarise them.",
)
@click.option("--until", type=float, metavar="RETURN", help=_UNTIL)
@click.option("--steps", type=int, metavar="N", help=_STEPS)
@click.option("--eval-every", type=int, metavar="N", help="Env steps between evaluations.")
@click.option(
    "--init-from", type=PATH, metavar="RUN", help="Start from the best policy of another run."
)
@click.option(
    "--from-store",
    type=PATH,
    metavar="DIR",
    help="Learn from a data folder instead of playing the game.",
)
@click.option(
    "--engine",
    metavar="NAME",
    help="Where actors play: `inline`, in this process (default), each in a `process`, on `ray`, "
    "or as `workers` that join over HTTP (understudy worker --help).",
)
@click.option(
    "--address",
    metavar="HOST:PORT",
    help="With --engine ray: the cluster, or `auto` (default: a Ray that ends with the run).",
)
@click.option(
    "--actors", type=int, metavar="N", help="Actors that the envs are divided among (default 1)."
)
@click.option("--listen", metavar="HOST:PORT", help="Where workers join (default 127.0.0.1:4444).")
@click.option("--certificate", type=PATH, metavar="FILE", help="TLS certificate for workers (PEM).")
@click.option("--certificate-key", type=PATH, metavar="FILE", help="Its private key (PEM).")
@click.option(
    "--insecure", is_flag=True, help="Allow workers on other machines to connect without TLS."
)
@click.option(
    "--key-file",
    type=PATH,
    metavar="FILE",
    help="The workers' key (default: the variable UNDERSTUDY_WORKER_KEY, else RUN/worker.key, "
    "which is created).",
)
@click.option(
    "--out", type=PATH, metavar="DIR", help="The run folder (default: runs/GAME-ALGORITHM-N)."
)
@click.option(
    "--resume",
    is_flag=True,
    help="Resume the run in --out; give more --steps or --until to train beyond its end.",
)
@click.option(
    "--keep-history",
    is_flag=True,
    help="Keep everything that was played in RUN/store, not only what a resume may need.",
)
@click.option(
    "--video", default=0, metavar="N", help="Record N episodes of the best policy to RUN/videos."
)
@click.option(
    "--log",
    default="",
    metavar="NAMES",
    help="Also log to tensorboard, wandb, mlflow (comma-separated).",
)
@click.option(
    "--list",
    "is_list",
    is_flag=True,
    help="List algorithms with their settings, defaults and ranges.",
)
@json_option
def train(
    game: str | None,
    sets: Sequence[str],
    env_kwargs: str,
    is_list: bool,
    as_json: bool,
    **options: Any,
) -> int:
    """Train a policy on GAME (any Gymnasium id) until it is solved or its steps are done.

    The run folder contains the settings, checkpoints, the learning curve as CSV and PNG, and the
    best and the last policy. A run can be killed at any moment and resumed with --resume;
    Ctrl-C saves a checkpoint first.
    """
    import_from_here()
    if is_list:
        fields = _listed(options["algorithm"])
        _show_list(results(as_json=as_json), fields)
        return finish(fields, as_json=as_json)
    if game is None and not options["resume"]:
        if store := options["from_store"]:
            raise ConfigError(
                f"no game given; give the name of a recorded game: understudy train GAME "
                f"--from-store {store} (list them: understudy data stats --data {store})"
            )
        raise ConfigError(
            "no game given; give a Gymnasium id: understudy train CartPole-v1 (see --help)"
        )
    options |= {
        "settings": setting_pairs(sets),
        "env_kwargs": json_object(env_kwargs, "--env-kwargs"),
    }
    out = console(as_json=as_json)
    progress = RunProgress()
    try:
        with Interrupts() as interrupts:
            result = _trained(out, progress, game, options, interrupts)
    except (KeyboardInterrupt, StorageFull, StorageFailed, OSError):
        if stopped := _stopped(progress, options["seeds"]):
            print(stopped.pop("message"), file=sys.stderr)
            finish(stopped, as_json=as_json)
        raise
    _print(results(as_json=as_json), result, seeds=options["seeds"])
    return finish(result, as_json=as_json)


def _trained(
    out: Console,
    progress: RunProgress,
    game: str | None,
    options: Mapping[str, Any],
    interrupts: Interrupts,
) -> Mapping[str, Any]:
    began_s = time.perf_counter() - process_age_s()
    with run_view(out, progress) as handle_event:
        # Imported late: importing JAX takes seconds.
        from understudy.training.train import TrainOptions
        from understudy.training.train import train as train_one
        from understudy.training.train_seeds import train_seeds

        def on_event(event: Event) -> None:
            handle_event(event)
            interrupts.check()

        def warn(text: str) -> None:
            out.print(f"[yellow]{escape(text)}[/]", soft_wrap=True)

        common = {**options, "on_event": on_event}
        seeds = common.pop("seeds")
        for name in ("eval_every", "actors", "keep_history"):
            value = common.pop(name)
            if value is None or value is False:
                continue
            if name in common["settings"]:
                raise ConfigError(
                    f"{name} is set twice: by --{name.replace('_', '-')} and by --set; omit one of "
                    "the two"
                )
            common["settings"] = {**common["settings"], name: value}
        common["listen"] = _listen(common)
        names = [field.name for field in dataclasses.fields(TrainOptions) if field.name in common]
        common["options"] = TrainOptions(
            on_warning=warn,
            started_s=began_s,
            hold_interrupts=interrupts.hold,
            **{name: common.pop(name) for name in names},
        )
        return (
            train_one(game, **common).result
            if seeds is None
            else train_seeds(game, seeds=seeds, **common).result
        )


def _listen(options: dict[str, Any]) -> Any:
    """Where workers join, from the options that say so; None if there are none."""
    address = options.pop("listen")
    names = ("certificate", "certificate_key", "insecure", "key_file")
    fields = {name: value for name in names if (value := options.pop(name))}
    if address is not None:
        # Imported late: it imports the workers' code.
        from understudy.training.train import listen_fields

        fields |= listen_fields(address)
    return fields or None


def process_age_s() -> float:
    """Seconds since this process started, with the interpreter's startup; CPU time if unknown."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started_s)
    except (OSError, ValueError, IndexError, AttributeError):
        return max(0.0, time.process_time())


def _stopped(progress: RunProgress, seeds: int | None) -> dict[str, Any]:
    """The state of a stopped run, and the command that resumes it; empty before it started."""
    run = progress.started
    if run is None:
        return {}
    command = f"understudy train --resume --out {shlex.quote(run.run)}"
    if seeds is not None:
        words = [word for word in sys.argv[1:] if word != "--resume"]
        has_out = any(word == "--out" or word.startswith("--out=") for word in words)
        words += [] if has_out else ["--out", str(Path(run.run).parent)]
        command = shlex.join(["understudy", *words, "--resume"])
    from understudy.training.folder import RunFolder

    # Read from disk: the run may have been stopped between a checkpoint and its event.
    unit = progress.unit.removesuffix("s")
    saved = RunFolder(Path(run.run)).saved_steps()
    checkpoint = (
        "there is no checkpoint yet"
        if saved is None
        else f"the last checkpoint is at {unit} {saved}"
    )
    stopped_at = max(progress.steps, saved or 0)
    return {
        "stopped": True,
        "run": run.run,
        "stopped_at_step": stopped_at,
        "saved_at_step": saved,
        "next": command,
        "message": f"stopped at {unit} {stopped_at}, {checkpoint}; resume with: {command}",
    }


def _print(out: Console, result: Mapping[str, Any], *, seeds: int | None) -> None:
    run = escape(shlex.quote(result["run"]))
    work = count_of(result["updates"], "update")
    if result["env_steps"]:
        work = f"{count_of(result['env_steps'], 'step')} and {work}"
    time = format_duration(result["train_s"])
    lines = [
        _outcome(result) if seeds is None else _outcome_of_seeds(result),
        f"{work} in {time}, compiling took {result['compile_s']:.1f} s",
    ]
    if seeds is None:
        lines.append(f"policy  {escape(result['policy'])}")
    lines.append(f"run     {escape(result['run'])}")
    lines += [f"video   {escape(path)}" for path in result.get("videos", ())]
    if result["updates"] == 0:
        lines.insert(1, "[bold red]nothing was learned[/]: too few steps for a first update")
    if known := result.get("known_episodes"):
        best = format_count(result["best_episodes"])
        lines.insert(2, f"cloned the best {best} of {count_of(known, 'whole episode')}")
    if cut := result.get("cut_episodes"):
        lines.insert(
            1,
            f"{format_count(cut)} of {format_count(result['episodes'])} episodes had not ended and "
            f"were cut after {format_count(_max_steps(result))} steps; change that with "
            "--set eval_max_steps=N",
        )
    if result["return_mean"] is not None:
        lines.append(f"next: understudy evaluate {run} --episodes 100 --seeds 10")
    elif seeds is None and result["updates"]:
        lines.append(f"next: understudy models add {run} --data DIR, and it plays in the game")
    if seeds is None and not result["solved"] and result["env_steps"]:
        lines.append(
            f"      understudy train --resume --out {run} --steps {2 * result['env_steps']}"
        )
    out.print("\n".join(lines), soft_wrap=True)


def _max_steps(result: Mapping[str, Any]) -> int:
    """The step limit of evaluations, of a run or of the first of several."""
    limit: int = result.get("runs", [result])[0]["eval_max_steps"]
    return limit


def _outcome(result: Mapping[str, Any]) -> str:
    if result["return_mean"] is None:
        return f"trained, not evaluated: {escape(result['why_no_return'])}"
    episodes = count_of(result["episodes"], "held-out episode")
    played = f"return {result['return_mean']:.1f} over {episodes}"
    if result["solved"]:
        return f"[bold green]solved[/]: {played}, goal {result['until']:g}"
    return (
        played
        if result["until"] is None
        else f"[bold]not solved[/]: {played}, goal {result['until']:g}"
    )


def _outcome_of_seeds(result: Mapping[str, Any]) -> str:
    if result["return_iqm"] is None:
        seeds = count_of(result["seeds"], "seed")
        return f"trained {seeds}, not evaluated: {escape(result['why_no_return'])}"
    low = result["return_low"]
    high = result["return_high"]
    interval = (
        "no interval below 5 seeds" if low is None else f"95 % interval {low:.1f} to {high:.1f}"
    )
    return (
        f"[bold]{result['solved_seeds']} of {count_of(result['seeds'], 'seed')} solved[/]: IQM of "
        "returns "
        f"{result['return_iqm']:.1f}, {interval}"
    )


# --- train --list: algorithms, their settings, defaults and ranges --------------------------------


def _listed(algorithm: str | None) -> dict[str, Any]:
    """The settings of all algorithms, or of the named one, and the names of the presets."""
    from understudy.training.preset import preset_families, preset_names
    from understudy.training.settings import (
        ALGORITHMS,
        LearnerPart,
        RunPart,
        algorithm_class,
        describe_algorithm,
    )

    algorithms = {}
    for name in [algorithm] if algorithm else sorted(ALGORITHMS):
        described_class: Any = (
            describe_algorithm(name) if name in ALGORITHMS else algorithm_class(name)
        )
        summary = (described_class.__doc__ or "").strip().partition("\n\n")[0]
        algorithms[name] = {
            "says": " ".join(summary.split()),
            "config": _settings_of(described_class.Config),
            "knobs": _settings_of(described_class.Knobs),
        }
    return {
        "algorithms": algorithms,
        "run": _settings_of(RunPart),
        "learner": _settings_of(LearnerPart),
        "presets": preset_names(),
        "preset_families": preset_families(),
    }


_OTHERS = {
    "widths": "widths of the layers (--network 64,64)",
    "centre": "a grid's cell that is shown in the middle: 'obs.grid 5' or 'obs.grid obs.y,obs.x'",
    "symmetry": "mirror images of such a grid to learn from: 'rows 1,0,2,3; columns 0,1,3,2'",
    "network": "a custom network (in Python)",
    "activation": f"activation after each layer: {', '.join(ACTIVATIONS)}",
    "replay": f"where steps are drawn from: {', '.join(REPLAYS)} or module:Class",
    "until": "the return at which a run is solved (--until)",
}
"""Descriptions of settings without a range."""


def _settings_of(part: Any) -> list[dict[str, Any]]:
    """The fields of a settings dataclass: name, default, range, help."""
    rows = []
    for setting in dataclasses.fields(part):
        limits: Range | None = setting.metadata.get("range")
        default: Any = None if setting.default is dataclasses.MISSING else setting.default
        is_switch = isinstance(default, bool)
        if isinstance(default, Schedule):
            default = {"start": default.start, "end": default.end, "until": default.until}
        rows.append(
            {
                "name": setting.name,
                "default": list(default) if isinstance(default, tuple) else default,
                "is_switch": is_switch,
                "low": None if is_switch else limits and limits.low,
                "high": None if is_switch else limits and limits.high,
                "says": limits.description if limits else _OTHERS.get(setting.name, ""),
            }
        )
    return rows


def _show_list(out: Console, fields: Mapping[str, Any]) -> None:
    """Print the list as text."""
    for name, algorithm in fields["algorithms"].items():
        out.print(f"[bold]{escape(name)}[/]  {escape(algorithm['says'])}", soft_wrap=True)
        _show_rows(
            out,
            algorithm["knobs"],
            note="may be schedules: --set 'NAME={start=1.0,end=0.1,until=0.5}'",
        )
        _show_rows(out, algorithm["config"], note="fixed for a run")
    out.print("[bold]every algorithm[/]")
    _show_rows(out, fields["run"], note="the run")
    _show_rows(out, fields["learner"], note="the learner; only for algorithms with a replay")
    families = ", ".join(fields["preset_families"])
    out.print(f"presets: {', '.join(fields['presets'])}", soft_wrap=True)
    out.print(
        f"         or, for the kind of game, one of {families}: --preset apex", soft_wrap=True
    )
    out.print("change one with --set NAME=VALUE, several with --config FILE", soft_wrap=True)
    out.print(
        "a preset changes some of these defaults; RUN/preset.toml has the settings of a run",
        soft_wrap=True,
    )


def _show_rows(out: Console, rows: Sequence[Mapping[str, Any]], *, note: str) -> None:
    out.print(f"  [dim]{escape(note)}[/]", soft_wrap=True)
    cells = [_cells(row) for row in rows]
    wide = [max((len(row[at]) for row in cells), default=0) for at in range(3)]
    for row, (name, default, limits) in zip(rows, cells, strict=True):
        line = (
            f"    {name:{wide[0]}}  {default:{wide[1]}}  {limits:{wide[2]}}  {row['says']}".rstrip()
        )
        out.print(escape(line), soft_wrap=True)


def _cells(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Name, default and range."""
    value = row["default"]
    if row["is_switch"]:
        return row["name"], "true" if value else "false", "true or false"
    if isinstance(value, dict):
        until = "" if value["until"] == 1.0 else f" by {value['until']:g}"
        value = f"{value['start']:g} → {value['end']:g}{until}"
    default = "" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return row["name"], default, "" if row["low"] is None else f"{row['low']:g} to {row['high']:g}"


# --- evaluate -------------------------------------------------------------------------------------


@click.command(
    epilog=examples(
        "understudy evaluate runs/CartPole-v1-ppo-1",
        "understudy evaluate R --episodes 100 --seeds 10 --json",
        "understudy evaluate R --max-steps 50000",
    )
)
@click.argument("run", type=PATH)
@click.option(
    "--episodes", default=100, show_default=True, help="Episodes per set of held-out seeds."
)
@click.option(
    "--seeds",
    default=10,
    show_default=True,
    help="Number of held-out seed sets; the interval needs at least 5.",
)
@click.option(
    "--policy",
    type=click.Choice(["best", "last"]),
    default="best",
    show_default=True,
    help="Which policy of the run to evaluate.",
)
@click.option(
    "--max-steps",
    type=int,
    metavar="N",
    help="Cut an episode after N steps, if the game has no limit (default: the run's "
    "eval_max_steps).",
)
@json_option
def evaluate(
    run: Path, episodes: int, seeds: int, policy: str, max_steps: int | None, as_json: bool
) -> int:
    """Evaluate the policy of RUN on held-out env seeds: IQM and 95 % interval.

    RUN is a run folder, or a folder of several runs with different seeds; then the interval is over
    those runs.
    """
    import_from_here()
    # Imported late, so that --help is fast.
    from understudy.training.evaluation import evaluate_run

    with console(as_json=as_json).status("playing ..."):
        result = evaluate_run(
            run, episodes=episodes, seeds=seeds, policy=policy, max_steps=max_steps
        )
    interval = (
        f"95 % interval {result.low:.1f} to {result.high:.1f}"
        if result.low is not None
        else ("no interval below 5 seed sets" if result.runs == 1 else "no interval below 5 runs")
    )
    out = results(as_json=as_json)
    out.print(f"IQM [bold]{result.iqm:.1f}[/], {interval}; mean {result.mean:.1f}", soft_wrap=True)
    runs = "" if result.runs == 1 else f" of {result.runs} runs"
    out.print(
        f"{count_of(result.played, 'episode')} of the {policy} policy{runs}, "
        f"{count_of(seeds, 'seed set')} of {count_of(episodes, 'episode')} each",
        soft_wrap=True,
    )
    if result.cut:
        out.print(
            f"{format_count(result.cut)} episodes had not ended and were cut after "
            f"{format_count(result.max_steps)} steps; change that with --max-steps",
            soft_wrap=True,
        )
    return finish(dataclasses.asdict(result), as_json=as_json)
