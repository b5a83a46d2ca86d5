"""The results of a measurement: figures with a goal and a gate, and ratios to a peer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from understudy.core.errors import ConfigError
from understudy.core.statistics import Sample

Measured = TypeVar("Measured")


@dataclass(frozen=True, slots=True)
class Percentiles:
    """The percentiles of a sample, in its unit."""

    count: int
    p50: float
    p99: float
    p9999: float
    max: float


@dataclass(frozen=True, slots=True)
class Rate:
    """The median of several measurements, and the lowest and highest of them."""

    median: float
    low: float
    high: float


def percentiles(sample: Sample) -> Percentiles:
    """p50, p99, p99.99 and the maximum; each is a measured value, never interpolated.

    If the sample is too small for p99.99, its maximum is returned instead.
    """
    values = _checked(sample)
    p50, p99, p9999 = np.quantile(values, [0.5, 0.99, 0.9999], method="inverted_cdf").tolist()
    return Percentiles(len(values), p50, p99, p9999, float(values.max()))


def rate(measurements: Sample) -> Rate:
    """The median of repeated measurements, with their range."""
    values = _checked(measurements)
    return Rate(float(np.median(values)), float(values.min()), float(values.max()))


def _checked(sample: Sample) -> NDArray[np.float64]:
    values = np.asarray(sample, np.float64).ravel()
    if values.size == 0 or not np.isfinite(values).all():
        raise ConfigError(
            f"the sample of {values.size} numbers is empty or not finite; measure at least once"
        )
    return values


@dataclass(frozen=True, slots=True)
class Gate:
    """Whether the work was correct; a figure whose gate failed does not count."""

    passed: bool
    says: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One quantity, measured several times; `goal` is None if it is only reported."""

    name: str
    unit: str
    values: Sequence[float]
    gate: Gate
    goal: float | None = None
    more_is_better: bool = True
    bound_by: str = ""
    """What limits this figure."""

    @property
    def median(self) -> float:
        return rate(self.values).median

    @property
    def verdict(self) -> str:
        """`met`, `missed`, `reported`, or `void` if the gate failed."""
        if not self.gate.passed:
            return "void"
        if self.goal is None:
            return "reported"
        is_met = self.median >= self.goal if self.more_is_better else self.median <= self.goal
        return "met" if is_met else "missed"

    def to_json(self) -> dict[str, Any]:
        overall = rate(self.values)
        fields = asdict(self) | {"values": [significant(value) for value in self.values]}
        spread = {
            "median": significant(overall.median),
            "low": significant(overall.low),
            "high": significant(overall.high),
        }
        return fields | spread | {"verdict": self.verdict}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Our value and a peer's, measured in turn; a ratio above 1 means that we are better."""

    name: str
    peer: str
    unit: str
    ours: Sequence[float]
    theirs: Sequence[float]
    gate: Gate
    more_is_better: bool = True

    @property
    def times(self) -> list[float]:
        """How many times better, one per round."""
        pairs = zip(self.ours, self.theirs, strict=True)
        return [ours / theirs if self.more_is_better else theirs / ours for ours, theirs in pairs]

    def to_json(self) -> dict[str, Any]:
        overall = rate(self.times)
        numbers = {"ours": [significant(value) for value in self.ours]}
        numbers |= {"theirs": [significant(value) for value in self.theirs]}
        spread = {
            "median": significant(overall.median),
            "low": significant(overall.low),
            "high": significant(overall.high),
        }
        return asdict(self) | numbers | spread


@dataclass(slots=True)
class Findings:
    """All results of one measurement."""

    figures: list[Figure] = field(default_factory=list)
    ratios: list[Ratio] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    """Peers that could not run, with the reason."""
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {
            "figures": [figure.to_json() for figure in self.figures],
            "ratios": [ratio.to_json() for ratio in self.ratios],
            "skipped": self.skipped,
            "notes": self.notes,
        }


@dataclass(frozen=True, slots=True)
class Took:
    """The cost of some work: processor time of all processes involved, and wall time."""

    cpu_s: float
    wall_s: float


def rate_ratios(
    what: str,
    peer: str,
    amount: float,
    ours: Sequence[Took],
    theirs: Sequence[Took],
    *,
    unit: str,
    gate: Gate,
) -> list[Ratio]:
    """The same work by us and by a peer, per core and by the clock."""
    return [
        Ratio(
            name=f"{what}, {how}",
            peer=peer,
            unit=f"{unit}{suffix}",
            gate=gate,
            ours=[amount / getattr(took, attribute) for took in ours],
            theirs=[amount / getattr(took, attribute) for took in theirs],
        )
        for how, attribute, suffix in (
            ("per core", "cpu_s", "/core"),
            ("by the clock", "wall_s", ""),
        )
    ]


def significant(value: float, digits: int = 5) -> float:
    """A number rounded to significant digits."""
    return float(f"{value:.{digits}g}")


def all_of(*checks: tuple[str, bool]) -> Gate:
    """A gate that passes if every named check does."""
    failed = [name for name, passed in checks if not passed]
    return Gate(
        not failed,
        f"failed: {'; '.join(failed)}" if failed else "; ".join(name for name, _ in checks),
    )


def in_turn(
    rounds: int, contestants: Mapping[str, Callable[[], Measured]]
) -> dict[str, list[Measured]]:
    """Run every contestant once per round, so that a busy moment of the machine affects all."""
    measured: dict[str, list[Measured]] = {name: [] for name in contestants}
    for at in range(rounds):
        # The order rotates, so that no contestant always pays for cold caches.
        names = list(contestants)
        for name in names[at % len(names) :] + names[: at % len(names)]:
            measured[name].append(contestants[name]())
    return measured
