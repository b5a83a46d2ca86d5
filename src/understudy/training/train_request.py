"""TrainRequest: what the user requested of a run, and the settings that follow from it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from understudy.algorithm import Rollouts
from understudy.core.errors import ConfigError
from understudy.core.wording import joined
from understudy.experience.game import GameSpec
from understudy.nn.heads import Head
from understudy.nn.network import NetworkSpec, ObservationNorm
from understudy.nn.policy import Policy
from understudy.replay import REPLAYS, replay_class
from understudy.training.preset import default_preset, is_family, read_preset, read_toml
from understudy.training.settings import (
    ALGORITHMS,
    ENGINES,
    LearnerPart,
    Resolver,
    RunPart,
    RunSettings,
    algorithm_name,
    check_until,
    describe_algorithm,
    field_names,
)

MAX_SEED = (1 << 32) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """What the user requested; None means the preset's value, or that of the resumed run."""

    algorithm: Any = None
    """A short name, an import path, or a class."""
    preset: str | None = None
    config_file: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Single settings by name."""
    network: NetworkSpec | Sequence[int] | None = None
    """A custom network, or the widths of its layers."""
    seed: int | None = None
    until: float | None = None
    init_from: Path | None = None
    """A run whose best policy provides the initial weights."""
    from_store: Path | None = None
    """A data folder to learn from instead of playing."""
    engine: str | None = None
    """Where actors play, of ENGINES."""
    address: str | None = None
    """The Ray cluster; None: the run starts Ray."""
    listen: Mapping[str, Any] | None = None
    """Where workers join: those fields of WorkersConfig that were given."""

    def __post_init__(self) -> None:
        if self.engine is not None and self.engine not in ENGINES:
            raise ConfigError(f"engine is {self.engine!r}; give one of {joined(ENGINES)}")
        if self.listen is not None and self.engine not in (None, "workers"):
            raise ConfigError(
                "an address, a certificate or a key for workers is set, but engine is "
                f"{self.engine!r}; use engine='workers', or omit it"
            )
        if self.address is not None and self.engine != "ray":
            raise ConfigError(
                f"address is {self.address!r}, which is that of a Ray cluster; use it with "
                "engine='ray', or omit it"
            )
        if self.engine not in (None, ENGINES[0]) and self.from_store is not None:
            raise ConfigError(
                f"engine is {self.engine!r}, but a run from a store plays no game; omit engine or "
                "from_store"
            )
        if self.seed is not None and (type(self.seed) is not int or not 0 <= self.seed <= MAX_SEED):
            raise ConfigError(f"seed is {self.seed!r}; give a whole number from 0 to {MAX_SEED}")
        check_until(self.until)


def requested_algorithm(request: TrainRequest) -> Any:
    """The algorithm named by flag, file or preset; by default ppo, or bc to train from a store."""
    named = {
        "algorithm": request.algorithm,
        f"config {request.config_file}": request.config_file
        and read_toml(request.config_file).get("algorithm"),
        f"preset {request.preset}": request.preset and read_preset(request.preset).get("algorithm"),
    }
    named = {source: algorithm for source, algorithm in named.items() if algorithm is not None}
    names = {source: algorithm_name(algorithm) for source, algorithm in named.items()}
    first = next(iter(names), None)
    for source, name in names.items():
        # A custom algorithm may reuse the run and learner sections of any preset.
        if first is not None and name != names[first] and names[first] in ALGORITHMS:
            raise ConfigError(
                f"{first} is for {names[first]}, and {source} for {name}; omit one of the two"
            )
    return named[first] if first is not None else "ppo" if request.from_store is None else "bc"


def check_request(request: TrainRequest) -> None:
    """ConfigError for settings invalid in any game.

    Imports JAX only for a custom algorithm, or if a custom replay does.
    """
    algorithm = requested_algorithm(request)
    name = algorithm_name(algorithm)
    chosen = (
        describe_algorithm(name)
        if name in ALGORITHMS
        else None
        if isinstance(algorithm, str)
        else algorithm
    )
    resolver = fill_resolver(Resolver(name, chosen), request, request.preset, with_environment=True)
    replay = resolver.values()["learner"].get("replay", LearnerPart().replay)
    if replay not in REPLAYS:
        replay_class(replay)


def resolve(request: TrainRequest, game: GameSpec) -> RunSettings:
    """The checked settings from preset, file, environment and flags; later sources win."""
    algorithm = requested_algorithm(request)
    name = algorithm_name(algorithm)
    resolver = Resolver(name, None if isinstance(algorithm, str) else algorithm)
    preset = _preset_for(request, name, game)
    settings = fill_resolver(resolver, request, preset, with_environment=True).settings()
    if request.engine == "workers":  # they come and go
        settings = replace(settings, run=replace(settings.run, asynchronous=True))
    if "horizon" not in without_preset(request, settings)["run"]:
        plan = Resolver(name, settings.algorithm_type)
        if preset:
            plan.add(read_preset(preset))
        settings = settings.with_horizon(plan.values()["run"].get("steps", RunPart().steps))
    return (
        settings
        if not isinstance(request.network, NetworkSpec)
        else with_network(settings, request.network)
    )


def _preset_for(request: TrainRequest, algorithm: str, game: GameSpec) -> str:
    """The preset, requested or of the algorithm, for this kind of game; "" if there is none."""
    preset = request.preset or default_preset(algorithm, game)
    return default_preset(preset, game) if is_family(preset) else preset


_OF_ACTORS = {
    "envs",
    "actors",
    "collect",
    "asynchronous",
    "ladder",
    "keep_history",
    "samples_per_insert",
    "min_inserts",
    "max_lag_versions",
}
"""Settings without an effect in a run from a store."""
_OF_WORKERS = {"evaluate_share", "lease_s"}
"""Settings without an effect with other engines than workers."""
_OFF_POLICY = {"collect", "ladder", "keep_history", *field_names(LearnerPart)}
"""Settings without an effect in a run of an on-policy algorithm."""


def check_effects(request: TrainRequest, settings: RunSettings, game: GameSpec) -> None:
    """ConfigError if file, environment or flags set what has no effect in this run.

    The values of presets and defaults are not checked, since they are for many runs.
    """
    algorithm = settings.algorithm_type(game, settings.config)
    needs = algorithm.needs
    head = getattr(algorithm, "head", None)  # custom algorithms may lack it
    kind = head.kind if isinstance(head, Head) else None
    has_epsilon = kind == "epsilon_greedy"
    requested = without_preset(request, settings)
    why: dict[str, str] = {}
    if request.engine != "workers":
        why |= dict.fromkeys(_OF_WORKERS, "it is for engine='workers'")
    elif requested["run"].get("asynchronous") is False:
        raise ConfigError(
            "asynchronous is false, but workers come and go, so their runs are always "
            "asynchronous; omit the setting, or use engine='process'"
        )
    if request.from_store is not None:
        reason = "a run from a store plays no game and reads everything in the store"
        why |= dict.fromkeys(_OF_ACTORS | ({"epsilon"} if has_epsilon else set()), reason)
    elif isinstance(needs, Rollouts):
        if settings.run.asynchronous:
            raise ConfigError(
                f"{settings.algorithm} is on-policy and learns only from its newest weights, which "
                "workers and other asynchronous actors do not wait for; use dqn, or "
                "asynchronous=false and engine='process'"
            )
        has_own_envs = hasattr(settings.config, "envs") and "envs" not in requested["config"]
        reason = f"{settings.algorithm} is on-policy and has no replay"
        why |= dict.fromkeys(_OFF_POLICY | ({"envs"} if has_own_envs else set()), reason)
    elif not needs.prioritised:
        why["alpha"] = f"{settings.algorithm} does not draw by priority here"
    if has_epsilon and settings.run.ladder:
        why.setdefault("epsilon", "each env has its own with ladder")
    if kind is not None and not has_epsilon:
        why.setdefault("ladder", f"{settings.algorithm} does not explore by epsilon")
    resolver = Resolver(settings.algorithm, settings.algorithm_type)
    if preset := _preset_for(request, settings.algorithm, game):
        resolver.add(read_preset(preset))
    usual = resolver.settings()
    # A knob of a custom algorithm may have the name of a setting.
    names = {"run": why.keys(), "learner": why.keys(), "knobs": why.keys() & {"epsilon"}}
    for section, unused in names.items():
        for name in sorted(requested[section].keys() & unused):
            value = getattr(getattr(settings, section), name)
            if value != getattr(getattr(usual, section), name):
                raise ConfigError(
                    f"{name} is {value!r}, but {why[name]}, so it has no effect; omit it"
                )


def without_preset(request: TrainRequest, settings: RunSettings) -> dict[str, dict[str, Any]]:
    """The values that file, environment and flags set, by section."""
    resolver = Resolver(settings.algorithm, settings.algorithm_type)
    return fill_resolver(resolver, request, None, with_environment=True).collected


def fill_resolver(
    resolver: Resolver, request: TrainRequest, preset: str | None, *, with_environment: bool = False
) -> Resolver:
    """Add preset, file, environment and single settings to the resolver; later sources win."""
    if preset:
        resolver.add(read_preset(preset))
    if request.config_file is not None:
        resolver.add(read_toml(request.config_file))
    if with_environment:
        resolver.add_environment()
    for key, value in request.settings.items():
        resolver.set(key, value)
    if request.network is not None and not isinstance(request.network, NetworkSpec):
        resolver.set("widths", list(request.network))
    return resolver


def with_network(settings: RunSettings, network: NetworkSpec | None) -> RunSettings:
    """The settings with a custom network."""
    if network is None:
        return settings
    if not hasattr(settings.config, "network"):
        raise ConfigError(f"{settings.algorithm} does not support a custom network; omit it")
    return replace(settings, config=replace(settings.config, network=network))


_OF_NETWORKS = {"widths", "activation", "observation_norm", "centre"}
"""Settings that describe layers of the default network."""


def with_network_of(
    start: Policy, settings: RunSettings, request: TrainRequest, game: GameSpec
) -> RunSettings:
    """The settings with the input and trunk layers of the policy that the run starts from.

    Its weights compute something else in other layers. With another `stack`, input layers are new
    but of the same kinds. The settings stay as they are if the request itself describes a network,
    or if the policy reads other observations.
    """
    requested = without_preset(request, settings)["config"]
    config = settings.config
    is_described = request.network is not None or requested.keys() & _OF_NETWORKS
    if is_described or not hasattr(config, "network"):
        return settings
    layers = [layer for column in start.network.inputs.values() for layer in column.layers]
    of_start: dict[str, Any] = {
        "observation_norm": any(isinstance(layer, ObservationNorm) for layer in layers)
    }
    if "stack" not in requested:
        of_start["stack"] = start.stack
    config = replace(
        config, **{name: value for name, value in of_start.items() if hasattr(config, name)}
    )
    own = getattr(settings.algorithm_type(game, config), "network", None)
    stack = getattr(config, "stack", 1)
    if own is None or _single_columns(own, stack) != _single_columns(start.network, start.stack):
        return settings
    inputs = start.network.inputs if stack == start.stack else own.inputs
    network = NetworkSpec(inputs, start.network.trunk, own.heads)
    settings = replace(settings, config=config)
    return settings if network == own else with_network(settings, network)


def _single_columns(network: NetworkSpec, stack: int) -> dict[str, Any]:
    """Shape and dtype of a single observation of each input."""
    return {
        name: (column.shape[stack > 1 :], column.dtype) for name, column in network.inputs.items()
    }
