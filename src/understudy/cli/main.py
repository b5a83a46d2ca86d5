"""Entry point of the `understudy` command; says what to install when the platform extra is missing."""

import os
import signal
import sys

INTERRUPTED = 130


def _stop(_number: int, _frame: object) -> None:
    """Asked to stop while commands are still being loaded: nothing was begun, so nothing is left to do."""
    os._exit(0)


def main() -> int:
    """Run the command line and give its exit code."""
    if sys.argv[1:2] == ["up"]:
        signal.signal(signal.SIGTERM, _stop)
    try:
        return _main()
    except KeyboardInterrupt:
        # Before a command has begun, while it is still being loaded.
        print("interrupted", file=sys.stderr)
        return INTERRUPTED


def _main() -> int:
    try:
        import click  # noqa: F401
        import rich  # noqa: F401
    except ImportError:
        print(
            "this is the light client; the understudy command needs the platform: pip install 'understudy[platform]'",
            file=sys.stderr,
        )
        return 2
    from understudy.cli.root import run

    code = run(sys.argv[1:])
    if code == INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C once more changes nothing: all is cleaned up
    if code == INTERRUPTED and "jax" in sys.modules:
        # Every command has cleaned up behind itself by now, but JAX may be compiling in threads of its own, and
        # taking the interpreter down under them crashes.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
