"""What docs/protocol.md and docs/formats.md say about acks, chunks and reports is what happens."""

import json
import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.ingest.specs import KnownSpecs
from tests.serve.gateways import Running, running
from understudy.core import tensors
from understudy.core.names import new_session
from understudy.experience.chunk import EpisodeNote
from understudy.experience.frame import Frame, FrameKind, data_frame
from understudy.experience.game import game_spec
from understudy.ingest.service import IngestService
from understudy.ports import Ack, SessionFilter, SessionInfo
from understudy.stores.local import LocalStore
from understudy.streams.file import FileStream

ROOT = Path(__file__).parents[2]
PROTOCOL = (ROOT / "docs" / "protocol.md").read_text()
FORMATS = (ROOT / "docs" / "formats.md").read_text()
SPEC = game_spec("cart", obs=2, actions=["left", "right"])
NOT_FINITE = {"reward": np.array([np.nan, 1, 0], np.float32)}


class Deployment:
    """A gateway, and an ingest into a store of its own."""

    def __init__(self, gateway: Running) -> None:
        self.gateway = gateway
        self.key = gateway.key("play", registers=True)
        self.store = LocalStore(gateway.folder / "store")
        self.stream = FileStream(gateway.folder / "stream")
        self.ingest = IngestService(self.stream, self.store, KnownSpecs(SPEC), owner="test")

    def send(self, *frames: Frame) -> list[Ack]:
        answer = self.gateway.send(self.key, frames)
        assert answer.status == 200
        return [Ack(**ack) for ack in answer.json["acks"]]

    def quarantined(self, session: uuid.UUID) -> list[str]:
        while self.ingest.step():
            pass
        return [frame.reason for frame in self.store.quarantined() if frame.session == session]

    def info(self, session: uuid.UUID) -> SessionInfo:
        (info,) = (info for info in self.store.sessions(SessionFilter()) if info.session == session)
        return info


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with running(tmp_path_factory.mktemp("experience")) as gateway:
        deployment = Deployment(gateway)
        loose = json.dumps(json.loads(SPEC.to_json()), indent=4).encode()
        registered = gateway.ask("PUT", "/v1/games/cart", deployment.key, loose)
        assert registered.json == {"game": "cart", "schema": SPEC.schema}, "in any formatting"
        yield deployment
        deployment.stream.close()
        deployment.store.close()


def chunk_frame(
    session: uuid.UUID,
    chunk_no: int = 0,
    *,
    metadata: Mapping[str, str] | None = None,
    columns: Mapping[str, Any] | None = None,
) -> Frame:
    """A chunk of two steps, with some of its metadata and columns replaced, unchecked."""
    all_metadata = {
        "format": "understudy-chunk/1",
        "game": "cart",
        "schema": SPEC.schema,
        "session": str(session),
        "chunk_no": str(chunk_no),
        "first_step": "0",
        "n_steps": "2",
        "kind": "player",
        "consent": "granted",
        "client": "example/1",
        "episodes": '[{"row":0,"seat":0}]',
    }
    all_columns: dict[str, Any] = {
        "obs": np.zeros((3, 2), np.float32),
        "action": np.array([1, 0, 0], np.int32),
        "reward": np.array([1, 1, 0], np.float32),
        "row": np.array([0, 0, 1], np.uint8),
        "is_first": np.array([True, False, False]),
        "terminated": np.array([False, True, False]),
        "truncated": np.zeros(3, np.bool_),
    }
    body = tensors.encode({**all_columns, **(columns or {})}, {**all_metadata, **(metadata or {})})
    return data_frame(session, chunk_no, body)


def report_frame(session: uuid.UUID, chunk_no: int, kind: FrameKind, body: str) -> Frame:
    """A frame with exactly this text as its body."""
    return replace(data_frame(session, chunk_no, body.encode()), kind=kind)


