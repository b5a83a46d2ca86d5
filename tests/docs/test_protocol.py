"""docs/protocol.md is enough to write a client: its routes, bytes, commands and rules are real."""

import base64
import hashlib
import json
import re
import shutil
import struct
import subprocess
import uuid
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.serve.gateways import SIGNER, Running, running
from understudy.core.errors import InvalidName
from understudy.core.names import game_name, player_name
from understudy.experience.chunk import Chunk, ChunkMeta, EpisodeNote, chunk_of
from understudy.experience.frame import (
    MAX_FRAME_BYTES,
    MAX_FRAMES_PER_SEND,
    Frame,
    decode_frame_batch,
    encode_frame_batch,
)
from understudy.experience.game import game_spec, spec_from_json
from understudy.models.keys import SCOPES
from understudy.serve.api import STATUS
from understudy.serve.pages import PAGES
from understudy.serve.routes import ROUTES
from understudy.serve.wire import ChunkColumns, Promote

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "protocol.md").read_text()
BLOCKS: list[tuple[str, str]] = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
SPEC = game_spec("cart", obs=2, actions=["left", "right"])
NOT_ON_THE_WIRE = {
    "superseded",
    "bad_entry",
    "bad_policy",
    "bad_manifest",
    "bad_signature",
    "bad_hash",
    "bad_golden",
    "unknown_key",
    "gone",
    "early_reward",
    "no_last_obs",
    "bad_order",
    "bad_frames",
    "truncated",
    "trailing_bytes",
}
"""Codes of models, which only their readers raise; `gone` is never sent. The next four are of
calls in a game, before there is anything to send, and the last two of streams: in a frame batch,
the header decides where a frame ends."""
SESSION = uuid.UUID("019a86a0-1000-7000-8000-0123456789ab")


def block(language: str, beginning: str = "") -> str:
    (found,) = [text for kind, text in BLOCKS if kind == language and text.startswith(beginning)]
    return found


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("protocol")) as found:
        yield found


def test_every_route_is_on_the_page_with_its_scope():
    told = set(re.findall(r"^\| `(\w+ /\S+)` \| `?(\w+)`? \|", PAGE, re.MULTILINE))
    assert told == {(route.name.replace(":int", ""), route.scope or "open") for route in ROUTES}
    assert all(f"| `{scope}` |" in PAGE for scope in SCOPES)
    assert [code for code in STATUS if f"`{code}`" not in PAGE] == []
    for word in ("columns", "player", "session", *(f for f in ChunkColumns.__struct_fields__)):
        assert f"`{word}`" in PAGE
    assert (MAX_FRAMES_PER_SEND, MAX_FRAME_BYTES) == (64, 512 * 1024)


def test_the_spec_and_its_schema_are_those_of_the_page():
    assert spec_from_json(block("json", '{"action":{"":').strip()) == SPEC
    assert block("json", '{"action":{"":').strip().encode() == SPEC.to_json()
    assert (
        block("text", "6238").strip() == SPEC.schema == hashlib.sha256(SPEC.to_json()).hexdigest()
    )


def worked_chunk(session: uuid.UUID = SESSION) -> Chunk:
    columns: dict[str, Any] = {
        "obs": np.array([[0.5, -0.5], [0.25, 0.0], [0.0, 1.0]], np.float32),
        "action": np.array([1, 0, 0], np.int32),
        "reward": np.array([1, 1, 0], np.float32),
        "row": np.array([0, 0, 1], np.uint8),
        "is_first": np.array([True, False, False]),
        "terminated": np.array([False, True, False]),
        "truncated": np.array([False, False, False]),
    }
    meta = ChunkMeta(
        game=SPEC.game,
        schema=SPEC.schema,
        session=session,
        chunk_no=0,
        first_step=0,
        n_steps=2,
        consent="granted",
        client="example/1",
        episodes=(EpisodeNote(row=0),),
    )
    return Chunk(meta, columns).validate()


