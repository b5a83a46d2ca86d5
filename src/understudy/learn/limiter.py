"""Limiter: keeps samples and inserts in balance, so that a step is sampled as often as the settings say."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from understudy.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class LimiterConfig:
    """How often a step is sampled, on average, before it leaves the replay."""

    samples_per_insert: float = 8.0
    """Raise for sample efficiency, lower for speed."""
    min_inserts: int = 1_000
    """Steps before the first update; they owe no samples."""
    slack: int = 2_048
    """Steps that actors may be ahead of the learner before they wait."""

    def __post_init__(self) -> None:
        if not (math.isfinite(self.samples_per_insert) and self.samples_per_insert > 0):
            raise ConfigError(f"samples_per_insert is {self.samples_per_insert}; give a number above 0, such as 8")
        if self.min_inserts < 0:
            raise ConfigError(f"min_inserts is {self.min_inserts}; give a whole number from 0, such as 1000")
        if self.slack < 1:
            raise ConfigError(f"slack is {self.slack}; give at least 1 step, or actors could never start")


class Limiter:
    """Counts steps in and samples out; says how many updates are due, and whether actors may go on.

    Players are never asked to wait: count what they send, and leave `may_insert` to the actors.
    """

    def __init__(self, config: LimiterConfig, *, batch: int = 1) -> None:
        self._config = config
        self._n_inserted = 0
        self._n_sampled = 0
        self._check(batch)

    def inserted(self, n_steps: int) -> None:
        """Count steps that entered the replay."""
        self._n_inserted += n_steps

    def sampled(self, n_rows: int) -> None:
        """Count rows that updates have eaten."""
        self._n_sampled += n_rows

    @property
    def may_insert(self) -> bool:
        """Whether actors may go on: the learner is less than `slack` steps behind them."""
        return self._owed() < self._config.slack * self._config.samples_per_insert

    def updates_due(self, batch: int) -> int:
        """How many updates of this batch the steps so far pay for."""
        self._check(batch)
        # A hair more, since 0.29 * 100 is 28.999999999999996.
        return max(0, math.floor(self._owed() / batch + 1e-9))

    def state(self) -> dict[str, int]:
        """What `restore` needs."""
        return {"n_inserted": self._n_inserted, "n_sampled": self._n_sampled}

    def restore(self, facts: Mapping[str, int]) -> None:
        """Go on from what `state` returned."""
        self._n_inserted, self._n_sampled = int(facts["n_inserted"]), int(facts["n_sampled"])

    def _owed(self) -> float:
        beyond = max(0, self._n_inserted - self._config.min_inserts)
        return beyond * self._config.samples_per_insert - self._n_sampled

    def _check(self, batch: int) -> None:
        """Refuse what would end in a deadlock: actors told to wait while no whole batch is due."""
        config = self._config
        if config.slack * config.samples_per_insert < batch:
            raise ConfigError(
                f"a slack of {config.slack} steps pays for {config.slack * config.samples_per_insert:g} samples, less "
                f"than one batch of {batch}, so learner and actors would wait for each other; "
                f"give a slack of at least {math.ceil(batch / config.samples_per_insert)}"
            )
