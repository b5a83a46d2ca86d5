"""understudy simulate: record simulated players."""

from dataclasses import asdict
from typing import Any

import click
from rich.table import Table

from understudy.backends.data import data_folder
from understudy.cli.options import (
    common_options,
    console,
    count_of,
    examples,
    finish,
    format_count,
    json_object,
    live_view,
    results,
)
from understudy.core.errors import ConfigError
from understudy.experience.intake import check_data_folder
from understudy.platform.config import mask_secrets, resolve
from understudy.simulation.people import SimulateConfig, Simulation, SimulationProgress

_LINE_EVERY_S = 2.0


@click.command(
    epilog=examples(
        "understudy simulate CartPole-v1 --players 4 --seconds 5 --data D",
        "understudy simulate Acrobot-v1 --players 16 --rate 60 --seconds 30 --data D --json",
    )
)
@click.argument("game")
@click.option("--players", default=4, show_default=True, help="Number of simulated players.")
@click.option("--seconds", default=10.0, show_default=True, help="How long they play.")
@click.option("--rate", default=0.0, help="Steps per second and player; 0 (default) is unlimited.")
@click.option(
    "--linger",
    "linger_s",
    default=1.0,
    show_default=True,
    help="Seconds that a recorded step may wait to be sent together with later ones.",
)
@click.option("--seed", default=0, show_default=True, help="Seed of games and players.")
@click.option(
    "--env-kwargs",
    default="{}",
    help="Keyword arguments for gymnasium.make, as a JSON object.",
)
@click.option(
    "--no-ingest",
    is_flag=True,
    help="Only record; store later with 'understudy ingest' or 'understudy data verify'.",
)
@common_options
def simulate(
    game: str,
    data_text: str | None,
    as_json: bool,
    no_ingest: bool,
    env_kwargs: str,
    **settings: Any,
) -> int:
    """Record simulated players of GAME (any Gymnasium id) with real recorders, stream and ingest.

    Every acknowledgement is written to a ledger in the data folder, which 'understudy data verify'
    checks. The command can be killed at any moment and run again on the same folder.
    """
    data = data_folder(data_text)
    check_data_folder(data.root)
    out = console(as_json=as_json)
    deployed = resolve({"data": data_text}).config
    if url := deployed.stream.url or deployed.store.url:
        raise ConfigError(
            f"the deployment in {data.root} records to {mask_secrets(url)}, but simulate records "
            "to a data folder only; give another folder with --data"
        )
    config = SimulateConfig(
        env_id=game,
        ingest=not no_ingest,
        env_kwargs=json_object(env_kwargs, "--env-kwargs"),
        **settings,
    )

    def line(progress: SimulationProgress) -> str:
        return (
            f"{progress.elapsed_s:5.1f} s of {config.seconds:g}: recorded "
            f"{format_count(progress.recorded_steps)}, acked {format_count(progress.acked_steps)}, "
            f"stored {count_of(progress.stored_steps, 'step')}"
        )

    def draw(progress: SimulationProgress) -> Table:
        return _table(progress, config)

    with Simulation(data, config) as simulation:
        if simulation.uses_running_ingest:
            out.print("another process has the store open; it will store the recorded steps")
        has_room = out.is_terminal
        with live_view(out, draw=draw, line=line, every_s=_LINE_EVERY_S, has_room=has_room) as show:
            result = simulation.run(show)
    summary = results(as_json=as_json)
    summary.print(
        f"recorded {count_of(result.recorded_steps, 'step')}, acked "
        f"{format_count(result.acked_steps)} ({format_count(result.steps_per_s)}/s), stored "
        f"{format_count(result.stored_steps)}"
    )
    summary.print(
        f"ack p50 {result.ack_p50_ms:.2f} ms, p99 {result.ack_p99_ms:.2f} ms; dropped "
        f"{result.dropped_steps}"
    )
    if result.unsent_steps:
        summary.print(
            f"not acknowledged yet: {count_of(result.unsent_steps, 'step')}; those in complete "
            "chunks are in the spool and will be sent by 'understudy data verify'"
        )
    summary.print(f"next: understudy data verify --data {data_text or data.root}")
    return finish(asdict(result), as_json=as_json)


def _table(progress: SimulationProgress, config: SimulateConfig) -> Table:
    title = (
        f"{count_of(config.players, 'player')} of {config.env_id}   {progress.elapsed_s:.1f} of "
        f"{config.seconds:g} s"
    )
    table = Table(title=title, title_justify="left", min_width=64)
    for name in ("", "processes", "steps", "steps/s", "lag"):
        table.add_column(name, justify="left" if not name else "right")
    elapsed_s = max(progress.elapsed_s, 1e-9)
    for name, processes, steps, lag in (
        ("players", str(progress.players_alive), progress.recorded_steps, ""),
        ("acked", "", progress.acked_steps, ""),
        (
            "stored",
            str(int(progress.ingest_alive)),
            progress.stored_steps,
            f"{progress.lag_s * 1000:.0f} ms",
        ),
    ):
        table.add_row(name, processes, format_count(steps), format_count(steps / elapsed_s), lag)
    return table
