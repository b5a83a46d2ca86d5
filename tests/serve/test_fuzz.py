"""Hostile input breaks nothing, stores nothing, and reads nothing outside."""

import itertools
import logging
import random
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis.core.result import Ok
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from tests.card import Card
from tests.faults.profiles import sizes
from tests.serve.gateways import Running, frames_of, played, running
from understudy.core.names import new_session, player_name
from understudy.experience.frame import CONTENT_TYPE, data_frame, encode_frame_batch
from understudy.serve.routes import ROUTES, document
from understudy.serve.state import GatewayConfig
from understudy.testing.samples import cart_spec

CANARY = "a-secret-that-no-answer-may-hold"
SCHEMA = schemathesis.openapi.from_dict(document(ROUTES))
OPERATIONS = [found.ok() for found in SCHEMA.get_all_operations() if isinstance(found, Ok)]
assert len(OPERATIONS) == len(ROUTES)
OFTEN = settings(
    max_examples=12,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.generate,),
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "canary").write_text(CANARY)
    (folder / "models").mkdir()
    (folder / "models" / "canary.json").write_text(CANARY)
    logging.getLogger("requests").setLevel(logging.ERROR)
    with running(folder, GatewayConfig(max_poll_s=0.02)) as found:
        found.release(found.register())
        found.register(cart_spec("elsewhere"))
        yield found


@pytest.fixture(scope="module")
def key(gateway: Running) -> str:
    return gateway.key("admin")


@pytest.fixture(autouse=True)
def nothing_happened(gateway: Running) -> Iterator[None]:
    """Before and after each test the stream is empty and the same files are there, but for
    champions by promote."""
    before = files(gateway.folder)
    yield
    assert gateway.streamed() == []
    assert files(gateway.folder) == before
    assert gateway.ask("GET", "/healthz").status == 200


def files(folder: Path) -> set[str]:
    """Everything but the journal of pointers, the stream's own partition, and games that an
    admin may register."""
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return {
        name
        for name in found
        if not name.startswith(("models/registry/cart/", "stream/", "models/games/"))
    }


# --- Names ----------------------------------------------------------------------------------------

TRICKS = [
    "..", ".", "../canary", "..%2fcanary", "%2e%2e", "%2e%2e%2fcanary", "..%252fcanary",
    "%252e%252e", "....//", "..\\canary", "..%5ccanary", "%00", "cart%00", "cart%00.json",
    "cart%2f..%2fcart", "cart/../../canary", "cart/", "%20", "cart%20", "%0a", "cart%0a",
    "cart%0d%0aX: y", "%ff", "%c0%ae%c0%ae", "%u002e", "con", "NUL", "com1.txt", "cart.", "-cart",
    "_cart", ".cart", "~root", "$HOME", "%24%7bHOME%7d", "{game}", "%7bgame%7d", "*", "?", "#",
    "file:%2f%2f%2fetc%2fpasswd", "http:%2f%2fevil.example", "%2fetc%2fpasswd", "/etc/passwd",
    "a" * 64, "a" * 500, "ä", "%c3%a4", "ﬁ", "cart;x", "cart,other", "cart&x=1", "<script>",
    "%3cscript%3e", "'--", '"', "`id`", "|id", "canary", "canary.json", "registry", "keys", "blobs",
    "0", "1e9", "%31", "1%20", "+1", "-1", "1.0", "0x1", "١",
]  # fmt: skip


def hostile_addresses(count: int) -> Iterator[tuple[str, str]]:
    """Every route with every trick in every name, then mixtures of tricks."""
    rng = random.Random(0)
    spots = [
        (route, part)
        for route in ROUTES
        for part in ("{game}", "{schema}", "{model_no:int}")
        if part in route.path
    ]
    given = list(itertools.product(spots, TRICKS))
    rng.shuffle(given)
    for (route, spot), trick in given[:count]:
        path = route.path.replace(spot, "TRICK")
        for part, good in (("{game}", "cart"), ("{schema}", "0" * 64), ("{model_no:int}", "1")):
            path = path.replace(part, good)
        yield route.method, path.replace("TRICK", trick)
    for _ in range(max(0, count - len(given))):
        route, spot = rng.choice(spots)
        yield route.method, route.path.replace(spot, "".join(rng.choices(TRICKS, k=3)))


