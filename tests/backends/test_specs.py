"""Specs from a remote registry: frames wait while it is unreachable, and misses cost little."""

import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from structlog.testing import capture_logs

from tests.models.small_s3 import SmallS3, Trouble, small_s3
from tests.streams.memory import MemoryStream
from understudy.backends.specs import MISS_S, RegistrySpecs
from understudy.core.errors import Unreachable
from understudy.experience.game import game_spec
from understudy.ingest.service import IngestService
from understudy.models.cloud import CloudObjects
from understudy.models.registry import Registry
from understudy.platform.ingest import repeat
from understudy.stores.local import LocalStore
from understudy.testing.clock import ManualClock
from understudy.testing.samples import cart_spec, random_session, stamped

SPEC = cart_spec()
OTHER = game_spec("cart", obs=7, actions=3)
REFUSALS: dict[Trouble, str] = {
    403: "check the permissions",
    "proxy": "the endpoint is not S3-compatible",
}
"""What ends ingest, for somebody to mend."""


class SpecsHarness:
    """A registry on a small S3, a stream, a store and ingest between them."""

    def __init__(self, s3: SmallS3, folder: Path) -> None:
        self.s3 = s3
        self.clock = ManualClock()
        self._rng = np.random.default_rng(5)
        self.registry = Registry(CloudObjects(s3.url), trusted={})
        self.stream, self.store = (
            MemoryStream(2, clock=self.clock),
            LocalStore(folder, clock=self.clock),
        )
        self.specs = RegistrySpecs(self.registry, clock=self.clock)
        self.service = IngestService(
            self.stream, self.store, self.specs, owner="harness", clock=self.clock
        )

    def send(self, n_chunks: int = 3, *, spec=SPEC) -> None:
        self.stream.append(list(stamped(random_session(spec, self._rng, n_chunks=n_chunks))))

    @property
    def asked(self) -> int:
        """How often the registry was asked since this was looked at last."""
        calls = self.s3.calls
        self.s3.calls = []
        return len(calls)


@pytest.fixture
def harness(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[SpecsHarness]:
    with small_s3(monkeypatch) as server:
        harness = SpecsHarness(server, tmp_path)
        yield harness
        harness.store.close()


@pytest.mark.parametrize("trouble", [503, "cut", 403, "proxy"])
def test_while_the_registry_is_unreachable_nothing_is_quarantined_and_later_all_is_stored(
    harness: SpecsHarness, monkeypatch: pytest.MonkeyPatch, trouble: Trouble
):
    monkeypatch.setattr("understudy.platform.ingest._TROUBLE_S", 0.01)
    harness.registry.register(SPEC)
    harness.send(5)
    harness.s3.trouble = trouble
    is_away = threading.Event()
    stop = threading.Event()

    def step() -> int:
        try:
            moved = harness.service.step()
        except Exception:
            if is_away.is_set():
                harness.s3.trouble = ""
            is_away.set()
            raise
        audit = harness.store.audit()
        if audit.chunks + audit.quarantined + audit.parked == 5:
            stop.set()
        return moved

    with capture_logs() as logs:
        if trouble in REFUSALS:
            with pytest.raises(Exception, match=REFUSALS[trouble]):
                repeat(step, stop)
            assert (harness.store.audit().quarantined, harness.store.positions()) == (0, {})
            harness.s3.trouble = ""
        repeat(step, stop)
    audit = harness.store.audit()
    assert (audit.chunks, audit.quarantined, audit.parked, audit.gap_chunks) == (5, 0, 0, 0)
    assert harness.service.stats.fates == {"new": 5}
    assert trouble in REFUSALS or [one["event"] for one in logs][:2] == ["unreachable"] * 2


def test_known_specs_stay_usable_while_the_registry_is_unreachable(harness: SpecsHarness):
    harness.registry.register(SPEC)
    harness.send(2)
    harness.service.drain()
    harness.s3.trouble = 503
    harness.send(3)
    harness.service.drain()
    assert harness.store.audit().chunks == 5
    harness.send(1, spec=OTHER)
    with pytest.raises(Unreachable, match="check that the server is running"):
        harness.service.drain()
    assert harness.store.audit().parked == 0


def test_a_flood_of_an_unknown_schema_costs_one_request_a_second(harness: SpecsHarness):
    harness.registry.register(SPEC)
    assert harness.asked
    harness.send(40, spec=OTHER)
    harness.service.drain()
    assert harness.asked == 2, "for the schema, and for the game"
    harness.send(40, spec=OTHER)
    harness.service.drain()
    assert harness.asked == 0
    harness.clock.advance(MISS_S)
    harness.send(40, spec=OTHER)
    harness.service.drain()
    assert harness.asked == 1
    assert harness.service.stats.refusals == {"unknown_schema": 120}


def test_a_spec_registered_later_is_visible_within_a_second(harness: SpecsHarness):
    for spec in (SPEC, OTHER):
        harness.send(1, spec=spec)
        harness.service.drain()
        harness.registry.register(spec)
        harness.clock.advance(MISS_S)
        harness.send(2, spec=spec)
        harness.service.drain()
    assert harness.service.stats.refusals == {"unknown_game": 1, "unknown_schema": 1}
    assert harness.store.audit().chunks == 4


def test_a_schema_registered_before_its_first_frame_is_known_whatever_else_is_missing(
    harness: SpecsHarness,
):
    harness.send(1, spec=OTHER)
    harness.service.drain()
    harness.registry.register(SPEC)
    harness.send(2)
    harness.service.drain()
    assert harness.store.audit().chunks == 2


def test_unknown_names_use_bounded_memory(harness: SpecsHarness, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("understudy.backends.specs._MOST_MISSES", 4)
    for number in range(30):
        assert not harness.specs.has_game(f"game-{number}")
    assert len(harness.specs._missed) <= 4
    assert harness.specs.spec("../cart", SPEC.schema) is None


def test_an_unreadable_spec_parks_only_its_own_frames(harness: SpecsHarness):
    harness.registry.register(SPEC)
    name = f"deployment/games/cart/{OTHER.schema}.json"
    harness.s3.objects[name] = b"{"
    harness.send(2)
    harness.send(2, spec=OTHER)
    harness.service.drain()
    assert (harness.store.audit().chunks, harness.service.stats.refusals["unknown_schema"]) == (
        2,
        2,
    )
