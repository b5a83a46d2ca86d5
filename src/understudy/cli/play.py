"""understudy play: watch a registered bot in a Gymnasium env, or play against it in a browser."""

import contextlib
import dataclasses
import signal
import tempfile
import time
import webbrowser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
from click.core import ParameterSource
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.text import Text

from understudy.act.vector import make_env
from understudy.act.vector_envs import MASK
from understudy.backends.deployment import Deployment, open_deployment
from understudy.cli.deployed import deployment
from understudy.cli.interrupts import INTERRUPTED
from understudy.cli.options import (
    PATH,
    common_options,
    console,
    count_of,
    examples,
    finish,
    import_from_here,
    json_object,
    print_json,
)
from understudy.cli.up import StopRequest
from understudy.core.errors import ConfigError, UnderstudyError
from understudy.core.tensors import Array
from understudy.models.manifest import open_policy
from understudy.nn.policy import Policy
from understudy.platform.config import Config, Resolved, resolve
from understudy.platform.platform import Platform, RoleStatus
from understudy.platform.play_page import (
    await_gateway,
    browser_url,
    check_bot,
    check_game,
    is_free,
    is_running,
    network_url_text,
    page_address,
    play_error,
    play_key,
    save_port,
    saved_port,
)
from understudy.training.env_info import GameChoice, different_spaces, inspect_env
from understudy.training.video import check_video, film, frame_of, open_rendering_env

MAX_STEPS = 100_000
"""Episodes that do not end are stopped after this many steps."""
_MAX_EPISODES = 1000
_FPS = 15
_COLUMNS = 72
_WATCH_OPTIONS = ("episodes", "seed", "gif", "env_kwargs")
"""Options for watching a bot; they cannot be combined with --web."""
_STORED = "Press Ctrl-C to stop; acknowledged steps are stored."
_TEMPORARY = "Press Ctrl-C to stop and discard games and models; --data D keeps them."
_KEY_TIMEOUT_S = 20.0


@click.command(
    epilog=examples(
        "understudy play CartPole-v1 --bot champion --data D",
        "understudy play CartPole-v1 --bot 3 --episodes 20 --data D --json",
        "understudy play CartPole-v1 --gif films --data D",
        "understudy play rally --web --open",
    )
)
@click.argument("game")
@click.option(
    "--bot", default="champion", show_default=True, help="champion, canary, or a model number."
)
@click.option(
    "--episodes",
    type=click.IntRange(1, _MAX_EPISODES),
    default=1,
    show_default=True,
    help="Number of episodes.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Seed of the first episode; later ones count up from it.",
)
@click.option("--gif", type=PATH, metavar="DIR", help="Record each episode to DIR/episode-N.gif.")
@click.option(
    "--web", is_flag=True, help="Play rally or CartPole-v1 yourself, against the bot, in a browser."
)
@click.option("--open", "opens", is_flag=True, help="With --web: open the page in a browser.")
@click.option(
    "--env-kwargs",
    default="{}",
    metavar="JSON",
    help="Keyword arguments for gymnasium.make, as a JSON object.",
)
@common_options
def play(
    data_text: str | None, as_json: bool, game: str, bot: str, gif: Path | None, **options: Any
) -> int:
    """Watch a bot play GAME, in the terminal or as GIFs; with --web, play against it in a browser.

    --web prints the URL of a page; games played there train the bot if the player consents. If no
    platform runs on the data folder, the command runs one until Ctrl-C; without --data, in a
    temporary folder.
    """
    _check_options(is_web=options["web"], opens=options["opens"])
    if options["web"]:
        return _play_web(data_text, game, bot=bot, opens=options["opens"], as_json=as_json)
    import_from_here()
    choice = GameChoice(game=game, env_kwargs=json_object(options["env_kwargs"], "--env-kwargs"))
    name, policy = _find_bot(deployment(data_text, must_exist=True), choice, bot)
    seeds = range(options["seed"], options["seed"] + options["episodes"])
    out = console(as_json=as_json)
    paths = []
    if gif is not None:
        check_video(choice, option="--gif")
        paths = film(choice, policy, gif, seeds=seeds, option="--gif")
    returns = _watch(choice, name, policy, seeds, out, is_filmed=gif is not None)
    mean = float(np.mean(returns))
    out.print(f"{name}: mean return {mean:.4g} over {count_of(len(returns), 'episode')}")
    for path in paths:
        out.print(f"  {path}", soft_wrap=True)
    fields = {
        "bot": name,
        "returns": returns,
        "mean": mean,
        "videos": [str(path) for path in paths],
    }
    return finish(fields, as_json=as_json)


