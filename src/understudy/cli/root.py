"""The root command; each subcommand is imported only when it is called."""

import contextlib
import difflib
import errno
import importlib
import platform
import signal
import sqlite3
import sys
from collections.abc import Sequence

import click

import understudy
from understudy.cli.interrupts import Interrupts, interrupted, raise_stop_signal, stop_signals
from understudy.cli.options import examples, finish, json_option, only_json, results
from understudy.core.errors import ConfigError, Corrupt, UnderstudyError

_COMMANDS = {
    "arena": ("understudy.cli.arena:arena", "play bots against each other"),
    "backup": (
        "understudy.cli.backup:backup",
        "copy store, models and keys while the platform runs",
    ),
    "config": ("understudy.cli.config:config", "create, show and check the config"),
    "data": ("understudy.cli.data:data", "inspect, verify, export, import and erase recorded data"),
    "demo": (
        "understudy.cli.demo:demo",
        "run the closed loop: people play, a learner learns, its bots play",
    ),
    "dev": ("understudy.cli.dev:dev", "run local servers for tests and development"),
    "doctor": ("understudy.cli.doctor:doctor", "check this machine and a data folder"),
    "evaluate": ("understudy.cli.train:evaluate", "evaluate a run's policy on held-out seeds"),
    "games": ("understudy.cli.games:games", "register, list and check games"),
    "ingest": ("understudy.cli.ingest:ingest", "follow the stream and store each step once"),
    "keys": ("understudy.cli.keys:keys", "create, list and revoke access keys"),
    "models": ("understudy.cli.models:models", "list, add, promote, roll back and export models"),
    "play": ("understudy.cli.play:play", "watch a bot play, or play against it in a browser"),
    "restore": ("understudy.cli.backup:restore", "create a data folder from a backup"),
    "simulate": (
        "understudy.cli.simulate:simulate",
        "record simulated players through the real client, stream and ingest",
    ),
    "status": (
        "understudy.cli.status:status",
        "show roles, rates, games and models of a platform",
    ),
    "store": ("understudy.cli.backends:store", "create a Cassandra store, or change its retention"),
    "stream": ("understudy.cli.backends:stream", "create a Kinesis stream or Kafka topic"),
    "train": ("understudy.cli.train:train", "train a policy on a game, or on recorded data"),
    "tune": ("understudy.cli.tune:tune", "search the settings of a training for the best ones"),
    "up": ("understudy.cli.up:up", "run the platform: gateway, ingest, learner"),
    "version": ("understudy.cli.root:version", "print versions"),
    "worker": ("understudy.cli.worker:worker", "play for a learner on another machine"),
}


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, attribute = _COMMANDS[cmd_name][0].split(":")
        with Interrupts():  # an imported package may catch Ctrl-C
            command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in _COMMANDS and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], _COMMANDS, n=1)
            hint = (
                f"; did you mean '{near[0]}'?"
                if near
                else f"; commands are {', '.join(sorted(_COMMANDS))}"
            )
            raise click.UsageError(f"no such command '{args[0]}'{hint}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in sorted(_COMMANDS.items())])


@click.group(
    cls=_Lazy,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples(
        "understudy demo",
        "understudy simulate CartPole-v1 --players 4 --seconds 5 --data D",
        "understudy data verify --data D",
        "understudy train CartPole-v1",
    ),
)
@click.option("--debug", is_flag=True, help="Show a traceback on errors.")
@click.version_option(understudy.__version__, message="understudy %(version)s")
@click.pass_context
def root(ctx: click.Context, debug: bool) -> None:
    """understudy turns the games people play into bots worth playing against."""
    ctx.obj = {"debug": debug}


@click.command(epilog=examples("understudy version", "understudy version --json"))
@json_option
def version(as_json: bool) -> int:
    """Print the version of understudy and of the formats it reads and writes."""
    # Imported late: other commands start without NumPy, which takes a tenth of a second.
    from understudy.experience.chunk import CHUNK_FORMAT
    from understudy.experience.frame import VERSION
    from understudy.experience.game import SPEC_FORMAT

    fields = {
        "understudy": understudy.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "frame": VERSION,
        "chunk": CHUNK_FORMAT,
        "spec": SPEC_FORMAT,
    }
    results(as_json=as_json).print(
        "\n".join(f"{name:<11}{value}" for name, value in fields.items()), soft_wrap=True
    )
    return finish(fields, as_json=as_json)


def run(arguments: Sequence[str]) -> int:
    """Run a command line and return its exit code.

    0 success, 1 fault found, 2 usage error, 3 failure, 130 interrupted.
    """
    # SIGTERM and SIGHUP act like Ctrl-C, so that every command cleans up.
    for number in stop_signals():
        if number != signal.SIGINT:
            signal.signal(number, raise_stop_signal)
    try:
        with only_json() if "--json" in arguments else contextlib.nullcontext():
            code = root.main(args=list(arguments), prog_name="understudy", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except (click.exceptions.Abort, KeyboardInterrupt) as error:
        return interrupted(error, arguments)
    except SystemError as error:
        # Python's report of an interrupt inside a function of a C library, such as Kafka's client.
        if not isinstance(error.__cause__, KeyboardInterrupt):
            raise
        return interrupted(error.__cause__, arguments)
    except TypeError as error:
        # While it reads its settings, which are all text, Kafka's client replaces the interrupt.
        if not str(error).endswith("as type unicode string"):
            raise
        return interrupted(error, arguments)
    except click.ClickException as error:
        error.show()
        return 2
    except (UnderstudyError, OSError, sqlite3.Error) as error:
        if "--debug" in arguments:
            raise
        message = str(error)
        if isinstance(error, sqlite3.Error):
            message = (
                f"cannot read the store's database: {error}; next: understudy doctor --data DIR"
            )
        elif isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
            message = (
                f"{error}; raise the limit of open files in the shell first, such as with: "
                "ulimit -n 4096"
            )
        elif isinstance(error, OSError):
            message = f"{error}; check that the path is correct, readable and writable"
        with contextlib.suppress(OSError):
            print(f"understudy: {message}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1 if isinstance(error, Corrupt) else 3
