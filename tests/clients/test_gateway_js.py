"""The JavaScript client with a real gateway: acked steps are stored once, even after a kill."""

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.act.policies import random_policy
from tests.clients.nodes import HERE, needs_node
from tests.ingest.specs import KnownSpecs
from tests.serve.gateways import PLENTY, SIGNER, TRUSTED, Running, running
from understudy.core.clock import SystemClock
from understudy.experience.chunk import By, RowKind, chunk_of
from understudy.experience.frame import FrameKind
from understudy.experience.game import game_spec
from understudy.experience.intake import deployment_key
from understudy.experience.ticket import TicketSeal
from understudy.games import rally
from understudy.games.rally import Ints
from understudy.ingest.service import IngestService
from understudy.models.keys import Keys
from understudy.models.manifest import Lineage
from understudy.models.objects import FolderObjects
from understudy.models.registry import Registry
from understudy.ports import Stored
from understudy.serve.server import Listen
from understudy.serve.state import GatewayConfig
from understudy.stores.local import LocalStore
from understudy.streams.file import FileStream

pytestmark = needs_node
SPEC = game_spec("rally", obs=list(rally.OBS_NAMES), actions=list(rally.ACTION_NAMES))
TIMEOUT_S = 60.0


class Page:
    """A game that runs in Node."""

    def __init__(self, url: str, key: str, **more: Any) -> None:
        self._process = subprocess.Popen(
            ["node", str(HERE / "live.mjs")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.send(url=url, key=key, consent="granted", **more)
        self.report: dict[str, Any] = {}

    def send(self, **message: Any) -> None:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def read(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        assert line, "the page is gone"
        self.report = json.loads(line)
        return self.report

    def until(self, is_reached: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        """Read reports until one satisfies the condition; returns it."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while not is_reached(self.read()):
            assert time.monotonic() < deadline_s, f"timed out; last report: {self.report}"
        return self.report

    def stop(self, timeout_s: float = 60.0) -> dict[str, Any]:
        self.send(stop=timeout_s)
        return self.until(lambda report: report.get("over"))

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def page() -> Iterator[Callable[..., Page]]:
    with contextlib.ExitStack() as stack:

        def opened(url: str, key: str, **more: Any) -> Page:
            game = Page(url, key, **more)
            stack.callback(game.end)
            return game

        yield opened


def stored(folder: Path) -> dict[tuple[int, int], dict[str, Any]]:
    """Ingest a gateway's stream; its episodes by serve and seat, without a duplicate step."""
    store = LocalStore(folder / "store")
    stream = FileStream(folder / "stream")
    service = IngestService(stream, store, KnownSpecs(SPEC), owner="test")
    while service.step():
        pass
    assert service.stats.refusals == {}
    chunks = [
        item.chunk
        for item in store.tail(None, max_items=100_000, wait_s=0).items
        if isinstance(item, Stored)
    ]
    audit = store.audit()
    assert (audit.duplicate_steps, audit.gap_chunks, audit.quarantined, list(audit.corrupt)) == (
        0,
        0,
        0,
        [],
    )
    stream.close()
    store.close()
    serves: dict[tuple[int, int], dict[str, Any]] = defaultdict(
        lambda: {"rows": [], "models": set(), "consents": set()}
    )
    for chunk in sorted(
        (chunk for chunk in chunks if chunk),
        key=lambda chunk: (str(chunk.meta.session), chunk.meta.chunk_no),
    ):
        starts = [note.row for note in chunk.meta.episodes] + [chunk.n_rows]
        for note, (begin, end) in zip(chunk.meta.episodes, pairwise(starts), strict=True):
            serve = serves[int(note.seed or 0), note.seat]
            serve["models"] |= {note.model}
            serve["consents"] |= {chunk.meta.consent}
            for at in range(begin, end):
                if chunk.columns["row"][at] == RowKind.STEP:
                    serve["rows"].append(
                        {name: column[at] for name, column in chunk.columns.items()}
                    )
                    serve["rows"][-1]["next"] = chunk.columns["obs"][at + 1]
    return dict(serves)


def assert_equals_replay(
    report: dict[str, Any], serves: dict[tuple[int, int], dict[str, Any]]
) -> int:
    """Assert that every recorded serve is stored as Python replays it; returns the steps."""
    n_steps = 0
    for serve in report["truth"]:
        for seat in (0, 1):
            if not serve["isRecorded"][seat]:
                assert (serve["seed"], seat) not in serves
                continue
            rows = serves.pop((serve["seed"], seat))["rows"]
            court = rally.serve(serve["seed"])
            assert len(rows) == len(serve["actions"])
            for at, (row, actions) in enumerate(zip(rows, serve["actions"], strict=True)):
                is_last = at == len(rows) - 1
                assert (row["obs"] == rally.observation(court, seat)).all()
                court, point = rally.step(Ints, court, *actions)
                assert (row["next"] == rally.observation(court, seat)).all()
                assert row["action"] == actions[seat]
                assert row["reward"] == (point if seat == 0 else -point)
                assert row["terminated"] == (is_last and not serve["isTruncated"])
                assert row["truncated"] == (is_last and serve["isTruncated"])
                assert row["is_first"] == (at == 0)
            n_steps += len(rows)
    assert serves == {}, "more was stored than was played"
    return n_steps


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Running]:
    with running(tmp_path) as gateway:
        gateway.register(SPEC)
        yield gateway


def test_episodes_note_the_ticket_by_which_their_bot_was_drawn(
    gateway: Running, page: Callable[..., Page]
):
    gateway.release(SPEC, "categorical")
    gateway.release(SPEC, "argmax", seed=1, promote=False)
    gateway.registry.set_alias(SPEC.game, "canary", 2, why="try", share=0.25)
    game = page(gateway.url, gateway.key("play"))

    def drawn() -> set[tuple[str | None, float | None]]:
        chunks = [chunk_of(frame) for frame in gateway.streamed() if frame.kind is FrameKind.DATA]
        notes = [
            note for chunk in chunks for note in chunk.meta.episodes if note.ticket is not None
        ]
        seal = TicketSeal(deployment_key(gateway.folder))
        tickets = [
            (note.model, seal.open(note.ticket or "", game=SPEC.game, schema=SPEC.schema))
            for note in notes
        ]
        assert all(model == f"{SPEC.game}/{ticket.model_no}" for model, ticket in tickets)
        return {(model, ticket.propensity) for model, ticket in tickets}

    both = {("rally/1", 0.75), ("rally/2", 0.25)}
    game.until(lambda report: report["acked"] > 50 and both <= drawn())
    game.stop()


def test_steps_are_recorded_and_a_bot_arrives_and_acts(gateway: Running, page: Callable[..., Page]):
    game = page(gateway.url, gateway.key("play"))
    game.until(lambda report: report["acked"] > 50)
    gateway.release(SPEC, "categorical")
    arrived = game.until(lambda report: report["bot"] == "rally/1")
    game.until(lambda report: report["decisions"] > arrived["decisions"] + 150)
    gateway.release(SPEC, "argmax", seed=1)
    arrived = game.until(lambda report: report["bot"] == "rally/2")
    game.until(lambda report: report["decisions"] > arrived["decisions"] + 150)
    report = game.stop()
    assert report["bots"] == ["rally/1", "rally/2"]
    serves = stored(gateway.folder)
    by = {(seat, int(row["by"])) for (_, seat), serve in serves.items() for row in serve["rows"]}
    assert by == {(0, By.PERSON), (1, By.SCRIPT), (1, By.BOT)}
    models = {
        seat: set.union(*(serve["models"] for (_, at), serve in serves.items() if at == seat))
        for seat in (0, 1)
    }
    assert models == {0: {None}, 1: {None, "rally/1", "rally/2"}}
    for (_, seat), serve in serves.items():
        assert serve["consents"] == {"granted"}
        assert all(
            ("logp" in row) == (seat == 1) or row["by"] == By.SCRIPT or seat == 0
            for row in serve["rows"]
        )
    assert (
        assert_equals_replay(report, serves)
        == report["stats"]["recorded"]
        == report["stats"]["acked"]
    )
    assert (report["isAll"], report["stats"]["lastError"]) == (True, "")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def serving(folder: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    root = HERE.parents[1]
    command = [sys.executable, "-m", "tests.clients.serving", str(folder), str(port)]
    process = subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_killed_gateway_loses_and_duplicates_nothing_and_play_never_stops(tmp_path, page):
    objects = FolderObjects(tmp_path / "models")
    port = free_port()
    registry = Registry(objects, trusted=TRUSTED, signer=SIGNER)
    registry.register(SPEC)
    manifest = registry.release(
        random_policy(SPEC, "categorical"),
        Lineage(algorithm="dqn"),
        epoch=registry.takeover("rally", owner="test"),
    )
    registry.set_alias("rally", "champion", manifest.model_no, why="test")
    key, _ = Keys(objects, trusted=TRUSTED, signer=SIGNER, clock=SystemClock()).create(
        ("play",), **PLENTY
    )
    with serving(tmp_path, port) as process:
        game = page(f"http://127.0.0.1:{port}", key)
        game.until(lambda report: report["acked"] > 100 and report["bot"] == "rally/1")
        process.kill()
        before = game.until(lambda report: report["lastError"])
    away = game.until(lambda report: report["decisions"] > before["decisions"] + 300)
    assert away["waiting"] > 100
    assert away["acked"] < away["recorded"]
    assert (away["bot"], away["stopped"], away["dropped"]) == ("rally/1", "", 0)
    with running(tmp_path, listen=Listen(port=port)):
        back = game.until(
            lambda report: report["acked"] >= away["recorded"] and not report["lastError"]
        )
        game.until(lambda report: report["decisions"] > back["decisions"] + 100)
        report = game.stop()
    serves = stored(tmp_path)
    assert (
        assert_equals_replay(report, serves)
        == report["stats"]["recorded"]
        == report["stats"]["acked"]
    )
    assert report["isAll"]
    assert report["slow"] <= report["decisions"] / 100, "decisions waited"


def test_a_revoked_key_stops_sending_and_another_key_resumes_it(
    gateway: Running, page: Callable[..., Page]
):
    key = gateway.key("play")
    game = page(gateway.url, key)
    game.until(lambda report: report["acked"] > 20)
    gateway.keys.revoke(key.split("_")[1])
    stopped = game.until(lambda report: report["stopped"])
    assert "revoked_key" in stopped["stopped"]
    assert "revoked_key" in stopped["lastError"]
    later = game.until(lambda report: report["decisions"] > stopped["decisions"] + 100)
    assert later["acked"] == stopped["acked"]
    assert later["failedSends"] == stopped["failedSends"], "it was retried"
    assert later["waiting"] > 0
    game.send(key=gateway.key("play"))
    game.until(lambda report: not report["stopped"] and report["acked"] > later["recorded"])
    gateway.release(SPEC, "categorical")
    game.until(lambda report: report["bot"] == "rally/1")
    report = game.stop()
    assert assert_equals_replay(report, stored(gateway.folder)) == report["stats"]["acked"]


def test_a_recording_rate_records_whole_episodes_and_counts_the_others(tmp_path, page):
    with running(tmp_path, GatewayConfig(target_steps_s=40.0)) as gateway:
        gateway.register(SPEC)
        game = page(gateway.url, gateway.key("play"), pauseMs=0)
        game.until(lambda report: report["recordingRate"] < 0.5 and report["skipped"] > 500)
        report = game.stop()
    stats = report["stats"]
    recorded = [is_recorded for serve in report["truth"] for is_recorded in serve["isRecorded"]]
    assert True in recorded
    assert False in recorded
    played = 2 * sum(len(serve["actions"]) for serve in report["truth"])
    assert assert_equals_replay(report, stored(tmp_path)) == stats["acked"] == stats["recorded"]
    assert stats["acked"] + stats["skipped"] == played


def test_connect_reports_why_a_game_is_rejected(
    gateway: Running, page: Callable[..., Page], tmp_path
):
    with running(tmp_path / "empty") as other:
        assert page(other.url, other.key("play")).read()["failed"] == "not_registered"
        detail = page(other.url, other.key("play")).read()["detail"]
        assert "games add" in detail
        assert page(other.url, other.key("play", registers=True)).read()["stopped"] == ""
    assert page(gateway.url, "uk_wrong_key").read()["failed"] == "wrong_key"
    assert page(gateway.url, gateway.key("read")).read()["failed"] == "wrong_scope"
    assert page(gateway.url, "").read()["failed"] == "no_key"
    assert page("http://10.0.0.1", "uk_x").read()["failed"] == "bad_url"


def test_a_game_that_starts_without_its_gateway_plays_and_sends_later(tmp_path, page):
    port = free_port()
    with running(tmp_path) as gateway:
        gateway.register(SPEC)
        key = gateway.key("play")
    game = page(f"http://127.0.0.1:{port}", key)
    alone = game.until(lambda report: report["decisions"] > 50)
    assert alone["lastError"].startswith("unreachable")
    with running(tmp_path, listen=Listen(port=port)):
        game.until(lambda report: report["acked"] > 50)
        report = game.stop()
    assert (
        assert_equals_replay(report, stored(tmp_path))
        == report["stats"]["acked"]
        == report["stats"]["recorded"]
    )
