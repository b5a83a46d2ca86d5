"""Where an import goes: the stream, the store and the registered games that a deployment's config names."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from understudy.app.backends import open_store
from understudy.app.config import Config
from understudy.app.data import DataFolder
from understudy.app.deployment import open_deployment
from understudy.app.exchange.landing_elsewhere import LandingElsewhere
from understudy.app.exchange.landing_here import LandingHere
from understudy.app.links import open_link, register
from understudy.app.roles.ingest import IngestRole, open_own_ingest
from understudy.app.specs import RegistrySpecs
from understudy.client.local import LocalLink
from understudy.core.clock import Clock
from understudy.core.game import GameSpec, spec_from_json
from understudy.core.log import is_locked
from understudy.core.names import GameName
from understudy.models.registry import Registry

Landing = LandingHere | LandingElsewhere
"""How what an import sends becomes stored, and how it sees that."""


@dataclass(frozen=True, slots=True)
class Destination:
    """A data folder, and what the config puts elsewhere."""

    data: DataFolder
    config: Config = field(default_factory=Config)
    wait_s: float = 60.0
    """How long to wait for the ingest of a store elsewhere while nothing gets on."""

    def specs(self, game: GameName) -> Sequence[GameSpec]:
        """A game's specs that are registered."""
        if self.config.models.url:
            return self._registry().specs(game)
        return [spec_from_json(path.read_bytes()) for path in sorted((self.data.games / game).glob("*.json"))]

    def register(self, spec: GameSpec, link: LocalLink) -> None:
        register(self.data, self.config, spec, link)

    def link(self, spec: GameSpec, clock: Clock) -> LocalLink:
        return open_link(self.data, self.config, spec, clock)

    def landing(self, clock: Clock) -> Landing:
        """What stores, or waits until it is stored."""
        if not self.config.store.url:
            return LandingHere(self.data, self._ingest)
        store = open_store(self.config.store.url, specs=RegistrySpecs(self._registry()), clock=clock)
        return LandingElsewhere(store, clock=clock, wait_s=self.wait_s)

    def _ingest(self) -> IngestRole:
        return open_own_ingest(self.data, self.config)

    def _registry(self) -> Registry:
        return open_deployment(self.data, models=self.config.models.url).registry

    def next_step(self) -> str:
        """What to do about steps that are in the stream and not stored."""
        root = self.data.root
        if is_locked(root / "ingest.lock"):
            return (
                f"ingest runs here and has not stored them yet, or refused them: understudy status --data {root}, "
                f"understudy data quarantine list --data {root}"
            )
        return (
            f"no ingest runs in this folder; unless one runs on another machine, start it with: understudy ingest "
            f"--data {root}; then give the same import again, which says when all is stored"
        )