def rows_after(page: str, header: str) -> list[list[str]]:
    """The cells of the table under this header line."""
    lines = page.split(f"\n{header}\n")[1].splitlines()[1:]
    table = lines[: next(n for n, line in enumerate(lines) if not line.startswith("|"))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_the_drop_report_and_close_of_the_page_leave_nothing_missing(deployment: Deployment):
    session = new_session()
    frames = []
    rows = rows_after(FORMATS, "| `chunk_no` | kind | `first_step` | body |")
    for numbers, kind, first_step, body in rows:
        if kind == "never sent":
            continue
        number = int(numbers)
        if kind == "0":
            frames.append(chunk_frame(session, number, metadata={"first_step": first_step}))
        else:
            frames.append(report_frame(session, number, FrameKind(int(kind)), body.strip("`")))
    assert [frame.chunk_no for frame in frames] == [0, 3, 4, 5]
    assert all(ack.accepted for ack in deployment.send(*frames))
    assert deployment.quarantined(session) == []
    info = deployment.info(session)
    assert (info.n_chunks, info.n_steps, info.dropped_steps) == (2, 4, 4)
    assert (info.high, info.missing, info.closed) == (6, (), True)


def test_the_two_chunks_of_an_episode_on_the_page_are_stored(deployment: Deployment):
    session = new_session()
    rows = rows_after(FORMATS, "| `chunk_no` | `obs` | `row` | `is_first` | `terminated` | |")
    for number in (0, 1):
        own = [row for row in rows if row[0] == str(number)]
        flags = {
            name: np.array([row[at] == "true" for row in own])
            for name, at in (("is_first", 3), ("terminated", 4))
        }
        columns = {
            **flags,
            "obs": np.zeros((len(own), 2), np.float32),
            "action": np.zeros(len(own), np.int32),
            "reward": np.zeros(len(own), np.float32),
            "row": np.array([int(row[2]) for row in own], np.uint8),
            "truncated": np.zeros(len(own), np.bool_),
        }
        facts = own[0][5]
        metadata = dict(re.findall(r"`(first_step|n_steps)` (\d+)", facts))
        (metadata["episodes"],) = re.findall(r"`(\[.*\])`", facts)
        frame = chunk_frame(session, number, metadata=metadata, columns=columns)
        assert deployment.send(frame)[0].accepted
    assert deployment.quarantined(session) == []
    assert deployment.info(session).n_steps == 4


CONTENTS: Sequence[tuple[str, Mapping[str, Any]]] = (
    ("not_finite", {"columns": NOT_FINITE}),
    ("not_finite", {"columns": {"reward": np.array([1e30, 1, 0], np.float32)}}),
    ("bad_action", {"columns": {"action": np.array([7, 0, 0], np.int32)}}),
    ("bad_rows", {"columns": {"row": np.zeros(3, np.uint8)}}),
    ("bad_columns", {"columns": {"colour": np.zeros(3, np.float32)}}),
    ("invalid_action", {"columns": {"action_mask": np.array([[1, 0]] * 3, np.bool_)}}),
    ("bad_metadata", {"metadata": {"episodes": "[]"}}),
    ("bad_metadata", {"metadata": {"episodes": '[{"row":0}]'}}),
    ("bad_json", {"metadata": {"episodes": '[{"row":0,'}}),
    ("bad_codec", {"metadata": {"codec": '{"obs":["lz4","F32",[3,2]]}'}}),
    ("bad_version", {"metadata": {"format": "understudy-chunk/2"}}),
    ("identity_mismatch", {"metadata": {"chunk_no": "1"}}),
    ("unknown_schema", {"metadata": {"schema": "ab" * 32}}),
)


@pytest.mark.parametrize(("code", "changes"), CONTENTS)
def test_contents_are_checked_after_the_ack(
    code: str, changes: Mapping[str, Any], deployment: Deployment
):
    session = new_session()
    assert deployment.send(chunk_frame(session, **changes))[0].accepted
    assert deployment.quarantined(session) == [code]
    (line,) = re.findall(r"^\| contents, after .*$", PROTOCOL, re.MULTILINE)
    assert f"`{code}`" in line


def test_a_corrected_frame_with_a_quarantined_number_is_a_conflict(deployment: Deployment):
    session = new_session()
    deployment.send(chunk_frame(session, columns=NOT_FINITE))
    deployment.quarantined(session)
    assert deployment.send(chunk_frame(session))[0].accepted
    assert deployment.quarantined(session) == ["not_finite", "conflict"]


def test_invalid_columns_are_rejected_at_once_and_their_number_stays_free(deployment: Deployment):
    path = "/v1/games/cart/columns"
    columns = {
        "obs": [[0, 0]] * 3,
        "action": [7, 0, 0],
        "reward": [0, 0, 0],
        "row": [0, 0, 1],
        "is_first": [True, False, False],
        "terminated": [False, True, False],
        "truncated": [False] * 3,
    }
    session = new_session()
    sent = {"player": "ada", "session": str(session), "chunk_no": 0, "columns": columns}
    rejected = deployment.gateway.ask("POST", path, deployment.key, sent)
    assert (rejected.status, rejected.code) == (400, "bad_action")
    corrected = sent | {"columns": columns | {"action": [1, 0, 0]}}
    assert deployment.gateway.ask("POST", path, deployment.key, corrected).status == 200
    assert deployment.quarantined(session) == []
    assert deployment.info(session).n_steps == 2


def test_unknown_parameters_are_ignored_and_unknown_fields_rejected(deployment: Deployment):
    ask = deployment.gateway.ask
    assert ask("GET", "/v1/games/cart/bot?zzz=1", deployment.key).status == 200
    close = {"player": "ada", "session": str(new_session()), "chunk_no": 0, "n_steps": 0, "zzz": 1}
    assert ask("POST", "/v1/games/cart/close", deployment.key, close).code == "bad_body"


def test_every_field_of_a_note_is_on_the_page():
    notes = FORMATS.split("\n### Notes\n")[1].split("\n## ")[0]
    fields = re.findall(r"^\| `(\w+)` \|", notes, re.MULTILINE)
    assert sorted(fields) == sorted(EpisodeNote.__dataclass_fields__)
