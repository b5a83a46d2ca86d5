"""understudy.train: the Python way to a trained policy."""

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from understudy.app.runs.choice import GameChoice, choice_of
from understudy.app.runs.evaluation import AT_THE_END, held_out_seeds
from understudy.app.runs.folder import RunFolder, check_free, default_folder
from understudy.app.runs.settings import MAX_SEED, Wanted, algorithm_name, wanted_algorithm
from understudy.app.runs.sinks import Feed, Feeds, both, sinks_named
from understudy.app.runs.train import Run
from understudy.app.runs.train import train as train_run
from understudy.app.runs.video import check_video, film
from understudy.core.errors import ConfigError
from understudy.core.events import OnEvent
from understudy.core.network import NetworkSpec
from understudy.core.settings import load
from understudy.core.statistics import bootstrap, iqm

MAX_VIDEOS = 1_000


def train(
    game: Any = None, *, algorithm: Any = None, preset: str | None = None, config: str | Path | None = None,
    settings: Mapping[str, Any] | None = None, network: Any = None, wrapper: Any = (),
    env_kwargs: Mapping[str, Any] | None = None, frame_skip: int = 1, seed: int | None = None,
    until: float | None = None, steps: int | None = None, eval_every: int | None = None,
    init_from: str | Path | None = None, from_store: str | Path | None = None, out: str | Path | None = None,
    resume: bool = False, video: int = 0, log: str | Sequence[str] = (), on_event: OnEvent | None = None,
    on_complaint: Callable[[str], object] | None = None, began_s: float | None = None,
) -> Run:  # fmt: skip
    """A trained policy, and the folder of the run that made it; the words are those of `understudy train --help`.

    `game` is a Gymnasium id, an env (it is copied, never touched) or a function that makes one. `algorithm` is a name,
    an import path `module:Class` or a class. `network` is a tuple of widths, a NetworkSpec or the import path of one.
    `on_event` gets every event of `understudy.events`; it may return `understudy.Stop` to end the run in good order.
    `on_complaint` gets what went wrong with a log, which never stops a run. `began_s`, by `time.perf_counter`, is when
    somebody began to wait for the first round; by default, when this was called.
    """
    began_s = time.perf_counter() if began_s is None else began_s
    single = {**(settings or {}), **{name: value for name, value in (("steps", steps), ("eval_every", eval_every))
                                     if value is not None}}  # fmt: skip
    wanted = Wanted(
        algorithm=algorithm, preset=preset, config_file=_path(config), settings=single, network=network_from(network),
        seed=seed, until=until, init_from=_path(init_from), from_store=_path(from_store),
    )  # fmt: skip
    wrappers = [wrapper] if isinstance(wrapper, str) or callable(wrapper) else list(wrapper)
    choice = None
    if game is not None:
        choice = GameChoice(game=game, env_kwargs=env_kwargs or {}, wrappers=wrappers, frame_skip=frame_skip)
    if on_event is not None and not callable(on_event):
        raise ConfigError(f"on_event is {on_event!r}; give a function that takes an event, such as print")
    opened = sinks_named(log) if log else {}
    if type(video) is not int or not 0 <= video <= MAX_VIDEOS:
        raise ConfigError(f"video is {video!r}; give how many episodes to film, from 0 to {MAX_VIDEOS}")
    if video:
        check_video(_as_it_was(choice, out))
    feeds = Feeds([Feed(name, open_sink) for name, open_sink in opened.items()])
    try:
        run = train_run(
            choice, wanted, out=_path(out), resume=resume, on_event=both(feeds, on_event), began_s=began_s
        )  # fmt: skip
        feeds.close()
    finally:
        feeds.close(timeout_s=1.0)
        for complaint in feeds.complaints:
            (on_complaint or warnings.warn)(complaint)
    return _filmed(run, choice, video)


def _filmed(run: Run, choice: GameChoice | None, video: int) -> Run:
    if not video:
        return run
    choice = _as_it_was(choice, run.folder)
    seeds = held_out_seeds(video, series=AT_THE_END)
    paths = film(choice, run.policy, run.folder / "videos", seeds=seeds)
    return replace(run, result={**run.result, "videos": [str(path) for path in paths]})


