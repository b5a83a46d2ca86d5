"""The contract of the Link port, as tests to subclass."""

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from understudy.core.errors import LinkFailed
from understudy.core.names import PlayerName, new_session, player_name
from understudy.core.signed import open_signed, trusted_keys
from understudy.experience.chunk import Chunk
from understudy.experience.frame import CloseReport, Frame, close_frame
from understudy.experience.game import GameSpec
from understudy.experience.ticket import MAX_TICKET_CHARS
from understudy.models.manifest import manifest_from_json, open_policy
from understudy.nn.policy import Policy
from understudy.ports import MAX_TICKETS, Link
from understudy.testing.samples import cart_spec, random_session

ADA = player_name("ada")


class LinkContract:
    """Tests of a Link: subclass, define `make`, `release` and `random_policy`; run with pytest.

    `make` is called once per test.
    """

    spec: GameSpec = cart_spec()

    def make(self) -> Link:
        """Create a link to an empty platform, for the game of `spec`."""
        raise NotImplementedError(
            "a subclass of LinkContract must define make(): a link to an empty platform"
        )

    def release(self, policy: Policy, alias: str = "champion") -> int:
        """Release a policy on the platform of the last `make` under an alias; return model_no."""
        raise NotImplementedError(
            "a subclass of LinkContract must define release(): it points the alias to the policy"
        )

    def random_policy(self) -> Policy:
        """Create any policy for `spec`."""
        raise NotImplementedError(
            "a subclass of LinkContract must define random_policy(): one that fits the game"
        )

    # --- Experience -------------------------------------------------------------------------------

    def test_a_spec_may_be_registered_twice(self) -> None:
        link = self.make()
        link.register(self.spec)
        link.register(self.spec)
        link.close()

    def test_frames_are_acknowledged_and_so_are_duplicates(self) -> None:
        link = self._registered()
        frames, players = _played(self.spec)
        for _ in range(2):
            acks = link.send(frames, players)
            assert [ack.accepted for ack in acks] == [True] * len(frames)
        report = CloseReport(len(frames), 0)
        (ack,) = link.send([close_frame(frames[0].session, len(frames), report)], players)
        assert ack.accepted
        link.close()

    def test_each_frame_has_its_own_ack(self) -> None:
        link = self._registered()
        frames, players = _played(self.spec)
        strangers, _ = _played(self.spec)
        acks = link.send([frames[0], strangers[0], frames[1]], players)
        assert [ack.accepted for ack in acks] == [True, False, True]
        assert acks[1].refused is not None
        assert "no_player" in acks[1].refused
        link.close()

    def test_sixty_four_frames_fit_into_one_send(self) -> None:
        link = self._registered()
        sessions = [_played(self.spec, n_chunks=2) for _ in range(32)]
        frames = [frame for frames, _ in sessions for frame in frames]
        players = {session: name for _, names in sessions for session, name in names.items()}
        assert all(ack.accepted for ack in link.send(frames, players))
        link.close()

    def test_skipped_steps_may_be_sent_alone_and_a_recording_rate_is_known(self) -> None:
        link = self._registered()
        assert link.recording_rate == 1.0
        assert list(link.send([], {}, skipped_steps=1000)) == []
        assert 0.0 <= link.recording_rate <= 1.0
        link.close()

    # --- Bots -------------------------------------------------------------------------------------

    def test_without_a_bot_there_are_no_live_models(self) -> None:
        link = self._registered()
        assert link.bot(0, wait_s=0.0) is None
        link.close()

    def test_a_champion_has_documents_that_verify(self) -> None:
        link = self._registered()
        policy = self.random_policy()
        number = self.release(policy)
        models = link.bot(0, wait_s=5.0)
        assert models is not None
        assert models.champion is not None
        assert models.champion_release is not None
        trusted = trusted_keys(*models.trust)
        point = open_signed(models.champion.encode(), trusted)
        assert (point["alias"], point["model_no"]) == ("champion", number)
        manifest = manifest_from_json(
            open_signed(models.champion_release.encode(), trusted)["manifest"]
        )
        assert manifest.name == f"{self.spec.game}/{number}"
        assert open_policy(manifest, link.policy(number)) == policy
        assert (models.canary_release, models.canary_share) == (None, 0.0)
        link.close()

    def test_a_canary_has_its_share(self) -> None:
        link = self._registered()
        self.release(self.random_policy())
        number = self.release(self.random_policy(), "canary")
        models = link.bot(0, wait_s=5.0)
        while models is not None and models.canary is None:
            models = link.bot(models.number, wait_s=5.0)
        assert models is not None
        assert models.canary is not None
        document = open_signed(models.canary.encode(), trusted_keys(*models.trust))
        assert document["model_no"] == number
        assert 0.0 < models.canary_share <= 0.5
        link.close()

    def test_tickets_draw_between_the_bots_of_a_trial(self) -> None:
        link = self._registered()
        champion = self.release(self.random_policy())
        assert link.tickets(1, schema=self.spec.schema).tickets == ()
        canary = self.release(self.random_policy(), "canary")
        models = link.bot(0, wait_s=5.0, schema=self.spec.schema)
        while models is not None and models.canary is None:
            models = link.bot(models.number, wait_s=5.0, schema=self.spec.schema)
        assert models is not None
        assert models.canary is not None
        batches = [link.tickets(n, schema=self.spec.schema) for n in (1, MAX_TICKETS)]
        entry = open_signed(models.canary.encode(), trusted_keys(*models.trust))["number"]
        assert [batch.entry for batch in batches] == [entry] * 2
        assert [set(batch.models) for batch in batches] == [{champion, canary}] * 2
        assert [len(batch.tickets) for batch in batches] == [1, MAX_TICKETS]
        drawn = [ticket for batch in batches for ticket in batch.tickets]
        assert {ticket.model_no for ticket in drawn} == {champion, canary}
        assert len({ticket.ticket for ticket in drawn}) == len(drawn)
        assert all(0 < len(ticket.ticket) <= MAX_TICKET_CHARS for ticket in drawn)
        assert all(batch.valid_s > 0 for batch in batches)
        link.close()

    def test_each_schema_has_its_own_live_models(self) -> None:
        link = self._registered()
        number = self.release(self.random_policy())
        other = replace(self.spec, max_episode_steps=(self.spec.max_episode_steps or 0) + 1)
        link.register(other)
        for schema in (None, self.spec.schema):
            models = link.bot(0, wait_s=5.0, schema=schema)
            while models is not None and models.champion is None:
                models = link.bot(models.number, wait_s=5.0, schema=schema)
            assert models is not None
            assert models.champion is not None
            point = open_signed(models.champion.encode(), trusted_keys(*models.trust))
            assert point["model_no"] == number
        models = link.bot(0, wait_s=1.0, schema=other.schema)
        assert models is None or models.champion is None
        link.close()

    def test_a_call_with_the_newest_number_waits_for_the_next(self) -> None:
        link = self._registered()
        self.release(self.random_policy())
        models = link.bot(0, wait_s=5.0)
        assert models is not None
        while (newer := link.bot(models.number, wait_s=0.3)) is not None:
            models = newer
        release = threading.Timer(0.1, self.release, [self.random_policy()])
        release.start()
        newest = link.bot(models.number, wait_s=10.0)
        release.join()
        assert newest is not None
        assert newest.number > models.number
        link.close()

    def test_a_missing_policy_fails_the_call(self) -> None:
        link = self._registered()
        assert _code(lambda: link.policy(99)) == "not_found"
        link.close()

    # --- Close ------------------------------------------------------------------------------------

    def test_close_ends_a_waiting_call_and_may_be_repeated(self) -> None:
        link = self._registered()
        ended = threading.Event()

        def wait() -> None:
            _code(lambda: link.bot(1_000_000, wait_s=25.0))
            ended.set()

        threading.Thread(target=wait, daemon=True).start()
        time.sleep(0.3)
        link.close()
        link.close()
        assert ended.wait(5.0)

    def _registered(self) -> Link:
        link = self.make()
        link.register(self.spec)
        return link


def _code(call: Callable[[], object]) -> str:
    try:
        call()
    except LinkFailed as failed:
        return failed.code
    return "no failure"


def _played(spec: GameSpec, n_chunks: int = 3) -> tuple[list[Frame], dict[uuid.UUID, PlayerName]]:
    chunks: Sequence[Chunk] = random_session(
        spec, np.random.default_rng(0), n_chunks=n_chunks, session=new_session(time.time())
    )
    frames = [chunk.frame() for chunk in chunks]
    return frames, {frames[0].session: ADA}