def test_the_bytes_of_the_page_are_the_frame_batch_we_write():
    raw = bytes.fromhex(block("text", "554e5041"))
    assert raw == encode_frame_batch([worked_chunk().frame()], {SESSION: player_name("ada")})
    (frame,) = decode_frame_batch(raw).frames
    assert isinstance(frame, Frame)
    assert chunk_of(frame) == worked_chunk()


def test_the_bytes_can_be_read_with_what_the_page_says_alone():
    raw = bytes.fromhex(block("text", "554e5041"))
    length = struct.unpack_from("<I", raw, 4)[0]
    assert (raw[:4], length, len(raw)) == (b"UNPA", 76, 976)
    assert json.loads(raw[8 : 8 + length]) == {"players": {str(SESSION): "ada"}, "skipped_steps": 0}
    header = raw[84:148]
    body = raw[148:]
    fields = struct.unpack("<4sBBHII16sQ16sII", header)
    assert fields == (b"UNDY", 1, 0, 0, 828, 0xEFD6750E, SESSION.bytes, 0, bytes(16), 0, 0x47AD007A)
    assert (zlib.crc32(body), zlib.crc32(header[:60])) == (0xEFD6750E, 0x47AD007A)
    size = struct.unpack_from("<Q", body)[0]
    assert (size, 148 + 8 + size) == (760, 916)
    table = json.loads(body[8 : 8 + size])
    start, end = table["obs"]["data_offsets"]
    assert np.frombuffer(body[8 + size :][start:end], "<f4").tolist() == [
        0.5,
        -0.5,
        0.25,
        0.0,
        0.0,
        1.0,
    ]


def test_the_command_of_the_page_sends_the_same_chunk(gateway: Running):
    if shutil.which("curl") is None:
        pytest.skip("no curl on this machine")
    key = gateway.key("play", registers=True)
    assert gateway.ask("PUT", "/v1/games/cart", key, SPEC.to_json()).status == 200
    ran = subprocess.run(
        ["sh", "-eu"],
        input=block("sh"),
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "/usr/bin:/bin", "UNDERSTUDY_URL": gateway.url, "UNDERSTUDY_KEY": key},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    answer = json.loads(ran.stdout)
    assert answer == json.loads(block("json", '{"acks"')), "and this is the answer of the page"
    (frame,) = gateway.streamed()
    assert frame.body == worked_chunk(frame.session).encode()


