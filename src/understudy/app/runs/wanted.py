"""Wanted: what the user asked for, and the settings that come of it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from understudy.app.runs.algorithms import ALGORITHMS, algorithm_name, described
from understudy.app.runs.presets import default_preset, read_preset, read_toml
from understudy.app.runs.settings import Resolver, Settings, check_until
from understudy.core.errors import ConfigError
from understudy.core.game import GameSpec
from understudy.core.network import NetworkSpec

MAX_SEED = (1 << 32) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What the user asked for; what is None comes from the preset, or from the run that goes on."""

    algorithm: Any = None
    """A short name, an import path, or a class."""
    preset: str | None = None
    config_file: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Single settings by name."""
    network: NetworkSpec | Sequence[int] | None = None
    """A network of one's own, or the widths of its layers."""
    seed: int | None = None
    until: float | None = None
    init_from: Path | None = None
    """A run whose best policy is where this one starts."""
    from_store: Path | None = None
    """A data folder to learn from, instead of playing."""

    def __post_init__(self) -> None:
        if self.seed is not None and (type(self.seed) is not int or not 0 <= self.seed <= MAX_SEED):
            raise ConfigError(f"seed is {self.seed!r}; give a whole number from 0 to {MAX_SEED}")
        check_until(self.until)


def wanted_algorithm(wanted: Wanted) -> Any:
    """The algorithm that was asked for, in words, in a file or by a preset; else the one for the kind of training."""
    named = {
        "--algorithm": wanted.algorithm,
        f"--config {wanted.config_file}": wanted.config_file and read_toml(wanted.config_file).get("algorithm"),
        f"--preset {wanted.preset}": wanted.preset and read_preset(wanted.preset).get("algorithm"),
    }
    named = {source: one for source, one in named.items() if one is not None}
    names = {source: algorithm_name(one) for source, one in named.items()}
    first = next(iter(names), None)
    for source, name in names.items():
        # An algorithm of one's own may borrow what a preset says about the run and the learner.
        if first is not None and name != names[first] and names[first] in ALGORITHMS:
            raise ConfigError(f"{first} is for {names[first]}, and {source} for {name}; leave out one of the two")
    return named[first] if first is not None else "ppo" if wanted.from_store is None else "bc"


def check_words(wanted: Wanted) -> None:
    """ConfigError for what is wrong whatever the game; without JAX, unless the algorithm is the user's own."""
    algorithm = wanted_algorithm(wanted)
    name = algorithm_name(algorithm)
    chosen = described(name) if name in ALGORITHMS else None if isinstance(algorithm, str) else algorithm
    _filled(Resolver(name, chosen), wanted, wanted.preset).values()


def resolve(wanted: Wanted, game: GameSpec) -> Settings:
    """Preset, file, environment and single settings, checked; in this order, the later wins."""
    algorithm = wanted_algorithm(wanted)
    name = algorithm_name(algorithm)
    resolver = Resolver(name, None if isinstance(algorithm, str) else algorithm)
    settings = _filled(resolver, wanted, wanted.preset or default_preset(name, game)).settings()
    return settings if not isinstance(wanted.network, NetworkSpec) else with_network(settings, wanted.network)


def _filled(resolver: Resolver, wanted: Wanted, preset: str | None) -> Resolver:
    if preset:
        resolver.add(read_preset(preset))
    if wanted.config_file is not None:
        resolver.add(read_toml(wanted.config_file))
    resolver.add_environment()
    for key, value in wanted.settings.items():
        resolver.set(key, value)
    if wanted.network is not None and not isinstance(wanted.network, NetworkSpec):
        resolver.set("widths", list(wanted.network))
    return resolver


def with_network(settings: Settings, network: NetworkSpec | None) -> Settings:
    """The same settings with a network of one's own."""
    if network is None:
        return settings
    if not hasattr(settings.config, "network"):
        raise ConfigError(f"{settings.algorithm} takes no network of one's own; leave it out")
    return replace(settings, config=replace(settings.config, network=network))
