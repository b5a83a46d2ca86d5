"""understudy config: create, show and check the platform's config."""

import os
import time
from pathlib import Path

import click
from rich.markup import escape
from rich.table import Table

from understudy.backends.data import data_folder
from understudy.cli.certificates import warnings
from understudy.cli.options import common_options, config_option, examples, finish, results
from understudy.core.errors import ConfigError
from understudy.core.log import write_file
from understudy.experience.intake import check_data_folder
from understudy.platform.config import FILE_NAME, config_file, example, resolve


@click.group(epilog=examples("understudy config init --data D", "understudy config show --data D"))
def config() -> None:
    """Create, show and check the platform's config."""


@config.command(
    epilog=examples(
        "understudy config init --data D", "understudy config init --config understudy.toml --json"
    )
)
@config_option
@click.option("--force", is_flag=True, help="Replace an existing file.")
@common_options
def init(data_text: str | None, as_json: bool, file: Path | None, force: bool) -> int:
    """Write a config file that lists every setting with its meaning and default."""
    file = file or (
        Path(os.environ["UNDERSTUDY_CONFIG"]) if os.environ.get("UNDERSTUDY_CONFIG") else None
    )
    data = data_text or os.environ.get("UNDERSTUDY_DATA")
    if file is None and not data:
        raise ConfigError(
            "no file to write; give --data DIR or --config FILE, or set UNDERSTUDY_DATA"
        )
    path = file or data_folder(data).root / FILE_NAME
    if path.exists() and not force:
        raise ConfigError(
            f"{path} already exists; see it with 'understudy config show', or replace it with "
            "--force"
        )
    if file is None:
        check_data_folder(path.parent)
        path.parent.mkdir(parents=True, exist_ok=True)
    elif not path.parent.is_dir():
        raise ConfigError(
            f"the folder {path.parent} does not exist; create it first, or correct --config {path}"
        )
    # A config inside the data folder need not name that folder.
    text = example(str(Path(data_text).expanduser().resolve()) if data_text and file else "")
    write_file(path, text.encode(), mode=0o644)
    where = f" --data {path.parent}" if file is None else ""
    results(as_json=as_json).print(
        f"wrote {path}; next: edit it, then understudy config check{where}", soft_wrap=True
    )
    return finish({"file": str(path)}, as_json=as_json)


@config.command(
    epilog=examples("understudy config show --data D", "understudy config show --config F --json")
)
@config_option
@common_options
def show(data_text: str | None, as_json: bool, file: Path | None) -> int:
    """Show every value and its origin; passwords are masked."""
    values = resolve({"data": data_text}, file=file).masked()
    table = Table("name", "value", "from")
    for name, setting in values.items():
        value = setting["value"]
        text = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
        origin = setting["origin"]
        table.add_row(name, text, origin, style="dim" if origin == "default" else "")
    results(as_json=as_json).print(table)
    return finish({"values": values}, as_json=as_json)


@config.command(
    epilog=examples("understudy config check --data D", "understudy config check --config F --json")
)
@config_option
@common_options
def check(data_text: str | None, as_json: bool, file: Path | None) -> int:
    """Check whether a platform could start with this config; exits 2 with the reason if not."""
    resolved = resolve({"data": data_text}, file=file)
    resolved.config.check()
    path = config_file({"data": data_text}, file=file, environ=os.environ)
    n_set = sum(origin != "default" for origin in resolved.origins.values())
    out = results(as_json=as_json)
    out.print(
        f"{path or 'no file'}: valid; {n_set} of {len(resolved.origins)} values are set, the "
        "others have their defaults"
    )
    notes = warnings(resolved.config, now_s=time.time())
    for warning in notes:
        out.print(f"[yellow]![/] {escape(warning)}", soft_wrap=True)
    fields = {"ok": True, "file": str(path) if path else None, "set": n_set, "warnings": notes}
    return finish(fields, as_json=as_json)
