"""understudy.train: trains a policy on a game and stores everything in a run's folder."""

import contextlib
import dataclasses
import math
import os
import shutil
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gymnasium.error import UnregisteredEnv

from understudy.backends.local import has_store, open_view
from understudy.core.errors import ConfigError, GameFailed, Locked
from understudy.core.log import FileLock
from understudy.core.names import game_name_of_env
from understudy.core.settings import load_object, nearest
from understudy.core.wording import joined
from understudy.experience.game import GameSpec
from understudy.learn.compile_cache import use_compile_cache
from understudy.learn.warm_start import fitting_weights
from understudy.nn.network import Activation, NetworkSpec
from understudy.nn.policy import Policy
from understudy.training.env_info import (
    EnvInfo,
    GameChoice,
    choice_of,
    different_spaces,
    inspect_env,
)
from understudy.training.evaluation import AT_THE_END, Evaluator, held_out_seeds, make_evaluator
from understudy.training.events import HoldInterrupts, InitFrom, OnEvent, Started
from understudy.training.folder import RunFolder, check_free, default_folder, draw_curve, is_empty
from understudy.training.preset import with_study
from understudy.training.recorded_env import check_recorded_env
from understudy.training.resume import (
    check_agrees,
    extend_run,
    requested_extension,
    settings_of,
    with_run_of_preset,
)
from understudy.training.settings import ENGINES, Resolver, RunSettings, algorithm_name
from understudy.training.sinks import Feed, Feeds, call_all, sinks_named
from understudy.training.train_request import (
    TrainRequest,
    check_effects,
    check_request,
    resolve,
    with_network,
    with_network_of,
)
from understudy.training.video import check_video, film

if TYPE_CHECKING:
    from understudy.training.training import Training
    from understudy.workers.team import WorkersConfig

MAX_VIDEOS = 1_000
_NO_GAME = "no game was given; pass a Gymnasium id, such as CartPole-v1"


@dataclass(frozen=True, slots=True)
class Run:
    """A finished training run."""

    folder: Path
    policy: Policy
    result: Mapping[str, Any]

    def __repr__(self) -> str:
        mean = self.result["return_mean"]
        return f"Run({str(self.folder)!r}, return {'unknown' if mean is None else f'{mean:.1f}'})"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """The less common options of `train`, named as in `understudy train --help`."""

    preset: str | None = None
    """Preset, by name or file, or the folder of a study: the settings of its best trial. By default
    the preset for the algorithm and the kind of game."""
    config: str | Path | None = None
    """TOML file of settings, in the format of a preset."""
    network: Any = None
    """Layer widths, a NetworkSpec, or the import path of one."""
    wrapper: Any = ()
    """Env wrappers, as classes or import paths; the first one is the innermost.

    `train:module:Class` wraps only the envs of training."""
    env_kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments for creating an env: of `gymnasium.make`, or of the function."""
    frame_skip: int = 1
    """Frames that each action is repeated for."""
    init_from: str | Path | None = None
    """Run whose best policy provides the initial weights."""
    from_store: str | Path | None = None
    """Data folder to learn from instead of playing the game."""
    engine: str | None = None
    """`inline`: actors play in this process (the default); `process`: each in its own; `ray`: each
    is a Ray actor; `workers`: they join over HTTP."""
    address: str | None = None
    """The Ray cluster, as host:port or `auto`; by default a Ray that ends with the run."""
    listen: "str | WorkersConfig | Mapping[str, Any] | None" = None
    """Where workers join: HOST:PORT (default 127.0.0.1:4444), a WorkersConfig, or some of its
    fields by name. A resumed run keeps the fields that are not given."""
    video: int = 0
    """Episodes of the best policy to film."""
    log: str | Sequence[str] = ()
    """Loggers: tensorboard, wandb, mlflow."""
    on_warning: Callable[[str], object] = warnings.warn
    """Called with a message about each logger that failed; these errors never stop a run."""
    started_s: float | None = None
    """When startup began, by `time.perf_counter`, for `startup_s`; default: the call of `train`."""
    hold_interrupts: HoldInterrupts = contextlib.nullcontext
    """Entered around each round and checkpoint; may delay a KeyboardInterrupt to the end of it.

    The command line does so. An interrupt between two rounds ends a run with a checkpoint."""

    def __post_init__(self) -> None:
        if type(self.video) is not int or not 0 <= self.video <= MAX_VIDEOS:
            raise ConfigError(
                f"video is {self.video!r}; give the number of episodes to film, from 0 to "
                f"{MAX_VIDEOS}"
            )


@dataclass(frozen=True, slots=True)
class _Listener:
    """The callback for a run's events, when its startup began, and how interrupts are held."""

    on_event: OnEvent
    started_s: float
    hold_interrupts: HoldInterrupts


