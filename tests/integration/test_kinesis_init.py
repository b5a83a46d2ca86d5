"""`understudy stream init` on a real Kinesis API: existing, requested and unreachable streams."""

import time
import uuid
from typing import Any

import pytest

from tests.integration.commands import four_at_once
from tests.integration.kinesis import harness
from tests.servers.web_page import web_page
from understudy.cli.root import run

RETRY_S = 120.0
"""Of the addresses here: what no second try mends is told long before that."""


def new_url(server: Any, *, endpoint: str = "") -> str:
    return (
        f"kinesis://made-{uuid.uuid4().hex[:12]}?region={server.credentials['region']}"
        f"&endpoint={endpoint or server.url}&credentials={server.credentials_file}"
        f"&retry_s={RETRY_S}"
    )


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """A command's exit code and its only line, within a time limit."""
    began_s = time.monotonic()
    code = run(["stream", "init", *words])
    assert time.monotonic() - began_s < RETRY_S / 2
    out, err = capsys.readouterr()
    (line,) = (out + err).strip().splitlines()
    return code, line


def test_an_existing_stream_reports_its_number_of_shards(kinesis_server: Any, capsys):
    with harness(kinesis_server, shards=2) as table:
        url = table.location(retry_s=RETRY_S).url
        code, line = said(capsys, url, "--json")
        assert (code, '"partitions": 2}' in line) == (0, True)
        code, line = said(capsys, url, "--partitions", "4")
        assert code == 2
        assert (
            "already exists with 2 open shards, but 4 were requested; omit the number to use it"
            in line
        )
        assert f"update-shard-count --stream-name {table.name} --target-shard-count 4" in line
        table.split_all()
        assert "is ready with 4 partitions" in said(capsys, url, "--partitions", "4")[1]


def test_more_shards_than_the_limit_are_rejected_quickly(kinesis_server: Any, capsys):
    code, line = said(capsys, new_url(kinesis_server), "--partitions", "9999")
    assert (code, "rejects a stream of 9999 shards" in line, "use fewer shards" in line) == (
        2,
        True,
        True,
    )


def test_a_server_of_another_kind_is_reported_quickly(kinesis_server: Any, s3_server: Any, capsys):
    code, line = said(capsys, new_url(kinesis_server, endpoint=s3_server.url))
    assert (code, "NotKinesis: status 405" in line) == (2, True)
    with web_page() as url:
        code, line = said(capsys, new_url(kinesis_server, endpoint=url))
    assert (code, f"{url} failed: NotKinesis" in line, "correct endpoint=" in line) == (
        2,
        True,
        True,
    )


def test_tls_with_a_plaintext_server_is_reported_quickly(kinesis_server: Any, capsys):
    code, line = said(
        capsys, new_url(kinesis_server, endpoint=kinesis_server.url.replace("http:", "https:"))
    )
    assert (
        code,
        "at https://127" in line,
        "use http:// if the server has no TLS" in line,
    ) == (2, True, True)


def test_four_concurrent_inits_create_one_stream(kinesis_server: Any):
    for code, text in four_at_once("stream", "init", new_url(kinesis_server)):
        assert (code, "is ready with 4 partitions" in text) == (0, True), text
