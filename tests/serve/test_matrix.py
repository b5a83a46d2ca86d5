"""Every route against every kind of key, generated from the routing table."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.card import Card
from tests.serve.gateways import Reply, Running, frames_of, played, running
from understudy.core.names import player_name
from understudy.experience.frame import encode_frame_batch
from understudy.models.keys import SCOPES
from understudy.serve.api import ApiRoute
from understudy.serve.gateway import Gateway
from understudy.serve.pages import PAGES
from understudy.serve.routes import ROUTES
from understudy.testing.samples import cart_spec

OPEN = {"/healthz", "/readyz"}
REFUSED = {
    "none": (401, "no_key"),
    "wrong": (401, "wrong_key"),
    "revoked": (401, "revoked_key"),
    "expired": (401, "expired_key"),
    "scheme": (401, "wrong_key"),
}


@dataclass
class Keyring:
    """A key for each row of the matrix."""

    texts: dict[str, str]

    def headers(self, which: str) -> dict[str, str]:
        if which == "none":
            return {}
        scheme = "Basic" if which == "scheme" else "Bearer"
        return {"Authorization": f"{scheme} {self.texts[which]}"}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with running(tmp_path_factory.mktemp("matrix")) as found:
        spec = found.register()
        found.register(cart_spec("other"))
        for seed in (0, 1):
            found.release(spec, seed=seed)
        yield found


@pytest.fixture(scope="module")
def keyring(gateway: Running) -> Keyring:
    everything = tuple(SCOPES)
    texts = {f"only {scope}": gateway.key(scope, registers=True) for scope in SCOPES}
    texts |= {
        "right": gateway.key(*everything, game="cart"),
        "other game": gateway.key(*everything, game="other"),
        "revoked": gateway.key(*everything),
        "expired": gateway.key(*everything, expires_s=time.time() - 1),
        "scheme": gateway.key(*everything),
        "wrong": "uk_0123456789ab_" + "A" * 43,
    }
    gateway.keys.revoke(texts["revoked"].split("_")[1])
    gateway.keys.follow()
    return Keyring(texts)


def example(route: ApiRoute) -> tuple[str, Any]:
    """An address and a body with which the route succeeds."""
    path = route.path.replace("{game}", "cart").replace("{model_no:int}", "1")
    path = path.replace("{schema}", cart_spec().schema)
    (frame,) = frames_of(played(n_chunks=1))
    bodies: dict[str, Any] = {
        "send_frames": encode_frame_batch([frame], {frame.session: player_name("ada")}),
        "register_game": cart_spec().to_json(),
        "promote": {"model_no": 1},
        "rollback": b"",
        "draw_tickets": {},
        "act": {"obs": [0, 0, 0, 0]},
        "advise": {"obs": [0, 0, 0, 0]},
        "close_session": {
            "player": "ada",
            "session": str(frame.session),
            "chunk_no": 0,
            "n_steps": 0,
        },
        "send_columns": {
            "player": "ada",
            "session": str(frame.session),
            "chunk_no": 0,
            "columns": {
                "obs": [[0, 0, 0, 0], [1, 1, 1, 1]],
                "action": [1, 0],
                "reward": [1, 0],
                "row": [0, 1],
                "is_first": [True, False],
                "terminated": [True, False],
                "truncated": [False, False],
            },
        },
    }
    return path, bodies.get(route.endpoint.__name__)


def expected(route: ApiRoute, which: str) -> tuple[int, str]:
    """What the table says about a key, written down once more, apart from the code that decides
    it."""
    if which in REFUSED:
        if route.scope is None and which == "none":
            return 200, ""
        return REFUSED[which]
    if route.scope is None:
        return 200, ""
    if which.startswith("only "):
        scope = which.removeprefix("only ")
        return (200, "") if scope in (route.scope, "admin") else (403, "wrong_scope")
    if which == "other game" and "{game}" in route.path:
        return 403, "wrong_game"
    return 200, ""


def ask(gateway: Running, route: ApiRoute, headers: dict[str, str]) -> Reply:
    path, body = example(route)
    return gateway.ask(route.method, path, None, body, headers=headers)


@pytest.mark.parametrize("route", [*ROUTES, *PAGES], ids=lambda route: route.name)
@pytest.mark.parametrize(
    "which",
    [
        "none",
        "wrong",
        "revoked",
        "expired",
        "scheme",
        "other game",
        "right",
        *(f"only {scope}" for scope in SCOPES),
    ],
)
def test_a_route_accepts_only_the_right_keys(
    gateway: Running, keyring: Keyring, route: ApiRoute, which: str, card: Card
):
    reply = ask(gateway, route, keyring.headers(which))
    status, code = expected(route, which)
    assert reply.status == status, reply.raw
    if code:
        assert reply.code == code
    assert ("www-authenticate" in reply.headers) == (status == 401)
    if which != "right":
        card.line("route × wrong key, or a key without the scope", tried=1, held=1)


def test_every_route_states_its_scope_and_only_health_and_pages_are_open():
    """The build fails here for a route without a policy."""
    assert {route.path for route in ROUTES if route.scope is None} == OPEN
    assert all(route.scope in SCOPES for route in ROUTES if route.path not in OPEN)
    assert all(
        route.path.startswith("/v1/") for route in ROUTES if route.path not in OPEN | {"/metrics"}
    )
    assert len({route.name for route in ROUTES}) == len(ROUTES)
    assert len({route.endpoint.__name__ for route in ROUTES}) == len(ROUTES)
    for route in ROUTES:
        assert (route.max_bytes > 0) == (route.takes is not None), (
            "a body that is taken has a limit"
        )
        assert route.summary


def test_pages_are_public_files_and_nothing_else():
    """A page's answer depends on nothing that the platform keeps: it is the file, whoever asks."""
    for page in PAGES:
        assert (page.method, page.scope, page.takes, page.max_bytes) == ("GET", None, None, 0)
        assert page.path == "/play" or page.path.startswith("/static/")
        assert "{" not in page.path, "a page has no part that a caller chooses"
        assert page.endpoint.__module__ == "understudy.serve.pages"
    assert not {page.path for page in PAGES} & {route.path for route in ROUTES}
    assert len({page.path for page in PAGES}) == len(PAGES)


