"""understudy config: make, show and check the platform's config."""

import os
from pathlib import Path

import click
from rich.table import Table

from understudy.backends.data import data_folder
from understudy.cli.options import common_options, config_option, examples, finish, results
from understudy.core.errors import ConfigError
from understudy.core.log import write_file
from understudy.platform.config import FILE_NAME, config_file, example, resolve


@click.group(epilog=examples("understudy config init --data D", "understudy config show --data D"))
def config() -> None:
    """Make, show and check the platform's config."""


@config.command(
    epilog=examples(
        "understudy config init --data D", "understudy config init --config understudy.toml --json"
    )
)
@config_option
@click.option("--force", is_flag=True, help="Replace a file that is there.")
@common_options
def init(data_text: str | None, as_json: bool, file: Path | None, force: bool) -> int:
    """Write a config file with every value, what it means and its default."""
    file = file or (
        Path(os.environ["UNDERSTUDY_CONFIG"]) if os.environ.get("UNDERSTUDY_CONFIG") else None
    )
    data = data_text or os.environ.get("UNDERSTUDY_DATA")
    if file is None and not data:
        raise ConfigError(
            "nowhere to write to; give --data DIR or --config FILE, or set UNDERSTUDY_DATA"
        )
    path = file or data_folder(data).root / FILE_NAME
    if path.exists() and not force:
        raise ConfigError(
            f"{path} is there already; look at it with 'understudy config show', or replace it: "
            "--force"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    # Inside the data folder its own place goes without saying.
    text = example(str(Path(data_text).expanduser().resolve()) if data_text and file else "")
    write_file(path, text.encode(), mode=0o644)
    results(as_json=as_json).print(
        f"wrote {path}; next: edit it, then understudy config check", soft_wrap=True
    )
    return finish({"file": str(path)}, as_json=as_json)


@config.command(
    epilog=examples("understudy config show --data D", "understudy config show --config F --json")
)
@config_option
@common_options
def show(data_text: str | None, as_json: bool, file: Path | None) -> int:
    """Show every value and where it comes from; passwords are stars."""
    values = resolve({"data": data_text}, file=file).shown()
    table = Table("name", "value", "from")
    for name, one in values.items():
        value = (
            ", ".join(map(str, one["value"]))
            if isinstance(one["value"], list | tuple)
            else str(one["value"])
        )
        table.add_row(name, value, one["origin"], style="dim" if one["origin"] == "default" else "")
    results(as_json=as_json).print(table)
    return finish({"values": values}, as_json=as_json)


@config.command(
    epilog=examples("understudy config check --data D", "understudy config check --config F --json")
)
@config_option
@common_options
def check(data_text: str | None, as_json: bool, file: Path | None) -> int:
    """Look whether a platform could start with this config; exits 2 and says why when it could
    not."""
    found = resolve({"data": data_text}, file=file)
    found.config.check()
    where = config_file({"data": data_text}, file=file, environ=os.environ)
    n_set = sum(origin != "default" for origin in found.origins.values())
    said = f"{where or 'no file'}: fine; {n_set} of {len(found.origins)} values are not the default"
    results(as_json=as_json).print(said)
    return finish(
        {"ok": True, "file": str(where) if where else None, "set": n_set}, as_json=as_json
    )
