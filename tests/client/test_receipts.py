"""Receipts: every acknowledged frame leaves a line, and a full disk does not stop a game."""

import json
import os
import tracemalloc
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from understudy.backends.data import DataFolder
from understudy.client.connect import ClientConfig, Game, connect, local_link
from understudy.client.receipts import Receipts, read_receipts
from understudy.client.session import RecordingWarning
from understudy.core.clock import SystemClock
from understudy.core.errors import ConfigError, Corrupt
from understudy.experience.game import game_spec
from understudy.simulation.ledger import LedgerLink, read_ledger
from understudy.testing.samples import cart_spec, random_session


def game(folder: Path, receipts: Path) -> Game:
    config = ClientConfig(background=False)
    return connect(
        "tag", obs=3, actions=2, data=folder, consent="granted", receipts=receipts, config=config
    )


def play(game: Game, steps: int, *, player: str = "ada") -> None:
    episode = game.episode(player=player)
    for _ in range(steps):
        episode.acted([0.0, 0.0, 0.0], 1)
    episode.end()


def test_every_acknowledged_frame_has_a_receipt(tmp_path: Path) -> None:
    receipts = tmp_path / "receipts.jsonl"
    with game(tmp_path / "D", receipts) as first:
        play(first, 700)
        play(first, 20, player="bob")
    acked = list(read_receipts(receipts))
    assert len(acked) == first.stats().acked_frames > 4
    assert {uuid.UUID(bytes=frame.session).version for frame in acked} == {7}
    with game(tmp_path / "D", receipts) as second:
        play(second, 20)
    assert len(list(read_receipts(receipts))) == len(acked) + second.stats().acked_frames
    assert receipts.stat().st_mode & 0o077 == 0


def test_receipts_match_an_independent_ledger(tmp_path: Path) -> None:
    data = DataFolder(tmp_path / "D")
    spec = game_spec("tag", obs=3, actions=2)
    link = LedgerLink(local_link(data.root, spec, SystemClock()), data.ledger)
    path = tmp_path / "receipts.jsonl"
    config = ClientConfig(link=link, background=False, spool=data.spool)
    with connect(spec, consent="granted", receipts=path, config=config) as recording:
        play(recording, 600)
    promised = {(entry.session, entry.chunk_no, entry.crc) for entry in read_ledger(data.ledger)}
    receipts = read_receipts(path)
    assert {(acked.session, acked.chunk_no, acked.crc) for acked in receipts} == promised


def test_a_cut_line_is_skipped_and_a_damaged_one_named(tmp_path: Path) -> None:
    path = tmp_path / "receipts.jsonl"
    with game(tmp_path / "D", path) as first:
        play(first, 20)
    whole = list(read_receipts(path))
    with path.open("ab") as file:
        file.write(b'{"session": "0190')  # killed while writing
    with game(tmp_path / "D", path) as second:
        play(second, 20)
    cut: list[int] = []
    assert list(read_receipts(path, on_cut=cut.append))[: len(whole)] == whole
    assert cut == [len(whole) + 1]
    assert len(list(read_receipts(path))) == 2 * len(whole)
    path.write_bytes(path.read_bytes().replace(b'"chunk_no"', b'"chunk_mo"', 1))
    with pytest.raises(Corrupt, match=r"line 1 of .* is not a receipt"):
        list(read_receipts(path))
    nested = "{" + '"a":{' * 100_000 + "}" * 100_001
    session = "019f0000-0000-7000-8000-000000000000"
    infinite = f'{{"session": "{session}", "chunk_no": 1e400, "length": 1, "crc": 1}}'
    for line in (nested, infinite, "[1, 2]", "17", "null", '{"session": 3}'):
        path.write_text(line)
        with pytest.raises(Corrupt, match=r"line 1 of .* is not a receipt"):
            list(read_receipts(path))


def test_a_line_without_an_end_is_not_read_into_memory(tmp_path: Path) -> None:
    path = tmp_path / "receipts.jsonl"
    with path.open("wb") as file:
        file.truncate(64 << 20)
    tracemalloc.start()
    with pytest.raises(Corrupt, match=r"line 1 of .* is not a receipt"):
        list(read_receipts(path))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_file_that_cannot_be_written_is_refused_at_the_start_and_warned_of_later(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match="use a file in an existing folder"):
        game(tmp_path / "D", tmp_path / "nowhere" / "receipts.jsonl")
    number: Any = 3
    with pytest.raises(ConfigError, match="receipts '3' cannot be written"):
        game(tmp_path / "D", number)
    path = tmp_path / "receipts.jsonl"
    with game(tmp_path / "D", path) as recording:
        path.unlink()
        path.mkdir()
        play(recording, 20)
        with pytest.warns(
            RecordingWarning,
            match="acknowledgements are missing: writing",
        ):
            assert recording.flush()
    assert recording.stats().acked_steps == 20


