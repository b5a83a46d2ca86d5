"""A platform in processes of its own, real browsers on its play page, and a player with a
keyboard."""

import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

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
"""Pictures for people to look at; git ignores them."""


@dataclass
class Stage:
    """A platform whose play page can be opened."""

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
        """Another champion, of random weights; its name."""
        registry = self.deployment.registry
        (spec,) = self.specs()
        epoch = registry.takeover(spec.game, owner="test")
        manifest = registry.release(
            random_policy(spec, "argmax", seed=seed), Lineage(algorithm="dqn"), epoch=epoch
        )
        registry.set_alias(spec.game, "champion", manifest.model_no, why="test")
        return manifest.name

    def specs(self) -> list[GameSpec]:
        return list(self.deployment.registry.specs(self.game))

    def chunks(self, *, steps: int) -> list[Chunk]:
        """Everything that is stored, once it is at least so many steps."""
        found: list[Chunk] = []

        def is_there() -> bool:
            found[:] = stored(self.up.data)
            return sum(chunk.meta.n_steps for chunk in found) >= steps

        wait_for(is_there, 30.0)
        return found


@contextmanager
def stage(
    folder: Path,
    game: str = "rally",
    *,
    with_bot: bool = True,
    roles: str = "gateway,ingest",
    **environment: str,
) -> Iterator[Stage]:
    """These roles on a folder, with a champion of random weights if wanted."""
    data = DataFolder(folder / "D")
    deployment = open_deployment(data)
    key = play_key(deployment, game)
    with Up(data.root, "--role", roles, **environment) as up:
        assert up.ready, up.errors
        found = Stage(up, deployment, key, game)
        if with_bot:
            found.release()
        yield found


def stored(data: Path) -> list[Chunk]:
    """Every chunk of the store, in the order of arrival."""
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
                if isinstance(item, Stored) and item.chunk is not None
            ]
    return chunks


@dataclass(frozen=True)
class Episode:
    """An episode as it was stored, put together from its chunks."""

    seat: int
    match: str | None
    opponents: tuple[str, ...]
    model: str | None
    result: str | float | None
    by: frozenset[str]
    steps: int


def episodes_of(chunks: list[Chunk]) -> list[Episode]:
    """Whole episodes, by session and order; a note that spans chunks is one episode."""
    found: list[Episode] = []
    for session in sorted({chunk.meta.session for chunk in chunks}):
        mine = sorted(
            (one for one in chunks if one.meta.session == session),
            key=lambda one: one.meta.chunk_no,
        )
        assert [one.meta.chunk_no for one in mine] == list(range(len(mine))), "a chunk is missing"
        for chunk in mine:
            ends = [note.row for note in chunk.meta.episodes[1:]] + [len(chunk.columns["row"])]
            for note, end in zip(chunk.meta.episodes, ends, strict=True):
                rows = slice(note.row, end)
                is_step = chunk.columns["row"][rows] == 0
                by = frozenset(
                    By(int(one)).name.lower() for one in chunk.columns["by"][rows][is_step]
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
                    found.append(episode)
                else:
                    last = found.pop()
                    found.append(
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
    return found


@dataclass
class Tab:
    """A page that is open, and everything it said or asked for."""

    page: Any
    errors: list[str] = field(default_factory=list)
    hosts: set[str] = field(default_factory=set)
    answers: list[Any] = field(default_factory=list)
    """Responses to what was sent."""

    def promised(self) -> set[tuple[uuid.UUID, int]]:
        """Chunks whose acknowledgement came over the wire: read there, not asked of the page."""
        found = set()
        for answer in self.answers:
            with suppress(ValueError, KeyError, driver_error()):
                frames = decode_frame_batch(answer.request.post_data_buffer).frames
                acks = answer.json()["acks"]
                found |= {
                    (frame.session, frame.chunk_no)
                    for frame, ack in zip(frames, acks, strict=True)
                    if isinstance(frame, Frame) and ack["accepted"]
                }
        return found

    def text(self, selector: str) -> str:
        return str(self.page.text_content(selector)).strip()

    def count(self, name: str) -> int:
        return int(self.text(f"#{name}").replace(",", ""))

    def fact(self, name: str) -> str | None:
        """What the page says about itself: phase, bot, recording."""
        value = self.page.get_attribute("body", f"data-{name}")
        return None if value is None else str(value)

    def shoot(self, name: str) -> None:
        SHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SHOTS / f"{name}.png")


@contextmanager
def tab(browser: Any, address: str, **how: Any) -> Iterator[Tab]:
    """The page in a context of its own: no other tab's storage, and nothing that answers in the
    gateway's place."""
    context = browser.new_context(
        **{"viewport": {"width": 1100, "height": 800}, "service_workers": "block", **how}
    )
    try:
        found = Tab(context.new_page())
        found.page.on(
            "console", lambda said: found.errors.append(said.text) if said.type == "error" else None
        )
        found.page.on("pageerror", lambda error: found.errors.append(str(error)))
        found.page.on("request", lambda request: found.hosts.add(urlsplit(request.url).netloc))
        found.page.on(
            "response",
            lambda answer: found.answers.append(answer) if answer.url.endswith("/frames") else None,
        )
        found.page.goto(address)
        found.page.wait_for_selector("body[data-phase=ready]")
        yield found
    finally:
        context.close()


def driver_error() -> type[Exception]:
    """What the browser's driver raises, for an answer that broke off."""
    from playwright.sync_api import Error

    kind: type[Exception] = Error
    return kind


class Player:
    """Follows the ball with the arrow keys, as a person would: it looks, and holds a key down or
    lets it go."""

    def __init__(self, tab: Tab) -> None:
        self.tab = tab
        self._held = ""
        self.seen: set[str] = set()

    def look(self) -> str:
        """Look once and move; the phase the page is in."""
        page = self.tab.page
        phase, place = page.evaluate(
            "() => [document.body.dataset.phase, document.getElementById('court').dataset.place ?? "
            "'']"
        )
        if place:
            self.seen.add(place)
            _, ball, own, _ = map(int, place.split())
            wanted = "ArrowUp" if ball < own - 120 else "ArrowDown" if ball > own + 120 else ""
            self._hold(wanted if phase == "playing" else "")
        return str(phase)

    def _hold(self, key: str) -> None:
        if key == self._held:
            return
        if self._held:
            self.tab.page.keyboard.up(self._held)
        if key:
            self.tab.page.keyboard.down(key)
        self._held = key


def play_out(*players: Player, timeout_s: float = 180.0) -> None:
    """Everybody plays until all their matches are over."""
    deadline_s = time.monotonic() + timeout_s
    while look(*players) != {"over"}:
        assert time.monotonic() < deadline_s, "the match takes too long"
        time.sleep(0.01)


def look(*players: Player) -> set[str]:
    """Everybody looks and moves once; the phases their pages are in."""
    return {player.look() for player in players}


def play_on(*players: Player, points_more: int = 1, timeout_s: float = 90.0) -> None:
    """Everybody plays until each has seen so many more points, or the end of the match."""
    wanted = [sum(points(player.tab)) + points_more for player in players]
    deadline_s = time.monotonic() + timeout_s
    while any(
        player.look() == "playing" and sum(points(player.tab)) < more
        for player, more in zip(players, wanted, strict=True)
    ):
        assert time.monotonic() < deadline_s, "the points take too long"
        time.sleep(0.01)


def points(tab: Tab) -> tuple[int, int]:
    mine, theirs = map(int, re.findall(r"\d+", tab.text("#score")))
    return mine, theirs
