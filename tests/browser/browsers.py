"""A platform in its own processes, browser tabs on its play page, and a keyboard player."""

import re
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

from tests.act.policies import random_policy
from tests.cli.platforms import Up, wait_for
from understudy.backends.data import DataFolder
from understudy.backends.deployment import Deployment, open_deployment
from understudy.experience.chunk import By, Chunk
from understudy.experience.frame import Frame, decode_frame_batch
from understudy.experience.game import GameSpec
from understudy.models.manifest import Lineage
from understudy.platform.play_page import page_address, play_key
from understudy.ports import Cursor, Stored
from understudy.stores.database import has_store
from understudy.stores.view import StoreView

SHOTS = Path(__file__).parents[2] / "build" / "browser"
"""Screenshots for manual inspection; ignored by git."""


SPEED = 4
"""How much faster than for people the games run, so that a match takes seconds."""

FASTER = f"""(() => {{
  const request = window.requestAnimationFrame.bind(window);
  window.requestAnimationFrame = (tick) => request((nowMs) => tick({SPEED} * nowMs));
}})()"""
TWO_FRAMES = """() => new Promise((resolve) => {
  requestAnimationFrame(() => requestAnimationFrame(() => resolve()));
})"""
DESKTOP = {"width": 800, "height": 600}
CONTROLS = ("ArrowUp", "ArrowDown")


@dataclass
class PagePlatform:
    """A running platform with a play page for one game."""

    up: Up
    deployment: Deployment
    key: str
    game: str

    @property
    def url(self) -> str:
        return str(self.up.ready["url"])

    @property
    def address(self) -> str:
        return page_address(self.url, self.game, key=self.key)

    def release(self, *, seed: int = 0) -> str:
        """Release a champion with random weights; returns its name."""
        registry = self.deployment.registry
        (spec,) = self.specs()
        epoch = registry.catalogue(self.game).epoch or registry.takeover(self.game, owner="test")
        manifest = registry.release(
            random_policy(spec, "argmax", seed=seed), Lineage(algorithm="dqn"), epoch=epoch
        )
        registry.set_alias(spec.game, "champion", manifest.model_no, why="test")
        return manifest.name

    @property
    def champion(self) -> str:
        model_no = self.deployment.registry.catalogue(self.game).model_of("champion")
        return f"{self.game}/{model_no}"

    def specs(self) -> list[GameSpec]:
        return list(self.deployment.registry.specs(self.game))

    def chunks(self, *, since_s: float, steps: int) -> list[Chunk]:
        """Return all chunks of sessions that began later, once they have at least these steps."""
        chunks: list[Chunk] = []

        def are_stored() -> bool:
            chunks[:] = stored(self.up.data, since_s=since_s)
            return sum(chunk.meta.n_steps for chunk in chunks) >= steps

        wait_for(are_stored, 30.0)
        return chunks


@contextmanager
def run_platform(
    folder: Path,
    game: str = "rally",
    *,
    with_bot: bool = True,
    roles: str = "gateway,ingest",
    **environment: str,
) -> Iterator[PagePlatform]:
    """Run these roles on a folder; `with_bot` releases a champion with random weights."""
    data = DataFolder(folder / "D")
    deployment = open_deployment(data)
    key = play_key(deployment, game)
    with Up(data.root, "--role", roles, **environment) as up:
        assert up.ready, up.errors
        platform = PagePlatform(up, deployment, key, game)
        if with_bot:
            platform.release()
        yield platform


def stored(data: Path, *, since_s: float = 0.0) -> list[Chunk]:
    """Every chunk in the store of a session that began later, in order of arrival."""
    chunks: list[Chunk] = []
    if not has_store(data / "store"):
        return chunks
    with StoreView(data / "store") as view:
        cursor: Cursor | None = None
        while (tail := view.tail(cursor, max_items=1000, wait_s=0)).items:
            cursor = tail.cursor
            chunks += [
                item.chunk
                for item in tail.items
                if isinstance(item, Stored)
                and item.chunk is not None
                and item.chunk.meta.session.int >> 80 >= int(since_s * 1000)
            ]
    return chunks


