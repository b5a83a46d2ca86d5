"""The contracts of the ExperienceStore and StoreAdmin ports, as tests to subclass.

Subclass both and define `make` and `reopen`. A store that moves data in the background also defines
`settle`, so that each promise is tested before and after. `files` and `damage` are optional; tests
whose hook is missing are skipped.
"""

import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from zlib import crc32

import numpy as np

from understudy.core.errors import ClaimLost, Closed, ConfigError
from understudy.core.names import new_session
from understudy.experience.chunk import Chunk
from understudy.experience.frame import FrameKind
from understudy.experience.session import MAX_AHEAD, tombstone_of
from understudy.ports import (
    Cursor,
    Forgotten,
    Position,
    RefusedFrame,
    SessionFilter,
    Stored,
    WriteBatch,
)
from understudy.testing.samples import (
    OTHER_PLAYER,
    PLAYER,
    random_chunk,
    random_session,
    random_spec,
)
from understudy.testing.store_harness import (
    SPEC,
    StoreFactory,
    StoreHarness,
    last_no,
    raises,
)

ALL_OPTIONAL = (
    "logp",
    "value",
    "priority",
    "version",
    "by",
    "frames",
    "t_ms",
    "event",
    "raw_action",
    "action_mask",
)


def changed(chunk: Chunk, by: int = 1) -> Chunk:
    """A chunk with the same number and other observations."""
    return Chunk(chunk.meta, {**chunk.columns, "obs": chunk.columns["obs"] + by})


