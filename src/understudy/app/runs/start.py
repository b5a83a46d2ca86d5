"""start: what a run takes from another one's policy."""

from collections.abc import Mapping

from understudy.core.errors import ConfigError
from understudy.core.events import InitFrom
from understudy.core.network import NetworkSpec
from understudy.core.tensors import Array

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