@dataclass(frozen=True)
class Episode:
    """A stored episode, assembled from its chunks."""

    seat: int
    match: str | None
    opponents: tuple[str, ...]
    model: str | None
    result: str | float | None
    by: frozenset[str]
    steps: int


def episodes_of(chunks: list[Chunk]) -> list[Episode]:
    """Whole episodes, ordered by session and chunk; notes that continue one are merged."""
    episodes: list[Episode] = []
    for session in sorted({chunk.meta.session for chunk in chunks}):
        ordered = sorted(
            (chunk for chunk in chunks if chunk.meta.session == session),
            key=lambda chunk: chunk.meta.chunk_no,
        )
        numbers = [chunk.meta.chunk_no for chunk in ordered]
        assert numbers == list(range(len(ordered))), "a chunk is missing"
        for chunk in ordered:
            ends = [note.row for note in chunk.meta.episodes[1:]] + [len(chunk.columns["row"])]
            for note, end in zip(chunk.meta.episodes, ends, strict=True):
                rows = slice(note.row, end)
                is_step = chunk.columns["row"][rows] == 0
                by = frozenset(
                    By(int(code)).name.lower() for code in chunk.columns["by"][rows][is_step]
                )
                episode = Episode(
                    note.seat,
                    note.match,
                    note.opponents,
                    note.model,
                    note.result,
                    by,
                    int(is_step.sum()),
                )
                if chunk.columns["is_first"][note.row]:
                    episodes.append(episode)
                else:
                    last = episodes.pop()
                    episodes.append(
                        Episode(
                            note.seat,
                            note.match,
                            note.opponents,
                            note.model or last.model,
                            note.result,
                            last.by | episode.by,
                            last.steps + episode.steps,
                        )
                    )
    return episodes


@dataclass
class Tab:
    """An open page, its console errors, requested hosts and responses to sent frames."""

    page: Any
    errors: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)
    responses: list[Any] = field(default_factory=list)
    """Responses to `/frames`."""

    def acked_chunks(self) -> set[tuple[uuid.UUID, int]]:
        """Chunks acknowledged on the wire, independent of what the page reports."""
        chunks = set()
        for response in self.responses:
            with suppress(ValueError, KeyError, driver_error()):
                frames = decode_frame_batch(response.request.post_data_buffer).frames
                acks = response.json()["acks"]
                chunks |= {
                    (frame.session, frame.chunk_no)
                    for frame, ack in zip(frames, acks, strict=True)
                    if isinstance(frame, Frame) and ack["accepted"]
                }
        return chunks

    def visit(self, address: str) -> None:
        """Load the page anew, although only the key in its address may differ."""
        if "/play" in self.page.url:
            self.page.goto("about:blank")
        self.page.goto(address)
        self.page.wait_for_selector("body[data-phase=ready]")

    def resize(self, viewport: Mapping[str, int]) -> None:
        """Change the size of the page, and wait until it is laid out and drawn again."""
        self.page.set_viewport_size(viewport)
        self.page.evaluate(TWO_FRAMES)

    def text(self, selector: str) -> str:
        return str(self.page.text_content(selector)).strip()

    def count(self, name: str) -> int:
        return int(self.text(f"#{name}").replace(",", ""))

    def data(self, name: str) -> str | None:
        """A data attribute of the page's body: phase, bot or recording."""
        value = self.page.get_attribute("body", f"data-{name}")
        return None if value is None else str(value)

    def screenshot(self, name: str) -> None:
        SHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SHOTS / f"{name}.png")


class Browser:
    """A browser that opens one page after another in the same few contexts.

    A new context starts a new process, which costs several times the processor time of a page.
    """

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self._pages: dict[str, Any] = {}

    def page(self, **how: Any) -> Any:
        """The page of the context with these settings."""
        name = repr(sorted(how.items()))
        if name not in self._pages:
            self._pages[name] = self.new_page(**how)
        return self._pages[name]

    def new_page(self, **how: Any) -> Any:
        """A page in a new context."""
        context = self.driver.new_context(**how)
        context.add_init_script(FASTER)
        return context.new_page()

    def close(self, page: Any) -> None:
        self._pages = {name: shared for name, shared in self._pages.items() if shared is not page}
        page.context.close()

    def clear(self, page: Any) -> None:
        """Make the next visit of a page a first one, except for the browser's cache of files."""
        page.unroute_all()
        page.mouse.up()
        for key in CONTROLS:
            page.keyboard.up(key)
        for other in page.context.pages:
            if other is not page:
                other.close()
        page.context.set_offline(False)
        page.emulate_media(color_scheme="light")
        page.goto(urljoin(page.url, "/static/icon.svg"))
        page.evaluate("localStorage.clear(); sessionStorage.clear()")


