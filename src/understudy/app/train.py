"""train: from a game and a few words to a trained policy in a run's folder."""

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from understudy.app.build import build, build_from_store
from understudy.app.choice import GameChoice, Seen, look_at
from understudy.app.evaluation import Judge, judge_of
from understudy.app.picture import draw_curve
from understudy.app.runs import RunFolder, default_folder, is_empty
from understudy.app.settings import Resolver, Settings, default_preset, read_preset, read_toml
from understudy.app.training import Training
from understudy.core.errors import ConfigError
from understudy.core.events import OnEvent
from understudy.core.game import GameSpec
from understudy.core.lock import FileLock
from understudy.core.log import write_file
from understudy.core.names import game_name_of_env
from understudy.core.network import NetworkSpec, network_from_json, network_to_json
from understudy.core.policy import Policy
from understudy.stores.reader import SegmentReader

_STARTED_S = time.perf_counter()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the user asked for; what is None comes from the preset."""

    algorithm: Any = None
    preset: str | None = None
    config_file: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Single settings by name."""
    network: NetworkSpec | Sequence[int] | None = None
    """A network of one's own, or the widths of its layers."""
    seed: int = 0
    until: float | None = None
    init_from: Path | None = None
    """A run whose best policy is where this one starts."""
    from_store: Path | None = None
    """A data folder to learn from, instead of playing."""


@dataclass(frozen=True, slots=True)
class Run:
    """What a training came to."""

    folder: Path
    policy: Policy
    result: Mapping[str, Any]


def resolve(wanted: Wanted, game: GameSpec) -> Settings:
    """Preset, file and single settings, checked; in this order, the later wins."""
    base = read_preset(wanted.preset) if wanted.preset else {}
    algorithm = wanted.algorithm or base.get("algorithm") or ("ppo" if wanted.from_store is None else "bc")
    name = algorithm if isinstance(algorithm, str) else f"{algorithm.__module__}:{algorithm.__qualname__}"
    resolver = Resolver(name)
    preset = wanted.preset or default_preset(name, game)
    if preset:
        resolver.add(base or read_preset(preset))
    if wanted.config_file is not None:
        resolver.add(read_toml(wanted.config_file))
    for key, value in wanted.settings.items():
        resolver.set(key, value)
    if wanted.network is not None and not isinstance(wanted.network, NetworkSpec):
        resolver.set("widths", list(wanted.network))
    settings = resolver.settings()
    if isinstance(wanted.network, NetworkSpec):
        settings = replace(settings, config=replace(settings.config, network=wanted.network))
    return settings


def train(
    choice: GameChoice, wanted: Wanted, *, out: Path | None = None, resume: bool = False,
    on_event: OnEvent | None = None,
) -> Run:  # fmt: skip
    """Train on a game until its goal or its steps are reached; the run's folder holds all that matters."""
    use_compile_cache()
    if resume:
        return _resumed(out, on_event)
    seen = look_at(choice) if wanted.from_store is None else None
    store = None if wanted.from_store is None else store_folder(wanted.from_store)
    spec = seen.spec if seen is not None else stored_spec(store, choice.name)
    settings = resolve(wanted, spec)
    until = wanted.until
    if until is None and seen is not None and "steps" not in wanted.settings:
        until = seen.threshold
    root = out or default_folder(Path("runs"), choice.name, settings.algorithm)
    if not is_empty(root):
        raise ConfigError(f"{root} is not empty; give another --out, or --resume to go on with the run there")
    facts = {
        **choice.to_json(), "algorithm": settings.algorithm, "seed": wanted.seed, "until": until, "starts": 0,
        "created_ms": int(time.time() * 1000), "schema": spec.schema, "from_store": store and str(store.resolve()),
        "init_from": None if wanted.init_from is None else str(wanted.init_from.resolve()), "versions": versions(),
    }  # fmt: skip
    folder = RunFolder(root)
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.lock, what="the run"):
        folder.create(facts, settings.to_toml())
        network = getattr(settings.config, "network", None)
        if network is not None:
            write_file(root / "network.json", network_to_json(network), mode=0o644)
        return _trained(folder, choice, settings, facts, seen=seen, on_event=on_event)


