"""understudy keys: make, list and revoke keys."""

import time
from dataclasses import asdict
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from understudy.cli.deployed import deployment
from understudy.cli.options import common_options, examples, finish, results
from understudy.core.errors import ConfigError
from understudy.models.keys import EVERY_GAME, MAX_REQUESTS_S, SCOPES, Key, Scope

_MAX_DAYS = 100_000


@click.group(
    epilog=examples(
        "understudy keys create --scopes play --game my-game --data D", "understudy keys list"
    )
)
def keys() -> None:
    """Make, list and revoke the keys of a deployment."""


@keys.command(
    epilog=examples(
        "understudy keys create --scopes play --game my-game --data D",
        "understudy keys create --scopes read --label dashboard --expires-days 30 --data D --json",
    )
)
@click.option(
    "--scopes",
    default="play",
    show_default=True,
    help=f"One or more of {','.join(SCOPES)}, with commas.",
)
@click.option("--game", default=EVERY_GAME, show_default=True, help="The one game it is for.")
@click.option("--label", default="", help="What it is for, in a word.")
@click.option(
    "--origin",
    "origins",
    multiple=True,
    metavar="URL",
    help="A web page that may use it; again for more.",
)
@click.option("--expires-days", type=float, metavar="N", help="Ends after N days (default: never).")
@click.option("--registers", is_flag=True, help="An unknown game registers itself under this key.")
@click.option(
    "--requests-s", type=float, metavar="N", help="Requests a second, on average (default 200)."
)
@common_options
def create(
    data_text: str | None,
    as_json: bool,
    scopes: str,
    origins: tuple[str, ...],
    expires_days: float | None,
    requests_s: float | None,
    **facts: Any,
) -> int:
    """Make a key and print it, once; only its hash is kept."""
    if expires_days is not None:
        if not 0 < expires_days < _MAX_DAYS:
            raise ConfigError(
                f"--expires-days is {expires_days}; give a number above 0 and below {_MAX_DAYS}, "
                "such as 30"
            )
        facts["expires_s"] = time.time() + expires_days * 86_400
    if requests_s is not None:
        if not 0 < requests_s < MAX_REQUESTS_S:
            raise ConfigError(
                f"--requests-s is {requests_s}; give a number above 0 and below "
                f"{MAX_REQUESTS_S:.0f}, such as 200"
            )
        facts["requests_s"] = requests_s
    where = deployment(data_text)
    text, key = where.keys.create(_scopes(scopes), origins=origins, **facts)
    out = results(as_json=as_json)
    out.print(text, soft_wrap=True)
    out.print(
        f"[dim]{_words(key)}; it is shown only now: keep it where the game reads it[/]",
        soft_wrap=True,
    )
    # Not asked for JSON: a registry that does not answer must not cost the one chance to see the
    # key.
    if (
        not as_json
        and key.game != EVERY_GAME
        and not key.registers
        and key.game not in where.registry.games()
    ):
        out.print(
            f"[dim]{key.game} is not registered yet; next: understudy games add {key.game} (your "
            "own: with "
            "--obs and --actions)[/]",
            soft_wrap=True,
        )
    return finish({"key": text, **_fields(key)}, as_json=as_json)


@keys.command(
    name="list",
    epilog=examples("understudy keys list --data D", "understudy keys list --data D --json"),
)
@common_options
def list_keys(data_text: str | None, as_json: bool) -> int:
    """List keys that are not revoked; never the keys themselves."""
    found = deployment(data_text, must_exist=True).keys.all()
    table = Table("id", "scopes", "game", "label", "made", "ends")
    for key in found:
        ends = _date(key.expires_s) if key.expires_s else "never"
        table.add_row(
            key.id, ",".join(key.scopes), key.game, escape(key.label), _date(key.created_s), ends
        )
    nothing = "no keys yet; next: understudy keys create --scopes play --game GAME"
    results(as_json=as_json).print(table if found else nothing)
    return finish({"keys": [_fields(key) for key in found]}, as_json=as_json)


@keys.command(
    epilog=examples(
        "understudy keys revoke 3f09a1b2c4d5 --data D",
        "understudy keys revoke 3f09 --data D --json",
    )
)
@click.argument("key_id", metavar="ID")
@common_options
def revoke(data_text: str | None, as_json: bool, key_id: str) -> int:
    """End a key; every gateway obeys within 2 seconds. ID is its id or how it begins."""
    # A whole key pasted by mistake is understood, and not shown again.
    wanted = key_id.split("_")[1] if key_id.startswith("uk_") and key_id.count("_") >= 2 else key_id
    key = deployment(data_text, must_exist=True).keys.revoke(wanted)
    results(as_json=as_json).print(
        f"revoked {key.id} ({_words(key)}); gateways refuse it within 2 s"
    )
    return finish({"revoked": key.id}, as_json=as_json)


def _scopes(text: str) -> tuple[Scope, ...]:
    given = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    found = tuple(scope for scope in SCOPES if scope in given)
    if not given or len(found) != len(given):
        raise ConfigError(
            f"--scopes is {text[:60]!r}; give one or more of {','.join(SCOPES)}, with commas"
        )
    return found


def _fields(key: Key) -> dict[str, Any]:
    fields = asdict(key)
    del fields["hash"]
    return fields


def _words(key: Key) -> str:
    game = "every game" if key.game == EVERY_GAME else key.game
    return f"scopes {', '.join(key.scopes)} for {game}" + (
        f", {escape(key.label)}" if key.label else ""
    )


def _date(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at_s))
