"""understudy simulate."""

from dataclasses import asdict
from typing import Any

import click

from understudy.app.config import hidden, resolve
from understudy.app.crowd.simulate import SimulateConfig, SimulateResult, Simulation
from understudy.cli.live import watching
from understudy.cli.options import console, count, data_option, examples, finish, folder, json_object, json_option
from understudy.core.errors import ConfigError


@click.command(
    epilog=examples(
        "understudy simulate CartPole-v1 --players 4 --seconds 5 --data D",
        "understudy simulate Acrobot-v1 --players 16 --rate 60 --seconds 30 --data D --json",
    )
)
@click.argument("game")
@click.option("--players", default=4, show_default=True, help="How many simulated players.")
@click.option("--seconds", default=10.0, show_default=True, help="How long they play.")
@click.option("--rate", default=0.0, help="Steps a second and player; 0 (default) is as fast as they go.")
@click.option("--linger", "linger_s", default=1.0, show_default=True, help="Seconds a step waits for others.")
@click.option("--seed", default=0, show_default=True, help="Seed of games and players.")
@click.option("--env-kwargs", default="{}", help="Keywords for gymnasium.make, as a JSON object.")
@click.option("--no-ingest", is_flag=True, help="Only record; 'understudy ingest' or 'data verify' stores later.")
@data_option
@json_option
def simulate(game: str, data_text: str | None, as_json: bool, no_ingest: bool, env_kwargs: str, **settings: Any) -> int:
    """Let simulated players play GAME (any Gymnasium id) through real recorders, a stream and ingest.

    Every acknowledgement goes into a ledger in the data folder, which 'understudy data verify' proves. The command may
    be killed at any moment and run again on the same folder.
    """
    data, out = folder(data_text), console(as_json=as_json)
    where = resolve({"data": data_text}).config
    if url := where.stream.url or where.store.url:
        raise ConfigError(
            f"the deployment in {data.root} records elsewhere ({hidden(url)}), and these players record into a data "
            "folder itself; give another one with --data"
        )
    config = SimulateConfig(
        env_id=game, ingest=not no_ingest, env_kwargs=json_object(env_kwargs, "--env-kwargs"), **settings
    )
    with Simulation(data, config) as simulation:
        if simulation.uses_running_ingest:
            out.print("another process has the store open; it stores what these players record")
        with watching(out, title=f"{config.players} players of {game}", seconds=config.seconds) as show:
            result = simulation.run(show)
    if not as_json:
        _print(result, data_text or str(data.root))
    return finish(asdict(result), as_json=as_json)


def _print(result: SimulateResult, data_text: str) -> None:
    out = console()
    out.print(
        f"recorded {count(result.recorded_steps)} steps, acked {count(result.acked_steps)} "
        f"({count(result.steps_per_s)}/s), stored {count(result.stored_steps)}"
    )
    out.print(f"ack p50 {result.ack_p50_ms:.2f} ms, p99 {result.ack_p99_ms:.2f} ms; dropped {result.dropped_steps}")
    if result.unsent_steps:
        out.print(f"{count(result.unsent_steps)} steps were not acknowledged yet; the spool keeps what was cut")
    out.print(f"next: understudy data verify --data {data_text}")
