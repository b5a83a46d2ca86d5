"""Who may write which partition: epochs that only rise, and claims that last as long as their holder writes."""

from dataclasses import dataclass

from understudy.core.errors import ClaimLost
from understudy.stores.catalogue import Catalogue


@dataclass(slots=True)
class _Held:
    owner: str
    epoch: int
    ttl_s: float
    expires_s: float


class Claims:
    """Epochs are durable. Holders are not: whoever held a claim when the store was closed holds it no more."""

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._held = {
            partition: _Held("", epoch, 0.0, 0.0)
            for partition, epoch in catalogue.rows("SELECT partition, epoch FROM claims")
        }

    def take(self, partition: str, *, owner: str, ttl_s: float, now_s: float) -> int:
        """A new epoch; ClaimLost while another owner's claim is fresh."""
        held = self._held.get(partition)
        if held is not None and held.owner != owner and held.expires_s > now_s:
            left_s = held.expires_s - now_s
            raise ClaimLost(
                f"partition {partition} is claimed by {held.owner} for {left_s:.1f} s more", retry_after_s=left_s
            )
        epoch = (held.epoch if held is not None else 0) + 1
        with self._catalogue.changing():
            self._catalogue.run("INSERT OR REPLACE INTO claims VALUES (?, ?)", partition, epoch)
        self._held[partition] = _Held(owner, epoch, ttl_s, now_s + ttl_s)
        return epoch

    def renew(self, partition: str, epoch: int, *, now_s: float) -> bool:
        """Whether this epoch still holds the partition; if so, its time starts anew."""
        held = self._held.get(partition)
        if held is None or held.epoch != epoch:
            return False
        held.expires_s = now_s + held.ttl_s
        return True

    def drop(self, partition: str) -> None:
        """Nobody will ask for this partition again."""
        self._held.pop(partition, None)
        self._catalogue.run("DELETE FROM claims WHERE partition = ?", partition)
