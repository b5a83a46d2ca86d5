"""Experience over HTTP: acked means durable, and bad frames affect no others."""

import json
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.serve.gateways import CART, Running, as_columns, frames_of, fresh, played, running
from understudy.core.clock import SystemClock
from understudy.core.errors import StorageFailed, StorageFull
from understudy.core.names import new_session, player_name
from understudy.experience.chunk import Chunk, chunk_of, decode_chunk
from understudy.experience.frame import (
    NO_PLAYER,
    CloseReport,
    close_frame,
    encode_frame_batch,
    read_close,
)
from understudy.experience.game import game_spec
from understudy.experience.intake import deployment_key, pseudonym
from understudy.serve.state import GatewayConfig
from understudy.testing.samples import cart_spec, random_chunk, random_spec


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("sending")) as found:
        found.register()
        yield found


@pytest.fixture(scope="module")
def key(gateway: Running) -> str:
    return gateway.key("play")


def bodies(gateway: Running, session: Any) -> list[bytes]:
    return [frame.body for frame in gateway.streamed() if frame.session == session]


def accepted(reply: Any) -> list[bool]:
    assert reply.status == 200, reply.raw
    return [ack["accepted"] for ack in reply.json["acks"]]


def reasons(reply: Any) -> list[str]:
    return [(ack["refused"] or "").partition(":")[0] for ack in reply.json["acks"]]


# --- Parcels --------------------------------------------------------------------------------------


def test_acked_frames_are_in_the_stream_and_carry_a_pseudonym(gateway: Running, key: str):
    frames = frames_of(played(n_chunks=5))
    assert accepted(gateway.send(key, frames)) == [True] * 5
    found = [frame for frame in gateway.streamed() if frame.session == frames[0].session]
    assert [frame.body for frame in found] == [frame.body for frame in frames]
    assert {frame.player for frame in found} == {
        pseudonym(deployment_key(gateway.folder), "cart", "ada")
    }
    assert all(abs(frame.received_s - time.time()) < 60 for frame in found)


def test_the_same_batch_sent_twice_is_acked_twice(gateway: Running, key: str):
    """The stream may hold it twice; the store keeps each chunk once."""
    frames = frames_of(played(n_chunks=2))
    assert (
        accepted(gateway.send(key, frames)) == accepted(gateway.send(key, frames)) == [True, True]
    )
    assert {
        chunk_of(frame).meta.chunk_no
        for frame in gateway.streamed()
        if frame.session == frames[0].session
    } == {0, 1}


def test_a_broken_frame_does_not_affect_its_neighbours(gateway: Running, key: str):
    one, two, three = frames_of(played(n_chunks=3))
    raw = bytearray(encode_frame_batch([one, two, three], {one.session: player_name("ada")}))
    raw[-len(three.body) - 64 - 10] ^= 1  # inside the second body
    reply = gateway.ask("POST", "/v1/games/cart/frames", key, bytes(raw))
    assert accepted(reply) == [True, False, True]
    assert reasons(reply) == ["", "bad_body_checksum", ""]
    assert bodies(gateway, one.session) == [one.body, three.body]


def test_a_client_cannot_set_another_players_pseudonym(gateway: Running, key: str):
    (frame,) = frames_of(played(n_chunks=1))
    stamped = frame.stamped(b"p" * 16, 0)
    reply = gateway.ask(
        "POST",
        "/v1/games/cart/frames",
        key,
        encode_frame_batch([stamped], {frame.session: player_name("x")}),
    )
    assert reasons(reply) == ["stamped"]
    reply = gateway.ask(
        "POST",
        "/v1/games/cart/frames",
        key,
        encode_frame_batch([frame], {fresh(): player_name("ada")}),
    )
    assert reasons(reply) == ["no_player"]
    assert bodies(gateway, frame.session) == []


def test_a_chunk_of_another_game_is_rejected_with_any_key(gateway: Running):
    other = cart_spec("other")
    gateway.register(other)
    chunks = frames_of(played(other, n_chunks=1))
    for wide in (gateway.key("play"), gateway.key("admin")):
        assert reasons(gateway.send(wide, chunks)) == ["wrong_game"]
    assert gateway.send(gateway.key("play", game="other"), chunks).code == "wrong_game"
    assert accepted(gateway.send(gateway.key("play", game="other"), chunks, game="other")) == [True]


def test_experience_of_actors_needs_the_scope_work(gateway: Running, key: str):
    chunk = played(n_chunks=1)[0]
    frame = Chunk(replace(chunk.meta, kind="actor"), chunk.columns).frame()
    assert reasons(gateway.send(key, [frame])) == ["wrong_scope"]
    assert accepted(gateway.send(gateway.key("play", "work"), [frame])) == [True]


