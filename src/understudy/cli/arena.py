"""understudy arena: bots against bots."""

import time
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING

import click
from rich.markup import escape

from understudy.cli.deployed import deployment
from understudy.cli.options import console, data_option, examples, finish, json_option
from understudy.cli.train import import_from_here

if TYPE_CHECKING:
    from understudy.arena.duel import Duel, Side


@click.group(epilog=examples("understudy arena duel rally/1 rally/3 --data D", "understudy arena duel champion strong"))
def arena() -> None:
    """Let bots play each other."""


@arena.command(
    epilog=examples(
        "understudy arena duel rally/1 rally/3 --data D",
        "understudy arena duel champion strong --game rally --serves 400 --data D --json",
        "understudy arena duel runs/rally-dqn-1 good",
    )
)
@click.argument("a")
@click.argument("b")
@click.option("--game", type=click.Choice(["rally"]), default="rally", show_default=True, help="A game with two seats.")
@click.option("--serves", default=400, show_default=True, metavar="N", help="How many; each seed from both sides.")
@click.option("--seed", type=click.IntRange(0, 1_000_000), default=0, show_default=True, help="Of the serves.")
@data_option
@json_option
def duel(data_text: str | None, as_json: bool, a: str, b: str, game: str, serves: int, seed: int) -> int:
    """Let A play B on the same serves from both sides, and say how sure the result is.

    A and B are models (rally/3, champion, canary), a run's folder, a policy's file, or one of beginner, casual, good,
    strong: scripted opponents.
    """
    import_from_here()
    from understudy.app.sides import side_of  # late: --help should not wait for it
    from understudy.arena.duel import duel as play

    began_s, opened = time.perf_counter(), partial(deployment, data_text, must_exist=True)
    out = console(as_json=as_json)
    with out.status("playing ..."):
        sides = side_of(a, opened), side_of(b, opened)
        found = play(*sides, serves=serves, seed=seed)
    if not as_json:
        ends = "too few for an interval" if found.low is None else f"95 % interval {found.low:.1%} to {found.high:.1%}"
        out.print(
            f"{_named(a, sides[0])} wins [bold]{found.share:.1%}[/] of {serves} serves against "
            f"{_named(b, sides[1])} ({ends})",
            soft_wrap=True,
        )
        out.print(_better(found), soft_wrap=True)
    who = {
        f"{letter}_{name}": getattr(side, name)
        for letter, side in zip("ab", sides, strict=True)
        for name in ("model", "policy_sha256")
    }
    took = {"game": game, "seed": seed, "seconds": round(time.perf_counter() - began_s, 3)}
    return finish(asdict(found) | who | took, as_json=as_json)


def _named(text: str, side: "Side") -> str:
    """What was typed, and the model that it stood for."""
    return escape(text if side.model in (None, text) else f"{text} ({side.model})")


def _better(found: "Duel") -> str:
    """Who is better, in words."""
    low, high = (0.0, 1.0) if found.low is None or found.high is None else (found.low, found.high)
    if low == high == 0.5:
        return "better: [bold]neither[/]; they play alike"
    if low <= 0.5 <= high:
        return "better: [bold]neither[/]; more serves may tell them apart"
    return f"better: [bold]{escape(found.a if found.share > 0.5 else found.b)}[/]"
