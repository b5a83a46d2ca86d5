"""understudy keys: create, list, revoke and repair keys."""

import time
from dataclasses import asdict
from typing import Any

import click
from rich.markup import escape

from understudy.cli.deployed import deployment
from understudy.cli.options import ResultTable, common_options, count_of, examples, finish, results
from understudy.core.errors import ConfigError
from understudy.models.keys import EVERY_GAME, MAX_REQUESTS_S, SCOPES, Key, Scope

_MAX_DAYS = 100_000


@click.group(
    epilog=examples(
        "understudy keys create --scopes play --game my-game --data D", "understudy keys list"
    )
)
def keys() -> None:
    """Create, list, revoke and repair the access keys of a deployment."""


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
    help=f"One or more of {','.join(SCOPES)}, comma-separated.",
)
@click.option(
    "--game",
    default=EVERY_GAME,
    show_default=True,
    help="The game that the key is valid for; * is every game.",
)
@click.option("--label", default="", help="A short note on the key's purpose.")
@click.option(
    "--origin",
    "origins",
    multiple=True,
    metavar="URL",
    help="A web origin that may use the key; repeatable.",
)
@click.option(
    "--expires-days", type=float, metavar="N", help="Expire after N days (default: never)."
)
@click.option("--registers", is_flag=True, help="Allow the key to register new games.")
@click.option(
    "--requests-s",
    type=float,
    metavar="N",
    help="Average requests per second that the key allows (default 200).",
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
    """Create a key and print it once; only its hash is stored."""
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
    opened = deployment(data_text)
    text, key = opened.keys.create(_scopes(scopes), origins=origins, **facts)
    out = results(as_json=as_json)
    out.print(text, soft_wrap=True)
    out.print(
        f"[dim]{_summary(key)}; the key is shown only once: store it where the game reads it[/]",
        soft_wrap=True,
    )
    # Skipped with --json: if the registry does not respond, the key must still be printed.
    if (
        not as_json
        and key.game != EVERY_GAME
        and not key.registers
        and key.game not in opened.registry.games()
    ):
        out.print(
            f"[dim]{key.game} is not registered yet; next: understudy games add {key.game} (for "
            "your own game, with --obs and --actions)[/]",
            soft_wrap=True,
        )
    return finish({"key": text, **_fields(key)}, as_json=as_json)


@keys.command(
    name="list",
    epilog=examples("understudy keys list --data D", "understudy keys list --data D --json"),
)
@common_options
def list_keys(data_text: str | None, as_json: bool) -> int:
    """List active keys without their secrets; exits 1 if the journal of keys is damaged."""
    stored = deployment(data_text, must_exist=True).keys
    active = stored.all()
    damage = stored.damage()
    table = ResultTable("id", "scopes", "game", "label", "created", "expires")
    for key in active:
        expires = _date(key.expires_s) if key.expires_s else "never"
        table.add_row(
            key.id, ",".join(key.scopes), key.game, escape(key.label), _date(key.created_s), expires
        )
    empty = "no keys yet; next: understudy keys create --scopes play --game GAME"
    out = results(as_json=as_json)
    if active or not damage:
        out.print(table if active else empty)
    if damage:
        out.print(f"[yellow]![/] the journal of keys is damaged: {escape(damage)}", soft_wrap=True)
    fields = {"keys": [_fields(key) for key in active], "damage": damage}
    return finish(fields, as_json=as_json, code=1 if damage else 0)


@keys.command(
    epilog=examples(
        "understudy keys revoke 3f09a1b2c4d5 --data D",
        "understudy keys revoke 3f09 --data D --json",
    )
)
@click.argument("key_id", metavar="ID")
@common_options
def revoke(data_text: str | None, as_json: bool, key_id: str) -> int:
    """Revoke a key; every gateway rejects it within 2 seconds. ID is its id or a prefix of it."""
    # A full key pasted by mistake is accepted, and not printed again.
    is_full_key = key_id.startswith("uk_") and key_id.count("_") >= 2
    key = deployment(data_text, must_exist=True).keys.revoke(
        key_id.split("_")[1] if is_full_key else key_id
    )
    results(as_json=as_json).print(
        f"revoked {key.id} ({_summary(key)}); gateways reject it within 2 s"
    )
    return finish({"revoked": key.id}, as_json=as_json)


@keys.command(
    epilog=examples(
        "understudy keys repair --keys revoke --data D",
        "understudy keys repair --keys keep --data D --json",
    )
)
@click.option(
    "--keys",
    "keys_action",
    type=click.Choice(["keep", "revoke"]),
    required=True,
    help="keep: every key of 'keys list' is valid, also one whose revocation was lost; revoke: "
    "none is.",
)
@common_options
def repair(data_text: str | None, as_json: bool, keys_action: str) -> int:
    """Accept the journal of keys as it is, after entries of it were damaged or lost.

    If they are the last ones, no key is accepted until then: a revocation may be among them. If
    there is a backup of models/keys with the entries, restore them instead, and nothing is lost.
    """
    stored = deployment(data_text, must_exist=True).keys
    is_repaired = stored.repair(revoke=keys_action == "revoke")
    active = stored.all()
    out = results(as_json=as_json)
    if not is_repaired:
        out.print("the journal of keys needs no repair; nothing was changed")
    elif keys_action == "revoke":
        out.print(
            "every key was revoked; next: understudy keys create, or understudy up for new "
            "development keys"
        )
    else:
        out.print(
            f"accepted {count_of(len(active), 'key')}; next: see 'understudy keys list', and "
            "revoke those that had been revoked"
        )
    return finish({"repaired": is_repaired, "keys": [key.id for key in active]}, as_json=as_json)


def _scopes(text: str) -> tuple[Scope, ...]:
    names = {part.strip() for part in text.split(",") if part.strip()}
    scopes = tuple(scope for scope in SCOPES if scope in names)
    if not names or len(scopes) != len(names):
        raise ConfigError(
            f"--scopes is {text[:60]!r}; give one or more of {','.join(SCOPES)}, comma-separated"
        )
    return scopes


def _fields(key: Key) -> dict[str, Any]:
    fields = asdict(key)
    del fields["hash"]
    return fields


def _summary(key: Key) -> str:
    game = "every game" if key.game == EVERY_GAME else key.game
    label = f", {escape(key.label)}" if key.label else ""
    return f"scopes {', '.join(key.scopes)} for {game}{label}"


def _date(at_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(at_s))
