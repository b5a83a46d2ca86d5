"""train: from a game and a few words to a trained policy in a run's folder."""

import contextlib
import dataclasses
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from understudy.app.runs.choice import GameChoice, Seen, choice_of, look_at
from understudy.app.runs.evaluation import Judge, judge_of
from understudy.app.runs.folder import RunFolder, check_free, default_folder, draw_curve, is_empty
from understudy.app.runs.resume import asked_more, begun_with, check_agrees, extended, settings_of, without
from understudy.app.runs.settings import Resolver, Settings, Wanted, algorithm_name, check_words, resolve, with_network
from understudy.app.runs.stored import store_folder, stored_spec
from understudy.core.errors import ConfigError, GameFailed, Locked
from understudy.core.events import InitFrom, OnEvent, Started
from understudy.core.game import GameSpec
from understudy.core.log import FileLock
from understudy.core.network import NetworkSpec
from understudy.core.policy import Policy
from understudy.core.tensors import Array
from understudy.learn.compile_cache import use_compile_cache

if TYPE_CHECKING:
    from understudy.app.runs.training import Training


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
class _Ears:
    """Who listens to a run, and since when its first round is waited for."""

    on_event: OnEvent | None
    began_s: float


def train(
    choice: GameChoice | None, wanted: Wanted, *, out: Path | None = None, resume: bool = False,
    on_event: OnEvent | None = None, began_s: float | None = None,
) -> Run:  # fmt: skip
    """Train on a game until its goal or its steps are reached; the run's folder holds all that matters.

    A run that goes on needs no choice, but what is given must agree with it. `began_s` is when the wait for the first
    round began, by `time.perf_counter`.
    """
    ears = _Ears(on_event, time.perf_counter() if began_s is None else began_s)
    if resume and out is None:
        raise ConfigError("which run is to be resumed? give its folder: --resume --out runs/GAME-ALGORITHM-N")
    if resume and out is not None and (choice is None or not is_empty(out)):
        return _resumed(RunFolder(out), choice, wanted, ears)
    if choice is None:
        raise ConfigError("which game? give a Gymnasium id, such as CartPole-v1")
    return _begun(choice, wanted, out, ears)


def _begun(choice: GameChoice, wanted: Wanted, out: Path | None, ears: _Ears) -> Run:
    check_words(wanted)  # here, since what comes next imports much and takes its time
    if out is not None:
        check_free(out)
    choice, wanted, start = begun_with(choice, wanted)
    seen, store = None, None
    if wanted.from_store is None:
        seen = look_at(choice)
        spec = seen.spec
    else:
        store = store_folder(wanted.from_store)
        spec = stored_spec(store, choice.name)
    settings = _with_goal(resolve(wanted, spec), wanted, seen)
    until = settings.run.until
    name = choice.name if choice.is_named else spec.game
    root = out or default_folder(Path("runs"), name, settings.algorithm)
    check_free(root)
    facts = {
        **choice.to_json(), "name": name, "algorithm": settings.algorithm, "seed": wanted.seed or 0,
        "until": None if until == math.inf else until, "starts": 0, "extensions": 0,
        "created_ms": int(time.time() * 1000), "schema": spec.schema, "from_store": store and str(store.resolve()),
        "init_from": None if wanted.init_from is None else str(wanted.init_from.resolve()), "versions": versions(),
    }  # fmt: skip
    folder = RunFolder(root)
    with _held(folder, is_new=True):
        network = getattr(settings.config, "network", None)
        folder.create(facts, settings.to_toml(), network=network, start=start)
        return _trained(folder, choice, settings, facts, seen=seen, ears=ears)


def _with_goal(settings: Settings, wanted: Wanted, seen: Seen | None) -> Settings:
    """The settings with the goal they come to, so that their preset makes the same run however steps were given."""
    until = wanted.until if wanted.until is not None else settings.run.until
    if until is None and seen is not None and "steps" not in wanted.settings:
        until = seen.threshold
    return replace(settings, run=replace(settings.run, until=math.inf if until is None else float(until)))


def _resumed(folder: RunFolder, choice: GameChoice | None, wanted: Wanted, ears: _Ears) -> Run:
    facts = folder.facts()
    is_object = wanted.algorithm is not None and not isinstance(wanted.algorithm, str)
    chosen = wanted.algorithm if is_object and algorithm_name(wanted.algorithm) == facts["algorithm"] else None
    resolver = Resolver(facts["algorithm"], chosen)
    resolver.add(settings_of(folder, facts))
    settings = with_network(resolver.settings(), folder.network())
    result = folder.result()
    more = {} if result is None else asked_more(facts, settings, wanted)
    check_agrees(folder.root, facts, settings, choice=choice, wanted=without(wanted, more))
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
                f"{choice.name} looks different from when {folder.root} began; resume it with the same packages"
            )
        return _trained(folder, choice, settings, facts, seen=seen, ears=ears, is_resumed=True)


