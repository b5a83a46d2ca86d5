"""understudy.train: from a game and a few words to a trained policy in a run's folder."""

import contextlib
import dataclasses
import math
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from understudy.backends.local import has_store, open_view
from understudy.core.errors import ConfigError, GameFailed, Locked
from understudy.core.log import FileLock
from understudy.core.names import game_name_of_env
from understudy.core.settings import load
from understudy.core.statistics import bootstrap, iqm
from understudy.core.tensors import Array
from understudy.experience.game import GameSpec
from understudy.learn.compile_cache import use_compile_cache
from understudy.nn.network import NetworkSpec
from understudy.nn.policy import Policy
from understudy.training.env_info import EnvInfo, GameChoice, choice_of, look_at
from understudy.training.evaluation import AT_THE_END, Judge, held_out_seeds, judge_of
from understudy.training.events import InitFrom, OnEvent, Started
from understudy.training.folder import RunFolder, check_free, default_folder, draw_curve, is_empty
from understudy.training.resume import asked_more, begun_with, check_agrees, extended, settings_of
from understudy.training.settings import (
    MAX_SEED,
    Resolver,
    RunSettings,
    TrainRequest,
    algorithm_name,
    check_words,
    resolve,
    wanted_algorithm,
    with_network,
)
from understudy.training.sinks import Feed, Feeds, both, sinks_named
from understudy.training.video import check_video, film

if TYPE_CHECKING:
    from understudy.training.training import Training

MAX_SEEDS = MAX_VIDEOS = 1_000
_WHICH_GAME = "which game? give a Gymnasium id, such as CartPole-v1"


@dataclass(frozen=True, slots=True)
class Run:
    """What a training came to."""

    folder: Path
    policy: Policy
    result: Mapping[str, Any]

    def __repr__(self) -> str:
        mean = self.result["return_mean"]
        return f"Run({str(self.folder)!r}, return {'unknown' if mean is None else f'{mean:.1f}'})"


@dataclass(frozen=True, slots=True)
class _Listener:
    """Where a run's events go, and since when its first round is waited for, by
    `time.perf_counter`."""

    on_event: OnEvent
    began_s: float


