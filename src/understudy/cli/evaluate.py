"""understudy evaluate."""

from dataclasses import asdict
from pathlib import Path

import click

from understudy.cli.options import console, count, examples, finish, json_option
from understudy.cli.train import import_from_here


@click.command(
    epilog=examples(
        "understudy evaluate runs/CartPole-v1-ppo-1",
        "understudy evaluate R --episodes 100 --seeds 10 --json",
    )
)
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--episodes", default=100, show_default=True, help="Episodes per seed.")
@click.option("--seeds", default=10, show_default=True, help="Held-out sets of env seeds; an interval wants 5.")
@click.option("--policy", type=click.Choice(["best", "last"]), default="best", show_default=True, help="Which policy.")
@json_option
def evaluate(run: Path, episodes: int, seeds: int, policy: str, as_json: bool) -> int:
    """Play the policy of RUN on env seeds that its training has not seen: IQM and 95 % interval.

    RUN is a run's folder, or a folder of several runs with different seeds; then the interval is over those runs.
    """
    import_from_here()
    from understudy.app.runs.evaluation import evaluate_run  # imported late: --help should not wait for it

    out = console(as_json=as_json)
    with out.status("playing ..."):
        verdict = evaluate_run(run, episodes=episodes, seeds=seeds, policy=policy)
    if not as_json:
        interval = f"95 % interval {verdict.low:.1f} to {verdict.high:.1f}" if verdict.low is not None else (
            "no interval below 5 seeds" if verdict.runs == 1 else "no interval below 5 runs"
        )  # fmt: skip
        out.print(f"IQM [bold]{verdict.iqm:.1f}[/], {interval}; mean {verdict.mean:.1f}", soft_wrap=True)
        runs = "" if verdict.runs == 1 else f" of {verdict.runs} runs"
        out.print(
            f"{count(verdict.played)} episodes of the {policy} policy{runs}, {seeds} seeds of {episodes} each",
            soft_wrap=True,
        )
    return finish(asdict(verdict), as_json=as_json)