def _as_it_was(choice: GameChoice | None, out: str | Path | None) -> GameChoice:
    if choice is not None and (out is None or not RunFolder(Path(out)).exists):
        return choice
    return choice_of(RunFolder(_must(out)).facts(), choice)


def network_from(given: Any) -> NetworkSpec | tuple[int, ...] | None:
    """Widths or a spec, from either, from `64,64`, or from the import path of a spec."""
    if given is None or isinstance(given, NetworkSpec):
        return given
    if isinstance(given, str) and ":" in given:
        found = load(given, what="network")
        if not isinstance(found, NetworkSpec):
            raise ConfigError(f"network {given!r} is a {type(found).__name__}; give the path of a NetworkSpec")
        return found
    try:
        widths = tuple(int(one) for one in (given.split(",") if isinstance(given, str) else given))
    except (TypeError, ValueError):
        widths = ()
    if not widths or min(widths) < 1:
        raise ConfigError(f"network is {given!r}; give the widths of its layers, such as 64,64")
    return widths


def _path(given: str | Path | None) -> Path | None:
    return None if given is None else Path(given)


def _must(out: str | Path | None) -> Path:
    if out is None:
        raise ConfigError("which game? give a Gymnasium id, such as CartPole-v1")
    return Path(out)


# --- Several runs that differ only by their seeds, one after another --------------------------------------------------


MAX_SEEDS = 1_000


@dataclass(frozen=True, slots=True)
class Runs:
    """What trainings with several seeds came to."""

    folder: Path
    runs: Sequence[Run]
    result: Mapping[str, Any]


def train_seeds(
    game: Any, *, seeds: int, seed: int | None = None, out: Path | None = None, resume: bool = False,
    on_run: Callable[[Path], object] = lambda folder: None, **asked: Any,
) -> Runs:  # fmt: skip
    """One run for each seed from `seed` on, in OUT/seed-S; `asked` is what `train` takes.

    With `resume`, runs that have ended stay as they are, and the others go on or begin.
    """
    first = seed or 0
    if not 1 <= seeds <= MAX_SEEDS or first + seeds - 1 > MAX_SEED:
        raise ConfigError(f"seeds is {seeds}; give how many runs to make, from 1 to {MAX_SEEDS}")
    if game is None:
        raise ConfigError("which game? several seeds need it, also to go on; give a Gymnasium id, such as CartPole-v1")
    if out is None and resume:
        raise ConfigError("which runs are to be resumed? give their folder: --resume --out runs/GAME-ALGORITHM-N")
    if out is None:
        wanted = Wanted(
            algorithm=asked.get("algorithm"), preset=asked.get("preset"), from_store=asked.get("from_store"),
            config_file=asked.get("config"),
        )  # fmt: skip
        out = default_folder(Path("runs"), str(game), algorithm_name(wanted_algorithm(wanted)))
    if not resume:
        check_free(out)
    runs = []
    for number in range(first, first + seeds):
        folder = out / f"seed-{number}"
        on_run(folder)
        runs.append(train(game, seed=number, out=folder, resume=resume, **asked))
        asked.pop("began_s", None)  # only the first run had to wait for the process
    result = together(out, [run.result for run in runs])
    RunFolder(out).write_json("summary.json", result)
    return Runs(out, runs, result)


def together(out: Path, results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The results of several seeds as one: sums of the work, IQM and interval of the returns over seeds."""
    means = [result["return_mean"] for result in results if result["return_mean"] is not None]
    found = bootstrap([[mean] for mean in means], iqm) if means else None
    work = ("episodes", "env_steps", "updates", "guarded_chunks", "train_s", "compile_s", "eval_s")
    return {
        "solved": all(result["solved"] for result in results), "solved_seeds": sum(one["solved"] for one in results),
        "seeds": len(results), "return_mean": sum(means) / len(means) if means else None,
        "return_iqm": found and found.value, "return_low": found and found.low, "return_high": found and found.high,
        **{name: round(sum(result.get(name, 0) for result in results), 3) for name in work},
        "startup_s": results[0]["startup_s"], "resumed_at_step": max(one["resumed_at_step"] for one in results),
        "env_class": results[0]["env_class"], "algorithm": results[0]["algorithm"], "game": results[0]["game"],
        "run": str(out), "runs": [dict(result) for result in results],
    }  # fmt: skip
