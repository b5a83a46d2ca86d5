"""understudy backup and understudy restore."""

import time
from dataclasses import asdict
from pathlib import Path

import click

from understudy.cli.options import (
    PATH,
    TIMEOUT,
    common_options,
    count_of,
    examples,
    finish,
    format_size,
    results,
)
from understudy.platform.backup import Proof, back_up
from understudy.platform.backup import restore as restore_backup
from understudy.platform.config import mask_secrets, resolve


@click.command(
    epilog=examples(
        "understudy backup B --data D", "understudy backup /mnt/b-2026-11-15 --data D --json"
    )
)
@click.argument("target", type=PATH, metavar="DIR")
@click.option(
    "--timeout",
    "timeout_s",
    type=TIMEOUT,
    default=600.0,
    show_default=True,
    help="Seconds to wait for a running ingest.",
)
@common_options
def backup(data_text: str | None, as_json: bool, target: Path, timeout_s: float) -> int:
    """Copy store, models and keys to DIR while the platform runs, then verify every byte.

    The backup contains the deployment's secrets: protect it like the secrets themselves.
    """
    config = resolve({"data": data_text}).config
    began_s = time.monotonic()
    proof = back_up(config.folder, target, config=config, timeout_s=timeout_s)
    out = results(as_json=as_json)
    out.print(f"backed up {_summary(proof)} in {time.monotonic() - began_s:.1f} s", soft_wrap=True)
    if proof.damaged:
        names = ", ".join(proof.damaged[:10])
        out.print(
            f"[yellow]![/] already damaged before the copy, so also damaged in the backup: {names}",
            soft_wrap=True,
        )
    if config.store.url:
        out.print(
            f"[yellow]![/] steps are not included: they are in {mask_secrets(config.store.url)}; "
            "back up that database with its own tools",
            soft_wrap=True,
        )
    out.print("[dim]the backup contains the deployment's secrets: protect it like them[/]")
    return finish({"backup": str(target), **asdict(proof)}, as_json=as_json)


@click.command(
    epilog=examples(
        "understudy restore B --keys revoke --data NEW",
        "understudy restore B --keys keep --data NEW --json",
    )
)
@click.argument("source", type=PATH, metavar="DIR")
@click.option(
    "--keys",
    "keys_action",
    type=click.Choice(["keep", "revoke"]),
    required=True,
    help="keep: the backup's keys are valid, also those that were revoked after the backup; "
    "revoke: none is.",
)
@common_options
def restore(data_text: str | None, as_json: bool, source: Path, keys_action: str) -> int:
    """Create a data folder from the backup in DIR, which is verified first."""
    config = resolve({"data": data_text}).config
    proof = restore_backup(
        source, config.folder, models=config.models.url, revoke_keys=keys_action == "revoke"
    )
    out = results(as_json=as_json)
    backed_up_at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(proof.at_s))
    out.print(f"restored {_summary(proof)}, as of {backed_up_at}", soft_wrap=True)
    out.print(
        "every key was revoked; create new ones with 'understudy keys create'"
        if keys_action == "revoke"
        else "[yellow]![/] keys that were revoked after the backup are valid again; see "
        "'understudy keys list'",
        soft_wrap=True,
    )
    # Only for the text output: this build may reject the restored understudy.toml.
    restored = config if as_json else resolve({"data": data_text}).config
    for part, url in (("stream", restored.stream.url), ("store", restored.store.url)):
        if url:
            out.print(
                f"[yellow]![/] the restored platform still uses the {part} at {mask_secrets(url)}",
                soft_wrap=True,
            )
    if (models_url := restored.models.url) != config.models.url:
        out.print(
            f"[yellow]![/] its understudy.toml names other models ({mask_secrets(models_url)}), "
            "which 'understudy up' will use; to use the backup's models, which are in the data "
            "folder, remove models.url from understudy.toml",
            soft_wrap=True,
        )
    out.print(f"[dim]next: understudy up --data {config.folder.root}[/]", soft_wrap=True)
    return finish({"data": str(config.folder.root), **asdict(proof)}, as_json=as_json)


def _summary(proof: Proof) -> str:
    return (
        f"{count_of(proof.steps, 'step')}, {count_of(proof.models, 'model')} and "
        f"{count_of(proof.keys, 'key')} in {count_of(proof.files, 'file')}, "
        f"{format_size(proof.size_bytes)}; every byte was verified"
    )
