"""Catalogue: a game's models, aliases and current learner, as its journal records them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from understudy.core.errors import Refused
from understudy.core.wording import joined
from understudy.experience.skill import MAX_EXPLORE_SHARE, checked_noise
from understudy.models.manifest import Manifest, manifest_from_json, model_name
from understudy.ports import MAX_CONTROL_SHARE, LiveModels

ALIASES = ("champion", "canary")
MAX_WHY = 500
PROMOTED = "promoted"
RESTORED = "restored by a rollback"
"""How the verdicts of champions begin."""
CANARY_SHARE = 0.2
"""The share of a canary whose entry states none: it was set by hand, or by an earlier version."""


class Control(NamedTuple):
    """An earlier champion that plays a share of the episodes while a canary is on trial."""

    model_no: int
    share: float


@dataclass(frozen=True, slots=True)
class Alias:
    """The model that an alias of a schema points to, and the entry that set it; model 0: none."""

    model_no: int
    number: int
    at_s: float
    """When it was set; for a canary when its trial started, also if its share has changed since."""
    why: str
    signed: bytes = b""
    """The signed entry as it was read, for clients to verify."""
    schema: str = ""
    share: float = 0.0
    """The share of episodes that a canary plays."""
    control: Control | None = None
    """The control of a canary's trial."""
    first_no: int = 0
    """The entry that started a canary's trial; `number` is a later one once its share changed."""


@dataclass(frozen=True, slots=True)
class SkillNoise:
    """The noise of each skill below `hard` of a schema's bots, and the entry that set it."""

    noise: Mapping[str, float]
    model_no: int
    """The champion whose play it was calibrated on."""
    episodes: int
    """The episodes of that model at any noise, so far."""
    explore_share: float = 0.0
    """The share of episodes in which the schema's champion explores."""
    signed: bytes = b""
    """The signed entry as it was read, for clients to verify."""


