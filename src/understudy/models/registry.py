"""Registry: a game's numbered models, and each schema's aliases (champion, canary) for them.

    blobs/SHA256.safetensors        policies, written and read back before an entry refers to them
    registry/GAME/NNNNNNNNNN.json   the game's journal of signed entries: takeover (a learner starts
                                    an epoch), release (a new model), point (an alias is set),
                                    reject (a model that no alias has pointed to), noise (how random
                                    each skill of a schema's bots plays, and how often they explore)
    games/GAME/SCHEMA.json          game specs
    trust/KEYID.txt                 public keys of the signers

A model exists once its release entry does, and its policy was stored before, so no reader sees an
incomplete model. Only the learner of the newest epoch can release. A learner that was paused while
another took over fails to write its next entry, because the number exists already; it then reads
the new entries and finds that its epoch has ended.
"""

import hashlib
import re
import threading
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from understudy.core.clock import Clock, SystemClock
from understudy.core.errors import (
    ConfigError,
    Corrupt,
    Fenced,
    Refused,
    SpecError,
    StorageFailed,
)
from understudy.core.names import game_name
from understudy.core.plural import plural
from understudy.core.settings import nearest
from understudy.core.signed import Signer, Trusted, public_key_text
from understudy.core.wording import joined
from understudy.experience.game import GameSpec, spec_from_json
from understudy.experience.skill import checked_noise
from understudy.models.catalogue import ALIASES, MAX_WHY, Alias, Catalogue, Control
from understudy.models.manifest import (
    MAX_POLICY_BYTES,
    Lineage,
    Manifest,
    make_manifest,
    model_name,
    open_policy,
)
from understudy.models.shared import Entry, Shared
from understudy.nn.policy import Policy
from understudy.ports import Objects

_SPEC = re.compile(r"[0-9a-f]{64}\.json")
SCHEMA_CHARS = 12
"""First characters of a schema that are shown, which tell a game's schemas apart."""


def write_trust(objects: Objects, signer: Signer) -> None:
    """Publish the signer's public key, with which clients verify signatures."""
    objects.create(f"trust/{signer.key_id}.txt", public_key_text(signer.public).encode())