def train(
    game: Any = None,
    *,
    algorithm: Any = None,
    settings: Mapping[str, Any] | None = None,
    seed: int | None = None,
    steps: int | None = None,
    until: float | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    on_event: OnEvent | None = None,
    options: TrainOptions | None = None,
) -> Run:
    """Train a policy; return it with its run's folder.

    `game` is a Gymnasium id, an env (which is copied and never modified) or a function that
    creates one; or a vector env (which is trained on and never closed) or a function of `num_envs`
    that creates one. `algorithm` is a name, an import path `module:Class` or a class. `settings`
    are single settings by name, as `understudy train --list` shows them; the argument `steps` wins
    over a `steps` in `settings`. To resume a run, `game` is needed only if it was an env or a
    function; arguments that are passed again must match the run. `on_event` receives every event of
    `understudy.events`, and may return `understudy.Stop` to end the run cleanly. `options` has
    everything else, as `understudy train --help` describes it.
    """
    options = TrainOptions() if options is None else options
    if not isinstance(options, TrainOptions):
        raise ConfigError(
            f"options is {str(options)[:80]!r}; pass understudy.TrainOptions, such as "
            "TrainOptions(network=(64, 64))"
        )
    if settings is not None and not isinstance(settings, Mapping):
        raise ConfigError(
            f"settings is {str(settings)[:80]!r}; pass values by name, such as "
            "{'learning_rate': 1e-3}"
        )
    started_s = time.perf_counter() if options.started_s is None else options.started_s
    preset, config_file = with_study(options.preset, path_from(options.config))
    request = TrainRequest(
        algorithm=algorithm,
        preset=preset,
        config_file=config_file,
        settings={**(settings or {}), **({} if steps is None else {"steps": steps})},
        network=network_from(options.network),
        seed=seed,
        until=until,
        init_from=path_from(options.init_from),
        from_store=path_from(options.from_store),
        engine=options.engine,
        address=options.address,
        listen=None if options.listen is None else listen_fields(options.listen),
    )
    choice = None if game is None else _choice(game, options)
    folder = path_from(out)
    if on_event is not None and not callable(on_event):
        raise ConfigError(
            f"on_event is {on_event!r}; give a function that accepts an event, such as print"
        )
    sinks = sinks_named(options.log) if options.log else {}
    if options.video:
        check_video(_choice_in(folder, choice))
    feeds = Feeds([Feed(name, open_sink) for name, open_sink in sinks.items()])
    listener = _Listener(call_all(feeds, on_event), started_s, options.hold_interrupts)
    try:
        if resume and folder is None:
            raise ConfigError(
                "no run to resume was given; pass its folder as out, such as runs/GAME-ALGORITHM-N"
            )
        if resume and folder is not None and (choice is None or not is_empty(folder)):
            run = _resume_run(RunFolder(folder), choice, request, listener)
        elif choice is None:
            raise ConfigError(_NO_GAME)
        else:
            run = _start_run(choice, request, folder, listener)
        feeds.close()
    finally:
        feeds.close(timeout_s=1.0)
        for warning in feeds.warnings:
            options.on_warning(warning)
    if not options.video:
        return run
    seeds = held_out_seeds(options.video, series=AT_THE_END)
    paths = film(_choice_in(run.folder, choice), run.policy, run.folder / "videos", seeds=seeds)
    return replace(run, result={**run.result, "videos": [str(path) for path in paths]})


