"""A small server with a real process and port, to test the server code without big servers."""

import sys
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest

from understudy.dev.packages import cache_folder
from understudy.dev.recipes import RECIPES, Launch, Recipe, ServerFolder

PROGRAM = """
import http.server, os, sys
class Answer(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers(); self.wfile.write(os.environ["SECRET"].encode())
    def log_message(self, *words): pass
if sys.argv[2] == "breaks":
    sys.exit("there is not enough of everything")
print("serving", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer).serve_forever()
"""


def prepare(place: ServerFolder) -> None:
    (place.folder / "program.py").write_text(PROGRAM)


def launch(place: ServerFolder, mood: str = "works") -> Launch:
    words: list[str | Path] = [
        sys.executable,
        place.folder / "program.py",
        str(place.ports["client"]),
        mood,
    ]
    return Launch(words, {"SECRET": place.credentials["password"]})


def probe(place: ServerFolder) -> None:
    with urllib.request.urlopen(place.url, timeout=5.0) as answer:
        assert answer.read().decode() == place.credentials["password"]


def initialise(place: ServerFolder) -> None:
    probe(place)
    with (place.folder / "guests").open("a") as file:
        file.write("one\n")


SMALL = Recipe(
    problem=lambda: None, prepare=prepare, launch=launch, probe=probe, initialise=initialise
)
"""Responds with its password, which is in its environment."""
BROKEN = replace(SMALL, launch=lambda place: launch(place, "breaks"))
"""Exits before it responds."""


def instead_of_kafka(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recipe: Recipe = SMALL
) -> None:
    """Replace `kafka` with the small server, which need not be fetched."""
    monkeypatch.setenv("UNDERSTUDY_SERVERS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(RECIPES, "kafka", recipe)
    place = cache_folder("kafka")
    place.mkdir(parents=True)
    (place / "nothing").touch()
    (place / "files.json").write_text('{"nothing": [0, ""]}')