def train(
    game: Any = None,
    *,
    algorithm: Any = None,
    preset: str | None = None,
    config: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    network: Any = None,
    wrapper: Any = (),
    env_kwargs: Mapping[str, Any] | None = None,
    frame_skip: int = 1,
    seed: int | None = None,
    until: float | None = None,
    steps: int | None = None,
    eval_every: int | None = None,
    init_from: str | Path | None = None,
    from_store: str | Path | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    video: int = 0,
    log: str | Sequence[str] = (),
    on_event: OnEvent | None = None,
    on_complaint: Callable[[str], object] | None = None,
    began_s: float | None = None,
) -> Run:
    """A trained policy, and the folder of the run that made it; the words are those of `understudy
    train --help`.

    `game` is a Gymnasium id, an env (it is copied, never touched) or a function that makes one.
    `algorithm` is a name, an import path `module:Class` or a class. `network` is a tuple of widths,
    a NetworkSpec or the import path of one. A run that goes on needs no game, but what is given
    must agree with it. `on_event` gets every event of `understudy.events`; it may return
    `understudy.Stop` to end the run in good order. `on_complaint` gets what went wrong with a log,
    which never stops a run. `began_s`, by `time.perf_counter`, is when the wait for the first round
    began; by default, when this was called.
    """
    began_s = time.perf_counter() if began_s is None else began_s
    single = {
        **(settings or {}),
        **{
            name: value
            for name, value in (("steps", steps), ("eval_every", eval_every))
            if value is not None
        },
    }
    wanted = TrainRequest(
        algorithm=algorithm,
        preset=preset,
        config_file=_path(config),
        settings=single,
        network=network_from(network),
        seed=seed,
        until=until,
        init_from=_path(init_from),
        from_store=_path(from_store),
    )
    wrappers = [wrapper] if isinstance(wrapper, str) or callable(wrapper) else list(wrapper)
    choice = None
    folder = _path(out)
    if game is not None:
        choice = GameChoice(
            game=game, env_kwargs=env_kwargs or {}, wrappers=wrappers, frame_skip=frame_skip
        )
    if on_event is not None and not callable(on_event):
        raise ConfigError(
            f"on_event is {on_event!r}; give a function that takes an event, such as print"
        )
    sinks = sinks_named(log) if log else {}
    if type(video) is not int or not 0 <= video <= MAX_VIDEOS:
        raise ConfigError(
            f"video is {video!r}; give how many episodes to film, from 0 to {MAX_VIDEOS}"
        )
    if video:
        check_video(_as_it_was(choice, folder))
    feeds = Feeds([Feed(name, open_sink) for name, open_sink in sinks.items()])
    listener = _Listener(both(feeds, on_event), began_s)
    try:
        if resume and folder is None:
            raise ConfigError(
                "which run is to be resumed? give its folder: --resume --out runs/GAME-ALGORITHM-N"
            )
        if resume and folder is not None and (choice is None or not is_empty(folder)):
            run = _resumed(RunFolder(folder), choice, wanted, listener)
        elif choice is None:
            raise ConfigError(_WHICH_GAME)
        else:
            run = _begun(choice, wanted, folder, listener)
        feeds.close()
    finally:
        feeds.close(timeout_s=1.0)
        for complaint in feeds.complaints:
            (on_complaint or warnings.warn)(complaint)
    if not video:
        return run
    seeds = held_out_seeds(video, series=AT_THE_END)
    paths = film(_as_it_was(choice, run.folder), run.policy, run.folder / "videos", seeds=seeds)
    return replace(run, result={**run.result, "videos": [str(path) for path in paths]})


def _as_it_was(choice: GameChoice | None, out: Path | None) -> GameChoice:
    """The choice with what a run in that folder has, if there is one."""
    if choice is not None and (out is None or not RunFolder(out).exists):
        return choice
    if out is None:
        raise ConfigError(_WHICH_GAME)
    return choice_of(RunFolder(out).facts(), choice)


def network_from(given: Any) -> NetworkSpec | tuple[int, ...] | None:
    """Widths or a spec, from either, from `64,64`, or from the import path of a spec."""
    if given is None or isinstance(given, NetworkSpec):
        return given
    if isinstance(given, str) and ":" in given:
        found = load(given, what="network")
        if not isinstance(found, NetworkSpec):
            raise ConfigError(
                f"network {given!r} is a {type(found).__name__}; give the path of a NetworkSpec"
            )
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


def _begun(choice: GameChoice, wanted: TrainRequest, out: Path | None, listener: _Listener) -> Run:
    check_words(wanted)  # here, since what comes next imports much and takes its time
    if out is not None:
        check_free(out)
    choice, wanted, start = begun_with(choice, wanted)
    seen = None
    store = None
    if wanted.from_store is None:
        seen = look_at(choice)
        spec = seen.spec
    else:
        store = store_folder(wanted.from_store)
        spec = stored_spec(store, choice.name)
    settings = resolve(wanted, spec)
    # The goal they come to is among the settings: their preset makes the same run however steps
    # were given.
    until = wanted.until if wanted.until is not None else settings.run.until
    if until is None and seen is not None and "steps" not in wanted.settings:
        until = seen.threshold
    until = math.inf if until is None else float(until)
    settings = replace(settings, run=replace(settings.run, until=until))
    name = choice.name if choice.is_named else spec.game
    root = out or default_folder(Path("runs"), name, settings.algorithm)
    check_free(root)
    facts = {
        **choice.to_json(),
        "name": name,
        "algorithm": settings.algorithm,
        "seed": wanted.seed or 0,
        "until": None if until == math.inf else until,
        "starts": 0,
        "extensions": 0,
        "created_ms": int(time.time() * 1000),
        "schema": spec.schema,
        "from_store": store and str(store.resolve()),
        "init_from": wanted.init_from and str(wanted.init_from.resolve()),
        "versions": {
            name: metadata.version(name) for name in ("understudy", "numpy", "jax", "gymnasium")
        },
    }
    folder = RunFolder(root)
    with _held(folder, is_new=True):
        network = getattr(settings.config, "network", None)
        folder.create(facts, settings.to_toml(), network=network, start=start)
        return _trained(folder, choice, settings, facts, seen=seen, listener=listener)


