"""Chooses among settings of a clone: those with which it predicts held-out steps best."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from understudy.algorithm import Batch, Schedule
from understudy.experience.game import GameSpec
from understudy.learn import networks
from understudy.learn.algorithms.bc import Bc, BcConfig, BcKnobs

_UPDATES = 512
"""Enough to order settings; a released clone has more."""
_BATCH = 128
_WIDTHS = (256, 256)
_KNOBS = BcKnobs(learning_rate=Schedule(1e-3, 1e-5), weight_decay=0.3)
"""Widths and knobs are those of the preset bc-people."""


def useful_symmetry(
    game: GameSpec,
    *,
    centre: str,
    symmetry: str,
    learned: Batch,
    held_out: Batch,
    temperature: float,
    stack: int = 1,
) -> str:
    """The mirror images to learn from: all, those without `swap`, or none."""
    without_swap = symmetry.partition("; swap ")[0]
    configs = [
        BcConfig(centre=centre, symmetry=each, widths=_WIDTHS, batch=_BATCH, stack=stack)
        for each in dict.fromkeys((symmetry, without_swap, ""))
    ]
    best = best_config(game, configs, learned=learned, held_out=held_out, temperature=temperature)
    return best.symmetry


def best_config(
    game: GameSpec,
    configs: Sequence[BcConfig],
    *,
    learned: Batch,
    held_out: Batch,
    temperature: float,
) -> BcConfig:
    """The first settings whose clone predicts held-out steps as well as the best one.

    That is within one standard error. Compared is the probability of recorded actions at the
    temperature of released bots; by that of clones as trained, settings would win that make them
    learn by heart.
    """
    chances = [
        _chances(Bc(game, config), learned, held_out, temperature=temperature) for config in configs
    ]
    best = max(chances, key=lambda own: float(own.mean()))
    for config, own in zip(configs, chances, strict=True):
        loss = best - own
        if loss.mean() <= loss.std() / len(loss) ** 0.5:
            return config
    raise AssertionError("the best is as good as itself")


def _chances(
    algorithm: Bc, learned: Batch, held_out: Batch, *, temperature: float
) -> NDArray[np.float32]:
    """The probabilities with which a trained clone chooses the held-out actions."""
    batches = learned._replace(obs_limits=None)
    n_steps = len(learned.action)
    rows = np.random.default_rng(0).integers(n_steps, size=(_UPDATES, algorithm.config.batch))
    progress = np.linspace(0, 1, _UPDATES)
    knobs = {field.name: getattr(_KNOBS, field.name) for field in fields(_KNOBS)}
    values = {
        name: np.array([knob.at(at) if isinstance(knob, Schedule) else knob for at in progress])
        for name, knob in knobs.items()
    }

    @jax.jit
    def trained(state: Any, batches: Batch, limits: Any, rows: Any, values: Any) -> Any:
        def update(state: Any, given: Any) -> tuple[Any, None]:
            batch = jax.tree.map(lambda column: column[given[0]], batches)
            return algorithm.update(state, batch._replace(obs_limits=limits), given[1])[0], None

        return jax.lax.scan(update, state, (rows, values))[0]

    state = algorithm.init(jax.random.PRNGKey(0))
    values = jax.tree.map(lambda value: jnp.asarray(value, jnp.float32), values)
    state = trained(state, jax.tree.map(jnp.asarray, batches), learned.obs_limits, rows, values)
    policy = algorithm.policy(state).at_temperature(temperature)
    outputs = policy.outputs(held_out.obs)
    logp = networks.logp(policy.head, outputs, held_out.action, held_out.action_mask)
    return np.exp(np.asarray(logp))