class StoreContract(StoreFactory):
    """Tests of storing and reading; need both ports, as they also audit and list quarantine."""

    timeout_s = 20.0
    """How long a test lets a tail wait; a commit or `close` must end the wait well before."""

    # --- exactly once, bit for bit ----------------------------------------------------------------

    def test_the_same_chunk_twice_is_stored_once(self) -> None:
        harness = self.harness()
        chunks = self.chunks(3)
        assert harness.put(*chunks) == ["new"] * 3
        for stage in self.stages(harness):
            with stage:
                harness.clock.advance(5.0)  # sent again, so stamped with another time
                receipt = harness.write([harness.candidate(chunk) for chunk in chunks])
                assert list(receipt.fates) == ["duplicate"] * 3
                assert list(receipt.reasons) == [""] * 3
                assert harness.chunks() == chunks
        audit = harness.store.audit()
        assert (audit.chunks, audit.duplicate_chunks, audit.gap_chunks, list(audit.corrupt)) == (
            3,
            0,
            0,
            [],
        )
        assert audit.steps == sum(chunk.meta.n_steps for chunk in chunks)

    def test_duplicates_within_one_batch_are_stored_once(self) -> None:
        harness = self.harness()
        first, second = self.chunks(2)
        assert harness.put(first, second, first, second, first) == [
            "new",
            "new",
            *["duplicate"] * 3,
        ]
        assert harness.chunks() == [first, second]

    def test_chunks_are_read_back_bit_for_bit(self) -> None:
        harness = self.harness()
        specs = [random_spec(self.rng) for _ in range(25)]
        sessions = [random_session(spec, self.rng, optional=ALL_OPTIONAL) for spec in specs]
        sent = [chunk for session in sessions for chunk in session]
        for chunk in sent:
            harness.put(chunk)
        for stage in self.stages(harness):
            with stage:
                for before, after in zip(sent, harness.chunks(), strict=True):
                    assert before.meta == after.meta
                    assert before.columns.keys() == after.columns.keys()
                    for name, column in before.columns.items():
                        stored = after.columns[name]
                        assert (stored.dtype, stored.shape, stored.tobytes()) == (
                            column.dtype,
                            column.shape,
                            column.tobytes(),
                        )

    def test_frames_keep_number_checksum_player_and_time(self) -> None:
        harness = self.harness()
        chunks = self.chunks(2)
        harness.put(*chunks)
        for stage in self.stages(harness):
            with stage:
                frames = harness.frames(FrameKind.DATA)
                assert frames == [
                    chunk.frame().stamped(PLAYER, int(harness.clock.now())) for chunk in chunks
                ]

    def test_optional_columns_of_other_shapes_share_a_store(self) -> None:
        harness = self.harness()
        plain = self.chunks(3)
        wide = []
        for chunk, width in zip(plain, (1, 3, 2), strict=True):
            raw = self.rng.normal(0, 1, (chunk.n_rows, width)).astype(
                np.float64 if width == 2 else np.float32
            )
            wide.append(Chunk(chunk.meta, {**chunk.columns, "raw_action": raw}))
        harness.put(*wide)
        for stage in self.stages(harness):
            with stage:
                assert harness.chunks() == wide

    def test_out_of_order_chunks_are_stored_once_each(self) -> None:
        harness = self.harness()
        chunks = self.chunks(12)
        order = self.rng.permutation(12)
        for index in order:
            assert harness.put(chunks[index]) == ["new"]
        assert harness.put(*chunks) == ["duplicate"] * 12
        info = harness.session(chunks[0].meta.session)
        assert info is not None
        assert (info.n_chunks, info.high, info.missing) == (12, 12, ())
        assert harness.store.audit().gap_chunks == 0

    def test_a_missing_number_is_a_visible_gap(self) -> None:
        harness = self.harness()
        chunks = self.chunks(5)
        harness.put(*chunks[:2], *chunks[3:])
        for stage in self.stages(harness):
            with stage:
                info = harness.session(chunks[0].meta.session)
                audit = harness.store.audit()
                assert info is not None
                assert (info.high, info.missing) == (2, ((2, 2),))
                assert (audit.gap_chunks, audit.gap_steps) == (1, chunks[2].meta.n_steps)

    def test_many_threads_write_at_once(self) -> None:
        harness = self.harness()
        lots = [self.chunks(10) for _ in range(6)]
        epochs = [harness.store.claim(f"t{n}", owner="harness", ttl_s=60.0).epoch for n in range(6)]

        def write(number: int) -> None:
            for at, chunk in enumerate(lots[number]):
                candidates = [harness.candidate(chunk)]
                harness.store.write(
                    WriteBatch(f"t{number}", epochs[number], Position(str(at)), candidates)
                )

        with ThreadPoolExecutor(6) as pool:
            list(pool.map(write, range(6)))
        assert len(harness.tail()) == 60
        assert {(chunk.meta.session, chunk.meta.chunk_no) for chunk in harness.chunks()} == {
            (chunk.meta.session, chunk.meta.chunk_no) for chunks in lots for chunk in chunks
        }

    # --- positions and claims ---------------------------------------------------------------------

    def test_positions_move_with_the_data(self) -> None:
        harness = self.harness()
        assert harness.store.claim("q", owner="a", ttl_s=60.0).position is None
        harness.put(*self.chunks(1))
        harness.write()
        without = [harness.candidate(chunk) for chunk in self.chunks(1)]
        harness.store.write(WriteBatch("p", harness.epoch, None, without))
        harness.store.write(WriteBatch("p", harness.epoch, None))
        for stage in self.stages(harness):
            with stage:
                claim = harness.store.claim("p", owner="harness", ttl_s=60.0)
                assert claim.position == "2", "a batch without a position leaves it unchanged"

    def test_a_stale_epoch_is_refused_and_changes_nothing(self) -> None:
        harness = self.harness()
        (chunk,) = self.chunks(1)
        stale = harness.epoch
        fresh = harness.store.claim("p", owner="harness", ttl_s=60.0)
        assert fresh.epoch > stale
        batch = WriteBatch(
            "p", stale, Position("9"), [harness.candidate(chunk)], [harness.refusal(chunk)]
        )
        assert raises(ClaimLost, lambda: harness.store.write(batch))
        assert harness.store.claim("p", owner="harness", ttl_s=60.0).position is None
        assert harness.chunks() == []
        assert list(harness.store.quarantined()) == []

    def test_epochs_rise_across_reopening(self) -> None:
        harness = self.harness()
        before = harness.epoch
        harness.reopen()
        assert harness.epoch > before
        batch = WriteBatch("p", before, Position("9"))
        assert raises(ClaimLost, lambda: harness.store.write(batch))

    def test_closing_releases_claims(self) -> None:
        harness = self.harness()
        harness.store.close()
        harness.store = self.reopen(harness.store, harness.clock)
        claim = harness.store.claim("p", owner="other", ttl_s=60.0)
        assert claim.epoch > harness.epoch

    def test_a_fresh_claim_excludes_other_owners_until_it_expires(self) -> None:
        harness = self.harness()
        harness.clock.advance(59.0)
        assert raises(ClaimLost, lambda: harness.store.claim("p", owner="other", ttl_s=60.0))
        harness.put(*self.chunks(1))
        harness.clock.advance(59.0)
        assert raises(ClaimLost, lambda: harness.store.claim("p", owner="other", ttl_s=60.0)), (
            "a write renews the claim"
        )
        harness.clock.advance(2.0)
        assert harness.store.claim("p", owner="other", ttl_s=60.0).epoch > harness.epoch
        assert raises(ClaimLost, lambda: harness.put(*self.chunks(1)))

    # --- the rules of a session -------------------------------------------------------------------

    def test_the_same_number_with_different_bytes_is_a_conflict(self) -> None:
        harness = self.harness()
        chunks = self.chunks(2)
        harness.put(*chunks)
        for turn, stage in enumerate(self.stages(harness), 1):
            with stage:
                other = changed(chunks[1], by=turn)
                receipt = harness.write([harness.candidate(other)])
                assert list(receipt.fates) == ["conflict"]
                assert list(receipt.reasons) == ["conflict"]
                assert harness.put(other) != ["new"]
        assert harness.chunks() == chunks
        assert [frame.reason for frame in harness.store.quarantined()] == ["conflict"] * 3, (
            "each is in quarantine once"
        )

    def test_a_number_far_ahead_is_out_of_window(self) -> None:
        harness = self.harness()
        chunk = self.chunks(1)[0]
        harness.put(chunk)
        for number in (MAX_AHEAD + 2, 1 << 40):
            far = random_chunk(
                SPEC, self.rng, session=chunk.meta.session, chunk_no=number, first_step=1 << 30
            )
            receipt = harness.write([harness.candidate(far)])
            assert (list(receipt.fates), list(receipt.reasons)) == (["refused"], ["out_of_window"])
        assert [frame.reason for frame in harness.store.quarantined()] == ["out_of_window"] * 2
        assert harness.chunks() == [chunk]

    def test_another_players_session_is_refused(self) -> None:
        harness = self.harness()
        chunks = self.chunks(4)
        harness.put(chunks[0])
        for chunk, stage in zip(chunks[1:], self.stages(harness), strict=True):
            with stage:
                assert harness.put(chunk, player=OTHER_PLAYER) == ["refused"]
                assert harness.put(chunk) == ["new"], "the owner continues undisturbed"
        assert {frame.reason for frame in harness.store.quarantined()} == {"other_player"}

    def test_steps_that_contradict_their_neighbours_are_refused(self) -> None:
        harness = self.harness()
        chunks = self.chunks(3)
        harness.put(chunks[0], chunks[2])
        wrong = Chunk(
            replace(chunks[1].meta, first_step=chunks[1].meta.first_step + 1), chunks[1].columns
        )
        receipt = harness.write([harness.candidate(wrong)])
        assert list(receipt.reasons) == ["step_mismatch"]
        assert harness.chunks() == [chunks[0], chunks[2]]
        info = harness.session(chunks[0].meta.session)
        assert info is not None
        assert info.missing == (), "a quarantined number counts as seen if it fits its session"

    def test_a_drop_report_marks_its_ranges_as_seen(self) -> None:
        harness = self.harness()
        chunks = self.chunks(6)
        session = chunks[0].meta.session
        n_dropped = sum(chunk.meta.n_steps for chunk in chunks[1:4])
        harness.put(chunks[0])
        assert list(
            harness.write([harness.drop_frame(session, 4, (1, 3), n_steps=n_dropped)]).fates
        ) == ["new"]
        after = Chunk(
            replace(chunks[5].meta, first_step=chunks[4].meta.first_step), chunks[5].columns
        )
        assert harness.put(after) == ["new"]
        for stage in self.stages(harness):
            with stage:
                info = harness.session(session)
                audit = harness.store.audit()
                assert info is not None
                assert (info.high, info.missing, info.dropped_steps) == (6, (), n_dropped)
                assert (audit.gap_chunks, audit.gap_steps, audit.dropped_steps) == (0, 0, n_dropped)
                assert [frame.chunk_no for frame in harness.frames(FrameKind.DROP)] == [4]
        assert harness.put(chunks[2]) == ["conflict"], (
            "a chunk that was reported as dropped is not stored later"
        )

    def test_a_huge_drop_report_costs_nothing(self) -> None:
        harness = self.harness()
        session = self.chunks(1)[0].meta.session
        assert list(
            harness.write(
                [harness.drop_frame(session, 1 << 40, (0, (1 << 40) - 1), n_steps=1 << 40)]
            ).fates
        ) == ["new"]
        assert harness.store.audit().gap_chunks == 0
        info = harness.session(session)
        assert info is not None
        assert (info.game, info.n_chunks) == ("", 0), "a report does not name its game"

    def test_nothing_follows_a_close(self) -> None:
        harness = self.harness()
        chunks = self.chunks(6)
        session = chunks[0].meta.session
        harness.put(chunks[0])
        assert list(harness.write([harness.close_frame(session, 2)]).fates) == ["new"]
        for chunk, stage in zip(chunks[3:], self.stages(harness), strict=True):
            with stage:
                assert list(harness.write([harness.candidate(chunk)]).reasons) == ["after_close"]
        assert harness.put(chunks[1]) == ["new"], "a late chunk from before the close is stored"
        info = harness.session(session)
        assert info is not None
        assert (info.closed, info.high, info.n_chunks) == (True, 3, 2)

    # --- listing and closing ----------------------------------------------------------------------

    def test_sessions_are_listed_by_game_player_and_time(self) -> None:
        harness = self.harness()
        chunks = self.chunks(2)
        other_chunks = self.chunks(1)
        other = random_session(random_spec(self.rng, "elsewhere"), self.rng, n_chunks=1)
        harness.put(*chunks)
        harness.clock.advance(100.0)
        harness.put(*other_chunks, player=OTHER_PLAYER)
        harness.put(*other)
        for stage in self.stages(harness):
            with stage:
                expected = {
                    SessionFilter(): {
                        chunks[0].meta.session,
                        other_chunks[0].meta.session,
                        other[0].meta.session,
                    },
                    SessionFilter(game="elsewhere"): {other[0].meta.session},
                    SessionFilter(player=OTHER_PLAYER): {other_chunks[0].meta.session},
                    SessionFilter(since_s=harness.clock.now()): {
                        other_chunks[0].meta.session,
                        other[0].meta.session,
                    },
                }
                for session_filter, sessions in expected.items():
                    infos = harness.store.sessions(session_filter)
                    assert {info.session for info in infos} == sessions
        info = harness.session(chunks[0].meta.session)
        assert info is not None
        assert (info.game, info.player, info.n_chunks, info.closed) == ("cart", PLAYER, 2, False)

    def test_a_tail_waits_for_a_commit_and_ends_with_close(self) -> None:
        harness = self.harness(waits_in_real_time=True)
        store = harness.store
        (chunk,) = self.chunks(1)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(store.tail, None, max_items=5, wait_s=self.timeout_s)
            assert not wait([waiting], timeout=0.1).done, "a tail waits for its first item"
            harness.put(chunk)
            began_s = time.monotonic()
            tail = waiting.result(timeout=2 * self.timeout_s)
            assert [item.chunk for item in tail.items if isinstance(item, Stored)] == [chunk]
            took_s = time.monotonic() - began_s
            assert took_s < 0.75 * self.timeout_s, "a commit wakes a waiting tail"
            began_s = time.monotonic()
            assert list(store.tail(tail.cursor, max_items=5, wait_s=0.1).items) == []
            assert time.monotonic() - began_s >= 0.09, "a tail waits for `wait_s`"
            waiting = pool.submit(store.tail, tail.cursor, max_items=5, wait_s=self.timeout_s)
            assert not wait([waiting], timeout=0.1).done
            began_s = time.monotonic()
            store.close()
            assert isinstance(waiting.exception(timeout=2 * self.timeout_s), Closed)
            took_s = time.monotonic() - began_s
            assert took_s < 0.75 * self.timeout_s, "close ends a waiting tail"

    def test_close_may_be_called_twice_and_ends_every_call(self) -> None:
        harness = self.harness()
        (chunk,) = self.chunks(1)
        harness.put(chunk)
        store = harness.store
        store.close()
        store.close()
        for call in (
            lambda: harness.put(*self.chunks(1)),
            lambda: store.tail(None, max_items=1, wait_s=0.0),
            lambda: store.claim("p", owner="harness", ttl_s=1.0),
            lambda: store.forget(PLAYER),
            lambda: list(store.sessions(SessionFilter())),
            store.audit,
            store.quarantined,
            lambda: store.quarantine([(chunk.meta.session, 0)], reason="guard"),
            lambda: store.replay([1], [harness.candidate(chunk)]),
            lambda: store.expire(harness.clock.now()),
        ):
            assert raises(Closed, call)