def _resumed(
    folder: RunFolder, choice: GameChoice | None, wanted: TrainRequest, listener: _Listener
) -> Run:
    facts = folder.facts()
    is_object = wanted.algorithm is not None and not isinstance(wanted.algorithm, str)
    chosen = (
        wanted.algorithm
        if is_object and algorithm_name(wanted.algorithm) == facts["algorithm"]
        else None
    )
    resolver = Resolver(facts["algorithm"], chosen)
    resolver.add(settings_of(folder, facts))
    settings = with_network(resolver.settings(), folder.network())
    result = folder.result()
    more = {} if result is None else asked_more(facts, settings, wanted)
    rest = {name: value for name, value in wanted.settings.items() if name not in more}
    wanted = replace(wanted, settings=rest, until=None if "until" in more else wanted.until)
    check_agrees(folder.root, facts, settings, choice=choice, wanted=wanted)
    if result is not None and not more:
        return Run(folder.root, folder.policy(), result)
    choice = choice_of(facts, choice, call=f"train(env, out={str(folder.root)!r}, resume=True)")
    with _held(folder, is_new=False):
        if result is not None:
            for name, value in more.items():
                resolver.set(name, value)
            settings = with_network(resolver.settings(), folder.network())
            facts = extended(folder, facts, settings, result)
        if settings.run.asynchronous:
            # Episodes begin anew, so their chunks must not meet those that were played before.
            facts["starts"] += 1
            folder.write_json("run.json", facts)
        seen = look_at(choice) if facts["from_store"] is None else None
        if seen is not None and seen.spec.schema != facts["schema"]:
            raise ConfigError(
                f"{choice.name} looks different from when {folder.root} began; resume it with the "
                "same packages"
            )
        return _trained(folder, choice, settings, facts, seen=seen, listener=listener)


@contextlib.contextmanager
def _held(folder: RunFolder, *, is_new: bool) -> Iterator[None]:
    """The run's lock. Whatever ends the block leaves no half-written file, and no run that could
    not even begin."""
    root = folder.root.absolute()
    missing = [path for path in (root, *root.parents) if not path.exists()]
    try:
        with FileLock(folder.lock, what="the run"):
            if is_new and not is_empty(root):
                raise Locked(
                    f"another process has begun a run in {root} just now; give another folder"
                )
            for left in (*root.glob(".*.tmp"), *folder.checkpoints.glob(".*.tmp")):
                left.unlink(missing_ok=True)  # of a process that was killed while it wrote
            yield
    except BaseException as error:
        for left in root.rglob(f".*.{os.getpid()}.tmp"):
            left.unlink(missing_ok=True)
        if is_new and isinstance(error, ConfigError) and not folder.checkpoints.exists():
            with contextlib.suppress(OSError):  # the error that ended the block is the one to see
                shutil.rmtree(root)
                for path in missing[1:]:
                    path.rmdir()
                if not missing:
                    root.mkdir()  # it was there, and empty
        raise