def _check_options(*, is_web: bool, opens: bool) -> None:
    """Raise ConfigError for options that cannot be combined."""
    if opens and not is_web:
        raise ConfigError("--open needs --web, whose page it opens; add --web, or omit --open")
    source = click.get_current_context().get_parameter_source
    flags = ", ".join(
        f"--{name.replace('_', '-')}"
        for name in _WATCH_OPTIONS
        if source(name) is ParameterSource.COMMANDLINE
    )
    if is_web and flags:
        raise ConfigError(
            f"--web cannot be combined with {flags}; omit {flags} to play in a browser, or --web "
            "to watch a bot"
        )


def _find_bot(deployment: Deployment, choice: GameChoice, bot: str) -> tuple[str, Policy]:
    """Name and policy of a bot, which is an alias, a number or GAME/NUMBER; raises ConfigError."""
    registry = deployment.registry
    try:
        spec = inspect_env(choice).spec
    except ConfigError as error:
        if choice.name not in registry.games():
            raise
        raise ConfigError(
            f"{choice.name} is registered, but has no env on this machine: {error}; without an "
            "env, its bots play only in your own game"
        ) from None
    manifest = registry.find(bot, game=str(spec.game))
    policy = open_policy(manifest, registry.policy_bytes(manifest))
    if difference := different_spaces(spec, policy.game):
        raise ConfigError(
            f"{manifest.name} was trained on a {spec.game} with other spaces than this env, whose "
            f"{difference}; use the packages and wrappers that it was trained with"
        )
    return manifest.name, policy


# --- Watching -------------------------------------------------------------------------------------


def _watch(
    choice: GameChoice, name: str, policy: Policy, seeds: range, out: Console, *, is_filmed: bool
) -> list[float]:
    """Play an episode per seed and return the returns; shows frames in a terminal, or lines."""
    can_show = out.is_terminal and not is_filmed
    if can_show:
        try:
            check_video(choice)
        except UnderstudyError:
            can_show = False
    if not can_show:

        def report_episode(number: int, moment: Moment) -> None:
            if moment.has_ended:
                steps = count_of(moment.step, "step")
                out.print(f"episode {number}: return {moment.total:.4g} after {steps}")
            elif moment.step == MAX_STEPS:
                out.print(
                    f"episode {number}: return {moment.total:.4g}, stopped after {MAX_STEPS} steps"
                )

        return watch(choice, policy, seeds=seeds, shows_frames=False, see=report_episode)
    next_s = time.monotonic()
    with Live(console=out, auto_refresh=False, transient=True) as live:

        def draw(number: int, moment: Moment) -> None:
            nonlocal next_s
            time.sleep(max(0.0, next_s - time.monotonic()))  # at a pace that a viewer can follow
            next_s = time.monotonic() + 1 / _FPS
            assert moment.frame is not None
            text = image_as_text(moment.frame)
            text.append(
                f"\n{name}, episode {number}, step {moment.step}, return {moment.total:.4g}"
            )
            live.update(text, refresh=True)

        return watch(choice, policy, seeds=seeds, shows_frames=True, see=draw)


@dataclass(frozen=True, slots=True)
class Moment:
    """One step of a watched episode."""

    step: int
    action: Any
    reward: float
    total: float
    has_ended: bool
    frame: Array | None
    """The rendered image, if the env can render."""


def watch(
    choice: GameChoice,
    policy: Policy,
    *,
    seeds: Sequence[int],
    shows_frames: bool,
    see: Callable[[int, Moment], None],
) -> list[float]:
    """Play an episode per seed and return the returns; `see` gets its number and each step."""
    returns = []
    with (
        open_rendering_env(choice)
        if shows_frames
        else contextlib.closing(make_env(choice.name, choice.env_kwargs))
    ) as env:
        for number, seed in enumerate(seeds, start=1):
            player = policy.player()
            obs, info = env.reset(seed=seed)
            total = 0.0
            for step in range(1, MAX_STEPS + 1):
                action = player.act(obs, action_mask=info.get(MASK))
                obs, reward, terminated, truncated, info = env.step(action)
                total += float(reward)
                has_ended = bool(terminated or truncated)
                frame = frame_of(env, choice) if shows_frames else None
                see(number, Moment(step, action, float(reward), total, has_ended, frame))
                if has_ended:
                    break
            returns.append(total)
    return returns


