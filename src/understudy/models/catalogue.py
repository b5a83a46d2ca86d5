"""Catalogue: a game's models, aliases and current learner, as its journal records them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from understudy.core.errors import Refused
from understudy.models.manifest import Manifest, manifest_from_json, model_name
from understudy.ports import LiveModels

ALIASES = ("champion", "canary")
MAX_WHY = 300


@dataclass(frozen=True, slots=True)
class Alias:
    """The model that an alias points to, and the entry that set it; model 0: none."""

    model_no: int
    number: int
    at_s: float
    why: str
    signed: bytes = b""
    """The signed entry as it was read, for clients to verify."""


@dataclass(slots=True)
class Catalogue:
    """The state of one game's journal up to `number`; invalid entries are skipped and counted."""

    game: str
    number: int = 0
    epoch: int = 0
    owner: str = ""
    """The owner of the newest takeover; only its releases are valid."""
    models: dict[int, Manifest] = field(default_factory=dict)
    aliases: dict[str, Alias] = field(default_factory=dict)
    history: list[Alias] = field(default_factory=list)
    """Every champion so far, oldest first."""
    signed: dict[str, bytes] = field(default_factory=dict)
    """Signed releases as they were read, by model name, for clients to verify."""
    bad_entries: int = 0
    last_bad_entry: str = ""

    def copy(self) -> "Catalogue":
        """A copy that later entries do not change."""
        return replace(
            self,
            models=dict(self.models),
            aliases=dict(self.aliases),
            history=list(self.history),
            signed=dict(self.signed),
        )

    @property
    def next_model_no(self) -> int:
        return max(self.models, default=0) + 1

    def model_of(self, alias: str) -> int:
        """The model number of an alias; 0 when it has none."""
        pointer = self.aliases.get(alias)
        return pointer.model_no if pointer else 0

    def previous_champion(self) -> int:
        """The champion before the current one; 0 when there was none."""
        now = self.model_of("champion")
        return next(
            (old.model_no for old in reversed(self.history) if old.model_no not in (0, now)), 0
        )

    def apply(self, entry: Mapping[str, Any], raw: bytes) -> None:
        """Apply the next entry; Refused when it is invalid in this state."""
        match entry.get("kind"):
            case "takeover":
                self.epoch += 1
                self.owner = str(entry["owner"])
            case "release":
                self._release(entry, raw)
            case "point":
                self._point(entry, raw)
            case kind:
                raise Refused(
                    "bad_entry",
                    f"this version does not know entry kind {kind!r}; install a newer understudy",
                )

    def _release(self, entry: Mapping[str, Any], raw: bytes) -> None:
        manifest = manifest_from_json(entry.get("manifest"))
        if (manifest.game, manifest.model_no) != (self.game, self.next_model_no) or entry.get(
            "epoch"
        ) != self.epoch:
            raise Refused(
                "bad_entry",
                f"{manifest.name} was released in epoch {entry.get('epoch')!r}; expected "
                f"{model_name(self.game, self.next_model_no)} in epoch {self.epoch}",
            )
        self.models[manifest.model_no] = manifest
        self.signed[manifest.name] = raw

    def _point(self, entry: Mapping[str, Any], raw: bytes) -> None:
        alias = entry.get("alias")
        model_no = entry.get("model_no")
        if alias not in ALIASES or model_no not in (0, *self.models):
            raise Refused(
                "bad_entry",
                f"alias {alias!r} cannot point to model {model_no!r}; expected one of {ALIASES} "
                "and a released model, or 0 for none",
            )
        why = str(entry.get("why", ""))[:MAX_WHY]
        pointer = Alias(model_no, entry["number"], float(entry["at_s"]), why, raw)
        self.aliases[alias] = pointer
        if alias == "champion":
            self.history.append(pointer)


CANARY_SHARE = 0.2


def live_models(
    now: Catalogue,
    champion: Alias | None,
    canary: Alias | None,
    *,
    trust: Sequence[str],
    canary_share: float = CANARY_SHARE,
) -> LiveModels:
    """Champion and canary with their signed entries, which each client verifies."""

    def release(pointer: Alias | None) -> str | None:
        return (
            now.signed[model_name(now.game, pointer.model_no)].decode()
            if pointer and pointer.model_no
            else None
        )

    return LiveModels(
        number=now.number,
        trust=tuple(trust),
        champion=champion.signed.decode() if champion else None,
        champion_release=release(champion),
        canary=canary.signed.decode() if canary else None,
        canary_release=release(canary),
        canary_share=canary_share if canary and canary.model_no else 0.0,
    )