def _choice(game: Any, options: TrainOptions) -> GameChoice:
    wrapper = options.wrapper
    return GameChoice(
        game=game,
        env_kwargs=options.env_kwargs,
        wrappers=[wrapper] if isinstance(wrapper, str) or callable(wrapper) else list(wrapper),
        frame_skip=options.frame_skip,
    )


def _choice_in(out: Path | None, choice: GameChoice | None) -> GameChoice:
    """The choice, completed from the run in that folder if there is one."""
    if choice is not None and (out is None or not RunFolder(out).exists):
        return choice
    if out is None:
        raise ConfigError(_NO_GAME)
    return choice_of(RunFolder(out).facts(), choice)


def listen_fields(listen: Any) -> Mapping[str, Any]:
    """The fields of WorkersConfig that `listen` gives; ConfigError if it is not an address."""
    # Imported late: other engines need no server.
    from understudy.workers.team import WorkersConfig, parse_listen

    if isinstance(listen, str):
        host, port = parse_listen(listen)
        return {"host": host, "port": port}
    if isinstance(listen, WorkersConfig):
        return listen.to_json()
    names = [field.name for field in dataclasses.fields(WorkersConfig)]
    if not isinstance(listen, Mapping) or not listen.keys() <= set(names):
        raise ConfigError(
            f"listen is {listen!r}; pass HOST:PORT, a WorkersConfig, or some of its fields: "
            f"{joined(names)}"
        )
    return listen


def _listen_facts(listen: Mapping[str, Any], stored: Mapping[str, Any] | None) -> dict[str, Any]:
    """Where workers join, for a run's folder: what is given, else what is stored or the default."""
    from understudy.workers.team import WorkersConfig, workers_config

    return workers_config({**(stored or WorkersConfig().to_json()), **listen}).to_json()


def network_from(network: Any) -> NetworkSpec | tuple[int, ...] | None:
    """Layer widths or a NetworkSpec; text may be widths (`64,64`) or the import path of a spec."""
    if network is None or isinstance(network, NetworkSpec):
        return network
    if isinstance(network, str) and ":" in network:
        spec = load_object(network, what="network")
        if not isinstance(spec, NetworkSpec):
            raise ConfigError(
                f"network {network!r} is a {type(spec).__name__}; give the import path of a "
                "NetworkSpec"
            )
        return spec
    try:
        parts = network.split(",") if isinstance(network, str) else network
        widths = tuple(int(part) for part in parts)
    except (TypeError, ValueError):
        widths = ()
    if not widths or min(widths) < 1:
        raise ConfigError(f"network is {network!r}; give the widths of its layers, such as 64,64")
    return widths


def path_from(path: str | Path | None) -> Path | None:
    try:
        return None if path is None else Path(path)
    except TypeError:
        raise ConfigError(
            f"{str(path)[:80]!r} is not a path; pass one such as 'runs/first'"
        ) from None


def _start_run(
    choice: GameChoice, request: TrainRequest, out: Path | None, listener: _Listener
) -> Run:
    request = replace(request, engine=request.engine or ENGINES[0])
    listen = None if request.listen is None else _listen_facts(request.listen, None)
    check_request(request)  # before the slow imports that follow
    if out is not None:
        check_free(out)
    choice, request, start = with_run_of_preset(choice, request)
    env_info = None
    store = None
    if request.from_store is None:
        env_info = inspect_env(choice, is_training=True)
        spec = env_info.spec
        if choice.num_envs is not None:
            request = replace(request, settings={"envs": choice.num_envs, **request.settings})
    else:
        store = store_folder(request.from_store)
        spec = stored_spec(store, choice.name)
        if choice.is_named and not choice.env_kwargs:
            check_recorded_env(store, spec)
    settings = resolve(request, spec)
    check_effects(request, settings, spec)
    symmetry = getattr(settings.config, "symmetry", "")
    # Only the learner service finds a centre by itself.
    if symmetry not in ("", "none") and getattr(settings.config, "centre", "") in ("", "none"):
        raise ConfigError(
            f"symmetry is {symmetry[:80]!r}, but no centre is set, so there is no grid to mirror; "
            "set centre, too, such as 'obs.grid 5', or leave symmetry out"
        )
    if start is not None:
        settings = with_network_of(start, settings, request, spec)
    # The resolved goal is stored with the settings, so that their preset reproduces the run
    # however its steps were passed.
    until = request.until if request.until is not None else settings.run.until
    if until is None and env_info is not None and "steps" not in request.settings:
        until = env_info.threshold
    until = math.inf if until is None else float(until)
    settings = replace(settings, run=replace(settings.run, until=until))
    name = choice.name if choice.is_named else spec.game
    root = out or default_folder(Path("runs"), name, settings.algorithm)
    check_free(root)
    facts = {
        **choice.to_json(),
        "name": name,
        "algorithm": settings.algorithm,
        "seed": request.seed or 0,
        "until": None if until == math.inf else until,
        "starts": 0,
        "extensions": 0,
        "created_ms": int(time.time() * 1000),
        "schema": spec.schema,
        "from_store": store and str(store.resolve()),
        "engine": request.engine,
        "address": request.address,
        "listen": listen,
        "init_from": request.init_from and str(request.init_from.resolve()),
        "versions": {
            name: metadata.version(name) for name in ("understudy", "numpy", "jax", "gymnasium")
        },
    }
    folder = RunFolder(root)
    with _locked(folder, is_new=True):
        network = getattr(settings.config, "network", None)
        folder.create(facts, settings.to_toml(), network=network, start=start)
        return _run(folder, choice, settings, facts, env_info=env_info, listener=listener)


