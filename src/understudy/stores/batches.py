"""What a reader is asked for and what it gives: filters, windows and batches of transitions."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from understudy.core.chunk import REQUIRED
from understudy.core.errors import ConfigError
from understudy.core.meta import CONSENTS, KINDS
from understudy.core.tensors import Array
from understudy.core.windows import Ids
from understudy.stores.sources import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFilter:
    """Which rows may be sampled; empty fields match everything."""

    kind: str | None = None
    """`player` or `actor`."""
    consent: tuple[str, ...] = ("granted",)
    """Players' steps under another consent are left out; actors' steps need none."""
    player: bytes | None = None
    """A pseudonym."""
    since_s: float = 0.0
    """Received at this time or later, in seconds since 1970."""
    until_s: float = float("inf")
    """Received at this time or before."""
    by: tuple[int, ...] = ()
    """Who decided: 1 person, 2 bot, 3 script, 0 unknown."""
    min_version: int = 0
    """Weights that acted, from this version on."""
    max_version: int = 2**32 - 1
    """... up to this one."""

    def __post_init__(self) -> None:
        if self.kind not in (None, *KINDS) or not set(self.consent) <= set(CONSENTS):
            raise ConfigError(f"kind {self.kind!r} or consent {self.consent!r}: give one of {KINDS} and of {CONSENTS}")

    @property
    def looks_at_rows(self) -> bool:
        return bool(self.by) or self.min_version > 0 or self.max_version < 2**32 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """How far a transition reaches."""

    n_step: int = 1
    """How many rewards one return holds at most."""
    discount: float = 0.99
    """What a reward is worth one step later."""
    stack: int = 1
    """How many observations one input holds; 1 means no extra axis."""

    def __post_init__(self) -> None:
        if self.n_step < 1 or self.stack < 1 or not 0.0 <= self.discount <= 1.0:
            raise ConfigError(f"{self}: give n_step and stack from 1, and a discount from 0 to 1, such as 0.99")


@dataclass(frozen=True, slots=True)
class Transitions:
    """A batch; learn from `reward + factor * value(next_obs)`."""

    obs: Mapping[str, Array]
    action: Mapping[str, Array]
    reward: Array  # float32[batch], discounted over the window
    next_obs: Mapping[str, Array]
    factor: Array  # float32[batch], discount^steps, 0 where the game ended
    terminated: Array
    truncated: Array
    extras: Mapping[str, Array]
    """Asked-for columns of the first row; `next_legal` beside `legal`."""
    rows: Ids
    """Row ids; they hold until the next refresh."""

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True, slots=True)
class Plan:
    """Which rows to take from which source: the source, where they go in the batch, and their local numbers."""

    n_rows: int
    parts: Sequence[tuple[Source, slice, Ids]]

    def moved(self, by: int) -> "Plan":
        return Plan(self.n_rows, [(source, where, local + by) for source, where, local in self.parts])

    def is_complete(self, name: str) -> bool:
        return name in REQUIRED or all(source.column(name) is not None for source, _, _ in self.parts)