class Registry:
    """The models of a deployment; thread-safe. Without a signer it is read-only."""

    def __init__(
        self,
        objects: Objects,
        *,
        trusted: Trusted,
        signer: Signer | None = None,
        clock: Clock | None = None,
        memory: Objects | None = None,
    ) -> None:
        """`memory`: objects on this machine, which remember the newest entries that it has read."""
        self._objects = objects
        self._memory = memory
        self._trusted = trusted
        self._signer = signer
        self._clock = clock or SystemClock()
        self._games: dict[str, Shared[Catalogue]] = {}
        self._snapshots: dict[str, Catalogue] = {}
        self._lock = threading.Lock()

    @property
    def poll_every_s(self) -> float:
        """Seconds between two looks for entries that other processes wrote."""
        return self._objects.poll_every_s

    # --- Reading ----------------------------------------------------------------------------------

    def games(self) -> list[str]:
        """The names of all games that have a registered spec."""
        names = [name.split("/") for name in self._objects.list("games") if name.endswith(".json")]
        return sorted({parts[1] for parts in names if len(parts) == 3})

    def catalogue(self, game: str) -> Catalogue:
        """A copy of the game's state, at most `poll_every_s` old; new entries do not change it.

        Raises Corrupt if entries that this machine has read are gone.
        """
        shared = self._shared(game)
        with shared.lock:
            now = shared.now()
            snapshot = self._snapshots.get(game)
            if snapshot is None or (snapshot.number, snapshot.bad_entries) != (
                now.number,
                now.bad_entries,
            ):
                snapshot = now.copy()
                self._snapshots[game] = snapshot
            return snapshot

    def policy(self, game: str, model_no: int) -> Policy:
        """A model's policy; Refused unless its bytes match the signed manifest."""
        manifest = self.manifest(game, model_no)
        return open_policy(manifest, self.policy_bytes(manifest))

    def policy_object(self, manifest: Manifest) -> str:
        """The name of the object that holds a model's policy."""
        return _blob(manifest.policy_sha256)

    def policy_bytes(self, manifest: Manifest) -> bytes:
        """The stored bytes of a model's policy, not yet verified."""
        raw = self._objects.get(_blob(manifest.policy_sha256))
        if raw is None:
            raise Corrupt(
                f"the policy of {manifest.name} is missing; restore it from a backup, or roll back"
            )
        return raw

    def find(self, text: str, *, game: str | None = None) -> Manifest:
        """The manifest of GAME/NUMBER or GAME/ALIAS; with `game`, NUMBER or ALIAS is enough.

        An alias is that of the newest schema which has one.
        """
        owner, _, last = text.rpartition("/")
        owner = owner or game or ""
        is_number = last.isascii() and last.isdigit() and len(last) < 10 and int(last) > 0
        if not owner or not (is_number or last in ALIASES):
            raise ConfigError(
                f"{text[:80]!r} is not a model; use GAME/NUMBER, such as my-game/7, or "
                "GAME/champion"
            )
        if game is not None and owner != game:
            raise ConfigError(
                f"{text[:80]} is a model of {owner}, not of {game}; see 'understudy models list "
                f"{game}'"
            )
        number = int(last) if is_number else self.catalogue(owner).model_of(last)
        if not number:
            self.check_game(owner)
            if last == "canary":
                raise ConfigError(
                    f"{owner} has no canary now, since no new model is on trial; use "
                    f"{owner}/champion, or see 'understudy models list {owner}'"
                )
            raise ConfigError(
                f"{owner} has no {last} yet; let people play, or add a trained run: understudy "
                "models add RUN"
            )
        return self.manifest(owner, number)

    def damage(
        self, game: str, *, every: bool = False, schemas: Iterable[str] = ()
    ) -> dict[str, str]:
        """Problems of a game's specs, journal and models that aliases point to; empty: none.

        With `every`, all models are checked. `schemas`: those of recorded steps, whose specs must
        exist. Keys are `spec`, `journal`, an alias of the newest schema, an alias and the name of
        an earlier schema's model, or the name of a model without an alias.
        """
        problems = dict[str, str]()
        names = self._spec_names(game)
        expected = [f"games/{game}/{schema}.json" for schema in sorted(schemas)]
        if missing := [name for name in expected if name not in names]:
            problems["spec"] = (
                f"{', '.join(missing)} {plural(len(missing), 'is', 'are')} missing, although "
                "recorded steps need it; restore it from a backup, or start ingest or the game, "
                "which register it again"
            )
        damaged = [
            name
            for name in names
            if (raw := self._objects.get(name)) is not None
            and hashlib.sha256(raw).hexdigest() != name.rpartition("/")[2].removesuffix(".json")
        ]
        if damaged:
            before = f"{problems['spec']}; " if missing else ""
            problems["spec"] = before + (
                f"the contents of {', '.join(damaged)} do not match the name; restore it from a "
                "backup, or start ingest or the game, which register it again"
            )
        if damage := self._shared(game).damage():
            problems["journal"] = damage
        try:
            now = self.catalogue(game)
        except Corrupt:
            return problems
        for manifest in now.models.values():
            key = damage_key(now, manifest)
            if key == manifest.name and not every:
                continue
            try:
                open_policy(manifest, self.policy_bytes(manifest))
            except (Corrupt, Refused, StorageFailed, OSError) as error:
                hint = self._repair_hint(now, key.partition(" ")[0], manifest.schema)
                problems[key] = f"{error}; {hint}"
        return problems

    def _repair_hint(self, now: Catalogue, alias: str, schema: str) -> str:
        """The effect of a damaged model on players, and the operator's next step."""
        newest = now.pointer(alias)
        which = now.game
        if newest is not None and newest.schema != schema:
            which = f"{now.game} --schema {schema[:SCHEMA_CHARS]}"
        if alias == "canary":
            return (
                "new players do not get it; next: restore it from a backup, or understudy models "
                f"withdraw {which}"
            )
        if alias != "champion":
            return "it is not in use; restore it from a backup if it is needed"
        if now.previous_champion(schema):
            return f"players keep the last good bot; next: understudy models rollback {which}"
        return (
            "new players get no bot; next: restore the models from a backup, or understudy models "
            "add RUN"
        )

    def manifest(self, game: str, model_no: int) -> Manifest:
        """A model's manifest; if there is no such model, ConfigError lists the newest ones."""
        models = self.catalogue(game).models
        if model_no not in models:
            self.check_game(game)
            newest = ", ".join(models[number].name for number in sorted(models)[-5:])
            hint = f"the newest are {newest}" if newest else f"{game} has no models yet"
            raise ConfigError(f"{model_name(game, model_no)} does not exist; {hint}")
        return models[model_no]

    # --- Writing ----------------------------------------------------------------------------------

    def takeover(self, game: str, *, owner: str) -> int:
        """Start a new epoch of a game and return its number; older epochs can no longer release."""
        epoch = 0

        def entry(now: Catalogue) -> Entry:
            nonlocal epoch
            epoch = now.next_epoch
            return {"kind": "takeover", "owner": owner[:100], "epoch": epoch}

        self._shared(game).write(entry)
        return epoch

    def release(self, policy: Policy, lineage: Lineage, *, epoch: int) -> Manifest:
        """Store a model under the next number; Fenced when another learner has taken over."""
        game = policy.game.game
        raw = policy.encode()
        if len(raw) > MAX_POLICY_BYTES:
            raise ConfigError(
                f"the policy has {len(raw)} bytes, and the limit is {MAX_POLICY_BYTES}; use a "
                "smaller network"
            )
        if self._signer is not None:
            write_trust(self._objects, self._signer)
        self._store_blob(raw)
        manifest = make_manifest(policy, raw, model_no=1, lineage=lineage)

        def entry(now: Catalogue) -> Entry:
            nonlocal manifest
            _check_epoch(now, epoch)
            manifest = replace(manifest, model_no=now.next_model_no)
            return {"kind": "release", "epoch": epoch, "manifest": manifest.to_json()}

        self._shared(game).write(entry)
        return manifest

    def set_alias(
        self,
        game: str,
        alias: str,
        model_no: int,
        *,
        why: str,
        epoch: int | None = None,
        share: float | None = None,
        control: Control | None = None,
        seen: Mapping[str, Alias] | None = None,
    ) -> None:
        """Point the alias of a model's schema to it; with `epoch`, Fenced when that has ended.

        `share`: the share of episodes that a canary plays from now on, and `control` the model
        beside it. The trial of a model that is the canary already continues. `seen`: the aliases
        that the decision was about, by name; if one was changed since it was read, nothing is
        written and Refused is raised (`superseded`).
        """
        if alias not in ALIASES:
            raise ConfigError(f"alias {alias!r} is not known; use one of {joined(ALIASES)}")
        self.manifest(game, model_no)
        entry: Entry = {"alias": alias, "model_no": model_no, "why": why[:MAX_WHY]}
        if share is not None:
            entry["share"] = share
        if control is not None:
            entry["control"] = control._asdict()
        self._point(game, lambda _: entry, epoch=epoch, seen=seen)

    def clear_alias(
        self,
        game: str,
        alias: str,
        *,
        schema: str,
        why: str,
        epoch: int | None = None,
        seen: Mapping[str, Alias] | None = None,
    ) -> None:
        """Let an alias of a schema point to no model; `epoch` and `seen` as in `set_alias`."""
        if alias not in ALIASES:
            raise ConfigError(f"alias {alias!r} is not known; use one of {joined(ALIASES)}")
        entry = {"alias": alias, "model_no": 0, "schema": schema, "why": why[:MAX_WHY]}
        self._point(game, lambda _: entry, epoch=epoch, seen=seen)

    def set_noise(
        self,
        game: str,
        model_no: int,
        noise: Mapping[str, float],
        *,
        episodes: int,
        epoch: int,
        explore_share: float = 0.0,
    ) -> None:
        """Publish the noise of each skill for the bots of a model's schema.

        `explore_share`: the share of episodes in which the schema's champion explores.
        """
        schema = self.manifest(game, model_no).schema
        entry: Entry = {"model_no": model_no, "schema": schema, "episodes": episodes}
        if explore_share:
            entry["explore_share"] = explore_share

        def checked(now: Catalogue) -> Entry:
            _check_epoch(now, epoch)
            return {"kind": "noise", **entry, "noise": checked_noise(dict(noise))}

        self._shared(game).write(checked)

    def _point(
        self,
        game: str,
        entry: Callable[[Catalogue], Entry],
        *,
        epoch: int | None = None,
        seen: Mapping[str, Alias] | None = None,
    ) -> None:
        def checked(now: Catalogue) -> Entry:
            if epoch is not None:
                _check_epoch(now, epoch)
            for alias, pointer in (seen or {}).items():
                if now.pointer(alias, pointer.schema) != pointer:
                    raise Refused(
                        "superseded",
                        f"{model_name(game, pointer.model_no)} is not the {alias} any more; decide "
                        "again",
                    )
            return {"kind": "point", **entry(now)}

        self._shared(game).write(checked)

    def reject(self, game: str, model_no: int, *, why: str, epoch: int) -> None:
        """Record why a model was rejected before it played; Fenced when the epoch has ended."""
        self.manifest(game, model_no)

        def entry(now: Catalogue) -> Entry:
            _check_epoch(now, epoch)
            return {"kind": "reject", "model_no": model_no, "why": why[:MAX_WHY]}

        self._shared(game).write(entry)

    def check_game(self, game: str) -> None:
        """Raise ConfigError if a game has neither a spec nor a journal."""
        games = self.games()
        if game not in games and not self._objects.list(f"registry/{game_name(game)}"):
            raise ConfigError(f"the game {game[:80]!r} is not registered; {nearest(game, games)}")

    def rollback(self, game: str, *, why: str, schema: str | None = None) -> int:
        """Restore the champion of a schema before the current one and return its number.

        Models that were rolled back or withdrawn are not restored, unless promoted since then.
        `schema` may be its first characters; by default it is the newest schema with a champion.
        """
        previous = 0

        def entry(now: Catalogue) -> Entry:
            nonlocal previous
            owner = _schema_of(now, "champion", schema)
            previous = now.previous_champion(owner)
            if not previous:
                discarded = ", ".join(
                    model_name(game, number)
                    for number in sorted(now.discarded)
                    if now.models[number].schema == owner
                )
                hint = f" (rolled back or withdrawn before: {discarded})" if discarded else ""
                raise ConfigError(
                    f"{game} has no previous champion to roll back to{hint}; see 'understudy "
                    f"models list {game}', and choose one: understudy models promote {game}/NUMBER"
                )
            return {
                "alias": "champion",
                "model_no": previous,
                "schema": now.models[previous].schema,
                "why": why[:MAX_WHY],
                "discards": True,
            }

        self._point(game, entry)
        return previous

    def withdraw(self, game: str, *, why: str, schema: str | None = None) -> int:
        """Clear the canary of a schema, as in `rollback`, and return its number."""
        canary = 0

        def entry(now: Catalogue) -> Entry:
            nonlocal canary
            owner = _schema_of(now, "canary", schema)
            canary = now.model_of("canary", owner)
            if not canary:
                raise ConfigError(
                    f"{game} has no canary to withdraw, since no new model is on trial; see "
                    f"'understudy models list {game}'"
                )
            return {
                "alias": "canary",
                "model_no": 0,
                "schema": owner,
                "why": f"withdrawn: {why}"[:MAX_WHY],
                "discards": True,
            }

        self._point(game, entry)
        return canary

    def repair(self, game: str) -> bool:
        """Accept a game's journal although entries are missing; False if it needs no repair."""
        if not self._shared(game).damage():
            return False
        self.restart(game)
        return True

    def restart(self, game: str) -> None:
        """Make all machines accept a game's journal, even those that have read newer entries."""
        self._shared(game).restart(lambda _: {"kind": "restart"})

    def _store_blob(self, raw: bytes) -> None:
        name = _blob(hashlib.sha256(raw).hexdigest())
        self._objects.create(name, raw)
        if self._objects.get(name) != raw:
            raise StorageFailed(
                f"{name} reads back different from what was written; check the disk, then release "
                "again"
            )

    def _shared(self, game: str) -> Shared[Catalogue]:
        with self._lock:
            if game not in self._games:
                name = game_name(game)
                self._games[game] = Shared(
                    self._objects,
                    f"registry/{name}",
                    lambda: Catalogue(name),
                    trusted=self._trusted,
                    signer=self._signer,
                    clock=self._clock,
                    memory=self._memory,
                )
            return self._games[game]

    # --- Specs ------------------------------------------------------------------------------------

    def register(self, spec: GameSpec) -> None:
        """Store a game's spec; storing the same spec again repairs a damaged one."""
        for other in self.games():
            if other != spec.game and other.casefold() == spec.game.casefold():
                raise ConfigError(
                    f"{spec.game} differs from the registered game {other} only in case; use "
                    f"{other}, or a name that differs in more than case"
                )
        name = f"games/{game_name(spec.game)}/{spec.schema}"
        if self._objects.create(f"{name}.json", spec.to_json()):
            return
        stored = self._objects.get(f"{name}.json") or b""
        if hashlib.sha256(stored).hexdigest() != spec.schema:
            # The name is the hash of the contents, so these bytes are damaged; a copy is kept.
            self._objects.create(f"{name}.damaged-{zlib.crc32(stored):08x}", stored)
            self._objects.delete(f"{name}.json")
            self._objects.create(f"{name}.json", spec.to_json())

    def spec(self, game: str, schema: str) -> GameSpec | None:
        """The game's spec with this schema, or None; SpecError when it is damaged."""
        return self._spec(f"games/{game_name(game)}/{schema}.json")

    def specs(self, game: str, *, skips_damaged: bool = False) -> Sequence[GameSpec]:
        """Every spec of a game; SpecError for one that cannot be read, unless it is skipped."""
        specs = []
        for name in self._spec_names(game):
            try:
                if (spec := self._spec(name)) is not None:
                    specs.append(spec)
            except SpecError:
                if not skips_damaged:
                    raise
        return specs

    def _spec_names(self, game: str) -> list[str]:
        """The objects that are named like a spec; a game's folder may have others."""
        names = self._objects.list(f"games/{game_name(game)}")
        return [name for name in names if _SPEC.fullmatch(name.rpartition("/")[2])]

    def _spec(self, name: str) -> GameSpec | None:
        raw = self._objects.get(name)
        try:
            return None if raw is None else spec_from_json(raw)
        except SpecError as error:
            raise SpecError(
                f"{name} cannot be read: {error}; if it is damaged, restore it from a backup"
            ) from None


