"""The routes of the API, each with the scope that its key needs, and their endpoints."""

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
from understudy.core.wording import joined
from understudy.experience.frame import (
    CONTENT_TYPE,
    MAX_FRAME_BATCH_BYTES,
    FrameBatch,
    decode_frame_batch,
)
from understudy.experience.game import GameSpec, spec_from_json
from understudy.models.catalogue import Catalogue
from understudy.models.keys import Key
from understudy.models.manifest import Manifest
from understudy.ports import LiveModels, TicketBatch, refused_ack
from understudy.serve import wire
from understudy.serve.api import JSON, Answer, ApiRoute, Call
from understudy.serve.bots import newest_of
from understudy.serve.intake import Admitted, close_of, frame_of
from understudy.serve.state import GameProgress

POLICY_TYPE = "application/vnd.understudy.policy"
_KIB = 1024
_INLINE_BYTES = 512 * _KIB
"""Larger bodies are decoded in a thread, so that other requests do not wait."""
T = TypeVar("T")


def _key(call: Call) -> Key:
    assert call.key is not None, "a route with a scope is not called without a key"
    return call.key


async def _on_disk(call: Call, work: Callable[..., T], *arguments: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(
        call.gateway_state.disk, work, *arguments
    )


# --- Experience -----------------------------------------------------------------------------------


async def send_frames(call: Call) -> Answer:
    """Append frames to the stream; they are acknowledged once they are durable there."""
    await call.gateway_state.specs.of(call.game)
    if len(call.content) > _INLINE_BYTES:
        batch = await asyncio.to_thread(decode_frame_batch, call.content)
    else:
        batch = decode_frame_batch(call.content)
    return await _send(call, batch)


async def send_columns(call: Call) -> Answer:
    """Append a chunk sent as JSON, converted to the frame that other clients would send."""
    sent = call.read(wire.ChunkColumns)
    specs = await call.gateway_state.specs.of(call.game)
    if len(call.content) > _INLINE_BYTES:
        frame, player = await asyncio.to_thread(frame_of, sent, specs)
    else:
        frame, player = frame_of(sent, specs)
    return await _send(call, FrameBatch([frame], {frame.session: player}, sent.skipped_steps))


async def close_session(call: Call) -> Answer:
    """Close a session, so that its last steps are available without waiting for more."""
    await call.gateway_state.specs.of(call.game)
    frame, player = close_of(call.read(wire.Close))
    return await _send(call, FrameBatch([frame], {frame.session: player}))


async def _send(call: Call, batch: FrameBatch) -> Answer:
    state = call.gateway_state
    outcomes = state.admission.admit(_key(call), call.game, batch.frames, batch.players)
    admitted = [outcome for outcome in outcomes if isinstance(outcome, Admitted)]
    appended = await state.appender.append([outcome.frame for outcome in admitted])
    recording_rate = state.count(call.game, admitted, appended, batch.skipped_steps)
    remaining_acks = iter(appended)
    acks = [
        next(remaining_acks) if isinstance(outcome, Admitted) else refused_ack(outcome)
        for outcome in outcomes
    ]
    return Answer(wire.SendResponse(acks=acks, recording_rate=recording_rate))


# --- Games and bots -------------------------------------------------------------------------------


async def list_games(call: Call) -> Answer:
    games = await _on_disk(call, call.gateway_state.registry.games)
    return Answer(wire.GameList(games=[game for game in games if _key(call).is_for(game)]))


async def show_game(call: Call) -> Answer:
    specs = await call.gateway_state.specs.of(call.game)
    catalogue = await _catalogue(call)
    progress = call.gateway_state.progress.get(call.game, GameProgress())
    return Answer(
        wire.GameInfo(
            game=call.game,
            schemas=sorted(specs),
            champion=catalogue.model_of("champion"),
            canary=catalogue.model_of("canary"),
            champions={pointer.schema: pointer.model_no for pointer in catalogue.live("champion")},
            missing_steps=progress.missing_steps,
            trained_schema=progress.schema,
            steps=dict(progress.schema_steps),
        )
    )


async def register_game(call: Call) -> Answer:
    """Register a spec; a known one is accepted, a new one needs a key that may register."""
    try:
        spec = spec_from_json(call.content)
    except SpecError as error:
        raise Refused("bad_spec", str(error)) from None
    if spec.game != call.game:
        raise Refused(
            "wrong_game",
            f"the spec is for {spec.game}, but the path for {call.game}; use the same name",
        )
    key = _key(call)
    await call.gateway_state.specs.register(spec, may_add=key.registers or key.may("admin"))
    return Answer(wire.Registered(game=spec.game, schema=spec.schema))


async def show_spec(call: Call) -> Answer:
    specs = await call.gateway_state.specs.of(call.game)
    spec = specs.get(str(call.path_params["schema"]))
    if spec is None:
        raise Refused(
            "not_found",
            f"{call.game} has no such schema; use one of {joined(specs, most=4)}",
        )
    return Answer(spec.to_json())


async def show_bot(call: Call) -> Answer:
    """Return the live models; with `after` and `wait_s`, wait for newer ones or return 204."""
    schema = await _schema(call)
    after = call.integer("after")
    wait_s = call.seconds("wait_s", most=call.gateway_state.config.max_poll_s)
    bots = call.gateway_state.bots
    if "after" not in call.query_params:
        return Answer((await bots.now(call.game, schema)).bot)
    served = await bots.newer(call.game, after, wait_s=wait_s, schema=schema)
    return Answer(b"", 204) if served is None else Answer(served.bot)


async def draw_tickets(call: Call) -> Answer:
    """Draw the bots of a client's next episodes between those of the trial, if there is one."""
    request = call.read(wire.TicketRequest)
    schema = await _registered(call, request.schema)
    return Answer(
        await call.gateway_state.tickets.draw(
            call.game, request.n, schema=schema, with_control=request.control
        )
    )


async def _schema(call: Call) -> str | None:
    """Return the registered schema that the query names; None without one."""
    return await _registered(call, call.query_params.get("schema"))


async def _registered(call: Call, schema: str | None) -> str | None:
    """Return a schema, or None without one; Refused unless it is registered."""
    specs = await call.gateway_state.specs.of(call.game)
    if schema is not None and schema not in specs:
        raise Refused(
            "not_registered",
            f"{call.game} has no schema {schema[:12]}; register its spec first: PUT "
            f"/v1/games/{call.game}",
        )
    return schema


async def weights(call: Call) -> Answer:
    """Return the champion's policy once the live models are newer than `after`; 204 on timeout."""
    schema = await _schema(call)
    after = call.integer("after")
    wait_s = call.seconds("wait_s", most=call.gateway_state.config.max_poll_s)
    served = await call.gateway_state.bots.newer(
        call.game, after, wait_s=wait_s, schema=schema, with_policy=True
    )
    if served is None:
        return Answer(b"", 204)
    headers = {
        "x-understudy-number": str(served.bot.number),
        "x-understudy-model": str(served.model_no),
    }
    return Answer(served.raw, kind=POLICY_TYPE, headers=headers)


async def show_model(call: Call) -> Answer:
    manifest, catalogue = await _model(call)
    return Answer(
        wire.ModelInfo(
            model_no=manifest.model_no,
            signed=catalogue.signed[manifest.name].decode(),
            verdict=catalogue.verdicts.get(manifest.model_no, ""),
        )
    )


async def show_policy(call: Call) -> Answer:
    """Return any model's policy; fails unless its bytes match the signed hash."""
    manifest, _ = await _model(call)
    served = await call.gateway_state.bots.now(call.game, manifest.schema)
    is_shared = served.model_no == manifest.model_no
    raw = served.raw if is_shared else await _on_disk(call, _signed_policy, call, manifest)
    return Answer(
        raw,
        kind=POLICY_TYPE,
        headers={"cache-control": "private, max-age=31536000, immutable"},
        own_bytes=0 if is_shared else len(raw),
    )


def _signed_policy(call: Call, manifest: Manifest) -> bytes:
    raw = call.gateway_state.registry.policy_bytes(manifest)
    if hashlib.sha256(raw).hexdigest() != manifest.policy_sha256:
        raise Corrupt(f"the policy of {manifest.name} is damaged; restore it from a backup")
    return raw


async def _model(call: Call) -> tuple[Manifest, Catalogue]:
    catalogue = await _catalogue(call)
    number = int(call.path_params["model_no"])
    if number not in catalogue.models:
        raise Refused(
            "not_found",
            f"{call.game} has no model {str(number)[:20]}; see 'understudy models list'",
        )
    return catalogue.models[number], catalogue


async def _catalogue(call: Call) -> Catalogue:
    # Registered games only, since the registry caches every name it is queried for.
    await call.gateway_state.specs.of(call.game)
    return await _on_disk(call, call.gateway_state.registry.catalogue, call.game)


async def promote(call: Call) -> Answer:
    request = call.read(wire.Promote)
    catalogue = await _catalogue(call)
    if request.model_no not in catalogue.models:
        raise Refused(
            "not_found",
            f"{call.game} has no model {request.model_no}; see 'understudy models list'",
        )
    registry = call.gateway_state.registry
    await _on_disk(
        call, lambda: registry.set_alias(call.game, "champion", request.model_no, why=request.why)
    )
    return Answer(wire.Pointed(alias="champion", model_no=request.model_no))


async def rollback(call: Call) -> Answer:
    schema = await _schema(call)
    registry = call.gateway_state.registry
    number = await _on_disk(
        call, lambda: registry.rollback(call.game, why="by hand", schema=schema)
    )
    return Answer(wire.Pointed(alias="champion", model_no=number))


# --- Decisions ------------------------------------------------------------------------------------


async def act(call: Call) -> Answer:
    ask = call.read(wire.Ask)
    return Answer(await call.gateway_state.decider.act(await _specs(call, ask, waits=False), ask))


async def advise(call: Call) -> Answer:
    ask = call.read(wire.Ask)
    return Answer(await call.gateway_state.decider.advise(await _spec(call, ask), ask))


async def _spec(call: Call, ask: wire.Ask) -> GameSpec:
    """Return the spec that the request names, else the newest with a champion, else any."""
    specs = await _specs(call, ask)
    if len(specs) == 1:
        return specs[0]
    return newest_of(specs, await call.gateway_state.bots.now(call.game), specs[0])


async def _specs(call: Call, ask: wire.Ask, *, waits: bool = True) -> list[GameSpec]:
    """Return the spec that the request names, else all of the game; `waits` as in `SpecCache`."""
    specs = await call.gateway_state.specs.of(call.game, schema=ask.schema, waits=waits)
    if ask.schema is None:
        return list(specs.values())
    if ask.schema not in specs:
        raise Refused(
            "unknown_schema",
            f"{call.game} has no such schema; send one of {joined(specs, most=4)}",
        )
    return [specs[ask.schema]]


# --- Operation ------------------------------------------------------------------------------------


async def health(call: Call) -> Answer:
    return Answer(wire.Health(status="ok"))


_DOWN = {"silent", "waiting", "restarting", "ended", "unknown"}


async def ready(call: Call) -> Answer:
    """Requests are served even if another role is down: acknowledged frames are in the stream."""
    state = call.gateway_state
    if not state.is_ready:
        return Answer(wire.Readiness(status="stopping"), 503)
    is_well = not set(state.roles.values()) & _DOWN
    return Answer(
        wire.Readiness(status="ready" if is_well else "degraded", roles=dict(state.roles))
    )


async def metrics(call: Call) -> Answer:
    text = await _on_disk(call, generate_latest, call.gateway_state.metrics.registry)
    return Answer(text, kind=CONTENT_TYPE_LATEST)


async def openapi(call: Call) -> Answer:
    return Answer(_document())


@cache
def _document() -> bytes:
    return msgspec.json.encode(document(ROUTES))


_GAME = "/v1/games/{game}"
_MODEL = _GAME + "/models/{model_no:int}"
# The busiest first, since Starlette's router tries them in order.
ROUTES = (
    ApiRoute(
        "POST",
        _GAME + "/frames",
        "play",
        send_frames,
        "Send a batch of frames",
        takes=CONTENT_TYPE,
        gives=wire.SendResponse,
        max_bytes=MAX_FRAME_BATCH_BYTES,
    ),
    ApiRoute(
        "GET",
        _GAME + "/bot",
        "play",
        show_bot,
        "The live models, signed; waits for newer ones",
        gives=LiveModels,
        waits=True,
        has_schema=True,
    ),
    ApiRoute(
        "POST",
        _GAME + "/tickets",
        "play",
        draw_tickets,
        "Draw the bots of the next episodes",
        takes=wire.TicketRequest,
        gives=TicketBatch,
        max_bytes=16 * _KIB,
    ),
    ApiRoute(
        "GET",
        _GAME + "/weights",
        "work",
        weights,
        "The champion's policy; waits for a newer one",
        gives=POLICY_TYPE,
        waits=True,
        has_schema=True,
    ),
    ApiRoute(
        "POST",
        _GAME + "/act",
        "play",
        act,
        "The bot's action for an observation",
        takes=wire.Ask,
        gives=wire.Acted,
        max_bytes=1024 * _KIB,
    ),
    ApiRoute(
        "POST",
        _GAME + "/columns",
        "play",
        send_columns,
        "Send a chunk as JSON",
        takes=wire.ChunkColumns,
        gives=wire.SendResponse,
        max_bytes=4096 * _KIB,
    ),
    ApiRoute(
        "POST",
        _GAME + "/close",
        "play",
        close_session,
        "Close a session",
        takes=wire.Close,
        gives=wire.SendResponse,
        max_bytes=16 * _KIB,
    ),
    ApiRoute("GET", "/healthz", None, health, "Whether the process is alive", gives=wire.Health),
    ApiRoute("GET", "/readyz", None, ready, "Whether requests can be served", gives=wire.Readiness),
    ApiRoute("GET", "/metrics", "read", metrics, "Metrics for Prometheus", gives="text/plain"),
    ApiRoute("GET", "/v1/openapi.json", "play", openapi, "This document", gives=JSON),
    ApiRoute("GET", "/v1/games", "play", list_games, "Registered games", gives=wire.GameList),
    ApiRoute("GET", _GAME, "play", show_game, "A game's schemas and bots", gives=wire.GameInfo),
    ApiRoute(
        "PUT",
        _GAME,
        "play",
        register_game,
        "Register a game's spec",
        takes=JSON,
        gives=wire.Registered,
        max_bytes=256 * _KIB,
    ),
    ApiRoute(
        "GET", _GAME + "/specs/{schema}", "play", show_spec, "A spec by its schema", gives=JSON
    ),
    ApiRoute("GET", _MODEL, "play", show_model, "A model's signed manifest", gives=wire.ModelInfo),
    ApiRoute("GET", _MODEL + "/policy", "play", show_policy, "A model's policy", gives=POLICY_TYPE),
    ApiRoute(
        "POST",
        _GAME + "/advise",
        "play",
        advise,
        "Rank the valid actions",
        takes=wire.Ask,
        gives=wire.Advised,
        max_bytes=1024 * _KIB,
    ),
    ApiRoute(
        "POST",
        _GAME + "/promote",
        "admin",
        promote,
        "Make a model champion",
        takes=wire.Promote,
        gives=wire.Pointed,
        max_bytes=16 * _KIB,
    ),
    ApiRoute(
        "POST",
        _GAME + "/rollback",
        "admin",
        rollback,
        "Restore the previous champion",
        gives=wire.Pointed,
        has_schema=True,
    ),
)
"""`{game}` in a path is always a game's name; keys of other games are rejected for that path."""


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
    """Return the OpenAPI 3.1 document of these routes."""
    types = [
        kind for route in routes for kind in (route.takes, route.gives) if isinstance(kind, type)
    ]
    unique = list(dict.fromkeys([*types, wire.Failed]))
    schemas, components = msgspec.json.schema_components(
        unique, ref_template="#/components/schemas/{name}"
    )
    schema_of = dict(zip(unique, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = _PARAMETER.sub(r"{\1}", route.path)
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "understudy",
            "version": understudy.__version__,
            "description": "Register games, record experience, and fetch bots.",
        },
        "paths": paths,
        "components": {
            # No other fields are accepted or returned; dataclasses such as Ack cannot express that.
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
    if route.has_schema:
        parameters.append({"name": "schema", "in": "query", "schema": _IN_PATH["schema"]})
    if parameters:
        operation["parameters"] = parameters
    if route.takes is not None:
        operation["requestBody"] = {"required": True, "content": _content(route.takes, schemas)}
    success = {"description": "Success"} | (
        {"content": _content(route.gives, schemas)} if route.gives else {}
    )
    failed = {"description": "Error", "content": _content(wire.Failed, schemas)}
    operation["responses"] = {"200": success, "default": failed}
    if route.waits:
        operation["responses"]["204"] = {"description": "Nothing newer within wait_s"}
    return operation


def _content(kind: type[Any] | str, schemas: dict[Any, Any]) -> dict[str, Any]:
    if isinstance(kind, str):
        binary = {"type": "string", "format": "binary"}
        return {kind: {"schema": {"type": "object"} if kind == JSON else binary}}
    return {JSON: {"schema": schemas[kind]}}