def test_a_batch_of_64_frames_of_many_players_is_accepted_and_65_are_not(
    gateway: Running, key: str
):
    frames = [frames_of(played(n_chunks=1, seed=seed))[0] for seed in range(65)]
    players = {frame.session: player_name(f"p{at}") for at, frame in enumerate(frames)}
    reply = gateway.ask(
        "POST", "/v1/games/cart/frames", key, encode_frame_batch(frames[:64], players)
    )
    assert accepted(reply) == [True] * 64
    assert len({frame.player for frame in gateway.streamed() if frame.session in players}) == 64
    assert (
        gateway.ask("POST", "/v1/games/cart/frames", key, encode_frame_batch(frames, players)).code
        == "bad_frame_batch"
    )


@pytest.mark.parametrize(
    "body", [b"", b"UNPA", b"x" * 100, b"UNPA\xff\xff\xff\xff", b"UNPA\x02\0\0\0[]"]
)
def test_an_invalid_batch_is_rejected(gateway: Running, key: str, body: bytes):
    before = len(gateway.streamed())
    reply = gateway.ask("POST", "/v1/games/cart/frames", key, body)
    assert (reply.status, reply.code) in ((400, "bad_frame_batch"), (400, "bad_json"))
    assert len(gateway.streamed()) == before


def test_old_and_invalid_sessions_are_rejected(gateway: Running, key: str):
    for _ in range(4):
        assert accepted(gateway.send(key, frames_of(played(n_chunks=1)))) == [True]
    for session in (
        new_session(time.time() - 9 * 86_400),
        new_session(time.time() + 2 * 86_400),
        uuid.uuid4(),
    ):
        (reason,) = reasons(gateway.send(key, frames_of(played(n_chunks=1, session=session))))
        assert reason in ("bad_session", "bad_session_time")


@pytest.mark.parametrize("days", [-2, 9])
def test_a_gateway_whose_clock_is_wrong_loses_nothing(tmp_path: Path, days: float):
    class Wrong(SystemClock):
        ahead_s = days * 86_400.0

        def now(self) -> float:
            return super().now() + self.ahead_s

    clock = Wrong()
    with running(tmp_path, clock=clock) as gateway:
        gateway.register()
        key = gateway.key("play")
        for frames in [frames_of(played(n_chunks=2)) for _ in range(3)]:
            acks = gateway.send(key, frames).json["acks"]
            assert [(ack["accepted"], ack["refused"]) for ack in acks] == [(False, None)] * 2
            assert {ack["retry_after_s"] for ack in acks} == {30.0}
            assert "clocks_differ" in acks[0]["error"]
        clock.ahead_s = 0.0
        assert accepted(gateway.send(key, frames)) == [True, True]
        assert len(gateway.streamed()) == 2


def test_the_error_for_an_unknown_game_states_how_to_register_it(gateway: Running, key: str):
    reply = gateway.send(key, frames_of(played(cart_spec("nobody"), n_chunks=1)), game="nobody")
    assert (reply.status, reply.code) == (404, "not_registered")
    assert "understudy games add" in reply.json["error"]["detail"]


# --- Columns and closing --------------------------------------------------------------------------


def test_json_columns_become_the_bytes_of_a_native_chunk(gateway: Running, key: str):
    """Over random games of every kind of space, with optional columns."""
    n_sent = 0
    for seed in range(30):
        rng = np.random.default_rng(seed)
        spec = random_spec(rng, f"sample-{seed}")
        gateway.register(spec)
        chunk = random_chunk(
            spec, rng, session=fresh(), optional=("logp", "by", "frames", "action_mask")
        )
        sent = as_columns(chunk)
        reply = gateway.ask("POST", f"/v1/games/{spec.game}/columns", key, sent)
        assert accepted(reply) == [True]
        assert bodies(gateway, chunk.meta.session) == [chunk.encode()]
        n_sent += 1
    assert n_sent == 30


def test_notes_of_episodes_may_be_left_out(gateway: Running, key: str):
    for seed in range(5):
        chunk = random_chunk(CART, np.random.default_rng(seed), session=fresh(), n_steps=40)
        sent = as_columns(chunk)
        del sent["episodes"]
        assert accepted(gateway.ask("POST", "/v1/games/cart/columns", key, sent)) == [True]
        (body,) = bodies(gateway, chunk.meta.session)
        assert [note.row for note in decode_chunk(body).meta.episodes] == [
            note.row for note in chunk.meta.episodes
        ]


