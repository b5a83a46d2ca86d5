"""understudy backup and understudy restore."""

import time
from dataclasses import asdict
from pathlib import Path

import click

from understudy.cli.options import PATH, common_options, count, examples, finish, results, size
from understudy.platform.backup import Proof, back_up
from understudy.platform.backup import restore as restore_backup
from understudy.platform.config import hidden, resolve


@click.command(
    epilog=examples(
        "understudy backup B --data D", "understudy backup /mnt/b-2026-11-15 --data D --json"
    )
)
@click.argument("target", type=PATH, metavar="DIR")
@click.option(
    "--timeout",
    "timeout_s",
    default=600.0,
    show_default=True,
    help="Seconds a running ingest may take.",
)
@common_options
def backup(data_text: str | None, as_json: bool, target: Path, timeout_s: float) -> int:
    """Copy store, models and keys into DIR while the platform runs, then read every byte again.

    The backup holds the deployment's secrets: keep it as you keep them.
    """
    config = resolve({"data": data_text}).config
    began_s = time.monotonic()
    proof = back_up(config.folder, target, config=config, timeout_s=timeout_s)
    out = results(as_json=as_json)
    out.print(f"backed up {_words(proof)} in {time.monotonic() - began_s:.1f} s", soft_wrap=True)
    if proof.damaged:
        names = ", ".join(proof.damaged[:10])
        out.print(
            f"[yellow]![/] damaged before it was copied, and in the backup: {names}", soft_wrap=True
        )
    if config.store.url:
        out.print(
            f"[yellow]![/] steps are not in it: {hidden(config.store.url)} keeps them, and has "
            "backups of its own",
            soft_wrap=True,
        )
    out.print("[dim]it holds the deployment's secrets: keep it as you keep them[/]")
    return finish({"backup": str(target), **asdict(proof)}, as_json=as_json)


@click.command(
    epilog=examples("understudy restore B --data NEW", "understudy restore B --data NEW --json")
)
@click.argument("source", type=PATH, metavar="DIR")
@common_options
def restore(data_text: str | None, as_json: bool, source: Path) -> int:
    """Make a new data folder from a backup, which is proved first."""
    config = resolve({"data": data_text}).config
    proof = restore_backup(source, config.folder, models=config.models.url)
    out = results(as_json=as_json)
    made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(proof.at_s))
    out.print(f"restored {_words(proof)}, as of {made}", soft_wrap=True)
    # Only for what people are shown: a restored understudy.toml may be one that this build refuses.
    now = config if as_json else resolve({"data": data_text}).config
    for part, url in (("stream", now.stream.url), ("store", now.store.url)):
        if url:
            out.print(f"[yellow]![/] its {part} is where it was: {hidden(url)}", soft_wrap=True)
    if (named := now.models.url) != config.models.url:
        out.print(
            f"[yellow]![/] its understudy.toml names models elsewhere ({hidden(named)}), which "
            "`up` will use; the "
            "backup's own are in the data folder: to use those, take that line out",
            soft_wrap=True,
        )
    out.print(f"[dim]next: understudy up --data {config.folder.root}[/]", soft_wrap=True)
    return finish({"data": str(config.folder.root), **asdict(proof)}, as_json=as_json)


def _words(proof: Proof) -> str:
    return (
        f"{count(proof.steps)} steps, {proof.models} models and {proof.keys} keys in "
        f"{count(proof.files)} files, "
        f"{size(proof.size_bytes)}; every byte was read again"
    )