def _resume_run(
    folder: RunFolder, choice: GameChoice | None, request: TrainRequest, listener: _Listener
) -> Run:
    facts = folder.facts()
    is_object = request.algorithm is not None and not isinstance(request.algorithm, str)
    chosen = (
        request.algorithm
        if is_object and algorithm_name(request.algorithm) == facts["algorithm"]
        else None
    )
    resolver = Resolver(facts["algorithm"], chosen)
    resolver.set("keep_history", True)  # as runs of earlier versions, whose preset lacks it
    resolver.add(settings_of(folder, facts))
    settings = with_network(resolver.settings(), folder.network())
    result = folder.result()
    extension = {} if result is None else requested_extension(facts, settings, request)
    rest = {name: value for name, value in request.settings.items() if name not in extension}
    request = replace(request, settings=rest, until=None if "until" in extension else request.until)
    check_agrees(folder.root, facts, settings, choice=choice, request=request)
    if result is not None and not extension:
        return Run(folder.root, folder.policy(), result)
    choice = choice_of(facts, choice, call=f"train(env, out={str(folder.root)!r}, resume=True)")
    # The request checks that engine, listen and store fit each other.
    request = replace(
        request,
        engine=request.engine or facts.get("engine", ENGINES[0]),
        from_store=path_from(facts["from_store"]),
    )
    if request.engine == "workers" and not settings.run.asynchronous:
        raise ConfigError(
            f"{folder.root} is a lock-step run, and workers are always asynchronous; resume it "
            "with engine='process', or start another run"
        )
    changes: dict[str, Any] = {"engine": request.engine}
    if request.address is not None:
        changes["address"] = request.address
    if request.listen is not None:
        changes["listen"] = _listen_facts(request.listen, facts.get("listen"))
    with _locked(folder, is_new=False):
        if result is not None:
            planned_steps = settings.run.steps
            for name, value in extension.items():
                resolver.set(name, value)
            settings = with_network(resolver.settings(), folder.network())
            settings = settings.with_horizon(planned_steps)
            facts = extend_run(folder, facts, settings, result)
        if settings.run.asynchronous:
            # Episodes restart, so their chunks need new ids.
            facts["starts"] += 1
        facts |= changes
        env_info = None
        if facts["from_store"] is None:
            env_info = inspect_env(choice, is_training=True)
        if env_info is not None and env_info.spec.schema != facts["schema"]:
            raise ConfigError(
                f"the spaces or the step limit of {choice.name} have changed since {folder.root} "
                "was started; resume it with the package versions it was started with"
            )
        return _run(folder, choice, settings, facts, env_info=env_info, listener=listener)