@contextmanager
def open_tab(
    browser: Browser,
    address: str,
    *,
    viewport: Mapping[str, int] = DESKTOP,
    own_context: bool = False,
    **how: Any,
) -> Iterator[Tab]:
    """Open the page for a first visit, without a service worker unless one is allowed."""
    how = {"service_workers": "block", **how}
    page = browser.new_page(**how) if own_context else browser.page(**how)
    page.goto("about:blank")  # late messages of the visit before arrive before this returns
    tab = Tab(page)

    def on_console(message: Any) -> None:
        if message.type == "error":
            tab.errors.append(message.text)

    def on_response(response: Any) -> None:
        if response.url.endswith("/frames"):
            tab.responses.append(response)

    listeners = {
        "console": on_console,
        "pageerror": lambda error: tab.errors.append(str(error)),
        "request": lambda request: tab.hosts.add(urlsplit(request.url).netloc),
        "response": on_response,
    }
    for event, listener in listeners.items():
        page.on(event, listener)
    try:
        page.set_viewport_size(viewport)
        tab.visit(address)
        yield tab
        if not own_context:
            for event, listener in listeners.items():
                page.remove_listener(event, listener)
            browser.clear(page)
    except BaseException:
        own_context = True
        raise
    finally:
        if own_context:
            browser.close(page)


def driver_error() -> type[Exception]:
    """The driver's exception for an interrupted response."""
    from playwright.sync_api import Error

    kind: type[Exception] = Error
    return kind


class Player:
    """Follows the ball with the arrow keys: reads the positions, and holds or releases a key."""

    def __init__(self, tab: Tab) -> None:
        self.tab = tab
        self._held = ""
        self.positions: set[str] = set()

    def look(self) -> str:
        """Read the positions once and move; returns the page's phase."""
        page = self.tab.page
        phase, place = page.evaluate(
            "() => [document.body.dataset.phase, document.getElementById('court').dataset.place ?? "
            "'']"
        )
        if place:
            self.positions.add(place)
            _, ball, own, _ = map(int, place.split())
            key = "ArrowUp" if ball < own - 120 else "ArrowDown" if ball > own + 120 else ""
            self._hold(key if phase == "playing" else "")
        return str(phase)

    def _hold(self, key: str) -> None:
        if key == self._held:
            return
        if self._held:
            self.tab.page.keyboard.up(self._held)
        if key:
            self.tab.page.keyboard.down(key)
        self._held = key


def finish_matches(*players: Player, timeout_s: float = 180.0) -> None:
    """Play until the matches of all players are over."""
    deadline_s = time.monotonic() + timeout_s
    while look(*players) != {"over"}:
        assert time.monotonic() < deadline_s, "the match takes too long"
        time.sleep(0.02)


def look(*players: Player) -> set[str]:
    """Every player looks and moves once; returns the phases of their pages."""
    return {player.look() for player in players}


def play_points(*players: Player, points_more: int = 1, timeout_s: float = 90.0) -> None:
    """Play until each match has this many more points or is over."""
    targets = [sum(points(player.tab)) + points_more for player in players]
    deadline_s = time.monotonic() + timeout_s
    while any(
        player.look() == "playing" and sum(points(player.tab)) < target
        for player, target in zip(players, targets, strict=True)
    ):
        assert time.monotonic() < deadline_s, "the points take too long"
        time.sleep(0.02)


def points(tab: Tab) -> tuple[int, int]:
    mine, theirs = map(int, re.findall(r"\d+", tab.text("#score")))
    return mine, theirs