@contextlib.contextmanager
def _held(folder: RunFolder, *, is_new: bool) -> Iterator[None]:
    """The run's lock. Whatever ends the block leaves no half-written file, and no run that could not even begin."""
    root = folder.root.absolute()
    missing = [path for path in (root, *root.parents) if not path.exists()]
    try:
        with FileLock(folder.lock, what="the run"):
            if is_new and not is_empty(root):
                raise Locked(f"another process has begun a run in {root} just now; give another folder")
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
    folder: RunFolder, choice: GameChoice, settings: Settings, facts: Mapping[str, Any], *, seen: Seen | None,
    ears: _Ears, is_resumed: bool = False,
) -> Run:  # fmt: skip
    from understudy.app.runs.training import build  # late: JAX takes seconds, and a wrong word must not wait

    use_compile_cache()
    with contextlib.ExitStack() as opened:
        if seen is not None:
            spec, judge = seen.spec, judge_of(choice, seen, settings.run.eval_episodes, opened)
        else:
            spec = stored_spec(Path(facts["from_store"]), choice.name)
            judge = _judge_if_installed(choice, spec, settings, opened)
        training = build(
            folder, settings, facts, spec=spec, choice=choice, judge=judge, on_event=ears.on_event, opened=opened
        )  # fmt: skip
        if is_resumed:
            training.resume()
        folder.cut_curve(training.judged_steps)
        folder.cut_guarded(training.resumed_at_step or -1)
        init_from = None
        if facts["init_from"] is not None:
            init_from = taken_from(facts["init_from"], folder.start().weights, training.engine.policy.network)
        training.clocks.startup_s = time.perf_counter() - ears.began_s
        training.hear(Started(
            env_steps=training.resumed_at_step, run=str(folder.root), game=facts["name"], seed=facts["seed"],
            algorithm=settings.algorithm, steps=settings.run.steps, until=facts["until"], init_from=init_from,
            is_from_store=seen is None,
        ))  # fmt: skip
        training.run()
        result = result_of(training, facts, env_class=seen.env_class if seen is not None else "")
        result["init_from"] = init_from and dataclasses.asdict(init_from)
        draw_curve(folder, title=f"{facts['name']}, {settings.algorithm}", goal=facts["until"])
        folder.write_json("result.json", result)  # last: from here on the run has ended
        policy = folder.policy()
    return Run(folder.root, policy, result)


def _judge_if_installed(choice: GameChoice, spec: GameSpec, settings: Settings, opened: contextlib.ExitStack) -> Judge:
    """Envs to evaluate in when the game is here, works, and is the one that was recorded."""
    try:
        seen = look_at(choice)
    except (ConfigError, GameFailed):
        return Judge(None)
    if seen.spec.schema != spec.schema:
        return Judge(None)
    return judge_of(choice, seen, settings.run.eval_episodes, opened)


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def result_of(training: "Training", facts: Mapping[str, Any], *, env_class: str) -> dict[str, Any]:
    """What the last line of `understudy train --json` says."""
    returns, counts, clocks = training.final_returns(), training.engine.learner.counts, training.clocks
    until = facts["until"]
    mean = None if returns is None else float(returns.mean())
    return {
        "solved": training.is_solved, "return_mean": mean,
        "return_std": _finite(None if returns is None else float(returns.std())),
        "episodes": 0 if returns is None else len(returns), "until": until,
        "env_steps": training.engine.env_steps, "updates": counts.updates, "train_episodes": training.episodes,
        "train_s": round(clocks.train_s, 3), "compile_s": round(clocks.compile_s, 3),
        "eval_s": round(clocks.eval_s, 3), "startup_s": round(clocks.startup_s, 3),
        "resumed_at_step": training.resumed_at_step, "env_class": env_class, "algorithm": facts["algorithm"],
        "game": facts["name"], "seed": facts["seed"], "replay_ratio": round(counts.replay_ratio, 3),
        "skipped_updates": counts.skipped_updates, "confirmations": training.confirmations,
        "guarded_chunks": training.guarded_chunks, "run": str(training.folder.root),
        "policy": str(training.folder.policy_path()),
    }  # fmt: skip


def versions() -> dict[str, str]:
    """What a run depends on for its bits."""
    return {name: metadata.version(name) for name in ("understudy", "numpy", "jax", "gymnasium")}


Shapes = Mapping[str, tuple[int, ...]]


def taken_from(run: str, weights: Mapping[str, Array], network: NetworkSpec) -> InitFrom:
    """Which weights of this network another run's fit; ConfigError where it has none of the same kind."""
    has: Shapes = {name: array.shape for name, array in weights.items()}
    wants: Shapes = network.shapes()
    fit = [name for name, shape in wants.items() if has.get(name) == shape]
    # Biases fit almost anything; a policy that shares no kernel is of another kind.
    if not any(len(wants[name]) > 1 for name in fit):
        raise ConfigError(
            f"no kernel of {run} fits this network: {_difference(has, wants)}; start from a run of the same game, and "
            f"give the algorithm and widths that its preset.toml has (--algorithm, --network 64,64)"
        )
    return InitFrom(run=run, fit=fit, new=[name for name in wants if name not in fit])


def _difference(has: Shapes, wants: Shapes) -> str:
    name = next(name for name, shape in wants.items() if len(shape) > 1)
    there = f"is {_text(has[name])} there" if name in has else "is not there"
    return f"{name} {there}, and {_text(wants[name])} is wanted"


def _text(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
