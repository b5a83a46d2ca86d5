"""understudy play."""

import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import click
import numpy as np
from click.core import ParameterSource
from rich.console import Console
from rich.live import Live
from rich.text import Text

from understudy.app.play import Bot, Moment, find_bot, watch
from understudy.app.runs.choice import GameChoice
from understudy.app.runs.video import check_video, film
from understudy.cli.deployed import deployment
from understudy.cli.options import console, data_option, examples, finish, json_object, json_option
from understudy.cli.train import import_from_here
from understudy.core.errors import ConfigError, UnderstudyError
from understudy.core.tensors import Array

_MAX_EPISODES = 1000
_FPS = 15
_COLUMNS = 72
_WATCHED = ("episodes", "seed", "gif", "env_kwargs")
"""Options that say how a bot is watched: a page has no use for them."""


@click.command(
    epilog=examples(
        "understudy play CartPole-v1 --bot champion --data D",
        "understudy play CartPole-v1 --bot 3 --episodes 20 --data D --json",
        "understudy play CartPole-v1 --gif films --data D",
        "understudy play rally --web --open",
    )
)
@click.argument("game")
@click.option("--bot", default="champion", show_default=True, help="champion, canary, or a model's number.")
@click.option("--episodes", type=click.IntRange(1, _MAX_EPISODES), default=1, show_default=True, help="How many.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the first episode.")
@click.option("--gif", type=click.Path(path_type=Path), metavar="DIR", help="Film them into DIR/episode-N.gif.")
@click.option("--web", is_flag=True, help="Play rally or CartPole-v1 yourself in a browser, against the bot.")
@click.option("--open", "opens", is_flag=True, help="With --web: open the page at once.")
@click.option("--env-kwargs", default="{}", metavar="JSON", help="Keywords for gymnasium.make, as a JSON object.")
@data_option
@json_option
def play(data_text: str | None, as_json: bool, game: str, bot: str, gif: Path | None, **asked: Any) -> int:
    """Let a bot play GAME and watch it: in the terminal, or as GIFs. With --web, play against it in a browser.

    --web prints the address of a page whose games teach the bot, if whoever plays wants that. Where no platform runs on
    the data folder, it runs one until Ctrl-C; without a folder in one of its own, which goes with it.
    """
    _check_together(is_web=asked["web"], opens=asked["opens"])
    if asked["web"]:
        from understudy.cli.play_web import play_web

        return play_web(data_text, game, bot=bot, opens=asked["opens"], as_json=as_json)
    import_from_here()
    choice = GameChoice(game=game, env_kwargs=json_object(asked["env_kwargs"], "--env-kwargs"))
    found = find_bot(deployment(data_text, must_exist=True), choice, bot)
    seeds, out = range(asked["seed"], asked["seed"] + asked["episodes"]), console(as_json=as_json)
    paths = []
    if gif is not None:
        check_video(choice, asked="--gif")
        paths = film(choice, found.policy, gif, seeds=seeds, asked="--gif")
    returns = _watch(choice, found, seeds, out, is_filmed=gif is not None)
    mean = float(np.mean(returns))
    out.print(f"{found.name}: mean return {mean:.4g} over {len(returns)} episodes")
    for path in paths:
        out.print(f"  {path}", soft_wrap=True)
    fields = {"bot": found.name, "returns": returns, "mean": mean, "videos": [str(path) for path in paths]}
    return finish(fields, as_json=as_json)


def _check_together(*, is_web: bool, opens: bool) -> None:
    """ConfigError for options that mean nothing beside one another."""
    if opens and not is_web:
        raise ConfigError("--open opens the page of --web, which was not given; add --web, or leave out --open")
    source = click.get_current_context().get_parameter_source
    given = [f"--{name.replace('_', '-')}" for name in _WATCHED if source(name) is ParameterSource.COMMANDLINE]
    if is_web and given:
        raise ConfigError(
            f"--web was given with {', '.join(given)}, which say how a bot is watched; leave out {', '.join(given)} to "
            "play in a browser, or --web to watch"
        )


def _watch(choice: GameChoice, bot: Bot, seeds: range, out: Console, *, is_filmed: bool) -> list[float]:
    """Frames in a terminal where the game can show them, else a line for each episode."""
    if out.is_terminal and not is_filmed and _can_show(choice):
        with Live(console=out, auto_refresh=False, transient=True) as live:
            return watch(choice, bot.policy, seeds=seeds, shows_frames=True, see=_Screen(live, bot.name))

    def see(number: int, moment: Moment) -> None:
        if moment.has_ended:
            out.print(f"episode {number}: return {moment.total:.4g} after {moment.step} steps")

    return watch(choice, bot.policy, seeds=seeds, shows_frames=False, see=see)


def _can_show(choice: GameChoice) -> bool:
    with suppress(UnderstudyError):
        check_video(choice)
        return True
    return False


class _Screen:
    """Draws frames with half blocks, two pixels to a letter, at a pace that eyes can follow."""

    def __init__(self, live: Live, name: str) -> None:
        self._live, self._name = live, name
        self._next_s = time.monotonic()

    def __call__(self, number: int, moment: Moment) -> None:
        wait_s = self._next_s - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)
        self._next_s = time.monotonic() + 1 / _FPS
        assert moment.frame is not None
        text = drawn(moment.frame)
        text.append(f"\n{self._name}, episode {number}, step {moment.step}, return {moment.total:.4g}")
        self._live.update(text, refresh=True)


def drawn(frame: Array, columns: int = _COLUMNS) -> Text:
    """A picture uint8[height, width, 3] as coloured half blocks."""
    height, width, _ = frame.shape
    columns = min(columns, width)
    rows = max(2, round(columns * height / width) // 2 * 2)
    small = frame[np.arange(rows) * height // rows][:, np.arange(columns) * width // columns]
    text = Text()
    for top, bottom in zip(small[::2], small[1::2], strict=True):
        for upper, lower in zip(top.tolist(), bottom.tolist(), strict=True):
            text.append("▀", style=f"rgb({','.join(map(str, upper))}) on rgb({','.join(map(str, lower))})")
        text.append("\n")
    return text
