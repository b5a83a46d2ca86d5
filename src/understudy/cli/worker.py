"""understudy worker."""

import dataclasses
import signal
import threading
from pathlib import Path
from typing import Any

import click
from rich.markup import escape

from understudy.cli.interrupts import INTERRUPTED, raise_stop_signal, stop_signals
from understudy.cli.options import (
    PATH,
    console,
    count_of,
    examples,
    finish,
    import_from_here,
    json_option,
    results,
)


@click.command(
    epilog=examples(
        "understudy worker http://127.0.0.1:4444 --key-file runs/CartPole-v1-dqn-1/worker.key",
        "UNDERSTUDY_WORKER_KEY=... understudy worker https://learner.example:4444",
        "understudy worker https://learner.example:4444 --game mygame:Racing-v0",
        "understudy worker https://learner.example:4444 --env-wrapper mygame.encoder:Encoder",
    )
)
@click.argument("url")
@click.option(
    "--key-file",
    type=PATH,
    metavar="FILE",
    help="The workers' key (default: the variable UNDERSTUDY_WORKER_KEY, or the file in "
    "UNDERSTUDY_WORKER_KEY_FILE).",
)
@click.option(
    "--game",
    metavar="MODULE:NAME",
    help="The game, if it is not a registered Gymnasium id: MODULE:Id-v0 or MODULE:FUNCTION.",
)
@click.option(
    "--env-wrapper",
    multiple=True,
    metavar="MODULE:CLASS",
    help="A wrapper around each env, as the learner's --wrapper; repeatable.",
)
@click.option("--insecure", is_flag=True, help="Allow plain HTTP to another machine.")
@json_option
def worker(
    url: str,
    key_file: Path | None,
    game: str | None,
    env_wrapper: tuple[str, ...],
    insecure: bool,
    as_json: bool,
) -> int:
    """Play for the learner at URL (`understudy train --engine workers`) until its run is over.

    The learner assigns a place in the team, the policy and its updates. While the learner is away,
    the worker waits and joins again. Ctrl-C and SIGTERM send what is complete and leave the run.
    """
    import_from_here()
    # Imported late, so that --help is fast.
    from understudy.workers.wire import read_key
    from understudy.workers.worker import Worker

    out = console(as_json=as_json)
    stop = threading.Event()
    received: list[int] = []

    def handle(number: int, frame: Any) -> None:
        if received:
            raise_stop_signal(number, frame)  # the second one does not wait
        received.append(number)
        stop.set()

    before = {number: signal.signal(number, handle) for number in stop_signals()}
    try:
        worked = Worker(
            url,
            key=None if key_file is None else read_key(key_file),
            game=game,
            env_wrapper=env_wrapper,
            insecure=insecure,
            on_message=lambda text: out.print(escape(text), soft_wrap=True),
        ).work(stop)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    end = "the run is over" if worked.is_over else "left the run"
    results(as_json=as_json).print(
        f"{end}: {count_of(worked.rounds, 'round')} of {count_of(worked.steps, 'step')} and "
        f"{count_of(worked.evaluations, 'evaluation')}",
        soft_wrap=True,
    )
    return finish(
        dataclasses.asdict(worked),
        as_json=as_json,
        code=INTERRUPTED if received == [signal.SIGINT] else 0,
    )
