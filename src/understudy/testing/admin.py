"""The contract of the StoreAdmin port and of what a tail shows when bytes are taken away, as tests to subclass."""

from dataclasses import replace

from understudy.core.chunk import Chunk
from understudy.core.frame import FrameKind
from understudy.core.names import new_session
from understudy.core.ports import Forgotten, RefusedFrame, SessionFilter
from understudy.core.session import tombstone_of
from understudy.testing.desk import SPEC, Desk, StoreFactory
from understudy.testing.samples import OTHER_PLAYER, PLAYER, random_chunk, random_session


class StoreAdminContract(StoreFactory):
    """Subclass beside StoreContract, with the same factory methods."""

    # --- quarantine -----------------------------------------------------------------------------------------------

    def test_refused_and_parked_frames_are_kept_with_reason_and_bytes(self) -> None:
        desk = self.desk()
        chunks, later = self.chunks(2), self.later(desk)
        garbage = RefusedFrame(b"garbage", "truncated", "7 bytes", desk.clock.now())
        huge = replace(chunks[0].frame(), chunk_no=(1 << 64) - 1, player=PLAYER)
        odd = RefusedFrame(huge.encode(), "bad_number", "\udc80 no text", desk.clock.now())
        refused, parked = desk.refusal(chunks[0]), desk.refusal(chunks[1], "unknown_schema")
        desk.write(refused=[refused, garbage, odd], parked=[parked])
        for _ in range(3):
            later()
            found = desk.store.quarantined()
            assert [one.raw for one in found] == [refused.raw, garbage.raw, odd.raw, parked.raw]
            assert [one.parked for one in found] == [False, False, False, True]
            assert [one.reason for one in found] == ["bad_action", "truncated", "bad_number", "unknown_schema"]
            assert (found[0].session, found[0].chunk_no) == (chunks[0].meta.session, 0)
            assert found[1].session is None
            audit = desk.store.audit()
            assert (audit.quarantined, audit.parked, audit.chunks, audit.gap_chunks) == (3, 1, 0, 0)
            assert [one.id for one in desk.store.quarantined(after_id=found[1].id, limit=1)] == [found[2].id]
        desk.store.close()

    def test_quarantined_numbers_count_as_seen(self) -> None:
        desk = self.desk()
        chunks, later = self.chunks(3), self.later(desk)
        desk.write([desk.candidate(chunks[0])], refused=[desk.refusal(chunks[1])])
        desk.put(chunks[2])
        for _ in range(3):
            later()
            info = desk.session(chunks[0].meta.session)
            assert info is not None
            assert (info.high, info.missing) == (3, ())
            desk.write(refused=[desk.refusal(chunks[1])])
            assert desk.put(chunks[1]) == ["duplicate"], "it is in quarantine already"
            assert len(desk.store.quarantined()) == 1
        assert desk.store.audit().gap_chunks == 0
        desk.store.close()

    def test_replay_stores_a_parked_frame_once(self) -> None:
        desk = self.desk()
        chunks, later = self.chunks(3), self.later(desk)
        desk.write(
            [desk.candidate(chunks[0]), desk.candidate(chunks[2])], parked=[desk.refusal(chunks[1], "unknown_schema")]
        )
        (parked,) = desk.store.quarantined()
        candidate = desk.candidate(chunks[1])
        assert list(desk.store.replay([parked.id], [candidate]).fates) == ["new"]
        for _ in range(3):
            later()
            assert "new" not in desk.store.replay([parked.id], [candidate]).fates
            assert desk.put(chunks[1]) == ["duplicate"]
            assert list(desk.store.quarantined()) == []
            assert desk.chunks() == [chunks[0], chunks[2], chunks[1]]
            info, audit = desk.session(chunks[0].meta.session), desk.store.audit()
            assert info is not None
            assert (info.n_chunks, info.n_steps) == (3, sum(chunk.meta.n_steps for chunk in chunks))
            assert (audit.chunks, audit.parked, audit.duplicate_chunks) == (3, 0, 0)
        desk.tail()
        desk.store.close()

    def test_replay_keeps_the_rules_of_sessions(self) -> None:
        desk = self.desk()
        chunks = self.chunks(2)
        desk.put(chunks[0])
        far = random_chunk(SPEC, self.rng, session=chunks[0].meta.session, chunk_no=5000, first_step=1 << 20)
        conflict = Chunk(chunks[0].meta, {**chunks[0].columns, "obs": chunks[0].columns["obs"] + 1})
        desk.put(far, conflict)
        desk.put(chunks[1], player=OTHER_PLAYER)
        waiting = desk.store.quarantined()
        candidates = [desk.candidate(far), desk.candidate(conflict), desk.candidate(chunks[1], player=OTHER_PLAYER)]
        assert "new" not in desk.store.replay([one.id for one in waiting], candidates).fates
        assert "new" not in desk.store.replay([10_000], [desk.candidate(chunks[1])]).fates, "it was never quarantined"
        assert desk.chunks() == [chunks[0]]
        desk.store.close()

    def test_a_stored_chunk_can_be_quarantined_and_brought_back(self) -> None:
        desk = self.desk()
        chunks, later = self.chunks(3), self.later(desk)
        desk.put(*chunks)
        bad = (chunks[1].meta.session, 1)
        desk.tail()
        assert desk.store.quarantine([bad, bad, (new_session(), 0)], reason="nan_gradient") == 1
        assert desk.store.quarantine([bad], reason="nan_gradient") == 0, "it is out already"
        for _ in range(3):
            later()
            assert desk.chunks() == [chunks[0], chunks[2]]
            assert desk.put(chunks[1]) == ["duplicate"]
        desk.write(refused=[RefusedFrame(b"garbage", "truncated", "", desk.clock.now())])
        one, other = desk.store.quarantined()
        assert (one.reason, one.session, one.chunk_no, other.reason) == ("nan_gradient", *bad, "truncated")
        assert desk.store.audit().gap_chunks == 0
        candidate = desk.candidate(chunks[1])
        assert one.raw == candidate.frame.encode()
        assert list(desk.store.replay([one.id], [candidate]).fates) == ["new"]
        self.settle(desk.store)
        assert desk.chunks() == [chunks[0], chunks[2], chunks[1]]
        audit = desk.store.audit()
        assert (audit.chunks, audit.quarantined, audit.duplicate_chunks, list(audit.corrupt)) == (3, 1, 0, [])
        assert desk.store.quarantine([bad], reason="again") == 1
        self.settle(desk.store)
        assert desk.chunks() == [chunks[0], chunks[2]]
        desk.tail()
        desk.store.close()

    # --- tail -----------------------------------------------------------------------------------------------------

    def test_a_tail_shows_every_number_once_whatever_happens_meanwhile(self) -> None:
        desk = self.desk()
        for turn in range(24):
            chunks = self.chunks(3)
            desk.put(*chunks, player=OTHER_PLAYER if turn % 2 else PLAYER)
            desk.write([desk.close(chunks[0].meta.session, 3)] if turn % 2 == 0 else [])
            match turn % 6:
                case 1:
                    desk.reopen()
                case 2:
                    self.settle(desk.store)
                case 3:
                    desk.store.quarantine([(chunks[0].meta.session, 1)], reason="guard")
                case 4:
                    desk.store.forget(PLAYER)
                    desk.clock.advance(3.0)
                case 5:
                    desk.clock.advance(60.0)
                    desk.store.expire(desk.clock.now() - 60.0)
            desk.tail()
        everything = desk.everything()
        assert [item.arrival_no for item in desk.tailed] == [item.arrival_no for item in everything]
        gone = {item.reason for item in everything if isinstance(item, Forgotten)}
        assert gone == {"forgotten", "expired", "quarantined"}
        desk.store.close()

    def test_a_tail_goes_on_from_any_cursor_in_pages(self) -> None:
        desk = self.desk()
        desk.put(*self.chunks(9))
        later = self.later(desk)
        for _ in range(3):
            later()
            for page in (1, 4, 100):
                cursor, seen = None, []
                while items := (tail := desk.store.tail(cursor, max_items=page, wait_s=0.0)).items:
                    assert len(items) <= page
                    seen += [item.arrival_no for item in items]
                    cursor = tail.cursor
                assert seen == list(range(1, 10))
        assert desk.store.tail(cursor, max_items=5, wait_s=0.0).cursor == cursor, "an empty page leaves one in place"
        desk.store.close()

    # --- taking away ----------------------------------------------------------------------------------------------

    def test_a_forgotten_player_is_gone_everywhere(self) -> None:
        for is_settled in (False, True):
            desk = self.desk()
            theirs, parked, others = self.chunks(3), self.chunks(1), self.chunks(2)
            desk.put(*theirs)
            desk.write([desk.close(theirs[0].meta.session, 3)], parked=[desk.refusal(parked[0], "unknown_schema")])
            desk.put(*others, player=OTHER_PLAYER)
            if is_settled:
                self.settle(desk.store)
            desk.tail()
            assert desk.store.forget(PLAYER) == 3
            later = self.later(desk)
            for _ in range(3):
                later()
                assert desk.chunks() == others
                assert list(desk.store.quarantined()) == []
                assert desk.frames(FrameKind.CLOSE) == []
                assert {one.player for one in desk.store.sessions(SessionFilter())} == {OTHER_PLAYER}
                audit = desk.store.audit()
                assert (audit.chunks, audit.forgotten_chunks, audit.gap_chunks) == (2, 3, 0)
            told = [item for item in desk.tail() if isinstance(item, Forgotten)]
            assert any(item.player == tombstone_of(PLAYER) and not item.chunks for item in told), "learners are told"
            assert desk.store.forget(PLAYER) == 0
            self._comes_back_no_more(desk, [*theirs, *parked])
            desk.store.close()

    def _comes_back_no_more(self, desk: Desk, chunks: list[Chunk]) -> None:
        """What a forgotten player's spool and the stream still hold is refused; what they play anew is stored."""
        for chunk in chunks:
            receipt = desk.write([desk.candidate(chunk)], refused=[desk.refusal(chunk)])
            assert (list(receipt.fates), list(receipt.reasons)) == (["refused"], ["forgotten"])
        assert list(desk.store.quarantined()) == []
        desk.clock.advance(10.0)
        fresh = random_session(SPEC, self.rng, session=new_session(desk.clock.now(), self.rng.bytes(10)))
        assert desk.put(*fresh) == ["new"] * 4
        desk.reopen()
        assert desk.put(*fresh) == ["duplicate"] * 4

    def test_a_clock_that_ran_ahead_does_not_save_old_frames(self) -> None:
        desk = self.desk()
        ahead = random_session(SPEC, self.rng, session=new_session(desk.clock.now() + 3600, self.rng.bytes(10)))
        in_stream = [desk.candidate(chunk) for chunk in ahead]
        desk.clock.advance(5.0)
        desk.store.forget(PLAYER)
        assert set(desk.write(in_stream).reasons) == {"forgotten"}
        desk.store.close()

    def test_expired_chunks_are_gone_and_stay_known(self) -> None:
        desk = self.desk()
        old, new = self.chunks(3), self.chunks(2)
        desk.put(*old)
        desk.clock.advance(100.0)
        desk.put(*new)
        assert desk.store.expire(desk.clock.now() - 50.0) == 3
        later = self.later(desk)
        for _ in range(3):
            later()
            assert desk.chunks() == new
            assert desk.put(*old) == ["duplicate"] * 3
            audit = desk.store.audit()
            assert (audit.chunks, audit.expired_chunks, audit.gap_chunks) == (2, 3, 0)
        assert desk.store.expire(desk.clock.now() - 50.0) == 0
        desk.tail()
        desk.store.close()

    def test_expired_quarantine_keeps_its_record_but_not_its_bytes(self) -> None:
        desk = self.desk()
        (chunk,) = self.chunks(1)
        desk.write(refused=[desk.refusal(chunk)])
        desk.clock.advance(100.0)
        desk.store.expire(desk.clock.now() - 50.0)
        assert list(desk.store.quarantined()) == []
        assert desk.put(chunk) == ["duplicate"]
        assert desk.store.audit().gap_chunks == 0
        desk.store.close()
