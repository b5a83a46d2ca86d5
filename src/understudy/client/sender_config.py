"""When a client cuts and sends, and how it tries again."""

from dataclasses import dataclass

from understudy.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SenderConfig:
    """When chunks are cut and how a link that does not answer is tried again."""

    linger_s: float = 1.0
    """A closed step waits at most this long for others."""
    idle_s: float = 60.0
    """A session without an episode for this long is closed."""
    adopt_every_s: float = 30.0
    """How often to look for sessions that another, killed process left."""
    retry_first_s: float = 0.5
    retry_cap_s: float = 30.0
    """Waits before a retry are random between 0 and a bound that doubles up to this."""

    def __post_init__(self) -> None:
        times = (self.linger_s, self.idle_s, self.adopt_every_s, self.retry_first_s, self.retry_cap_s)
        if not all(time_s > 0 for time_s in times):
            raise ConfigError(f"{self} holds a time that is not above 0; give seconds such as linger_s=1.0")
