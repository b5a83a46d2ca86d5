"""understudy doctor."""

import os
from collections.abc import Iterator
from dataclasses import asdict

import click

from understudy.app.config import Config, resolve
from understudy.app.data import DataFolder
from understudy.app.doctor import Check, examine
from understudy.cli.options import console, data_option, examples, finish, folder, json_option
from understudy.core.errors import ConfigError

_MARKS = {"green": "[green]ok  [/]", "yellow": "[yellow]note[/]", "red": "[red]BAD [/]"}


@click.command(epilog=examples("understudy doctor", "understudy doctor --data D --json"))
@data_option
@json_option
def doctor(data_text: str | None, as_json: bool) -> int:
    """Check this machine and a data folder; every yellow or red line says what to do. Exits 1 on red."""
    data = folder(data_text) if data_text or os.environ.get("UNDERSTUDY_DATA") else None
    out, checks = console(as_json=as_json), []
    for check in _checks(data, data_text):
        checks.append(check)
        advice = f"  → {check.next}" if check.next else ""
        out.print(f"{_MARKS[check.colour]} {check.name:<15} {check.found}{advice}", soft_wrap=True)
    code = 1 if any(check.colour == "red" for check in checks) else 0
    return finish({"checks": [asdict(check) for check in checks], "ok": code == 0}, as_json=as_json, code=code)


def _checks(data: DataFolder | None, data_text: str | None) -> Iterator[Check]:
    """Every check; a config that cannot be read is one that failed."""
    config = Config()
    if data is not None:
        try:
            config = resolve({"data": data_text}).config.check()
        except ConfigError as error:
            yield Check("config", "red", str(error), "understudy config check shows more")
    yield from examine(data, models=config.models.url, stream=config.stream.url, store=config.store.url)
