"""understudy version."""

import platform

import click

import understudy
from understudy.cli.options import console, examples, finish, json_option
from understudy.core.chunk import CHUNK_FORMAT
from understudy.core.frame import VERSION
from understudy.core.game import SPEC_FORMAT


@click.command(epilog=examples("understudy version", "understudy version --json"))
@json_option
def version(as_json: bool) -> int:
    """Print the version of understudy and of the formats it reads and writes."""
    fields = {
        "understudy": understudy.__version__, "python": platform.python_version(), "platform": platform.platform(),
        "frame": VERSION, "chunk": CHUNK_FORMAT, "spec": SPEC_FORMAT,
    }  # fmt: skip
    if not as_json:
        console().print("\n".join(f"{name:<11}{value}" for name, value in fields.items()), soft_wrap=True)
    return finish(fields, as_json=as_json)