def image_as_text(frame: Array, columns: int = _COLUMNS) -> Text:
    """An image uint8[height, width, 3] as coloured half blocks, two pixels per character."""
    height, width, _ = frame.shape
    columns = min(columns, width)
    rows = max(2, round(columns * height / width) // 2 * 2)
    small = frame[np.arange(rows) * height // rows][:, np.arange(columns) * width // columns]
    text = Text()
    for top, bottom in zip(small[::2], small[1::2], strict=True):
        for upper, lower in zip(top.tolist(), bottom.tolist(), strict=True):
            text.append(
                "▀", style=f"rgb({','.join(map(str, upper))}) on rgb({','.join(map(str, lower))})"
            )
        text.append("\n")
    return text


# --- In a browser ---------------------------------------------------------------------------------


def _play_web(data_text: str | None, game: str, *, bot: str, opens: bool, as_json: bool) -> int:
    """Print the URL of the page; if no platform runs on the folder, run one until Ctrl-C.

    Without a data folder, it uses a temporary one.
    """
    check_game(game)
    resolved = resolve({"data": data_text})
    out = console(as_json=as_json)
    config = resolved.config
    if bot != "champion" and not (config.data and config.folder.root.is_dir()):
        raise ConfigError(
            f"--bot is {bot}, but there are no models yet; omit --bot, or give a data folder that "
            "has models with --data (see 'understudy models list')"
        )
    with contextlib.ExitStack() as opened:
        has_data = bool(config.data)
        runs = has_data and is_running(config.folder)
        if not runs:
            config = _own_config(resolved)
        if not has_data:
            scratch = opened.enter_context(tempfile.TemporaryDirectory(prefix="understudy-play-"))
            config = dataclasses.replace(config, data=str(Path(scratch) / "D"))
        served = open_deployment(config.folder, models=config.models.url)
        model = check_bot(served, game, bot)
        key = play_key(served, game)

        def announce(url: str) -> None:
            address = page_address(url, game, key=key, bot=model)
            if as_json:
                page = {"url": browser_url(url), "game": game, "key": key, "page": address}
                print_json(page)
            out.print(f"play {game} at\n\n  {escape(address)}\n", soft_wrap=True)
            if others := network_url_text(url, config.gateway.hosts):
                out.print(f"[dim]{escape(others)}[/]", soft_wrap=True)
            if opens and not webbrowser.open(address):
                out.print(
                    "cannot open a browser on this machine; open the URL yourself", soft_wrap=True
                )

        if not runs:
            return _run(
                config,
                announce,
                lambda url: play_error(url, game, key=key),
                _STORED if has_data else _TEMPORARY,
                out,
            )
        announce(await_gateway(config.folder, game, key=key))
    return 0


def _own_config(resolved: Resolved[Config]) -> Config:
    """The config of the platform that this command runs; ConfigError if it has no gateway."""
    config = resolved.config
    if "gateway" not in config.roles:
        raise ConfigError(
            f"roles is {','.join(config.roles)} ({resolved.origins['roles']}), but the page needs "
            "a gateway and none runs on this folder; add gateway to roles, or run 'understudy up "
            "--role gateway' first"
        )
    is_set = resolved.origins["gateway.port"] != "default"
    port = config.gateway.port if is_set else saved_port(config.folder) if config.data else 0
    port = port if port and is_free(config.gateway.host, port) else 0
    return dataclasses.replace(config, gateway=dataclasses.replace(config.gateway, port=port))


def _run(
    config: Config,
    announce: Callable[[str], None],
    answer: Callable[[str], str],
    stop_hint: str,
    out: Console,
) -> int:
    """Run the platform until stopped; `answer` returns why the page cannot play yet, or ''."""
    request = StopRequest()
    is_announced = False
    late_s = time.monotonic() + _KEY_TIMEOUT_S

    def report_state(status: RoleStatus, text: str) -> None:
        if status.state == "waiting":
            out.print(f"[yellow]{status.role.name}[/] {escape(text)}", soft_wrap=True)

    with request, Platform(config, on_state_change=report_state) as platform:

        def each() -> None:
            nonlocal is_announced, late_s
            url = platform.url
            if is_announced or not platform.supervisor.is_ready or url is None:
                return
            reason = answer(url)
            if not reason:
                is_announced = True
                save_port(
                    config.folder, int(platform.supervisor.statuses["gateway"].report["port"])
                )
                announce(url)
                out.print(f"[dim]{stop_hint}[/]", soft_wrap=True)
            elif time.monotonic() > late_s:
                late_s += _KEY_TIMEOUT_S
                out.print(
                    f"[yellow]the gateway at {url} does not accept the page's key yet:[/] "
                    f"{escape(reason)}"
                )

        platform.supervisor.run(request.stop, each)
        finished = platform.supervisor.stop(request.at_once)
    if request.number == signal.SIGINT:
        return INTERRUPTED
    return 0 if finished else 1