def exactly(gateway: Running, method: str, path: str, key: str) -> tuple[int, bytes]:
    """The answer to an address that no client library touched."""
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer "
        f"{key}\r\nConnection: close\r\n\r\n"
    )
    received = b""
    with socket.create_connection(("127.0.0.1", gateway.server.port), 10) as connection:
        connection.sendall(head.encode())
        while part := connection.recv(1 << 20):
            received += part
    return int(received.split(b" ", 2)[1]), received


def test_a_thousand_hostile_names_open_nothing(gateway: Running, key: str, card: Card):
    n_tried = 0
    statuses = dict[int, int]()
    for method, path in hostile_addresses(1000):
        status, body = exactly(gateway, method, path, key)
        assert status in (400, 403, 404, 405, 413), (method, path, status, body)
        assert CANARY.encode() not in body
        assert str(gateway.folder).encode() not in body
        statuses[status] = statuses.get(status, 0) + 1
        n_tried += 1
    assert n_tried == 1000
    assert {400, 404} <= statuses.keys()
    card.line("hostile names in addresses", tried=n_tried, held=n_tried)


def test_hostile_names_in_bodies_and_queries_open_nothing(gateway: Running, key: str):
    for trick in TRICKS:
        sent = {"player": trick, "session": trick, "chunk_no": 0, "n_steps": 0}
        assert gateway.ask("POST", "/v1/games/cart/close", key, sent).status == 400
        assert gateway.ask("GET", f"/v1/games/cart/bot?after={quote(trick)}", key).status in (
            200,
            204,
            400,
        )
        spec = {
            "format": 1,
            "game": trick,
            "obs": {},
            "action": {},
            "obs_names": [],
            "action_names": [],
        }
        assert gateway.ask(
            "PUT", "/v1/games/cart", key, spec | {"has_action_mask": False}
        ).status in (
            400,
            403,
        )


def test_queries_with_many_or_long_fields_are_rejected(gateway: Running, key: str):
    assert (
        gateway.ask("GET", "/v1/games?" + "&".join(f"a{n}=1" for n in range(21)), key).code
        == "bad_query"
    )
    assert gateway.ask("GET", "/v1/games?a=" + "x" * 2000, key).status == 413
    assert gateway.ask("GET", "/v1/games/" + "x" * 2000, key).status == 413


# --- By the document ------------------------------------------------------------------------------


@schemathesis.serializer(CONTENT_TYPE)
def frame_batch(_: Any, value: Any) -> bytes:
    return value if isinstance(value, bytes) else bytes(getattr(value, "data", b""))


@sizes("examples", short=5, full=12)
@pytest.mark.parametrize(
    ("operation", "mode"),
    [
        pytest.param(one, mode, id=f"{one.label} {mode.value}")
        for one in OPERATIONS
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
        if mode == GenerationMode.POSITIVE or one.body or one.path_parameters or one.query
    ],
)
def test_requests_generated_from_the_document_never_break_anything(
    gateway: Running, key: str, operation: Any, mode: Any, card: Card, examples: int
):
    n_tried = 0

    @settings(OFTEN, max_examples=examples)
    @given(case=operation.as_strategy(generation_mode=mode))
    def try_it(case: Any) -> None:
        nonlocal n_tried
        n_tried += 1
        if mode == GenerationMode.POSITIVE and "game" in (case.path_parameters or {}):
            case.path_parameters["game"] = "cart"  # else nothing gets further than its name
        began_s = time.monotonic()
        reply = case.call(
            base_url=gateway.url, headers={"Authorization": f"Bearer {key}"}, timeout=60
        )
        assert reply.status_code < 500, (case, reply.content)
        assert time.monotonic() - began_s < 5
        assert CANARY.encode() not in reply.content
        case.validate_response(
            reply, checks=[response_schema_conformance, content_type_conformance]
        )

    try_it()
    card.line("requests made from the API's document: no 5xx", tried=n_tried, held=n_tried)