def test_the_commands_for_other_languages_register_a_game_send_a_chunk_and_get_a_decision(
    gateway: Running,
):
    if shutil.which("curl") is None:
        pytest.skip("no curl on this machine")
    page = (ROOT / "docs" / "other-languages.md").read_text()
    (script,) = re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    key = gateway.key("play", registers=True)
    before = len(gateway.streamed())
    ran = subprocess.run(
        ["sh", "-eu"],
        input=script,
        capture_output=True,
        text=True,
        timeout=60,
        env={"PATH": "/usr/bin:/bin", "UNDERSTUDY_URL": gateway.url, "UNDERSTUDY_KEY": key},
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    registered, sent, acted = map(json.loads, ran.stdout.replace("}{", "}\n{").splitlines())
    assert registered == {"game": "cart", "schema": SPEC.schema}
    assert sent["acks"][0]["accepted"]
    assert acted["is_fallback"]
    assert len(gateway.streamed()) == before + 1


def test_every_code_of_a_refusal_is_on_the_page():
    codes = {
        code
        for folder in ("core", "experience", "nn", "models", "serve", "ingest")
        for path in (ROOT / "src" / "understudy" / folder).glob("*.py")
        for code in re.findall(r'Refused\(\s*"(\w+)"', path.read_text())
    }
    assert len(codes) > 40
    assert sorted(code for code in codes - NOT_ON_THE_WIRE if f"`{code}`" not in PAGE) == []


def test_a_signed_document_is_checked_by_slicing_its_text(gateway: Running):
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    gateway.release(gateway.register(game_spec("signing", obs=2, actions=2)))
    bot = gateway.ask("GET", "/v1/games/signing/bot", gateway.key("play")).json
    told = re.findall(r"`(\w+)`", PAGE.split("\n## Bots\n")[1].split("With `after")[0])
    assert bot.keys() <= set(told)
    public = base64.b64decode(bot["trust"][0].removeprefix("ed25519:"))
    assert public == SIGNER.public
    for text in (bot["champion"], bot["champion_release"]):
        entry = text[len('{"entry":') : text.rindex(',"key_id":')]
        facts = json.loads(text)
        assert json.loads(entry) == facts["entry"]
        assert facts["key_id"] == hashlib.sha256(public).hexdigest()[:16]
        signed = b"understudy-entry/1\0" + entry.encode()
        Ed25519PublicKey.from_public_bytes(public).verify(
            base64.b64decode(facts["signature"]), signed
        )
    pointer, release = (json.loads(bot[name])["entry"] for name in ("champion", "champion_release"))
    assert (pointer["kind"], pointer["alias"], release["kind"]) == ("point", "champion", "release")
    assert release["manifest"]["model_no"] == pointer["model_no"]
    raw = gateway.ask(
        "GET", f"/v1/games/signing/models/{pointer['model_no']}/policy", gateway.key("play")
    ).raw
    assert len(raw) == release["manifest"]["policy_bytes"]
    assert hashlib.sha256(raw).hexdigest() == release["manifest"]["policy_sha256"]


def test_what_is_open_is_on_the_page():
    opened = {route.path for route in (*ROUTES, *PAGES) if route.scope is None}
    assert {path for path in opened if not path.startswith("/static/")} == {
        "/healthz",
        "/readyz",
        "/play",
    }
    assert all(f"`{path}`" in PAGE for path in ("/healthz", "/readyz", "/play", "/static/"))


def test_names_of_games_are_those_of_the_page(gateway: Running):
    for name in ("CON", "nul.x", "lpt0", "com9", "ends.", ".begins", "a" * 64, "ü"):
        with pytest.raises(InvalidName):
            game_name(name)
    for name in ("a" * 63, "9-lives", "con-game", "com", "x.y_z"):
        assert game_name(name) == name
    key = gateway.key("play", registers=True)
    assert (
        gateway.ask(
            "PUT", "/v1/games/Cased", key, game_spec("Cased", obs=2, actions=2).to_json()
        ).status
        == 200
    )
    assert (
        gateway.ask(
            "PUT", "/v1/games/cased", key, game_spec("cased", obs=2, actions=2).to_json()
        ).status
        == 400
    )


def test_a_champion_is_chosen_with_the_bodies_of_the_page(gateway: Running):
    spec = gateway.register(game_spec("chosen", obs=2, actions=2))
    gateway.release(spec)
    gateway.release(spec)
    admin = gateway.key("admin")
    told = json.loads(block("json", '{"alias"'))
    (asked,) = re.findall(r"promote` with `(\{.*?\})`", PAGE)
    fields = json.loads(asked)
    assert fields.keys() == set(Promote.__struct_fields__)
    for body in ({**fields, "model_no": 2}, {"model_no": 1}):
        got = gateway.ask("POST", "/v1/games/chosen/promote", admin, body)
        assert (got.status, got.json) == (200, {**told, "model_no": body["model_no"]})
    back = gateway.ask("POST", "/v1/games/chosen/rollback", admin)
    assert (back.status, back.json) == (200, {**told, "model_no": 2})


def test_answers_have_the_fields_of_the_page(gateway: Running):
    spec = game_spec("answers", obs=2, actions=["left", "right"])
    gateway.release(gateway.register(spec))
    key = gateway.key("play")
    for route, beginning in (("act", '{"action": 1'), ("advise", '{"model_no"')):
        told = json.loads(block("json", beginning))
        got = gateway.ask("POST", f"/v1/games/answers/{route}", key, {"obs": [0.1, 0.2]}).json
        assert got.keys() == told.keys()
        if route == "advise":
            assert got["actions"][0].keys() == told["actions"][0].keys()
