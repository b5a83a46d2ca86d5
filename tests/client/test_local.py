"""The link into a local stream: the same intake, and a full disk delays frames without loss."""

import numpy as np
import pytest

from tests.act.policies import random_policy
from tests.client.fakes import FakeClock, chunks, client
from tests.streams.memory import MemoryStream
from understudy.backends.data import DataFolder
from understudy.backends.deployment import open_deployment
from understudy.client import ClientConfig, RecordingWarning, connect
from understudy.client.connect import local_link
from understudy.client.local import RETRY_AFTER_S, LocalLink
from understudy.core.errors import LinkFailed, StorageFailed, StorageFull
from understudy.core.names import game_name, new_session, player_name
from understudy.core.signed import Signer
from understudy.experience.frame import data_frame, decode_frame
from understudy.experience.game import game_spec, spec_from_json
from understudy.experience.intake import Intake, pseudonym
from understudy.models.manifest import Lineage
from understudy.models.objects import FolderObjects
from understudy.models.registry import Registry, write_trust
from understudy.ports import Ack

KEY = bytes(32)
CLOCK = FakeClock()
ANNA = player_name("anna")


def link_over(stream, tmp_path, clock=CLOCK):
    return LocalLink(
        stream, intake=Intake(KEY, game_name("my-game"), clock), specs_folder=tmp_path / "games"
    )


def frame():
    return data_frame(new_session(CLOCK.now()), 0, b"body")


class Broken:
    """A stream with scripted results."""

    def __init__(self, answer):
        self.answer = answer

    def append(self, frames):
        if isinstance(self.answer, Exception):
            raise self.answer
        return [self.answer] * len(frames)

    def close(self):
        pass


def test_a_spec_is_written_once_to_the_specs_folder(tmp_path):
    spec = game_spec("my-game", obs=2, actions=3)
    link = link_over(MemoryStream(), tmp_path)
    link.register(spec)
    link.register(spec)
    (path,) = (tmp_path / "games").rglob("*.json")
    assert path == tmp_path / "games" / "my-game" / f"{spec.schema}.json"
    assert spec_from_json(path.read_bytes()) == spec


def test_a_key_that_was_added_to_the_models_signs_no_bot(tmp_path):
    spec = game_spec("my-game", obs=2, actions=3)
    deployment = open_deployment(DataFolder(tmp_path))
    registry = deployment.registry
    registry.register(spec)
    epoch = registry.takeover(spec.game, owner="learner")
    registry.release(random_policy(spec, "argmax", seed=0), Lineage(algorithm="bc"), epoch=epoch)
    registry.set_alias(spec.game, "champion", 1, why="test")
    # May write below models, but cannot read signing.key.
    signer = Signer(b"E" * 32)
    objects = FolderObjects(tmp_path / "models")
    write_trust(objects, signer)
    forging = Registry(
        objects,
        trusted={**deployment.trusted, signer.key_id: signer.public},
        signer=signer,
    )
    forging.release(random_policy(spec, "argmax", seed=1), Lineage(algorithm="bc"), epoch=epoch)
    forging.set_alias(spec.game, "champion", 2, why="forged")
    config = ClientConfig(background=False)
    with connect(spec, data=tmp_path, config=config) as game:
        assert game.wait_for_bot(5.0)
        assert game.stats().bot == "my-game/1"


def test_an_unreadable_signing_key_gives_no_bot(tmp_path):
    link = local_link(tmp_path, game_spec("my-game", obs=2, actions=3), CLOCK)
    assert link.bot(0, wait_s=0.0) is None
    (tmp_path / "signing.key").write_bytes(b"damaged")
    with pytest.raises(LinkFailed, match=r"signing\.key is damaged"):
        link.bot(0, wait_s=0.0)
    link.close()


def test_admitted_frames_are_stamped_and_acknowledged(tmp_path):
    stream = MemoryStream()
    good = frame()
    nameless = frame()
    acks = link_over(stream, tmp_path).send([nameless, good], {good.session: ANNA})
    assert [ack.accepted for ack in acks] == [False, True]
    assert acks[0].refused is not None
    assert "no_player" in acks[0].refused
    (record,) = stream.read(stream.partitions()[0].id, None, max_bytes=1 << 20, wait_s=0.0).records
    assert decode_frame(record.raw).player == pseudonym(KEY, "my-game", "anna")