def test_a_line_names_session_number_length_and_checksum_and_no_descriptor_stays(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    path = tmp_path / "receipts.jsonl"
    receipts = Receipts(path, warn=lambda topic, text: pytest.fail(text))
    frames = [chunk.frame() for chunk in random_session(cart_spec(), rng, n_chunks=3)]
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else 0
    receipts.add(frames)
    receipts.add([])
    if before:
        assert len(os.listdir("/proc/self/fd")) == before
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["chunk_no"] for line in lines] == [0, 1, 2]
    assert lines[0] == {
        "session": str(frames[0].session),
        "chunk_no": 0,
        "length": len(frames[0].body),
        "crc": frames[0].body_crc,
    }


def test_lines_that_did_not_fit_into_one_write_are_added(
    tmp_path: Path, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_write = os.write
    monkeypatch.setattr(os, "write", lambda file, raw: true_write(file, raw[:100]))
    receipts = Receipts(tmp_path / "receipts.jsonl", warn=lambda topic, text: pytest.fail(text))
    frames = [chunk.frame() for chunk in random_session(cart_spec(), rng, n_chunks=3)]
    receipts.add(frames)
    acked = list(read_receipts(tmp_path / "receipts.jsonl"))
    assert [frame.chunk_no for frame in acked] == [0, 1, 2]


def test_lines_that_are_cut_at_a_limit_are_warned_of_and_skipped(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    resource = pytest.importorskip("resource")
    path = tmp_path / "receipts.jsonl"
    warned: list[str] = []
    receipts = Receipts(path, warn=lambda topic, text: warned.append(text))
    frames = [chunk.frame() for chunk in random_session(cart_spec(), rng, n_chunks=3)]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, hard))
    try:
        receipts.add(frames)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(warned) == 1
    assert path.stat().st_size == 200
    receipts.add(frames)
    assert [frame.chunk_no for frame in read_receipts(path)] == [0, 0, 1, 2]


def test_a_line_that_another_process_left_cut_spoils_no_line_after_it(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    path = tmp_path / "receipts.jsonl"
    receipts = Receipts(path, warn=lambda topic, text: pytest.fail(text))
    frames = [chunk.frame() for chunk in random_session(cart_spec(), rng, n_chunks=3)]
    receipts.add(frames[:1])
    with path.open("ab") as file:
        file.write(b'{"session": "0190')  # another process, on a full disk
    receipts.add(frames[1:])
    cut: list[int] = []
    assert [acked.chunk_no for acked in read_receipts(path, on_cut=cut.append)] == [0, 1, 2]
    assert cut == [2]


def test_lines_that_two_processes_wrote_into_each_other_are_counted_as_cut(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    path = tmp_path / "receipts.jsonl"
    receipts = Receipts(path, warn=lambda topic, text: pytest.fail(text))
    receipts.add([chunk.frame() for chunk in random_session(cart_spec(), rng, n_chunks=2)])
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first[:20] + second + first[20:])
    cut: list[int] = []
    assert [acked.chunk_no for acked in read_receipts(path, on_cut=cut.append)] == [1]
    assert cut == [1, 2]


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("chunk_no", "-1"),
        ("chunk_no", "1.7"),
        ("chunk_no", "1e23"),
        ("chunk_no", str(1 << 48)),
        ("length", '"3"'),
        ("length", str(512 * 1024)),
        ("crc", "true"),
        ("crc", str(1 << 32)),
        ("crc", "9" * 5000),
    ],
)
def test_a_number_that_no_receipt_can_have_is_named(tmp_path: Path, name: str, number: str) -> None:
    fields = {"chunk_no": "0", "length": "1", "crc": "1"} | {name: number}
    numbers = ", ".join(f'"{field}": {text}' for field, text in fields.items())
    path = tmp_path / "receipts.jsonl"
    path.write_text(f'{{"session": "019f0000-0000-7000-8000-000000000000", {numbers}}}\n')
    with pytest.raises(Corrupt, match=r"line 1 of .* is not a receipt"):
        list(read_receipts(path))