def _trained(
    folder: RunFolder,
    choice: GameChoice,
    settings: RunSettings,
    facts: Mapping[str, Any],
    *,
    seen: EnvInfo | None,
    listener: _Listener,
) -> Run:
    from understudy.training.training import (
        build,
    )  # late: JAX takes seconds, and a wrong word must not wait

    use_compile_cache()
    with contextlib.ExitStack() as opened:
        if seen is not None:
            spec = seen.spec
            judge = judge_of(choice, seen, settings.run.eval_episodes, opened)
        else:
            spec = stored_spec(Path(facts["from_store"]), choice.name)
            judge = Judge(None)
            here = None
            with contextlib.suppress(ConfigError, GameFailed):
                here = look_at(choice)
            # Evaluated where the game is here, works, and is the one that was recorded.
            if here is not None and here.spec.schema == spec.schema:
                judge = judge_of(choice, here, settings.run.eval_episodes, opened)
        training = build(
            folder,
            settings,
            facts,
            spec=spec,
            choice=choice,
            judge=judge,
            on_event=listener.on_event,
            opened=opened,
        )
        training.resume()
        folder.cut_curve(training.judged_steps)
        folder.cut_guarded(training.resumed_at_step or -1)
        init_from = None
        if facts["init_from"] is not None:
            init_from = taken_from(
                facts["init_from"], folder.start().weights, training.engine.policy.network
            )
        training.clocks.startup_s = time.perf_counter() - listener.began_s
        training.hear(
            Started(
                env_steps=training.resumed_at_step,
                run=str(folder.root),
                game=facts["name"],
                seed=facts["seed"],
                algorithm=settings.algorithm,
                steps=settings.run.steps,
                until=facts["until"],
                init_from=init_from,
                is_from_store=seen is None,
            )
        )
        training.run()
        result = result_of(training, facts, env_class=seen.env_class if seen is not None else "")
        result["init_from"] = init_from and dataclasses.asdict(init_from)
        draw_curve(folder, title=f"{facts['name']}, {settings.algorithm}", goal=facts["until"])
        folder.write_json("result.json", result)  # last: from here on the run has ended
        policy = folder.policy()
    return Run(folder.root, policy, result)


def result_of(training: "Training", facts: Mapping[str, Any], *, env_class: str) -> dict[str, Any]:
    """What the last line of `understudy train --json` says."""
    returns = training.final_returns()
    counts = training.engine.learner.counts
    clocks = training.clocks
    mean, std = (None, None) if returns is None else (float(returns.mean()), float(returns.std()))
    return {
        "solved": training.is_solved,
        "return_mean": mean,
        "return_std": std if std is not None and math.isfinite(std) else None,
        "episodes": 0 if returns is None else len(returns),
        "until": facts["until"],
        "env_steps": training.engine.env_steps,
        "updates": counts.updates,
        "train_episodes": training.episodes,
        "train_s": round(clocks.train_s, 3),
        "compile_s": round(clocks.compile_s, 3),
        "eval_s": round(clocks.eval_s, 3),
        "startup_s": round(clocks.startup_s, 3),
        "resumed_at_step": training.resumed_at_step,
        "env_class": env_class,
        "algorithm": facts["algorithm"],
        "game": facts["name"],
        "seed": facts["seed"],
        "replay_ratio": round(counts.replay_ratio, 3),
        "skipped_updates": counts.skipped_updates,
        "confirmations": training.confirmations,
        "guarded_chunks": training.guarded_chunks,
        "run": str(training.folder.root),
        "policy": str(training.folder.policy_path()),
    }


def taken_from(run: str, weights: Mapping[str, Array], network: NetworkSpec) -> InitFrom:
    """Which weights of this network another run's fit; ConfigError where it has none of the same
    kind."""
    has = {name: " x ".join(map(str, array.shape)) for name, array in weights.items()}
    wants = {name: " x ".join(map(str, shape)) for name, shape in network.shapes().items()}
    fit = [name for name, shape in wants.items() if has.get(name) == shape]
    # Biases fit almost anything; a policy that shares no kernel is of another kind.
    kernels = [name for name, shape in network.shapes().items() if len(shape) > 1]
    if not set(kernels) & set(fit):
        first = kernels[0]
        there = f"is {has[first]} there" if first in has else "is not there"
        raise ConfigError(
            f"no kernel of {run} fits this network: {first} {there}, and {wants[first]} is wanted; "
            "start from a run of "
            "the same game, and give the algorithm and widths that its preset.toml has "
            "(--algorithm, --network 64,64)"
        )
    return InitFrom(run=run, fit=fit, new=[name for name in wants if name not in fit])


