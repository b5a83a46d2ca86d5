"""The play page as served: types, a strict policy, nothing inline, nothing from other hosts."""

import gzip
import re
import socket
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.serve.gateways import Running, running
from understudy.serve.pages import FILES, PAGES, load_pages, without_comments

ROOT = Path(__file__).parents[2]
OWN = sorted(path for path in (ROOT / "src/understudy/serve/static").iterdir() if path.is_file())


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("pages")) as found:
        yield found


@pytest.mark.parametrize(("path", "name"), FILES.items())
def test_a_file_is_served_with_its_type_and_a_strict_policy(gateway: Running, path: str, name: str):
    reply = gateway.ask("GET", path)
    assert reply.status == 200
    kinds = {
        "html": "text/html",
        "css": "text/css",
        "js": "text/javascript",
        "svg": "image/svg+xml",
    }
    assert reply.headers["content-type"].partition(";")[0] == kinds[name.rpartition(".")[2]]
    assert reply.headers["x-content-type-options"] == "nosniff"
    policy = reply.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    assert reply.raw == load_pages()[name].raw


def test_a_file_that_has_not_changed_is_not_sent_again(gateway: Running):
    first = gateway.ask("GET", "/static/play.js")
    assert first.headers["cache-control"] == "no-cache"
    etag = first.headers["etag"]
    for known in (etag, f"W/{etag}", f'"other", {etag}', "*"):
        again = gateway.ask("GET", "/static/play.js", headers={"If-None-Match": known})
        assert (again.status, again.raw, again.headers["etag"]) == (304, b"", etag)
        assert "content-security-policy" in again.headers
    for other in ('"other"', etag[1:-1], "W/"):
        assert gateway.ask("GET", "/static/play.js", headers={"If-None-Match": other}).status == 200
    head = gateway.ask("HEAD", "/static/play.js")
    assert (head.status, head.raw, head.headers["content-length"]) == (
        200,
        b"",
        str(len(first.raw)),
    )


def test_a_file_is_compressed_for_clients_that_accept_gzip(gateway: Running):
    plain = gateway.ask("GET", "/static/understudy.js")
    for accepted in ("gzip", "br, gzip;q=0.8, *"):
        packed = gateway.pool.request(
            "GET",
            f"{gateway.url}/static/understudy.js",
            headers={"Accept-Encoding": accepted},
            decode_content=False,
        )
        assert packed.headers["content-encoding"] == "gzip"
        assert packed.headers["vary"] == "accept-encoding"
        assert packed.headers["etag"] != plain.headers["etag"]
        assert gzip.decompress(packed.data) == plain.raw
        assert len(packed.data) < len(plain.raw) / 2
    assert "content-encoding" not in plain.headers
    whole = sum(len(page.packed) for name, page in load_pages().items() if name.endswith(".js"))
    assert whole < 60_000, "the page's scripts are to be quick on a phone"


def test_comments_of_whole_lines_are_removed_and_nothing_else_changes():
    script = "/**\n * Words.\n */\nconst a = /** @type {any} */ (b); // kept\n  // gone\n"
    script += "/** @type {x} */ (c).d();\n/** gone */\n"
    kept = "\n\n\nconst a = /** @type {any} */ (b); // kept\n\n/** @type {x} */ (c).d();\n\n"
    assert without_comments(script) == kept
    for name in ("play.js", "understudy.js", "rally.js"):
        page = load_pages()[name]
        folder = ROOT / (
            "clients/js" if name in ("understudy.js", "rally.js") else "src/understudy/serve/static"
        )
        whole = (folder / name).read_text().splitlines()
        served = page.raw.decode().splitlines()
        assert len(served) == len(whole), "line numbers stay"
        assert all(one in ("", other) for one, other in zip(served, whole, strict=True))


@pytest.mark.parametrize(
    "path",
    [
        "/static/../routes.py",
        "/static/..%2froutes.py",
        "/static/%2e%2e/routes.py",
        "/static//play.js",
        "//static/play.js",
        "/static/play.js/",
        "/static/play.js%00",
        "/static/PLAY.JS",
        "/static/./play.js",
        "/play/../static/play.js",
        "/static\\..\\routes.py",
        "/static/%70lay.js",
        "/static/play.js;x",
        "/static/.gitignore",
        "/static/tsconfig.json",
        "/static/package.json",
        "/clients/js/understudy.js",
    ],
)
def test_path_traversal_is_not_possible(gateway: Running, path: str):
    with socket.create_connection(("127.0.0.1", gateway.server.port), 10) as connection:
        connection.sendall(
            f"GET {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode("latin-1")
        )
        answer = b""
        while part := connection.recv(65536):
            answer += part
    assert int(answer.split(b" ", 2)[1]) in (400, 401), answer[:200]


def test_a_query_changes_nothing_and_other_methods_are_rejected(gateway: Running):
    assert gateway.ask("GET", "/play?key=x&name=../keys").raw == load_pages()["play.html"].raw
    key = gateway.key("play")
    for method in ("POST", "PUT", "DELETE"):
        assert gateway.ask(method, "/play").status == 401
        assert gateway.ask(method, "/play", key).headers["allow"] == "GET"


class _Tags(HTMLParser):
    """What a page loads, and whether anything in it is inline."""

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.inline: list[str] = []
        self._script = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, Any]]) -> None:
        facts = dict(attrs)
        self.loads += [facts[name] for name in ("src", "href") if facts.get(name)]
        self.inline += [
            f"{tag} {name}" for name in facts if name == "style" or name.startswith("on")
        ]
        self._script = tag == "script"
        if tag == "style" or (tag == "script" and not facts.get("src")):
            self.inline.append(tag)

    def handle_data(self, data: str) -> None:
        if self._script and data.strip():
            self.inline.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._script = False


def test_the_page_has_nothing_inline_and_loads_only_what_is_served_here():
    tags = _Tags()
    tags.feed(load_pages()["play.html"].raw.decode())
    assert tags.inline == []
    assert len(tags.loads) >= 4
    assert set(tags.loads) <= FILES.keys()


def test_modules_import_only_what_is_served_here_and_use_no_external_urls():
    for name, page in load_pages().items():
        text = page.raw.decode()
        if name.endswith(".js"):
            imported = re.findall(
                r"""^\s*(?:import|export)\b[^;]*?from\s+["'](.+?)["']""", text, re.MULTILINE
            )
            assert {f"/static/{one.removeprefix('./')}" for one in imported} <= FILES.keys(), name
        assert not re.search(
            r"\b(innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function)", text
        ), name
        urls = set(re.findall(r"(?:https?:)?//[\w.-]+\.[a-z]{2,}[^\s\"'`]*", text)) - {
            "http://www.w3.org/2000/svg"
        }
        assert {url for url in urls if "example" not in url} == set(), name


def test_every_file_of_the_page_is_served_and_exists_once_in_git():
    assert {path.name for path in OWN} | {"rally.js", "understudy.js"} == set(FILES.values())
    assert len(PAGES) == len(FILES)
    clients = {path.name for path in (ROOT / "clients/js").glob("*.js")}
    assert not clients & {path.name for path in OWN}