# --- Bytes ----------------------------------------------------------------------------------------


def test_mutated_frame_batches_never_break_anything(gateway: Running, key: str, card: Card):
    """Bits flipped, bytes cut, added and moved in a good batch: all that passes is a frame
    whose sums are right."""
    frames = frames_of(played(n_chunks=3))
    body = encode_frame_batch(frames, {frames[0].session: player_name("ada")})
    rng = random.Random(1)
    for _ in range(400):
        raw = bytearray(body)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(raw))
            match rng.randrange(4):
                case 0:
                    raw[at] ^= 1 << rng.randrange(8)
                case 1:
                    del raw[at : at + rng.randint(1, 40)]
                case 2:
                    raw[at:at] = rng.randbytes(rng.randint(1, 40))
                case _:
                    raw[at : at + 4] = b"\xff\xff\xff\xff"
        # To a game that no chunk is of: whatever is still sound is refused for that.
        reply = gateway.ask("POST", "/v1/games/elsewhere/frames", key, bytes(raw))
        assert reply.status in (200, 400), reply.raw
        if reply.status == 200:
            assert not any(ack["accepted"] for ack in reply.json["acks"])
    card.line("mutated frame batches", tried=400, held=400)


@settings(OFTEN, max_examples=60)
@given(raw=st.binary(max_size=300))
def test_random_bytes_are_rejected_by_every_route(gateway: Running, key: str, raw: bytes):
    for route in ("frames", "columns", "close", "act", "advise", "promote"):
        assert gateway.ask("POST", f"/v1/games/cart/{route}", key, raw).status in (400, 404)
    assert gateway.ask("PUT", "/v1/games/cart", key, raw).status == 400


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=8), inner, max_size=5)
    ),
    max_leaves=12,
)


@settings(OFTEN, max_examples=60)
@given(value=JSON_VALUES, other=JSON_VALUES)
def test_json_of_any_shape_in_any_field_is_rejected(
    gateway: Running, key: str, value: Any, other: Any
):
    columns = {
        "obs": value,
        "action": other,
        "reward": [1, 0],
        "row": [0, 1],
        "is_first": [True, False],
    }
    flags = {"terminated": [True, False], "truncated": [False, False]}
    session = str(played(n_chunks=1)[0].meta.session)
    sent = {"player": "ada", "session": session, "chunk_no": 0, "columns": columns | flags}
    assert gateway.ask("POST", "/v1/games/cart/columns", key, sent).status == 400
    assert (
        gateway.ask(
            "POST", "/v1/games/cart/columns", key, sent | {"episodes": [{"result": value}]}
        ).status
        == 400
    )
    assert gateway.ask("POST", "/v1/games/cart/act", key, {"obs": value}).status == 400
    assert (
        gateway.ask(
            "PUT", "/v1/games/cart", key, {"format": 1, "game": "cart", "obs": value}
        ).status
        == 400
    )


def test_a_malicious_pickle_a_false_header_and_a_zip_bomb_are_rejected_by_every_route(
    gateway: Running, key: str, card: Card
):
    n_refused = 0
    pickled = (
        b"\x80\x04\x95\x1d\0\0\0\0\0\0\0"
        b"\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x02id\x94\x85\x94R\x94."
    )
    lying = (1 << 60).to_bytes(8, "little") + b"{" * 1000
    zipped = b"PK\x03\x04" + bytes(1000)
    for raw in (pickled, lying, zipped):
        frame = data_frame(new_session(), 0, raw)
        reply = gateway.ask(
            "POST",
            "/v1/games/cart/frames",
            key,
            encode_frame_batch([frame], {frame.session: player_name("ada")}),
        )
        assert reply.json["acks"][0]["refused"].startswith("bad_tensors")
        for route in ROUTES:
            if route.method in ("POST", "PUT") and route.takes is not None:
                assert (
                    gateway.ask(route.method, route.path.replace("{game}", "cart"), key, raw).status
                    == 400
                )
                n_refused += 1
    card.line(
        "evil pickle, lying header, zip bomb at every entry point", tried=n_refused, held=n_refused
    )
