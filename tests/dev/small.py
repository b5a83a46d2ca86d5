"""A small server with a real process and a real port, so that what is around servers is tested without big ones."""

import sys
import urllib.request
from pathlib import Path

import pytest

from understudy.dev import cache, servers
from understudy.dev.recipe import Launch, Place

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


class Small:
    """Answers with its password, which stands in its environment."""

    ports = ("client",)
    keeps_data = True
    mood = "works"

    def trouble(self) -> str | None:
        return None

    def prepare(self, place: Place) -> None:
        (place.folder / "program.py").write_text(PROGRAM)

    def launch(self, place: Place) -> Launch:
        words: list[str | Path] = [sys.executable, place.folder / "program.py", str(place.ports["client"]), self.mood]
        return Launch(words, {"SECRET": place.credentials["password"]})

    def ask(self, place: Place) -> None:
        with urllib.request.urlopen(place.url, timeout=5.0) as answer:
            assert answer.read().decode() == place.credentials["password"]

    def welcome(self, place: Place) -> None:
        self.ask(place)
        with (place.folder / "guests").open("a") as file:
            file.write("one\n")


class Broken(Small):
    """Ends before it answers."""

    mood = "breaks"


def instead_of_kafka(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, recipe: type[Small] = Small) -> None:
    """From now on `kafka` is the small server, and it need not be fetched."""
    monkeypatch.setenv("UNDERSTUDY_SERVERS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(servers, "_RECIPES", {**servers._RECIPES, "kafka": recipe})
    place = cache.place_of("kafka")
    place.mkdir(parents=True)
    (place / "nothing").touch()
    (place / "files.json").write_text('{"nothing": [0, ""]}')