def test_the_open_routes_show_no_data(gateway: Running):
    assert gateway.ask("GET", "/healthz").json == {"status": "ok"}
    assert gateway.ask("GET", "/readyz").json == {"status": "ready"}


def test_readiness_names_the_roles_that_are_down(gateway: Running):
    served = gateway.server._gateway
    assert isinstance(served, Gateway)
    state = served._state
    assert state is not None
    try:
        for roles, status in (
            ({"ingest": "running", "learner": "not running"}, "ready"),
            ({"ingest": "silent", "learner": "running"}, "degraded"),
            ({"ingest": "waiting"}, "degraded"),
            ({"ingest": "restarting"}, "degraded"),
            ({"ingest": "starting"}, "ready"),
        ):
            state.roles = roles
            answer = gateway.ask("GET", "/readyz")
            assert (answer.status, answer.json) == (200, {"status": status, "roles": roles})
    finally:
        state.roles = {}


def test_callers_without_a_key_do_not_learn_which_paths_exist(gateway: Running, keyring: Keyring):
    known = keyring.headers("right")
    for path in (
        "/",
        "/v1",
        "/v1/",
        "/v1/nothing",
        "/admin",
        "/docs",
        "/v1/games/cart/",
        "//v1/games",
        "/static",
        "/static/",
        "/static/play.html",
        "/static/pages.py",
        "/play/",
        "/favicon.ico",
    ):
        assert gateway.ask("GET", path).status == 401
        assert gateway.ask("GET", path, headers=known).status == 404
    for method in ("DELETE", "PATCH", "POST", "OPTIONS", "TRACE"):
        assert gateway.ask(method, "/v1/games").status == 401
        reply = gateway.ask(method, "/v1/games", headers=known)
        assert (reply.status, reply.headers["allow"]) == (405, "GET")
    assert gateway.ask("DELETE", "/v1/games/cart", headers=known).headers["allow"] == "GET, PUT"


def test_head_is_get_without_a_body(gateway: Running, keyring: Keyring):
    for route in ROUTES:
        if route.method == "GET":
            path, _ = example(route)
            got = gateway.ask("GET", path, headers=keyring.headers("only admin"))
            reply = gateway.ask("HEAD", path, headers=keyring.headers("only admin"))
            assert (reply.status, reply.raw) == (got.status, b"")
            if route.path != "/metrics":
                assert reply.headers.get("content-length") == got.headers.get("content-length")
    assert gateway.ask("HEAD", "/v1/games").status == 401