# --- a store to learn from ------------------------------------------------------------------------


def store_folder(folder: Path) -> Path:
    """The store in a data folder or a run's folder, or the store itself."""
    for one in (folder / "store", folder):
        if has_store(one):
            return one
    raise ConfigError(
        f"there is no store in {folder}; give a data folder with one, or store what was recorded: "
        f"understudy ingest --data {folder} --until-empty"
    )


def stored_spec(store: Path, game: str) -> GameSpec:
    """The newest spec of a game as the store keeps it."""
    with open_view(store) as view:
        # An id may name the package the game is in; recorders know the game by what comes after it.
        for name in dict.fromkeys((game, game.rpartition(":")[2])):
            if specs := view.specs(game_name_of_env(name)):
                return specs[0]
    folder = store.parent if store.name == "store" else "DIR"
    raise ConfigError(
        f"the store {store} holds nothing of {game}; see what it holds: understudy data stats "
        f"--data {folder}"
    )


# --- Several runs that differ only by their seeds, one after another ------------------------------


@dataclass(frozen=True, slots=True)
class Runs:
    """What trainings with several seeds came to."""

    folder: Path
    runs: Sequence[Run]
    result: Mapping[str, Any]


def train_seeds(
    game: Any,
    *,
    seeds: int,
    seed: int | None = None,
    out: Path | None = None,
    resume: bool = False,
    on_run: Callable[[Path], object] = lambda folder: None,
    **asked: Any,
) -> Runs:
    """One run for each seed from `seed` on, in OUT/seed-S; `asked` is what `train` takes.

    With `resume`, runs that have ended stay as they are, and the others go on or begin.
    """
    first = seed or 0
    if not 1 <= seeds <= MAX_SEEDS or first + seeds - 1 > MAX_SEED:
        raise ConfigError(f"seeds is {seeds}; give how many runs to make, from 1 to {MAX_SEEDS}")
    if game is None:
        raise ConfigError(
            "which game? several seeds need it, also to go on; give a Gymnasium id, such as "
            "CartPole-v1"
        )
    if out is None and resume:
        raise ConfigError(
            "which runs are to be resumed? give their folder: --resume --out runs/GAME-ALGORITHM-N"
        )
    if out is None:
        wanted = TrainRequest(
            algorithm=asked.get("algorithm"),
            preset=asked.get("preset"),
            from_store=asked.get("from_store"),
            config_file=asked.get("config"),
        )
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
    """The results of several seeds as one: sums of the work, IQM and interval of the returns
    over seeds."""
    means = [result["return_mean"] for result in results if result["return_mean"] is not None]
    found = bootstrap([[mean] for mean in means], iqm) if means else None
    work = ("episodes", "env_steps", "updates", "guarded_chunks", "train_s", "compile_s", "eval_s")
    return {
        "solved": all(result["solved"] for result in results),
        "solved_seeds": sum(one["solved"] for one in results),
        "seeds": len(results),
        "return_mean": sum(means) / len(means) if means else None,
        "return_iqm": found and found.value,
        "return_low": found and found.low,
        "return_high": found and found.high,
        **{name: round(sum(result.get(name, 0) for result in results), 3) for name in work},
        "startup_s": results[0]["startup_s"],
        "resumed_at_step": max(one["resumed_at_step"] for one in results),
        "env_class": results[0]["env_class"],
        "algorithm": results[0]["algorithm"],
        "game": results[0]["game"],
        "run": str(out),
        "runs": [dict(result) for result in results],
    }
