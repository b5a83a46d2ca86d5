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
    """The state of one game's journal up to `number`; invalid entries are skipped and counted.

    An entry that cannot be read may have started an epoch or released a model. So epochs and model
    numbers are part of the entries instead of being counted, and those that such an entry may have
    used are not used again.
    """

    game: str
    number: int = 0
    unread: int = 0
    epoch: int = 0
    owner: str = ""
    """The owner of the newest takeover; only its releases are valid."""
    last_epoch: int = 0
    """The highest epoch that may have been used."""
    last_model_no: int = 0
    """The highest model number that may have been used."""
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
    def next_epoch(self) -> int:
        return self.last_epoch + self.unread + 1

    @property
    def next_model_no(self) -> int:
        return self.last_model_no + self.unread + 1

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

    def apply(self, entry: Mapping[str, Any], raw: bytes, *, lost: int) -> None:
        """Apply the next entry; Refused when it is invalid in this state."""
        last_epoch = self.last_epoch + lost
        last_model_no = self.last_model_no + lost
        match entry.get("kind"):
            case "takeover":
                last_epoch = self._takeover(entry["epoch"], str(entry["owner"]))
            case "release":
                last_model_no = self._release(entry, raw)
                last_epoch = max(last_epoch, self.epoch)
            case "point":
                self._point(entry, raw)
            case "restart":
                # An operator accepted that entries are gone, all with lower numbers than this one.
                # Neither an epoch nor a model number is ever above the number of its entry.
                last_epoch = max(last_epoch, entry["number"])
                last_model_no = max(last_model_no, entry["number"])
            case kind:
                raise Refused(
                    "bad_entry",
                    f"this version does not know entry kind {kind!r}; install a newer understudy",
                )
        self.last_epoch = last_epoch
        self.last_model_no = last_model_no

    def _takeover(self, epoch: Any, owner: str) -> int:
        if type(epoch) is not int or epoch <= self.epoch:
            raise Refused(
                "bad_entry",
                f"{owner} took over in epoch {epoch!r}; expected an epoch above {self.epoch}",
            )
        self.epoch = epoch
        self.owner = owner
        return epoch

    def _release(self, entry: Mapping[str, Any], raw: bytes) -> int:
        manifest = manifest_from_json(entry.get("manifest"))
        epoch = entry.get("epoch")
        newest = max(self.models, default=0)
        if (
            manifest.game != self.game
            or manifest.model_no <= newest
            or type(epoch) is not int
            or epoch < self.epoch
        ):
            raise Refused(
                "bad_entry",
                f"{manifest.name} was released in epoch {epoch!r}; expected a model after "
                f"{model_name(self.game, newest)} in epoch {self.epoch}",
            )
        if epoch > self.epoch:
            self._takeover(epoch, "another learner")  # the takeover's own entry cannot be read
        self.models[manifest.model_no] = manifest
        self.signed[manifest.name] = raw
        return manifest.model_no

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
