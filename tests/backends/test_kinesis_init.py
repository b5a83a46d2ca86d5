"""`understudy stream init` on a real Kinesis API: what is there, what was asked for, and what listens elsewhere."""

import subprocess
import sys
import time
import uuid
from typing import Any

import pytest

from tests.backends.kinesis import PATIENCE_S, desk
from tests.servers.web_page import web_page
from understudy.cli.root import run


def new_url(server: Any, *, endpoint: str = "") -> str:
    return (
        f"kinesis://made-{uuid.uuid4().hex[:12]}?region={server.credentials['region']}"
        f"&endpoint={endpoint or server.url}&credentials={server.credentials_file}"
    )


def said(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """A command's exit code, and the only line it says; soon."""
    began_s = time.monotonic()
    code = run(["stream", "init", *words])
    assert time.monotonic() - began_s < 6.0
    out, err = capsys.readouterr()
    (line,) = (out + err).strip().splitlines()
    return code, line


def test_a_stream_that_is_there_says_how_many_shards_it_has(kinesis_server: Any, capsys):
    with desk(kinesis_server, shards=2) as table:
        url = table.location().url
        code, line = said(capsys, url, "--json")
        assert (code, '"partitions": 2}' in line) == (0, True)
        code, line = said(capsys, url, "--partitions", "4")
        assert code == 2
        assert "is there with 2 open shards, and 4 were asked for; name no number to use it as it is" in line
        assert f"update-shard-count --stream-name {table.name} --target-shard-count 4" in line
        table.split_all()
        assert "is ready with 4 partitions" in said(capsys, url, "--partitions", "4")[1]


def test_more_shards_than_there_may_be_are_refused_soon(kinesis_server: Any, capsys):
    code, line = said(capsys, new_url(kinesis_server), "--partitions", "9999")
    assert (code, "makes no stream of 9999 shards" in line, "ask for fewer" in line) == (2, True, True)


def test_a_server_of_another_kind_is_told_soon(kinesis_server: Any, s3_server: Any, capsys):
    code, line = said(capsys, new_url(kinesis_server, endpoint=s3_server.url))
    assert (code, "answers, and not as Kinesis does (status 405" in line) == (2, True)
    with web_page() as url:
        code, line = said(capsys, new_url(kinesis_server, endpoint=url))
    assert (code, f"{url} answers, and not as Kinesis does" in line, "correct endpoint=" in line) == (2, True, True)


def test_tls_with_a_server_that_speaks_none_is_told_soon(kinesis_server: Any, capsys):
    code, line = said(capsys, new_url(kinesis_server, endpoint=kinesis_server.url.replace("http:", "https:")))
    assert (code, "TLS with https://127" in line, "give http:// where it speaks none" in line) == (2, True, True)


def test_four_at_once_make_one_stream(kinesis_server: Any):
    command = [sys.executable, "-m", "understudy.cli.main", "stream", "init", new_url(kinesis_server)]
    at_once = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(4)]
    told = [one.communicate(timeout=3 * PATIENCE_S)[0] for one in at_once]
    assert [one.returncode for one in at_once] == [0] * 4, told
    assert all("is ready with 4 partitions" in text for text in told)
