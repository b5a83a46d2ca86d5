"""understudy arena: play bots against each other."""

import contextlib
import hashlib
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray
from rich.markup import escape

from understudy.arena.duel import Duel, Side
from understudy.arena.duel import duel as play
from understudy.backends.deployment import Deployment
from understudy.cli.deployed import deployment
from understudy.cli.options import (
    common_options,
    console,
    examples,
    finish,
    import_from_here,
    results,
)
from understudy.core.errors import ConfigError, Refused
from understudy.games import rally
from understudy.games.rally import Court
from understudy.models.catalogue import ALIASES
from understudy.models.manifest import MAX_POLICY_BYTES, open_policy
from understudy.nn.policy import Policy, decode_policy
from understudy.training.folder import RunFolder


@click.group(
    epilog=examples(
        "understudy arena duel rally/1 rally/3 --data D", "understudy arena duel champion strong"
    )
)
def arena() -> None:
    """Play bots against each other."""


@arena.command(
    epilog=examples(
        "understudy arena duel rally/1 rally/3 --data D",
        "understudy arena duel champion strong --game rally --serves 400 --data D --json",
        "understudy arena duel runs/rally-dqn-1 good",
    )
)
@click.argument("a")
@click.argument("b")
@click.option(
    "--game",
    type=click.Choice(["rally"]),
    default="rally",
    show_default=True,
    help="The game; it must have two seats.",
)
@click.option(
    "--serves",
    default=400,
    show_default=True,
    metavar="N",
    help="Number of serves; each seed is played from both sides.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 1_000_000),
    default=0,
    show_default=True,
    help="Seed of the serves.",
)
@common_options
def duel(
    data_text: str | None, as_json: bool, a: str, b: str, game: str, serves: int, seed: int
) -> int:
    """Play A against B on the same serves from both sides; report the win rate of A.

    The win rate has a 95 % confidence interval. A and B are each a model (rally/3, champion,
    canary), a run folder, a policy file, or a scripted opponent: beginner, casual, good, strong.
    """
    import_from_here()
    began_s = time.perf_counter()
    opened = partial(deployment, data_text, must_exist=True)
    with console(as_json=as_json).status("playing ..."):
        sides = side_of(a, opened), side_of(b, opened)
        outcome = play(*sides, serves=serves, seed=seed)
    interval = (
        "too few serves for an interval"
        if outcome.low is None
        else f"95 % interval {outcome.low:.1%} to {outcome.high:.1%}"
    )
    out = results(as_json=as_json)
    out.print(
        f"{_named(a, sides[0])} wins [bold]{outcome.share:.1%}[/] of {serves} serves against "
        f"{_named(b, sides[1])} ({interval})",
        soft_wrap=True,
    )
    out.print(_better(outcome), soft_wrap=True)
    models = {
        f"{letter}_{name}": getattr(side, name)
        for letter, side in zip("ab", sides, strict=True)
        for name in ("model", "policy_sha256")
    }
    fields = {"game": game, "seed": seed, "seconds": round(time.perf_counter() - began_s, 3)}
    return finish(asdict(outcome) | models | fields, as_json=as_json)


def _named(text: str, side: Side) -> str:
    """The argument as typed, and in brackets the model that it resolved to."""
    return escape(text if side.model in (None, text) else f"{text} ({side.model})")


def _better(outcome: Duel) -> str:
    """A line that names the better side, or neither."""
    low = 0.0
    high = 1.0
    if outcome.low is not None and outcome.high is not None:
        low = outcome.low
        high = outcome.high
    if low == high == 0.5:
        return "better: [bold]neither[/]; they play alike"
    if low <= 0.5 <= high:
        return "better: [bold]neither[/]; more serves may tell them apart"
    return f"better: [bold]{escape(outcome.a if outcome.share > 0.5 else outcome.b)}[/]"


# --- Sides ----------------------------------------------------------------------------------------


def side_of(text: str, opened: Callable[[], Deployment]) -> Side:
    """Resolve a scripted skill, a model, an alias, a run folder or a policy file to a side."""
    if text in rally.SKILLS:
        skill = rally.skill_of(text)

        def script(
            court: Court, seat: int, seeds: NDArray[np.int64], decision: int
        ) -> NDArray[np.int64]:
            drawn = rally.random_bits(seeds * 2 + seat, decision)
            return np.asarray(
                rally.scripted(np, rally.seat_view(court, seat), skill, drawn), np.int64
            )

        return Side(text, script)
    policy, model = _policy(text, opened)
    if policy.game.game != rally.GAME_ID:
        raise ConfigError(
            f"{text} plays {policy.game.game}, but duels need a game with two seats; give a model "
            "of rally"
        )
    obs = policy.game.obs_columns.get("obs")
    actions = policy.game.discrete
    # A policy with more actions than rally has could move its paddle faster.
    has_our_spaces = (
        obs is not None
        and obs.shape == rally.SCALES.shape
        and actions is not None
        and (actions.n, actions.start) == (len(rally.ACTION_NAMES), 0)
    )
    if policy.stack > 1 or not has_our_spaces:
        raise ConfigError(
            f"{text} was trained on a different rally, or stacks observations; give a model with "
            f"{len(rally.OBS_NAMES)} observed numbers and {len(rally.ACTION_NAMES)} actions"
        )

    def decide(
        court: Court, seat: int, seeds: NDArray[np.int64], decision: int
    ) -> NDArray[np.int64]:
        action: Any = policy.decide(
            {"obs": rally.observation(court, seat)}, None, deterministic=True
        ).action
        return np.asarray(action, np.int64).reshape(-1)

    return Side(text, decide, model, hashlib.sha256(policy.encode()).hexdigest())


def _policy(text: str, opened: Callable[[], Deployment]) -> tuple[Policy, str | None]:
    """A policy, and the name of its model; None for run folders and files."""
    path = Path(text)
    is_folder = False
    is_file = False
    with contextlib.suppress(OSError):  # the text may be too long for a file name
        is_folder = bool(text) and path.is_dir()
        is_file = path.is_file()
    if is_folder:
        return RunFolder(path).policy(), None
    if is_file:
        return _from_file(path), None
    if "/" not in text and text not in ALIASES and not text.isdigit():
        raise ConfigError(
            f"unknown rally player {text[:60]!r}; give a model (rally/3, champion), a run folder, "
            f"a policy file, or one of {', '.join(rally.SKILLS)}"
        )
    registry = opened().registry
    manifest = registry.find(text, game=None if "/" in text else rally.GAME_ID)
    return open_policy(manifest, registry.policy_bytes(manifest)), manifest.name


def _from_file(path: Path) -> Policy:
    raw = b""
    try:
        if (size := path.stat().st_size) > MAX_POLICY_BYTES:
            raise Refused("too_large", f"{size} bytes; the limit is {MAX_POLICY_BYTES}")
        raw = path.read_bytes()
        return decode_policy(raw)
    except Refused as error:
        reason = "it is JSON" if raw.lstrip()[:1] == b"{" else error
        raise ConfigError(
            f"{path} is not a policy: {reason}; give a file written by a training run or by "
            "'models export --safetensors'"
        ) from None