@dataclass(slots=True)
class Catalogue:
    """The state of one game's journal up to `number`; invalid entries are skipped and counted.

    Every schema of the game has its own champion and canary, so that the clients of each version of
    the game keep their bot. Without a schema, `pointer` and `model_of` use the newest schema that
    has a model under the alias: the one whose first champion is the newest.

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
    aliases: dict[tuple[str, str], Alias] = field(default_factory=dict)
    """By schema and alias."""
    history: list[Alias] = field(default_factory=list)
    """Every champion of every schema so far, oldest first."""
    trials: dict[str, int] = field(default_factory=dict)
    """The number of canaries so far, by schema."""
    discarded: set[int] = field(default_factory=set)
    """Models that an operator rolled back or withdrew, and that no alias has pointed to since."""
    verdicts: dict[int, str] = field(default_factory=dict)
    """What became of each model that was judged, with the reason."""
    signed: dict[str, bytes] = field(default_factory=dict)
    """Signed releases as they were read, by model name, for clients to verify."""
    noise: dict[str, SkillNoise] = field(default_factory=dict)
    """By schema."""
    bad_entries: int = 0
    last_bad_entry: str = ""

    def copy(self) -> "Catalogue":
        """A copy that later entries do not change."""
        return replace(
            self,
            models=dict(self.models),
            aliases=dict(self.aliases),
            history=list(self.history),
            trials=dict(self.trials),
            discarded=set(self.discarded),
            verdicts=dict(self.verdicts),
            signed=dict(self.signed),
            noise=dict(self.noise),
        )

    @property
    def next_epoch(self) -> int:
        return self.last_epoch + self.unread + 1

    @property
    def next_model_no(self) -> int:
        return self.last_model_no + self.unread + 1

    def pointer(self, alias: str, schema: str | None = None) -> Alias | None:
        """The newest entry of an alias, of one schema or of the newest one that has a model."""
        if schema is not None:
            return self.aliases.get((schema, alias))
        pointers = [pointer for (_, name), pointer in self.aliases.items() if name == alias]
        return max(pointers, key=self._age_key, default=None)

    def _age_key(self, pointer: Alias) -> tuple[bool, int]:
        """Sorts pointers to a model last, those of the newest schema at the end."""
        numbers = (old.number for old in self.history if old.schema == pointer.schema)
        return pointer.model_no > 0, next(numbers, 0)

    def model_of(self, alias: str, schema: str | None = None) -> int:
        """The model number of an alias; 0 when it has none."""
        pointer = self.pointer(alias, schema)
        return pointer.model_no if pointer else 0

    def pointers(self, schema: str | None = None) -> tuple[Alias | None, Alias | None]:
        """Champion and canary of a schema; by default of the newest one that has a champion."""
        champion = self.pointer("champion", schema)
        if schema is None and champion is not None:
            schema = champion.schema
        return champion, self.pointer("canary", schema)

    def control_of(self, canary: Alias | None) -> Control | None:
        """The control of a canary's trial, unless it has become champion or was discarded."""
        control = canary.control if canary is not None else None
        if canary is None or control is None or control.model_no in self.discarded:
            return None
        is_champion = control.model_no == self.model_of("champion", canary.schema)
        return None if is_champion else control

    def live(self, alias: str) -> list[Alias]:
        """The pointers of all schemas that have a model under this alias, newest schema first."""
        pointers = [
            pointer
            for (_, name), pointer in self.aliases.items()
            if name == alias and pointer.model_no
        ]
        return sorted(pointers, key=self._age_key, reverse=True)

    def previous_champion(self, schema: str) -> int:
        """The champion of a schema before the current one, not a discarded one; 0 if none is left.

        A champion that was rolled back does not return by another rollback.
        """
        unwanted = {0, self.model_of("champion", schema), *self.discarded}
        return next(
            (
                old.model_no
                for old in reversed(self.history)
                if old.schema == schema and old.model_no not in unwanted
            ),
            0,
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
                self._point(entry, raw, last_model_no=last_model_no)
            case "noise":
                self._set_noise(entry, raw)
            case "reject":
                self._reject(entry)
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

    def _point(self, entry: Mapping[str, Any], raw: bytes, *, last_model_no: int) -> None:
        alias = entry.get("alias")
        model_no = entry.get("model_no")
        is_lost = type(model_no) is int and 0 < model_no <= last_model_no
        if alias in ALIASES and is_lost and model_no not in self.models:
            self._discard(alias, entry)
            return
        if alias not in ALIASES or model_no not in (0, *self.models):
            raise Refused(
                "bad_entry",
                f"alias {alias!r} cannot point to model {model_no!r}; expected one of "
                f"{joined(ALIASES)}, and a released model, or 0 for none",
            )
        share = entry.get("share", CANARY_SHARE)
        if type(share) not in (int, float) or not 0 < share <= 1:
            raise Refused("bad_entry", f"share is {share!r}; expected a number above 0, at most 1")
        schema = self.models[model_no].schema if model_no else entry.get("schema")
        if not isinstance(schema, str | None):
            raise Refused("bad_entry", f"schema is {str(schema)[:80]!r}; expected a text")
        if schema is None:  # an entry of an earlier version, which had one alias for all schemas
            schema = self._newest_schema(alias)
        before = self.aliases.get((schema, alias))
        is_canary = alias == "canary" and model_no > 0
        continues = is_canary and before is not None and before.model_no == model_no
        pointer = Alias(
            model_no,
            entry["number"],
            before.at_s if before is not None and continues else float(entry["at_s"]),
            str(entry.get("why", ""))[:MAX_WHY],
            raw,
            schema=schema,
            share=float(share) if is_canary else 0.0,
            control=self._control(entry.get("control"), schema) if is_canary else None,
            first_no=before.first_no if before is not None and continues else entry["number"],
        )
        self.aliases[schema, alias] = pointer
        self.discarded.discard(model_no)
        if entry.get("discards") and before is not None and before.model_no not in (0, model_no):
            self.discarded.add(before.model_no)
        if alias == "champion" and model_no:
            is_rollback = bool(entry.get("discards"))
            what = RESTORED if is_rollback else PROMOTED
            self.verdicts[model_no] = f"{what}: {pointer.why}"
            if before is not None and before.model_no not in (0, model_no):
                how = "rolled back to" if is_rollback else "replaced by"
                self.verdicts[before.model_no] += f"; {how} {model_name(self.game, model_no)}"
        elif is_canary and not continues:
            self.verdicts[model_no] = f"on trial: {pointer.why}"
        undecided = before.model_no if before is not None and alias == "canary" else 0
        if undecided not in (0, model_no, self.model_of("champion", schema)):
            self.verdicts[undecided] = (
                f"undecided when {model_name(self.game, model_no)} took its place"
                if model_no
                else pointer.why
            )
        if is_canary and not continues:
            self.trials[schema] = self.trials.get(schema, 0) + 1
        if alias == "champion":
            self.history.append(pointer)

    def _control(self, control: Any, schema: str) -> Control | None:
        """The control that an entry names; None without one, or if its release cannot be read."""
        if control is None:
            return None
        fields = control if isinstance(control, dict) else {}
        model_no = fields.get("model_no")
        share = fields.get("share")
        if (
            not isinstance(model_no, int)
            or not isinstance(share, int | float)
            or not 0 < share <= MAX_CONTROL_SHARE
        ):
            raise Refused(
                "bad_entry",
                f"control is {str(control)[:80]}; expected a model and a share above 0, at most "
                f"{MAX_CONTROL_SHARE}",
            )
        manifest = self.models.get(model_no)
        has_schema = manifest is not None and manifest.schema == schema
        return Control(model_no, float(share)) if has_schema else None

    def _discard(self, alias: str, entry: Mapping[str, Any]) -> None:
        """Apply what an entry discards, although the release of its own model cannot be read.

        Otherwise a champion that was rolled back would return with one damaged entry. The champion
        before it plays instead, if one is left.
        """
        schema = str(entry.get("schema") or self._newest_schema(alias))
        before = self.aliases.get((schema, alias))
        if not entry.get("discards") or before is None or not before.model_no:
            return
        self.discarded.add(before.model_no)
        lost = model_name(self.game, entry["model_no"])
        self.verdicts[before.model_no] += f"; replaced by {lost}, whose release cannot be read"
        previous = [
            old
            for old in self.history
            if old.schema == schema and old.model_no not in {0, *self.discarded}
        ]
        del self.aliases[schema, alias]
        if previous and alias == "champion":
            self.aliases[schema, alias] = previous[-1]

    def _newest_schema(self, alias: str) -> str:
        pointers = (pointer for (_, name), pointer in self.aliases.items() if name == alias)
        newest = max(pointers, key=lambda pointer: pointer.number, default=None)
        return newest.schema if newest else ""

    def _set_noise(self, entry: Mapping[str, Any], raw: bytes) -> None:
        model_no = entry.get("model_no")
        episodes = entry.get("episodes")
        if type(model_no) is not int or model_no not in self.models or type(episodes) is not int:
            raise Refused(
                "bad_entry",
                f"the noise of the skills is that of model {str(model_no)[:20]!r} after "
                f"{str(episodes)[:20]!r} episodes; expected a released model and a whole number",
            )
        explore_share = entry.get("explore_share", 0.0)
        if type(explore_share) not in (int, float) or not 0 <= explore_share <= MAX_EXPLORE_SHARE:
            raise Refused(
                "bad_entry",
                f"explore_share is {str(explore_share)[:20]!r}; expected a number from 0 to "
                f"{MAX_EXPLORE_SHARE}",
            )
        self.noise[self.models[model_no].schema] = SkillNoise(
            checked_noise(entry.get("noise")), model_no, episodes, float(explore_share), raw
        )

    def _reject(self, entry: Mapping[str, Any]) -> None:
        model_no = entry.get("model_no")
        if model_no not in self.models:
            raise Refused(
                "bad_entry", f"model {model_no!r} was rejected; expected a released model"
            )
        self.verdicts[model_no] = f"reject: {str(entry.get('why', ''))[:MAX_WHY]}"


def live_models(
    now: Catalogue, champion: Alias | None, canary: Alias | None, *, trust: Sequence[str]
) -> LiveModels:
    """Champion and canary with their signed entries, which each client verifies."""

    def release(model: Alias | Control | None) -> str | None:
        return (
            now.signed[model_name(now.game, model.model_no)].decode()
            if model and model.model_no
            else None
        )

    noise = now.noise.get(champion.schema) if champion else None
    return LiveModels(
        number=now.number,
        trust=tuple(trust),
        champion=champion.signed.decode() if champion else None,
        champion_release=release(champion),
        canary=canary.signed.decode() if canary else None,
        canary_release=release(canary),
        canary_share=canary.share if canary else 0.0,
        control_release=release(now.control_of(canary)),
        noise=noise.signed.decode() if noise else None,
    )