@contextlib.contextmanager
def _locked(folder: RunFolder, *, is_new: bool) -> Iterator[None]:
    """Hold the run's lock; after an error, delete partial files and a run that never started."""
    root = folder.root.absolute()
    missing = [path for path in (root, *root.parents) if not path.exists()]
    try:
        with FileLock(folder.lock, what="the run"):
            if is_new and not is_empty(root):
                raise Locked(
                    f"another process has just started a run in {root}; give another folder"
                )
            for partial in (*root.glob(".*.tmp"), *folder.checkpoints.glob(".*.tmp")):
                partial.unlink(missing_ok=True)  # from a process that was killed while writing
            yield
    except BaseException as error:
        for partial in root.rglob(f".*.{os.getpid()}.tmp"):
            partial.unlink(missing_ok=True)
        if is_new and isinstance(error, ConfigError) and not folder.checkpoints.exists():
            with contextlib.suppress(OSError):  # must not hide the original error
                shutil.rmtree(root)
                for path in missing[1:]:
                    path.rmdir()
                if not missing:
                    root.mkdir()  # it existed before, and was empty
        raise


def _run(
    folder: RunFolder,
    choice: GameChoice,
    settings: RunSettings,
    facts: Mapping[str, Any],
    *,
    env_info: EnvInfo | None,
    listener: _Listener,
) -> Run:
    if env_info is not None and env_info.resets_itself and not settings.run.asynchronous:
        raise ConfigError(
            f"the vector env of {choice.name} resets its envs itself, so the open episodes of a "
            "lock-step run could not be rebuilt; set asynchronous=true, which off-policy "
            "algorithms such as dqn support, or create it with "
            "autoreset_mode=AutoresetMode.DISABLED"
        )
    # Imported late: JAX takes seconds, and an invalid argument must be reported at once.
    from understudy.training.from_store import FromStore
    from understudy.training.training import build

    use_compile_cache()
    with contextlib.ExitStack() as opened:
        played = env_info
        why_not = ""
        if env_info is not None:
            spec = env_info.spec
        else:
            spec = stored_spec(Path(facts["from_store"]), choice.name)
        if env_info is None or choice.is_vector:
            # Evaluated only if the game is installed, works, and matches what is learned from.
            try:
                played = inspect_env(choice)
                if difference := different_spaces(played.spec, spec):
                    why_not = f"{choice.name} is not the game that was recorded: its {difference}"
                    if env_info is not None:
                        why_not = f"single envs differ from {choice.name}: their {difference}"
            except (ConfigError, GameFailed) as error:
                why_not = str(error)
                if isinstance(error.__cause__, UnregisteredEnv):
                    why_not = f"{choice.name} has no Gymnasium env here that the policy could play"
        evaluator = Evaluator(None, why_not=why_not)
        if played is not None and not why_not:
            evaluator = make_evaluator(
                choice,
                played,
                episodes=settings.run.eval_episodes,
                max_steps=settings.run.eval_max_steps,
                opened=opened,
                num_processes=settings.run.actors if facts.get("engine") == "process" else 1,
            )
        training = build(
            folder,
            settings,
            facts,
            spec=spec,
            choice=choice,
            evaluator=evaluator,
            on_event=listener.on_event,
            opened=opened,
        )
        # Only now: an engine that does not start must not replace the one that did.
        folder.write_json("run.json", facts)
        training.hold_interrupts = listener.hold_interrupts
        training.resume()
        folder.cut_curve(training.evaluated_steps)
        folder.cut_guarded(training.resumed_at_step or -1)
        init_from = None
        if facts["init_from"] is not None:
            init_from = matching_weights(
                facts["init_from"], folder.start(), training.engine.policy.network
            )
        training.clocks.startup_s = time.perf_counter() - listener.started_s
        training.handle_event(
            Started(
                env_steps=training.resumed_at_step,
                run=str(folder.root),
                game=facts["name"],
                seed=facts["seed"],
                algorithm=settings.algorithm,
                steps=settings.run.steps,
                until=facts["until"],
                init_from=init_from,
                is_from_store=env_info is None,
                horizon=settings.run.horizon,
                cut_schedules=settings.cut_schedules(),
                worker_command="" if training.workers is None else training.workers.command,
                worker_key="" if training.workers is None else training.workers.key_place,
            )
        )
        training.run()
        result = result_of(
            training, facts, env_class=env_info.env_class if env_info is not None else ""
        )
        if isinstance(training.engine, FromStore):
            result |= training.engine.best_of
        result["init_from"] = init_from and dataclasses.asdict(init_from)
        result["horizon"] = settings.run.horizon or settings.run.steps
        result["cut_schedules"] = {
            name: list(values) for name, values in settings.cut_schedules().items()
        }
        result["eval_max_steps"] = settings.run.eval_max_steps
        draw_curve(folder, title=f"{facts['name']}, {settings.algorithm}", goal=facts["until"])
        folder.write_json("result.json", result)  # last: this file marks the run as finished
        policy = folder.policy()
    return Run(folder.root, policy, result)


