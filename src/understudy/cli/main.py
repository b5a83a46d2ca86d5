"""Entry point of the `understudy` command; says what to install when the platform extra is
missing."""

import os
import signal
import sys

from understudy.cli.interrupts import INTERRUPTED, Interrupts, interrupted


def main() -> int:
    """Run the command line and give its exit code."""
    try:
        return _main()
    except KeyboardInterrupt as error:
        return interrupted(
            error, sys.argv[1:]
        )  # before a command has begun, while it is still being loaded


def _main() -> int:
    with Interrupts():
        try:
            import click  # noqa: F401
            import rich  # noqa: F401
        except ImportError:
            print(
                "this is the light client; the understudy command needs the platform: "
                "pip install 'understudy[platform]'",
                file=sys.stderr,
            )
            return 2
        from understudy.cli.root import run

    code = run(sys.argv[1:])
    if code == INTERRUPTED:
        signal.signal(
            signal.SIGINT, signal.SIG_IGN
        )  # Ctrl-C once more changes nothing: all is cleaned up
    if code == INTERRUPTED and "jax" in sys.modules:
        # Every command has cleaned up behind itself by now, but JAX may be compiling in threads of
        # its own, and taking the interpreter down under them crashes.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
