"""Casting: who plays a game, taken from its catalogue together with the documents that prove it."""

from collections.abc import Sequence

from understudy.core.manifest import model_name
from understudy.core.ports import Casting
from understudy.models.catalogue import Catalogue

CANARY_SHARE = 0.2


def casting(now: Catalogue, *, trust: Sequence[str], canary_share: float = CANARY_SHARE) -> Casting:
    """Champion and canary with their signed entries; a client checks those for itself."""

    def text(name: str) -> str | None:
        raw = now.signed.get(name)
        return None if raw is None else raw.decode()

    champion, canary = now.points_to("champion"), now.points_to("canary")
    return Casting(
        number=now.number, champion=text("champion"), canary=text("canary"), trust=tuple(trust),
        champion_release=text(model_name(now.game, champion)) if champion else None,
        canary_release=text(model_name(now.game, canary)) if canary else None,
        canary_share=canary_share if canary else 0.0,
    )  # fmt: skip
