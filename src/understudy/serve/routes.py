"""The API, one line per route; what has no line here and is no page does not exist, and every
line says its key."""

import asyncio
import hashlib
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

import understudy
from understudy.core.errors import Corrupt, Refused, SpecError
from understudy.experience.frame import CONTENT_TYPE, MAX_PARCEL_BYTES, FrameBatch, decode_parcel
from understudy.experience.game import GameSpec, spec_from_json
from understudy.models.catalogue import Catalogue
from understudy.models.keys import Key
from understudy.models.manifest import Manifest
from understudy.ports import Ack, LiveModels
from understudy.serve import wire
from understudy.serve.api import JSON, Answer, ApiRoute, Call
from understudy.serve.intake import Admitted, close_of, frame_of

POLICY_TYPE = "application/vnd.understudy.policy"
_KIB = 1024
_INLINE_BYTES = 512 * _KIB
"""Larger bodies are taken apart in a thread, so that nobody else waits for them."""
T = TypeVar("T")


def _key(call: Call) -> Key:
    assert call.key is not None, "a route with a scope is not called without a key"
    return call.key


async def _on_disk(call: Call, work: Callable[..., T], *arguments: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(call.house.disk, work, *arguments)


# --- Experience -----------------------------------------------------------------------------------


async def send_parcel(call: Call) -> Answer:
    """Frames into the stream; acked only when they are durable there."""
    await call.house.specs.of(call.game)
    if len(call.content) > _INLINE_BYTES:
        parcel = await asyncio.to_thread(decode_parcel, call.content)
    else:
        parcel = decode_parcel(call.content)
    return await _send(call, parcel)


async def send_columns(call: Call) -> Answer:
    """A chunk as JSON; it becomes the frame that any other client would have sent."""
    sent = call.read(wire.ChunkColumns)
    specs = await call.house.specs.of(call.game)
    if len(call.content) > _INLINE_BYTES:
        frame, player = await asyncio.to_thread(frame_of, sent, specs)
    else:
        frame, player = frame_of(sent, specs)
    return await _send(call, FrameBatch([frame], {frame.session: player}, sent.skipped_steps))


async def close_session(call: Call) -> Answer:
    """Say that a session has ended, so that its last steps need not wait for more."""
    await call.house.specs.of(call.game)
    frame, player = close_of(call.read(wire.Close))
    return await _send(call, FrameBatch([frame], {frame.session: player}))


async def _send(call: Call, parcel: FrameBatch) -> Answer:
    verdicts = call.house.admission.admit(_key(call), call.game, parcel.frames, parcel.players)
    admitted = [one for one in verdicts if isinstance(one, Admitted)]
    appended = await call.house.appender.append([one.frame for one in admitted])
    share = call.house.count(call.game, admitted, appended, parcel.skipped_steps)
    left = iter(appended)
    acks = [
        next(left) if isinstance(one, Admitted) else Ack(False, refused=str(one))
        for one in verdicts
    ]
    return Answer(wire.SendResponse(acks=acks, keep_share=share))


# --- Games and bots -------------------------------------------------------------------------------


async def list_games(call: Call) -> Answer:
    games = await _on_disk(call, call.house.registry.games)
    return Answer(wire.GameList(games=[game for game in games if _key(call).is_for(game)]))


async def show_game(call: Call) -> Answer:
    specs = await call.house.specs.of(call.game)
    catalogue = await _catalogue(call)
    return Answer(
        wire.GameInfo(
            game=call.game,
            schemas=sorted(specs),
            champion=catalogue.points_to("champion"),
            canary=catalogue.points_to("canary"),
        )
    )


async def register_game(call: Call) -> Answer:
    """Keep a spec; known ones are answered alike, new ones need a key that may register."""
    try:
        spec = spec_from_json(call.content)
    except SpecError as error:
        raise Refused("bad_spec", str(error)) from None
    if spec.game != call.game:
        raise Refused("wrong_game", f"the spec is of {spec.game}, the address of {call.game}")
    key = _key(call)
    await call.house.specs.register(spec, may_add=key.registers or key.may("admin"))
    return Answer(wire.Registered(game=spec.game, schema=spec.schema))


async def show_spec(call: Call) -> Answer:
    specs = await call.house.specs.of(call.game)
    spec = specs.get(str(call.path_params["schema"]))
    if spec is None:
        raise Refused("not_found", f"{call.game} has no such schema; it has {sorted(specs)[:4]}")
    return Answer(spec.to_json())


async def show_bot(call: Call) -> Answer:
    """Who plays; with `after` and `wait_s` the answer waits for something newer, else it is 204."""
    await call.house.specs.of(call.game)
    after = call.whole("after")
    wait_s = call.seconds("wait_s", most=call.house.config.max_poll_s)
    if "after" not in call.query_params:
        return Answer((await call.house.bots.now(call.game)).bot)
    stage = await call.house.bots.newer(call.game, after, wait_s)
    return Answer(b"", 204) if stage is None else Answer(stage.bot)


async def weights(call: Call) -> Answer:
    """The champion's policy itself, newer than `after`; what workers wait for."""
    await call.house.specs.of(call.game)
    after = call.whole("after")
    wait_s = call.seconds("wait_s", most=call.house.config.max_poll_s)
    stage = await call.house.bots.newer(call.game, after, wait_s, with_policy=True)
    if stage is None:
        return Answer(b"", 204)
    headers = {
        "x-understudy-number": str(stage.bot.number),
        "x-understudy-model": str(stage.model_no),
    }
    return Answer(stage.raw, kind=POLICY_TYPE, headers=headers)


async def show_model(call: Call) -> Answer:
    manifest, catalogue = await _model(call)
    return Answer(
        wire.ModelInfo(model_no=manifest.model_no, signed=catalogue.signed[manifest.name].decode())
    )


async def show_policy(call: Call) -> Answer:
    """Any model's policy; the bytes that were signed, or none."""
    manifest, _ = await _model(call)
    stage = await call.house.bots.now(call.game)
    raw = (
        stage.raw
        if stage.model_no == manifest.model_no
        else await _on_disk(call, _signed_policy, call, manifest)
    )
    return Answer(
        raw, kind=POLICY_TYPE, headers={"cache-control": "private, max-age=31536000, immutable"}
    )


def _signed_policy(call: Call, manifest: Manifest) -> bytes:
    raw = call.house.registry.policy_bytes(manifest)
    if hashlib.sha256(raw).hexdigest() != manifest.policy_sha256:
        raise Corrupt(f"the policy of {manifest.name} is damaged; restore it from a backup")
    return raw


async def _model(call: Call) -> tuple[Manifest, Catalogue]:
    catalogue = await _catalogue(call)
    number = int(call.path_params["model_no"])
    if number not in catalogue.models:
        raise Refused("not_found", f"{call.game} has no model {str(number)[:20]}")
    return catalogue.models[number], catalogue


async def _catalogue(call: Call) -> Catalogue:
    # Registered games only: the registry remembers every name that it is asked about.
    await call.house.specs.of(call.game)
    return await _on_disk(call, call.house.registry.catalogue, call.game)


async def promote(call: Call) -> Answer:
    asked = call.read(wire.Promote)
    catalogue = await _catalogue(call)
    if asked.model_no not in catalogue.models:
        raise Refused("not_found", f"{call.game} has no model {asked.model_no}")
    await _on_disk(
        call,
        lambda: call.house.registry.point(call.game, "champion", asked.model_no, why=asked.why),
    )
    return Answer(wire.Pointed(alias="champion", model_no=asked.model_no))


async def rollback(call: Call) -> Answer:
    await call.house.specs.of(call.game)
    number = await _on_disk(call, lambda: call.house.registry.rollback(call.game, why="by hand"))
    return Answer(wire.Pointed(alias="champion", model_no=number))


# --- Deciding -------------------------------------------------------------------------------------


async def act(call: Call) -> Answer:
    asked = call.read(wire.Ask)
    return Answer(await call.house.decider.act(await _spec(call, asked), asked))


async def advise(call: Call) -> Answer:
    asked = call.read(wire.Ask)
    return Answer(await call.house.decider.advise(await _spec(call, asked), asked))


async def _spec(call: Call, asked: wire.Ask) -> GameSpec:
    """The spec that was named, else the champion's, else any."""
    specs = await call.house.specs.of(call.game)
    if asked.schema is not None:
        if asked.schema not in specs:
            raise Refused(
                "unknown_schema", f"{call.game} has no such schema; it has {sorted(specs)[:4]}"
            )
        return specs[asked.schema]
    policy = call.house.bots.known_policy(call.game)
    return specs.get(policy.game.schema if policy else "") or next(iter(specs.values()))


# --- Operating ------------------------------------------------------------------------------------


async def health(call: Call) -> Answer:
    return Answer(wire.Health(status="ok"))


async def ready(call: Call) -> Answer:
    return (
        Answer(wire.Health(status="ready"))
        if call.house.is_ready
        else Answer(wire.Health(status="stopping"), 503)
    )


async def metrics(call: Call) -> Answer:
    text = await _on_disk(call, generate_latest, call.house.metrics.registry)
    return Answer(text, kind=CONTENT_TYPE_LATEST)


async def openapi(call: Call) -> Answer:
    return Answer(_document())


@cache
def _document() -> bytes:
    return msgspec.json.encode(document(ROUTES))


_GAME = "/v1/games/{game}"
_MODEL = _GAME + "/models/{model_no:int}"
# The busiest first: Starlette's router tries one line after the other.
ROUTES = (
    ApiRoute("POST", _GAME + "/frames", "play", send_parcel, "Send a parcel of frames",
             takes=CONTENT_TYPE, gives=wire.SendResponse, max_bytes=MAX_PARCEL_BYTES),
    ApiRoute("GET", _GAME + "/bot", "play", show_bot, "Who plays now, signed; waits for news",
             gives=LiveModels, waits=True),
    ApiRoute("GET", _GAME + "/weights", "work", weights, "The champion's policy; waits for news",
             gives=POLICY_TYPE, waits=True),
    ApiRoute("POST", _GAME + "/act", "play", act, "One decision",
             takes=wire.Ask, gives=wire.Acted, max_bytes=1024 * _KIB),
    ApiRoute("POST", _GAME + "/columns", "play", send_columns, "Send a chunk as JSON",
             takes=wire.ChunkColumns, gives=wire.SendResponse, max_bytes=4096 * _KIB),
    ApiRoute("POST", _GAME + "/close", "play", close_session, "Close a session",
             takes=wire.Close, gives=wire.SendResponse, max_bytes=16 * _KIB),
    ApiRoute("GET", "/healthz", None, health, "Whether the process lives", gives=wire.Health),
    ApiRoute("GET", "/readyz", None, ready, "Whether requests can be served", gives=wire.Health),
    ApiRoute("GET", "/metrics", "read", metrics, "Figures for Prometheus", gives="text/plain"),
    ApiRoute("GET", "/v1/openapi.json", "play", openapi, "This document", gives=JSON),
    ApiRoute("GET", "/v1/games", "play", list_games, "Registered games", gives=wire.GameList),
    ApiRoute("GET", _GAME, "play", show_game, "A game's schemas and bots", gives=wire.GameInfo),
    ApiRoute("PUT", _GAME, "play", register_game, "Register a game's spec",
             takes=JSON, gives=wire.Registered, max_bytes=256 * _KIB),
    ApiRoute("GET", _GAME + "/specs/{schema}", "play", show_spec, "A spec by its schema",
             gives=JSON),
    ApiRoute("GET", _MODEL, "play", show_model, "A model's signed facts", gives=wire.ModelInfo),
    ApiRoute("GET", _MODEL + "/policy", "play", show_policy, "A model's policy",
             gives=POLICY_TYPE),
    ApiRoute("POST", _GAME + "/advise", "play", advise, "Legal actions, ranked",
             takes=wire.Ask, gives=wire.Advised, max_bytes=1024 * _KIB),
    ApiRoute("POST", _GAME + "/promote", "admin", promote, "Make a model champion",
             takes=wire.Promote, gives=wire.Pointed, max_bytes=16 * _KIB),
    ApiRoute("POST", _GAME + "/rollback", "admin", rollback, "Go back to the champion before",
             gives=wire.Pointed),
)  # fmt: skip
"""`{game}` in a path is always a game's name, and a key of another game is refused there."""


# --- The OpenAPI document -------------------------------------------------------------------------

_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")
_IN_PATH: dict[str, dict[str, Any]] = {
    "game": {"type": "string", "pattern": "^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"},
    "schema": {"type": "string", "pattern": "^[0-9a-f]{64}$"},
    "model_no": {"type": "integer", "minimum": 1},
}
_IN_QUERY: dict[str, dict[str, Any]] = {
    "after": {"type": "integer", "minimum": 0, "maximum": 999_999_999_999_999},
    "wait_s": {"type": "number", "minimum": 0, "exclusiveMaximum": 1e6},
}


def document(routes: Sequence[ApiRoute]) -> dict[str, Any]:
    """OpenAPI 3.1 of these routes."""
    types = [
        kind for route in routes for kind in (route.takes, route.gives) if isinstance(kind, type)
    ]
    unique = list(dict.fromkeys([*types, wire.Failed]))
    schemas, components = msgspec.json.schema_components(
        unique, ref_template="#/components/schemas/{name}"
    )
    found = dict(zip(unique, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = _PARAMETER.sub(r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, found)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "understudy",
            "version": understudy.__version__,
            "description": "Games, experience and bots.",
        },
        "paths": paths,
        "components": {
            # Nothing is taken or given beyond what is named; dataclasses cannot say so themselves.
            "schemas": {
                name: schema | {"additionalProperties": False}
                for name, schema in components.items()
            },
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: ApiRoute, schemas: dict[Any, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {"summary": route.summary, "operationId": route.endpoint.__name__}
    if route.scope is not None:
        operation |= {"security": [{"key": []}], "x-scope": route.scope}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": _IN_PATH[name]}
        for name in _PARAMETER.findall(route.path)
    ]
    if route.waits:
        parameters += [
            {"name": name, "in": "query", "schema": kind} for name, kind in _IN_QUERY.items()
        ]
    if parameters:
        operation["parameters"] = parameters
    if route.takes is not None:
        operation["requestBody"] = {"required": True, "content": _content(route.takes, schemas)}
    success = {"description": "As asked"} | (
        {"content": _content(route.gives, schemas)} if route.gives else {}
    )
    failed = {"description": "Why not", "content": _content(wire.Failed, schemas)}
    operation["responses"] = {"200": success, "default": failed}
    if route.waits:
        operation["responses"]["204"] = {"description": "Nothing newer came in that time"}
    return operation


def _content(kind: type[Any] | str, schemas: dict[Any, Any]) -> dict[str, Any]:
    if isinstance(kind, str):
        binary = {"type": "string", "format": "binary"}
        return {kind: {"schema": {"type": "object"} if kind == JSON else binary}}
    return {JSON: {"schema": schemas[kind]}}
