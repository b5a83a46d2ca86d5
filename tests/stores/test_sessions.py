"""Many sessions: their state stays bounded in memory and correct on disk."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.stores.local_stores import local, local_harness
from understudy.core.names import new_session
from understudy.experience.chunk import Chunk
from understudy.experience.frame import Frame, data_frame
from understudy.ports import Candidate, SessionFilter
from understudy.stores import view
from understudy.testing.clock import START_S
from understudy.testing.samples import PLAYER, random_chunk
from understudy.testing.store_harness import SPEC


@pytest.mark.parametrize(
    ("n_sessions", "n_cached"),
    [(1_500, 1_024), pytest.param(20_000, view._RECENT, marks=pytest.mark.slow)],
)
def test_more_sessions_than_are_cached_need_bounded_memory(
    quick_path: Path, monkeypatch: pytest.MonkeyPatch, n_sessions: int, n_cached: int
):
    """The full profile has five times as many sessions as are cached by default."""
    monkeypatch.setattr(view, "_RECENT", n_cached)
    harness = local_harness(quick_path)
    rng = np.random.default_rng(0)
    template = random_chunk(SPEC, rng, session=new_session(START_S), n_steps=1)

    def candidate(number: int) -> Candidate:
        session = new_session(START_S, number.to_bytes(10, "big"))
        chunk = Chunk(replace(template.meta, session=session), template.columns)
        frame: Frame = data_frame(session, 0, chunk.encode())
        return Candidate(frame.stamped(PLAYER, int(START_S)), chunk)

    for start in range(0, n_sessions, 500):
        receipt = harness.write([candidate(number) for number in range(start, start + 500)])
        assert set(receipt.fates) == {"new"}
        assert len(local(harness).lookup._recent) <= n_cached
    for start in (0, 500, n_sessions - 500):
        receipt = harness.write([candidate(number) for number in range(start, start + 500)])
        assert set(receipt.fates) == {"duplicate"}
    assert sum(1 for _ in harness.store.sessions(SessionFilter())) == n_sessions
    audit = harness.store.audit()
    assert (audit.sessions, audit.chunks, audit.duplicate_chunks) == (n_sessions, n_sessions, 0)
    harness.store.close()
