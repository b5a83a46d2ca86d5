"""Casting: who plays a game, taken from its catalogue together with the documents that prove it."""

from collections.abc import Sequence

from understudy.core.manifest import model_name
from understudy.core.ports import Casting
from understudy.models.catalogue import Catalogue, Pointer

CANARY_SHARE = 0.2


def casting(
    now: Catalogue, champion: Pointer | None, canary: Pointer | None, *, trust: Sequence[str],
    canary_share: float = CANARY_SHARE,
) -> Casting:  # fmt: skip
    """These two with their signed entries; a client checks those for itself."""

    def release(pointer: Pointer | None) -> str | None:
        return now.signed[model_name(now.game, pointer.model_no)].decode() if pointer and pointer.model_no else None

    return Casting(
        number=now.number, trust=tuple(trust), champion=champion.signed.decode() if champion else None,
        champion_release=release(champion), canary=canary.signed.decode() if canary else None,
        canary_release=release(canary), canary_share=canary_share if canary and canary.model_no else 0.0,
    )  # fmt: skip