def test_a_session_of_columns_can_be_closed(gateway: Running, key: str):
    chunks = played(n_chunks=2)
    for chunk in chunks:
        assert accepted(gateway.ask("POST", "/v1/games/cart/columns", key, as_columns(chunk))) == [
            True
        ]
    n_steps = sum(chunk.meta.n_steps for chunk in chunks)
    closing = {
        "player": "ada",
        "session": str(chunks[0].meta.session),
        "chunk_no": 2,
        "n_steps": n_steps,
    }
    assert accepted(gateway.ask("POST", "/v1/games/cart/close", key, closing)) == [True]
    last = [frame for frame in gateway.streamed() if frame.session == chunks[0].meta.session][-1]
    assert read_close(last) == CloseReport(2, n_steps)


def change(sent: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return sent | changes


def with_column(sent: dict[str, Any], name: str, values: Any) -> dict[str, Any]:
    return sent | {"columns": sent["columns"] | {name: values}}


def test_invalid_columns_are_rejected_with_a_reason(gateway: Running, key: str):
    chunk = random_chunk(CART, np.random.default_rng(5), session=fresh(), n_steps=3)
    sent = as_columns(chunk)
    n = chunk.n_rows
    wrong = [
        change(sent, player=""),
        change(sent, player="\n"),
        change(sent, session="x"),
        change(sent, chunk_no=-1),
        change(sent, chunk_no=1 << 64),
        change(sent, chunk_no=1 << 48),
        change(sent, first_step=1 << 70),
        change(sent, consent="maybe"),
        change(sent, client="c" * 129),
        change(sent, episodes=[]),
        change(sent, episodes=[{"row": 1}]),
        change(sent, episodes=[{"seed": 1 << 70}]),
        change(sent, episodes=[{"match": "\ud800"}]),
        change(sent, episodes=[{"result": 1e301}]),
        change(sent, episodes=[{"result": 10**400}]),
        change(sent, columns={}),
        change(sent, columns=[]),
        change(sent, skipped_steps=10**400),
        change(sent, schema="x"),
        change(sent, schema="0" * 64),
        change(sent, misspelt=1),
        with_column(sent, "reward", [1.0] * (n - 1)),
        with_column(sent, "reward", ["1"] * n),
        with_column(sent, "reward", [1e39] * n),
        with_column(sent, "obs", [[1.0] * 3] * n),
        with_column(sent, "obs", [[1.0] * 4] * (n - 1) + [[1.0]]),
        with_column(sent, "obs", [1e400] * n),
        with_column(sent, "obs", [[1e39] * 4] * n),
        with_column(sent, "action", [0.5] * n),
        with_column(sent, "action", [7] * n),
        with_column(sent, "action", [10**30] * n),
        with_column(sent, "action", [None] * n),
        with_column(sent, "row", [-1] * n),
        with_column(sent, "row", []),
        with_column(sent, "terminated", [0] * n),
        with_column(sent, "is_first", [1] * n),
        with_column(sent, "action_mask", [[True] * 3] * n),
        with_column(sent, "../x", [1] * n),
        with_column(sent, "obs", [[[[[[[[[1]]]]]]]]] * n),
    ]
    before = len(gateway.streamed())
    for one in wrong:
        reply = gateway.ask("POST", "/v1/games/cart/columns", key, one)
        assert reply.status == 400, (one, reply.raw)
        assert reply.json["error"]["detail"]
    for raw in (
        b"",
        b"{",
        b"[" * 100_000,
        b"\xff",
        json.dumps(sent).encode()[:-1],
        b"null",
        b"NaN",
    ):
        assert gateway.ask("POST", "/v1/games/cart/columns", key, raw).status == 400
    assert len(gateway.streamed()) == before
    assert accepted(gateway.ask("POST", "/v1/games/cart/columns", key, sent)) == [True], (
        "the right one passes"
    )


def test_columns_of_any_other_shape_are_rejected(gateway: Running, key: str):
    (chunk,) = played(n_chunks=1)
    sent = as_columns(chunk)
    names = [*sent["columns"], "by", "t_ms", "logp", "frames", "action_mask"]
    shapes: list[Any] = [0, True, 1.5, [], [[]], [[[]]], [[[0]]], [0], [[True]], [[0, 0, 0]], None]
    for name in names:
        for values in shapes:
            changed_columns = sent | {"columns": sent["columns"] | {name: values}}
            reply = gateway.ask("POST", "/v1/games/cart/columns", key, changed_columns)
            assert reply.status == 400, (name, values)


def test_columns_that_fit_two_specs_need_a_schema(gateway: Running, key: str):
    specs = [game_spec("twice", obs=names, actions=2) for names in (4, ["a", "b", "c", "d"])]
    for spec in specs:
        gateway.register(spec)
    chunk = random_chunk(specs[1], np.random.default_rng(0), session=fresh())
    sent = as_columns(chunk)
    assert gateway.ask("POST", "/v1/games/twice/columns", key, sent).code == "which_schema"
    sent["schema"] = specs[1].schema
    assert accepted(gateway.ask("POST", "/v1/games/twice/columns", key, sent)) == [True]
    assert bodies(gateway, chunk.meta.session) == [chunk.encode()]


# --- Quota, metrics, failures ---------------------------------------------------------------------


def test_the_recording_rate_falls_with_the_steps_played(tmp_path: Path):
    with running(tmp_path, GatewayConfig(target_steps_s=10.0)) as gateway:
        gateway.register()
        key = gateway.key("play")
        (frame,) = frames_of(played(n_chunks=1))
        reply = gateway.send(key, [frame])
        assert accepted(reply) == [True]
        body = encode_frame_batch([frame], {frame.session: player_name("ada")}, 10_000)
        share = gateway.ask("POST", "/v1/games/cart/frames", key, body).json["recording_rate"]
        assert 0 < share < 0.01
        columns = as_columns(played(n_chunks=1)[0]) | {"skipped_steps": 1_000_000}
        assert (
            gateway.ask("POST", "/v1/games/cart/columns", key, columns).json["recording_rate"]
            < share / 2
        )


def test_without_a_target_the_recording_rate_is_1(gateway: Running, key: str):
    body = encode_frame_batch([], {}, 1 << 40)
    assert gateway.ask("POST", "/v1/games/cart/frames", key, body).json == {
        "acks": [],
        "recording_rate": 1.0,
    }


def test_metrics_count_frames_by_outcome(gateway: Running, key: str):
    gateway.send(key, frames_of(played(n_chunks=2)))
    assert gateway.ask("DELETE", "/v1/games/cart/frames", key).status == 405
    reply = gateway.ask("GET", "/metrics", gateway.key("read"))
    assert reply.headers["content-type"].startswith("text/plain")
    text = reply.raw.decode()
    assert 'understudy_frames_total{fate="accepted",game="cart"}' in text
    assert 'understudy_requests_total{route="none",status="405"} 1.0' in text
    assert 'understudy_requests_total{route="POST /v1/games/{game}/frames",status="200"}' in text
    assert 'understudy_recording_rate{game="cart"} 1.0' in text
    assert "understudy_waiting_bytes 0.0" in text
    assert "ada" not in text
    assert gateway.ask("GET", "/metrics", key).code == "wrong_scope"


def test_after_a_stream_error_clients_retry_and_the_gateway_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    errors: list[Exception] = [
        StorageFull("/secret/place"),
        StorageFailed("/secret"),
        RuntimeError("/secret"),
    ]
    with running(tmp_path) as gateway:
        gateway.register()
        key = gateway.key("play")
        frames = frames_of(played(n_chunks=1))
        real = gateway.stream.append

        def append(given: Any) -> Any:
            if errors:
                raise errors.pop(0)
            return real(given)

        monkeypatch.setattr(gateway.stream, "append", append)
        for _ in range(3):
            (ack,) = gateway.send(key, frames).json["acks"]
            assert (ack["accepted"], ack["refused"], ack["retry_after_s"]) == (False, None, 1.0)
            assert "secret" not in ack["error"]
        assert accepted(gateway.send(key, frames)) == [True]


def test_a_key_above_its_limit_gets_a_retry_time(gateway: Running):
    frames = frames_of(played(n_chunks=3))
    few = gateway.key("play", requests_s=2.0)
    statuses = [gateway.send(few, frames).status for _ in range(6)]
    assert statuses[:4] == [200] * 4
    assert statuses[-1] == 429
    reply = gateway.send(few, frames)
    assert reply.code == "too_many"
    assert 0 < reply.json["error"]["retry_after_s"] <= 1
    assert reply.headers["retry-after"] == "1"
    small = gateway.key("play", bytes_s=1000.0)
    assert gateway.send(small, frames).status == 200
    assert gateway.send(small, frames).status == 429, "one large request is paid for afterwards"


def test_bytes_that_were_not_announced_are_counted_too(gateway: Running):
    frames = frames_of(played(n_chunks=8))
    body = encode_frame_batch(frames, {frames[0].session: player_name("ada")})
    small = gateway.key("play", bytes_s=1000.0)
    headers = {"Authorization": f"Bearer {small}"}
    parts = iter([body[:100], body[100:]])
    reply = gateway.pool.request(
        "POST", f"{gateway.url}/v1/games/cart/frames", body=parts, headers=headers
    )
    assert reply.status == 200, "chunked"
    assert gateway.send(small, frames).status == 429


def test_close_frames_and_drop_reports_may_be_in_batches(gateway: Running, key: str):
    session = fresh()
    closing = close_frame(session, 0, CloseReport(0, 0))
    assert accepted(gateway.send(key, [closing])) == [True]
    assert [
        frame.player != NO_PLAYER for frame in gateway.streamed() if frame.session == session
    ] == [True]