def _resumed(out: Path | None, on_event: OnEvent | None) -> Run:
    if out is None:
        raise ConfigError("which run is to be resumed? give its folder: --resume --out runs/GAME-ALGORITHM-N")
    folder = RunFolder(out)
    facts = folder.facts()
    if (result := folder.result()) is not None:
        return Run(out, folder.policy(), result)
    if facts["game"] is None:
        raise ConfigError(f"{out} was trained on an env object, which no folder holds; it cannot be resumed")
    choice = GameChoice(**{name: facts[name] for name in ("game", "env_kwargs", "wrappers", "frame_skip")})
    resolver = Resolver(facts["algorithm"])
    resolver.add(read_toml(out / "preset.toml"))
    settings = resolver.settings()
    if (out / "network.json").exists():
        network = network_from_json((out / "network.json").read_bytes())
        settings = replace(settings, config=replace(settings.config, network=network))
    with FileLock(folder.lock, what="the run"):
        if settings.run.asynchronous:
            # Episodes begin anew, so their chunks must not meet those that were played before.
            facts["starts"] += 1
            folder.write_json("run.json", facts)
        seen = look_at(choice) if facts["from_store"] is None else None
        if seen is not None and seen.spec.schema != facts["schema"]:
            raise ConfigError(f"{choice.name} looks different from when {out} began; resume it with the same packages")
        return _trained(folder, choice, settings, facts, seen=seen, on_event=on_event, is_resumed=True)


def _trained(
    folder: RunFolder, choice: GameChoice, settings: Settings, facts: Mapping[str, Any], *, seen: Seen | None,
    on_event: OnEvent | None, is_resumed: bool = False,
) -> Run:  # fmt: skip
    with contextlib.ExitStack() as opened:
        if seen is not None:
            training = build(
                folder, settings, facts, seen=seen, choice=choice, on_event=on_event, opened=opened
            )  # fmt: skip
        else:
            spec = stored_spec(Path(facts["from_store"]), choice.name)
            judge = _judge_if_installed(choice, spec, settings, opened)
            training = build_from_store(
                folder, settings, facts, spec=spec, judge=judge, on_event=on_event, opened=opened
            )  # fmt: skip
        if is_resumed:
            training.resume()
        folder.cut_curve(training.resumed_at_step)
        training.clocks.startup_s = time.perf_counter() - _STARTED_S
        training.run()
        result = result_of(training, facts, env_class=seen.env_class if seen is not None else "")
        folder.write_json("result.json", result)
        draw_curve(folder, title=f"{choice.name}, {settings.algorithm}", goal=facts["until"])
        policy = folder.policy()
    return Run(folder.root, policy, result)


def _judge_if_installed(choice: GameChoice, spec: GameSpec, settings: Settings, opened: contextlib.ExitStack) -> Judge:
    """Envs to evaluate in when the game is here and is the one that was recorded."""
    try:
        seen = look_at(choice)
    except ConfigError:
        return Judge(None)
    if seen.spec.schema != spec.schema:
        return Judge(None)
    return judge_of(choice, seen, settings.run.eval_episodes, opened)


def result_of(training: Training, facts: Mapping[str, Any], *, env_class: str) -> dict[str, Any]:
    """What the last line of `understudy train --json` says."""
    returns, counts, clocks = training.final_returns(), training.engine.learner.counts, training.clocks
    until = facts["until"]
    mean = None if returns is None else float(returns.mean())
    return {
        "solved": mean is not None and until is not None and mean >= until, "return_mean": mean,
        "return_std": None if returns is None else float(returns.std()),
        "episodes": 0 if returns is None else len(returns), "until": until,
        "env_steps": training.engine.env_steps, "updates": counts.updates, "train_episodes": training.episodes,
        "train_s": round(clocks.train_s, 3), "compile_s": round(clocks.compile_s, 3),
        "eval_s": round(clocks.eval_s, 3), "startup_s": round(clocks.startup_s, 3),
        "resumed_at_step": training.resumed_at_step, "env_class": env_class, "algorithm": facts["algorithm"],
        "game": facts["name"], "seed": facts["seed"], "replay_ratio": round(counts.replay_ratio, 3),
        "skipped_updates": counts.skipped_updates, "run": str(training.folder.root),
        "policy": str(training.folder.root / "best.safetensors"),
    }  # fmt: skip


def store_folder(folder: Path) -> Path:
    """The store in a data folder, or the store itself."""
    for one in (folder / "store", folder):
        if (one / "catalogue.sqlite").exists():
            return one
    raise ConfigError(f"there is no store in {folder}; give a data folder that 'understudy simulate --data' wrote")


def stored_spec(store: Path | None, game: str) -> GameSpec:
    """The spec of a game as the store knows it."""
    assert store is not None
    with SegmentReader(store, game=game_name_of_env(game)) as reader:
        spec = reader.spec
    if spec is None:
        raise ConfigError(f"the store {store} holds nothing of {game}; 'understudy data stats' says what it holds")
    return spec


def versions() -> dict[str, str]:
    """What a run depends on for its bits."""
    return {name: metadata.version(name) for name in ("understudy", "numpy", "jax", "optax", "gymnasium")}


def use_compile_cache() -> None:
    """Keep compiled programs on the disk, so that the next run of the same shape starts at once."""
    import jax

    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "understudy" / "jax"
    folder = os.environ.get("UNDERSTUDY_COMPILE_CACHE", str(default))
    if folder and not getattr(jax.config, "jax_compilation_cache_dir", None):
        jax.config.update("jax_compilation_cache_dir", folder)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
