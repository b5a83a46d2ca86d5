"""The arguments of the env in which imported steps were recorded, as their chunks note them."""

import contextlib
import json
import shlex
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from understudy.backends.local import open_view
from understudy.core.canonical import strict_json
from understudy.core.errors import ConfigError, Refused
from understudy.experience.game import GameSpec
from understudy.training.follower import stored_chunks

_CLIENT = "minari-import/1"
_MAX_CLIENT = 128
"""Characters of a chunk's `client`."""


def client_of_dataset(env_kwargs: Mapping[str, Any]) -> str:
    """The `client` of a dataset's chunks: it ends with the arguments of the env, if there are any.

    Arguments that are too long are cut.
    """
    text = json.dumps(env_kwargs, sort_keys=True, separators=(",", ":"))
    return f"{_CLIENT} {text}"[:_MAX_CLIENT] if env_kwargs else _CLIENT


def check_recorded_env(store: Path, spec: GameSpec) -> None:
    """ConfigError if a game's first and last stored steps are of an env with arguments.

    The arguments are not applied automatically: the clients of players write `client`, too.
    """
    with open_view(store) as view:
        rows = view.chunks(game=spec.game, player=None, since_s=0.0)
        ends = [(uuid.UUID(bytes=row.session), row.chunk_no) for row in (*rows[:1], *rows[-1:])]
        clients = [
            chunk.meta.client for end in ends for chunk in stored_chunks(view, {end}).values()
        ]
    arguments = [_arguments(client) for client in clients]
    if arguments and all(arguments):
        raise ConfigError(
            f"the dataset of {spec.game} was recorded in an env with arguments{arguments[-1]}, so "
            "that the policy is evaluated in the same env"
        )


def _arguments(client: str) -> str:
    """How to pass the arguments that a chunk's `client` notes; empty: it notes none."""
    name, _, text = client.partition(" ")
    if name != _CLIENT or not text:
        return ""
    if len(client) == _MAX_CLIENT:
        return " that are too long to be stored; pass those of its env_spec as --env-kwargs"
    with contextlib.suppress(Refused):
        arguments = strict_json(text)
        if isinstance(arguments, dict) and arguments:
            compact = json.dumps(arguments, separators=(",", ":"))
            return f"; pass --env-kwargs {shlex.quote(compact)}"
    return ""
