"""A forgotten player is in no file, whatever is sent again; other players are unaffected."""

import shutil
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.card import Card
from tests.faults import sabotage
from tests.faults.processes import start, understudy_here, wait_until
from tests.faults.recording import GAME, cart, playing
from understudy.backends.data import DataFolder
from understudy.core.names import new_session
from understudy.experience.frame import Frame, decode_frame
from understudy.experience.intake import deployment_key, pseudonym
from understudy.platform.ingest import IngestRole
from understudy.ports import Stored
from understudy.stores.view import StoreView
from understudy.streams.file import FileStream
from understudy.testing import Faults, FaultyLink
from understudy.testing.samples import random_chunk

CANARY = np.array([1234.5678, -8765.4321, 0.000123456, 4242.4242], np.float32).tobytes()


@pytest.fixture
def data(tmp_path: Path) -> DataFolder:
    return DataFolder(tmp_path / "data")


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def record_everywhere(data: DataFolder, rng: np.random.Generator, aside: Path) -> list[Frame]:
    """Leave ada's canary in store, quarantine, stream and spool; returns her frames."""
    with IngestRole(data) as role:
        for _ in range(2):
            with playing(data, ["ada", "bob"], rng, canary=CANARY) as table:
                for _ in range(6):
                    table.play()
                    role.service.drain()
            poison(data, rng)
            role.service.drain()
    with playing(data, ["ada", "bob"], rng, canary=CANARY) as table:
        for _ in range(4):
            table.play()
    spooled = DataFolder(data.root)
    with playing(
        spooled,
        ["ada"],
        rng,
        canary=CANARY,
        wrap=lambda link: FaultyLink(link, Faults(fail=1.0), rng),
    ) as table:
        table.play()
        shutil.copytree(data.spool, aside)
    ada = pseudonym(deployment_key(data.root), GAME, "ada")
    raws = [raw for path in data.stream.glob("*/*.log") for raw in sabotage.frames_in(path)]
    return [frame for frame in map(decode_frame, raws) if frame.player == ada]


def poison(data: DataFolder, rng: np.random.Generator) -> None:
    """A frame of ada's that ends in quarantine: the canary beside an action that is none."""
    chunk = random_chunk(cart(), rng, session=new_session())
    columns = {name: column.copy() for name, column in chunk.columns.items()}
    columns["obs"][0] = np.frombuffer(CANARY, np.float32)
    columns["action"][0] = 77
    frame = replace(chunk, columns=columns).frame()
    stream = FileStream(data.stream)
    ada = pseudonym(deployment_key(data.root), GAME, "ada")
    assert stream.append([frame.stamped(ada, int(chunk.meta.session.int >> 80) // 1000)])[
        0
    ].accepted
    stream.close()


def places(data: DataFolder) -> set[str]:
    """Parts of the data folder in which the canary is."""
    found = set()
    for path in data.root.rglob("*"):
        if path.is_file() and CANARY in path.read_bytes():
            found.add("/".join(path.relative_to(data.root).parts[:2]))
    return found


def others(data: DataFolder) -> set[tuple[uuid.UUID, int, int]]:
    """Stored frames of all players but ada."""
    ada = pseudonym(deployment_key(data.root), GAME, "ada")
    with StoreView(data.store) as view:
        items = view.tail(None, max_items=100_000, wait_s=0.0).items
    frames = [item.frame for item in items if isinstance(item, Stored)]
    return {
        (frame.session, frame.chunk_no, frame.body_crc) for frame in frames if frame.player != ada
    }


def settle(data: DataFolder) -> None:
    """Store or refuse what is in the stream, then let its retention pass."""
    with IngestRole(data) as role:
        role.service.drain()
        role.trim(0.0)


def send_again(data: DataFolder, frames: list[Frame], aside: Path) -> Iterator[str]:
    """Everything that could bring the canary back."""
    shutil.rmtree(data.spool)
    shutil.copytree(aside, data.spool)
    assert understudy_here("data", "verify", "--data", data.root).code == 0
    yield "spool"
    stream = FileStream(data.stream)
    assert all(outcome.accepted for outcome in stream.append(frames))
    stream.close()
    yield "stream"


def test_a_canary_is_in_no_file_after_forget_and_retention(
    data: DataFolder, rng: np.random.Generator, tmp_path: Path, card: Card
) -> None:
    frames = record_everywhere(data, rng, tmp_path / "aside")
    assert {"store", "stream", "spool"} <= {place.split("/")[0] for place in places(data)}
    settle(data)
    before = others(data)
    assert before
    answer = understudy_here("data", "forget", "ada", "--data", data.root)
    assert (answer.code, answer.fields["spooled_sessions"]) == (0, 1), answer
    assert answer.fields["chunks"] > 10
    held = [places(data) == set()]
    for way in send_again(data, frames, tmp_path / "aside"):
        settle(data)
        assert places(data) == set(), f"the {way} brought the canary back"
        held.append(True)
    verified = understudy_here("data", "verify", "--data", data.root)
    assert verified.code == 0, verified
    assert verified.fields["forgotten_chunks"] > 10
    assert others(data) == before
    card.line(
        "marker of an erased player found in no file",
        tried=len(held),
        held=sum(held),
        note="at once, from spool, from stream",
    )
    assert all(held)


def test_a_live_store_forgets_while_others_keep_playing(
    data: DataFolder, rng: np.random.Generator, card: Card
) -> None:
    ingest = start("understudy.platform.ingest", str(data.root))
    try:
        with playing(data, ["ada"], rng, canary=CANARY) as table:
            for _ in range(5):
                table.play()
        with playing(data, ["bob"], rng) as table:
            table.play()
            wait_until(lambda: ingest.latest.get("stored", 0) >= 48, timeout_s=60, what="storing")
            answer = understudy_here("data", "forget", "ada", "--data", data.root)
            table.play()
        assert answer.code == 0, answer
        assert answer.fields["chunks"] >= 5
    finally:
        ingest.stop()
        assert ingest.wait(60.0) == 0, ingest.errors
    settle(data)
    gone = places(data) == set()
    card.line("marker of an erased player found in no file, writer alive", tried=1, held=int(gone))
    assert gone
    assert len(others(data)) >= 2
    assert understudy_here("data", "verify", "--data", data.root).code == 0