def result_of(training: "Training", facts: Mapping[str, Any], *, env_class: str) -> dict[str, Any]:
    """The result of a run: the last line of `understudy train --json`."""
    returns = training.final_returns()
    counts = training.engine.learner.counts
    clocks = training.clocks
    mean = None if returns is None else float(returns.mean())
    std = None if returns is None else float(returns.std())
    return {
        "solved": training.is_solved,
        "return_mean": mean,
        "return_std": std if std is not None and math.isfinite(std) else None,
        "why_no_return": training.why_no_return if returns is None else "",
        "episodes": 0 if returns is None else len(returns),
        "cut_episodes": training.final_cut,
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


def matching_weights(run: str, start: Policy, network: NetworkSpec) -> InitFrom:
    """The weights of another run's policy that fit this network.

    ConfigError if no kernel fits, or if the layers around the fitting ones are of another kind.
    """
    weights = start.weights
    run_shapes = {name: " x ".join(map(str, array.shape)) for name, array in weights.items()}
    shapes = {name: " x ".join(map(str, shape)) for name, shape in network.shapes().items()}
    fit = fitting_weights(weights, network)
    # Biases fit almost any network, so they do not count.
    kernels = [name for name, shape in network.shapes().items() if len(shape) > 1]
    if not set(kernels) & set(fit):
        first = kernels[0]
        got = f"is {run_shapes[first]} there" if first in run_shapes else "does not exist there"
        raise ConfigError(
            f"cannot start from {run}: none of its weight matrices has the shape that this network "
            f"needs ({first} {got}, and {shapes[first]} here); choose a run of the same game, and "
            f"use algorithm and network as in {run}/preset.toml"
        )
    run_layers = dict(start.network.places())
    for place, layers in network.places():
        for index, (here, there) in enumerate(zip(layers, run_layers.get(place, ()), strict=False)):
            kinds = [
                layer.name if isinstance(layer, Activation) else type(layer).__name__
                for layer in (here, there)
            ]
            if kinds[0] != kinds[1] and not place.startswith("heads."):
                raise ConfigError(
                    f"cannot start from {run}: {place}.{index} is {kinds[0]} in this network and "
                    f"{kinds[1]} there, so its weights would compute something else; omit what "
                    "is set of network, activation, observation_norm and centre to use the layers "
                    "of that run, or omit init_from"
                )
    return InitFrom(
        run=run,
        fit=fit,
        new=[name for name in shapes if name not in fit],
        unused=[name for name in weights if name not in fit],
    )


# --- Training from a store ------------------------------------------------------------------------


def store_folder(folder: Path) -> Path:
    """The store inside a data folder or a run's folder, or the store itself."""
    for path in (folder / "store", folder):
        if has_store(path):
            return path
    raise ConfigError(
        f"{folder} contains no store; give a data folder that has one, or ingest what was "
        f"recorded: understudy ingest --data {folder} --until-empty"
    )


def stored_spec(store: Path, game: str) -> GameSpec:
    """The newest spec of a game in a store."""
    with open_view(store) as view:
        # An env id may start with the game's package, which recorders leave out.
        for name in dict.fromkeys((game, game.rpartition(":")[2])):
            if specs := view.specs(game_name_of_env(name)):
                return specs[0]
        known = sorted({spec.game for spec in view.specs()})
    folder = store.parent if store.name == "store" else "DIR"
    raise ConfigError(
        f"the store {store} has no experience of {game}; list its games: understudy data stats "
        f"--data {folder}; {nearest(game, known)}"
    )
