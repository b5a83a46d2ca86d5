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

_PER_CALL = 64
"""Updates in one compiled call."""
_UPDATES = 512
"""Enough to order settings; a released clone has more."""
_BATCH = 128
_WIDTHS = (256, 256)
_KNOBS = BcKnobs(learning_rate=Schedule(1e-3, 1e-5), weight_decay=0.3)
"""Widths and knobs are those of the preset bc-people."""


class Choice:
    """Trains a clone with each of several settings, a call of updates at a time, and compares them.

    `held_out`: steps that no clone learns from. `temperature`: that of released bots.
    """

    def __init__(
        self,
        game: GameSpec,
        configs: Sequence[BcConfig],
        *,
        learned: Batch,
        held_out: Batch,
        temperature: float,
    ) -> None:
        self._game = game
        self._configs = configs
        self._learned = learned
        self._held_out = held_out
        self._temperature = temperature
        self._clone: _Clone | None = None
        self._chances: list[NDArray[np.float32]] = []

    def step(self) -> bool:
        """Run one compiled call of updates; False if all clones are trained."""
        number = len(self._chances)
        if number == len(self._configs):
            return False
        if self._clone is None:
            self._clone = _Clone(Bc(self._game, self._configs[number]), self._learned)
        if not self._clone.step():
            self._chances.append(self._clone.chances(self._held_out, self._temperature))
            self._clone = None
        return True

    @property
    def progress(self) -> str:
        """Which clone is trained, as text."""
        number = min(len(self._chances) + 1, len(self._configs))
        return f"clone {number} of {len(self._configs)}"

    def best(self) -> BcConfig:
        """The first settings whose clone predicts held-out steps as well as the best one.

        That is within one standard error. Compared is the probability of recorded actions at the
        temperature of released bots; by that of clones as trained, settings would win that make
        them learn by heart.
        """
        best = max(self._chances, key=lambda own: float(own.mean()))
        for config, own in zip(self._configs, self._chances, strict=True):
            loss = best - own
            if loss.mean() <= loss.std() / len(loss) ** 0.5:
                return config
        return self._configs[-1]  # no clone has finite probabilities


class _Clone:
    """A clone in training."""

    def __init__(self, algorithm: Bc, learned: Batch) -> None:
        self._algorithm = algorithm
        self._data = jax.tree.map(jnp.asarray, learned._replace(obs_limits=None))
        self._limits = learned.obs_limits
        self._rng = np.random.default_rng(0)
        self._state = algorithm.init(jax.random.PRNGKey(0))
        self._updates = 0

        def call(state: Any, data: Batch, limits: Any, rows: Any, knobs: Any) -> Any:
            def update(state: Any, drawn: Any) -> tuple[Any, None]:
                batch = jax.tree.map(lambda column: column[drawn[0]], data)
                return algorithm.update(state, batch._replace(obs_limits=limits), drawn[1])[0], None

            return jax.lax.scan(update, state, (rows, knobs))[0]

        self._call = jax.jit(call)

    def step(self) -> bool:
        """Run one compiled call of updates; False if all were made before."""
        if self._updates >= _UPDATES:
            return False
        progress = (self._updates + np.arange(_PER_CALL)) / _UPDATES
        knobs = {}
        for field in fields(_KNOBS):
            knob = getattr(_KNOBS, field.name)
            values = [knob.at(at) if isinstance(knob, Schedule) else knob for at in progress]
            knobs[field.name] = jnp.asarray(values, jnp.float32)
        size = (_PER_CALL, self._algorithm.config.batch)
        rows = self._rng.integers(len(self._data.action), size=size)
        self._state = self._call(self._state, self._data, self._limits, rows, knobs)
        self._updates += _PER_CALL
        return True

    def chances(self, held_out: Batch, temperature: float) -> NDArray[np.float32]:
        """The probabilities with which the clone chooses the held-out actions."""
        policy = self._algorithm.policy(self._state).at_temperature(temperature)
        outputs = policy.outputs(held_out.obs)
        logp = networks.logp(policy.head, outputs, held_out.action, held_out.action_mask)
        return np.exp(np.asarray(logp))


def symmetry_choice(
    game: GameSpec,
    *,
    centre: str,
    symmetry: str,
    learned: Batch,
    held_out: Batch,
    temperature: float,
    stack: int = 1,
) -> Choice:
    """A choice among all of these mirror images, those without `swap`, and none."""
    without_swap = symmetry.partition("; swap ")[0]
    configs = [
        BcConfig(centre=centre, symmetry=each, widths=_WIDTHS, batch=_BATCH, stack=stack)
        for each in dict.fromkeys((symmetry, without_swap, ""))
    ]
    return Choice(game, configs, learned=learned, held_out=held_out, temperature=temperature)