class StoreAdminContract(StoreFactory):
    """Tests of administration and of tails after deletions; subclass it with StoreContract."""

    # --- quarantine -------------------------------------------------------------------------------

    def test_refused_and_parked_frames_are_kept_with_reason_and_bytes(self) -> None:
        harness = self.harness()
        chunks = self.chunks(2)
        garbage = RefusedFrame(b"garbage", "truncated", "7 bytes", harness.clock.now())
        huge = replace(chunks[0].frame(), chunk_no=(1 << 64) - 1, player=PLAYER)
        odd = RefusedFrame(huge.encode(), "bad_number", "\udc80 no text", harness.clock.now())
        refused = harness.refusal(chunks[0])
        parked = harness.refusal(chunks[1], "unknown_schema")
        harness.write(refused=[refused, garbage, odd], parked=[parked])
        for stage in self.stages(harness):
            with stage:
                frames = harness.store.quarantined()
                assert [frame.raw for frame in frames] == [
                    refused.raw,
                    garbage.raw,
                    odd.raw,
                    parked.raw,
                ]
                assert [frame.parked for frame in frames] == [False, False, False, True]
                assert [frame.reason for frame in frames] == [
                    "bad_action",
                    "truncated",
                    "bad_number",
                    "unknown_schema",
                ]
                assert (frames[0].session, frames[0].chunk_no) == (chunks[0].meta.session, 0)
                assert frames[1].session is None
                assert [frame.crc for frame in frames] == [
                    chunks[0].frame().body_crc,
                    crc32(garbage.raw),
                    crc32(odd.raw),
                    chunks[1].frame().body_crc,
                ], "the checksum of the body, or of all bytes where the header is damaged"
                info = harness.session(chunks[0].meta.session)
                assert info is not None
                assert (info.game, info.n_chunks) == ("cart", 0), "its session is listed"
                audit = harness.store.audit()
                assert (audit.quarantined, audit.parked, audit.chunks, audit.gap_chunks) == (
                    3,
                    1,
                    0,
                    0,
                )
                (third,) = harness.store.quarantined(after_id=frames[1].id, limit=1)
                assert third.id == frames[2].id

    def test_refused_and_parked_numbers_count_as_seen(self) -> None:
        harness = self.harness()
        chunks = self.chunks(4)
        refused = [harness.refusal(chunks[1])]
        parked = [harness.refusal(chunks[2], "unknown_schema")]
        harness.write([harness.candidate(chunks[0])], refused=refused, parked=parked)
        harness.put(chunks[3])
        for stage in self.stages(harness):
            with stage:
                info = harness.session(chunks[0].meta.session)
                assert info is not None
                assert (info.high, info.missing, info.n_chunks) == (4, (), 2)
                harness.write(refused=refused, parked=parked)
                assert harness.put(*chunks[1:3]) == ["duplicate"] * 2, "they are in quarantine"
                assert len(harness.store.quarantined()) == 2
        assert harness.store.audit().gap_chunks == 0

    def test_replay_stores_a_parked_frame_once(self) -> None:
        harness = self.harness()
        chunks = self.chunks(3)
        harness.write(
            [harness.candidate(chunks[0]), harness.candidate(chunks[2])],
            parked=[harness.refusal(chunks[1], "unknown_schema")],
        )
        (parked,) = harness.store.quarantined()
        other = harness.candidate(changed(chunks[1]))
        assert list(harness.store.replay([parked.id], [other]).fates) == ["refused"], (
            "only the frame with this id is replayed"
        )
        candidate = harness.candidate(chunks[1])
        assert list(harness.store.replay([parked.id], [candidate]).fates) == ["new"]
        for stage in self.stages(harness):
            with stage:
                assert "new" not in harness.store.replay([parked.id], [candidate]).fates
                assert harness.put(chunks[1]) == ["duplicate"]
                assert list(harness.store.quarantined()) == []
                assert harness.chunks() == [chunks[0], chunks[2], chunks[1]]
                info = harness.session(chunks[0].meta.session)
                audit = harness.store.audit()
                assert info is not None
                assert (info.n_chunks, info.n_steps) == (
                    3,
                    sum(chunk.meta.n_steps for chunk in chunks),
                )
                assert (audit.chunks, audit.parked, audit.duplicate_chunks) == (3, 0, 0)
        harness.tail()

    def test_replay_follows_the_rules_of_sessions(self) -> None:
        harness = self.harness()
        chunks = self.chunks(2)
        harness.put(chunks[0])
        far = random_chunk(
            SPEC, self.rng, session=chunks[0].meta.session, chunk_no=5000, first_step=1 << 20
        )
        conflict = changed(chunks[0])
        harness.put(far, conflict)
        harness.put(chunks[1], player=OTHER_PLAYER)
        waiting = harness.store.quarantined()
        candidates = [
            harness.candidate(far),
            harness.candidate(conflict),
            harness.candidate(chunks[1], player=OTHER_PLAYER),
        ]
        assert "new" not in harness.store.replay([frame.id for frame in waiting], candidates).fates
        assert "new" not in harness.store.replay([10_000], [harness.candidate(chunks[1])]).fates, (
            "it was never quarantined"
        )
        assert harness.chunks() == [chunks[0]]

    def test_a_stored_chunk_can_be_quarantined_and_replayed(self) -> None:
        harness = self.harness()
        chunks = self.chunks(3)
        harness.put(*chunks)
        bad = (chunks[1].meta.session, 1)
        harness.tail()
        assert harness.store.quarantine([bad, bad, (new_session(), 0)], reason="nan_gradient") == 1
        assert harness.store.quarantine([bad], reason="nan_gradient") == 0, (
            "it is already quarantined"
        )
        (event,) = harness.tail()
        assert isinstance(event, Forgotten)
        assert (event.reason, event.player, event.chunks) == ("quarantined", None, (bad,)), (
            "the event names the chunks that learners must evict"
        )
        for stage in self.stages(harness):
            with stage:
                assert harness.chunks() == [chunks[0], chunks[2]]
                assert harness.put(chunks[1]) == ["duplicate"]
                assert harness.removed() == [
                    (2, "quarantined", PLAYER, (bad,)),
                    (4, "quarantined", None, (bad,)),
                ]
        harness.write(refused=[RefusedFrame(b"garbage", "truncated", "", harness.clock.now())])
        quarantined, garbage = harness.store.quarantined()
        assert (
            quarantined.reason,
            quarantined.session,
            quarantined.chunk_no,
            garbage.reason,
        ) == (
            "nan_gradient",
            *bad,
            "truncated",
        )
        assert harness.store.audit().gap_chunks == 0
        candidate = harness.candidate(chunks[1])
        assert quarantined.raw == candidate.frame.encode()
        assert quarantined.crc == candidate.frame.body_crc
        assert list(harness.store.replay([quarantined.id], [candidate]).fates) == ["new"]
        self.settle(harness.store)
        assert harness.chunks() == [chunks[0], chunks[2], chunks[1]]
        audit = harness.store.audit()
        assert (audit.chunks, audit.quarantined, audit.duplicate_chunks, list(audit.corrupt)) == (
            3,
            1,
            0,
            [],
        )
        assert harness.store.quarantine([bad], reason="again") == 1
        self.settle(harness.store)
        assert harness.chunks() == [chunks[0], chunks[2]]
        harness.tail()

    # --- tail -------------------------------------------------------------------------------------

    def test_a_tail_shows_every_number_once_despite_concurrent_changes(self) -> None:
        harness = self.harness()
        for turn in range(24):
            chunks = self.chunks(3)
            harness.put(*chunks, player=OTHER_PLAYER if turn % 2 else PLAYER)
            harness.write([harness.close_frame(chunks[0].meta.session, 3)] if turn % 2 == 0 else [])
            match turn % 6:
                case 1:
                    harness.reopen()
                case 2:
                    self.settle(harness.store)
                case 3:
                    harness.store.quarantine([(chunks[0].meta.session, 1)], reason="guard")
                case 4:
                    harness.store.forget(PLAYER)
                    harness.clock.advance(3.0)
                case 5:
                    harness.clock.advance(60.0)
                    harness.store.expire(harness.clock.now() - 60.0)
            harness.tail()
        everything = harness.everything()
        assert last_no(everything[-1]) == last_no(harness.tailed[-1])
        reasons = {item.reason for item in everything if isinstance(item, Forgotten)}
        assert reasons == {"forgotten", "expired", "quarantined"}

    def test_a_tail_continues_from_any_cursor_in_pages(self) -> None:
        harness = self.harness()
        start = harness.store.tail(None, max_items=5, wait_s=0.0).cursor
        harness.put(*self.chunks(9))
        assert len(harness.store.tail(start, max_items=100, wait_s=0.0).items) == 9, (
            "the cursor of an empty store stays valid"
        )
        assert raises(
            ConfigError,
            lambda: harness.store.tail(Cursor("not a cursor"), max_items=5, wait_s=0.0),
        )
        for stage in self.stages(harness):
            with stage:
                for page in (1, 4, 100):
                    cursor = None
                    arrival_nos = []
                    while items := (
                        tail := harness.store.tail(cursor, max_items=page, wait_s=0.0)
                    ).items:
                        assert len(items) <= page
                        arrival_nos += [item.arrival_no for item in items]
                        cursor = tail.cursor
                    assert arrival_nos == list(range(1, 10))
        assert harness.store.tail(cursor, max_items=5, wait_s=0.0).cursor == cursor, (
            "an empty page does not move the cursor"
        )

    def test_a_damaged_frame_is_reported_and_others_are_read(self) -> None:
        harness = self.harness()
        chunks = self.chunks(3)
        harness.put(*chunks)
        self.damage(harness.store, harness.frames(FrameKind.DATA)[1])
        assert harness.chunks() == [chunks[0], chunks[2]]
        assert [(number, reason) for number, reason, _, _ in harness.removed()] == [(2, "damaged")]
        assert len(harness.store.audit().corrupt) == 1
        assert harness.put(chunks[1]) == ["duplicate"], "its number still counts as seen"

    # --- deletion ---------------------------------------------------------------------------------

    def test_a_forgotten_player_is_gone_everywhere(self) -> None:
        for is_settled in (False, True):
            harness = self.harness()
            erased = self.chunks(3)
            parked = self.chunks(1)
            others = self.chunks(2)
            harness.put(*erased)
            harness.write(
                [harness.close_frame(erased[0].meta.session, 3)],
                parked=[harness.refusal(parked[0], "unknown_schema")],
            )
            harness.put(*others, player=OTHER_PLAYER)
            if is_settled:
                self.settle(harness.store)
            harness.tail()
            assert harness.store.forget(PLAYER) == 3
            for stage in self.stages(harness):
                with stage:
                    assert harness.chunks() == others
                    assert list(harness.store.quarantined()) == []
                    assert harness.frames(FrameKind.CLOSE) == []
                    players = {info.player for info in harness.store.sessions(SessionFilter())}
                    assert players == {OTHER_PLAYER}
                    audit = harness.store.audit()
                    assert (audit.chunks, audit.forgotten_chunks, audit.gap_chunks) == (2, 3, 0)
            (event,) = harness.tail()
            assert isinstance(event, Forgotten)
            expected = ("forgotten", tombstone_of(PLAYER), ())
            assert (event.reason, event.player, event.chunks) == expected, "the tail reports it"
            *places, _ = harness.removed()
            assert places == [(number, "forgotten", None, ()) for number in range(1, 5)], (
                "the places of erased frames name neither player nor session"
            )
            assert harness.store.forget(PLAYER) == 0
            self._assert_stays_forgotten(harness, [*erased, *parked])
            harness.store.close()

    def _assert_stays_forgotten(self, harness: StoreHarness, chunks: list[Chunk]) -> None:
        """Assert that late frames of an erased player are refused and new sessions stored."""
        for chunk in chunks:
            receipt = harness.write([harness.candidate(chunk)], refused=[harness.refusal(chunk)])
            assert (list(receipt.fates), list(receipt.reasons)) == (["refused"], ["forgotten"])
        assert list(harness.store.quarantined()) == []
        harness.clock.advance(10.0)
        fresh = self.session_now(harness)
        assert harness.put(*fresh) == ["new"] * 4
        harness.reopen()
        assert harness.put(*fresh) == ["duplicate"] * 4

    def test_forgetting_refuses_sessions_that_began_before_it(self) -> None:
        harness = self.harness()
        harness.clock.advance(0.25)
        before = self.session_now(harness)
        harness.store.forget(PLAYER)
        harness.clock.advance(0.25)
        assert harness.put(*self.session_now(harness)) == ["new"] * 4, (
            "a session that begins after the erasure is stored, even within the same second"
        )
        harness.clock.advance(10.0)
        assert list(harness.write([harness.candidate(before[0])]).reasons) == ["forgotten"], (
            "a session that began before the erasure is refused, even if it arrives only later"
        )

    def test_no_file_contains_a_forgotten_player(self) -> None:
        harness = self.harness()
        chunks = self.chunks(3)
        harness.put(*chunks)
        harness.write(parked=[harness.refusal(chunk) for chunk in self.chunks(1)])
        harness.put(*self.chunks(2), player=OTHER_PLAYER)
        session = chunks[0].meta.session
        harness.store.quarantine([(session, 1)], reason="guard")
        harness.store.forget(PLAYER)
        self.settle(harness.store)
        harness.store.close()
        erased = {
            "pseudonym": PLAYER,
            "pseudonym in hex": PLAYER.hex().encode(),
            "session id": session.bytes,
            "session id in hex": session.hex.encode(),
            "session id as text": str(session).encode(),
            "steps": chunks[0].columns["obs"].tobytes(),
        }
        for path in self.files(harness.store):
            raw = path.read_bytes()
            assert [name for name, needle in erased.items() if needle in raw] == [], path

    def test_a_client_clock_ahead_does_not_admit_old_frames(self) -> None:
        harness = self.harness()
        ahead = random_session(
            SPEC, self.rng, session=new_session(harness.clock.now() + 3600, self.rng.bytes(10))
        )
        in_stream = [harness.candidate(chunk) for chunk in ahead]
        harness.clock.advance(5.0)
        harness.store.forget(PLAYER)
        assert set(harness.write(in_stream).reasons) == {"forgotten"}

    def test_expired_chunks_are_deleted_and_stay_known(self) -> None:
        harness = self.harness()
        old = self.chunks(3)
        new = self.chunks(2)
        harness.put(*old)
        received_s = harness.clock.now()
        harness.clock.advance(100.0)
        harness.put(*new)
        harness.tail()
        assert harness.store.expire(received_s) == 0, "only chunks received before that time"
        assert harness.store.expire(harness.clock.now() - 50.0) == 3
        assert harness.tail() == [], "expiry adds no event"
        for stage in self.stages(harness):
            with stage:
                assert harness.chunks() == new
                assert harness.removed() == [
                    (number, "expired", PLAYER, (chunk.meta.id,))
                    for number, chunk in enumerate(old, 1)
                ]
                assert harness.put(*old) == ["duplicate"] * 3
                audit = harness.store.audit()
                assert (audit.chunks, audit.expired_chunks, audit.gap_chunks) == (2, 3, 0)
        assert harness.store.expire(harness.clock.now() - 50.0) == 0
        harness.tail()

    def test_expired_quarantine_keeps_its_record_but_not_its_bytes(self) -> None:
        harness = self.harness()
        (chunk,) = self.chunks(1)
        harness.write(refused=[harness.refusal(chunk)])
        harness.store.expire(harness.clock.now())
        assert len(harness.store.quarantined()) == 1, "only frames received before that time"
        harness.clock.advance(100.0)
        harness.store.expire(harness.clock.now() - 50.0)
        assert list(harness.store.quarantined()) == []
        assert harness.put(chunk) == ["duplicate"]
        assert harness.store.audit().gap_chunks == 0

    def test_a_frame_quarantined_after_its_time_expired_is_deleted_by_the_next_expiry(self) -> None:
        harness = self.harness()
        late = harness.refusal(self.chunks(1)[0])
        harness.clock.advance(100.0)
        harness.store.expire(harness.clock.now() - 50.0)
        harness.write(refused=[late])
        assert len(harness.store.quarantined()) == 1
        harness.clock.advance(1.0)
        harness.store.expire(harness.clock.now() - 50.0)
        assert list(harness.store.quarantined()) == []