def damage_key(now: Catalogue, manifest: Manifest) -> str:
    """The key under which `Registry.damage` reports a model."""
    for alias in ALIASES:
        if now.model_of(alias, manifest.schema) == manifest.model_no:
            is_newest = now.model_of(alias) == manifest.model_no
            return alias if is_newest else f"{alias} {manifest.name}"
    return manifest.name


def _blob(sha256: str) -> str:
    return f"blobs/{sha256}.safetensors"


def _schema_of(now: Catalogue, alias: str, schema: str | None) -> str:
    """The only schema of a game's models that starts with this text; by default the newest one."""
    if schema is None:
        pointer = now.pointer(alias)
        return pointer.schema if pointer else ""
    schemas = {manifest.schema for manifest in now.models.values()}
    matching = [name for name in schemas if name.startswith(schema)]
    if len(matching) != 1:
        known = ", ".join(sorted(name[:SCHEMA_CHARS] for name in schemas)) or "none"
        raise ConfigError(
            f"{len(matching)} schemas of the models of {now.game} start with {schema[:80]!r}; give "
            f"one of these: {known}"
        )
    return matching[0]


def _check_epoch(now: Catalogue, epoch: int) -> None:
    if epoch != now.epoch:
        raise Fenced(
            f"{now.owner} has taken over {now.game} (epoch {now.epoch}, this learner has epoch "
            f"{epoch}), so nothing was written; stop this learner"
        )
