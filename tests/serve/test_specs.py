"""Specs of games while the registry is unreadable: known ones stay valid, which is logged once."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from understudy.core.errors import Unreachable
from understudy.models.objects import FolderObjects
from understudy.models.registry import Registry
from understudy.serve.state import SpecCache
from understudy.testing.clock import ManualClock
from understudy.testing.samples import cart_spec

SPEC = cart_spec()


def test_unreadable_specs_stay_valid_and_are_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    registry = Registry(FolderObjects(tmp_path), trusted={})
    clock = ManualClock()
    registry.register(SPEC)

    async def look(specs: SpecCache, times: int) -> None:
        for _ in range(times):
            assert SPEC.schema in await specs.of(SPEC.game)
            clock.advance(60.0)

    def away(*_: object) -> None:
        raise Unreachable("no answer")

    with ThreadPoolExecutor(1) as pool, capture_logs() as logs:
        specs = SpecCache(registry, pool, clock)
        asyncio.run(look(specs, 1))
        for _ in range(2):
            with monkeypatch.context() as patch:
                patch.setattr(specs, "_read", away)
                asyncio.run(look(specs, 3))
            asyncio.run(look(specs, 1))
    assert [line["event"] for line in logs] == ["specs_not_readable"] * 2
