"""Warm starts: the weights of a policy for the next version of its game, where both are alike.

numbers that both observe ─► their rows of the first dense layer
new numbers               ─► rows of 0, so that they change nothing at first
the same actions          ─► the last layers; otherwise these are new
"""

from collections.abc import Hashable, Mapping

import numpy as np

from understudy.core.tensors import Array
from understudy.experience.game import GameSpec
from understudy.nn.heads import Head
from understudy.nn.network import Dense, Flatten, NetworkSpec, ObservationNorm, centre_of
from understudy.nn.policy import Policy

_KERNEL = "trunk.0.kernel"


def fitting_weights(start: Mapping[str, Array], network: NetworkSpec) -> list[str]:
    """Names of the weights that the network can copy, since their shapes match.

    The count of an ObservationNorm fits only with the mean and variance that it counts for.
    """
    fit = [
        name
        for name, shape in network.shapes().items()
        if name in start and start[name].shape == shape
    ]
    return [
        name
        for name in fit
        if not name.endswith(".count")
        or {name.removesuffix("count") + part for part in ("mean", "var")} <= {*fit}
    ]


def warm_start(
    old: Policy, game: GameSpec, *, network: NetworkSpec, head: Head
) -> Mapping[str, Array]:
    """Weights with which this network of this game begins to play as the old policy does.

    Columns are the same if they have the same name, type, shape and layers; numbers of a column
    with `obs_names`, if they have the same name. Empty if the dense layers differ, or if nothing
    that both observe is the same.
    """
    if old.network.trunk != network.trunk or not isinstance((*network.trunk, None)[0], Dense):
        return {}
    row_of = {number: row for row, number in enumerate(_numbers(old.game, old.network))}
    rows = np.array([row_of.get(number, -1) for number in _numbers(game, network)])
    if (rows < 0).all():
        return {}
    start = {name: array for name, array in old.weights.items() if name.startswith("trunk.")}
    start[_KERNEL] = np.where((rows >= 0)[:, None], old.weights[_KERNEL][rows], np.float32(0))
    before = (old.head, old.network.heads, old.game.action, old.game.action_names)
    if before == (head, network.heads, game.action, game.action_names):
        start |= {name: array for name, array in old.weights.items() if name.startswith("heads.")}
    end = 0
    for name, column in network.inputs.items():
        begin = end
        end += network.widths()[name]
        own = rows[begin:end]
        prefixes = [f"inputs.{name}.{index}." for index in range(len(column.layers))]
        if _has_names(game, network):
            start |= _norms(old, prefixes, own)
        elif (own >= 0).all():
            start |= {
                name: array
                for name, array in old.weights.items()
                if name.startswith(tuple(prefixes))
            }
    return start


def keeps_play(old: Policy, game: GameSpec, *, network: NetworkSpec, head: Head) -> bool:
    """Whether a warm start plays as the old policy: it observes all that, and acts alike."""
    start = warm_start(old, game, network=network, head=head)
    has_heads = any(name.startswith("heads.") for name in start)
    return has_heads and {*_numbers(old.game, old.network)} <= {*_numbers(game, network)}


def _norms(old: Policy, prefixes: list[str], rows: Array) -> dict[str, Array]:
    """The ObservationNorms of a column whose numbers have names."""
    norms: dict[str, Array] = {}
    for prefix in prefixes:
        if prefix + "mean" not in old.weights:
            continue
        for part, value in (("mean", 0.0), ("var", 1.0)):
            array = old.weights[prefix + part]
            norms[prefix + part] = np.where(rows >= 0, array[rows], np.float32(value))
        if (rows >= 0).all():  # the count is that of all numbers, and new ones have none yet
            norms[prefix + "count"] = old.weights[prefix + "count"]
    return norms


def _numbers(game: GameSpec, network: NetworkSpec) -> list[Hashable]:
    """What each row of the first dense layer stands for; the same in another game if equal."""
    if _has_names(game, network):
        ((name, column),) = network.inputs.items()
        return [(name, column.dtype, column.layers, number) for number in game.obs_names]
    numbers: list[Hashable] = []
    for name, column in network.inputs.items():
        # The layers after a Centre also see the other columns.
        what = column if centre_of(column) is None else tuple(network.inputs.items())
        numbers += [(name, what, number) for number in range(network.widths()[name])]
    return numbers


def _has_names(game: GameSpec, network: NetworkSpec) -> bool:
    """Whether each row of the first dense layer is a number with a name."""
    return [column.shape for column in network.inputs.values()] == [(len(game.obs_names),)] and all(
        isinstance(layer, ObservationNorm | Flatten)
        for column in network.inputs.values()
        for layer in column.layers
    )