@pytest.mark.parametrize(
    ("answer", "retry_after_s", "error"),
    [
        (StorageFull("no room"), RETRY_AFTER_S, "no room"),
        (StorageFailed("gone"), RETRY_AFTER_S, "gone"),
        (OSError(5, "io"), RETRY_AFTER_S, "[Errno 5] io"),
        (Ack(False, None, 3.0, "busy"), 3.0, "busy"),
        (Ack(False, None, 3.0), 3.0, ""),
    ],
)
def test_a_stream_that_cannot_store_now_asks_for_a_retry_and_gives_the_reason(
    tmp_path, answer, retry_after_s, error
):
    good = frame()
    (ack,) = link_over(Broken(answer), tmp_path).send([good], {good.session: ANNA})
    assert ack == Ack(False, refused=None, retry_after_s=retry_after_s, error=error)


@pytest.mark.parametrize(
    "ack", [Ack(False, "too_large: no"), Ack(False), Ack(False, None, 3.0, "busy"), Ack(True)]
)
def test_the_ack_of_the_stream_is_the_ack_of_the_link(tmp_path, ack):
    good = frame()
    assert link_over(Broken(ack), tmp_path).send([good], {good.session: ANNA}) == [ack]


def test_a_frame_that_the_stream_rejects_is_not_retried_forever(tmp_path):
    game = client(
        link_over(Broken(Ack(False, "too_large: no")), tmp_path, clock := FakeClock()),
        tmp_path,
        clock=clock,
    )
    ep = game.episode(player="anna")
    ep.acted([0, 0], 0)
    ep.end([1, 1])
    with pytest.warns(RecordingWarning, match="too_large"):
        assert game.close()
    assert (game.stats().refused_steps, game.stats().failed_sends) == (1, 0)


def test_a_full_disk_stops_nothing_and_loses_nothing(tmp_path):
    class SometimesFull(MemoryStream):
        is_full = True

        def append(self, frames):
            if self.is_full:
                raise StorageFull("no room: free some space")
            return super().append(frames)

    clock = FakeClock()
    stream = SometimesFull(clock=clock)
    game = client(link_over(stream, tmp_path, clock), tmp_path, clock=clock)
    ep = game.episode(player="anna")
    for at in range(1500):
        ep.acted(np.array([at, 0], np.float32), 0)
    ep.end()
    for _ in range(5):
        clock.advance(40)
        game.pump()
    assert game.stats().acked_steps == 0
    assert game.stats().last_error == "no room: free some space"
    stream.is_full = False
    clock.advance(40)
    game.pump()
    game.close()
    records = [
        record
        for one in stream.partitions()
        for record in stream.read(one.id, None, max_bytes=1 << 24, wait_s=0).records
    ]
    frames = {one.chunk_no: one for one in (decode_frame(record.raw) for record in records)}
    assert sum(chunk.meta.n_steps for chunk in chunks(frames)) == 1500


@pytest.mark.parametrize("days", [-2, 9])
def test_a_client_drops_nothing_while_the_platforms_clock_is_wrong(tmp_path, days):
    clock = FakeClock()
    platform = FakeClock(clock.now_s + days * 86_400)
    stream = MemoryStream()
    game = client(link_over(stream, tmp_path, platform), tmp_path, clock=clock)
    for name in ("anna", "ben", "carl"):
        ep = game.episode(player=name)
        ep.acted([0, 0], 0)
        ep.end([1, 0])
    for _ in range(20):
        clock.advance(31)
        game.pump()
    stats = game.stats()
    assert (stats.acked_steps, stats.refused_steps, stats.dropped_steps) == (0, 0, 0)
    assert "clocks_differ" in stats.last_error
    platform.now_s = clock.now_s
    clock.advance(31)
    assert game.flush(1.0)
    assert game.stats().acked_steps == 3
    game.close()
