"""Entry point of the `understudy` command; reports a missing platform extra."""

import contextlib
import os
import signal
import sys

from understudy.cli.interrupts import INTERRUPTED, Interrupts, interrupted


def main() -> int:
    """Run the command line and return its exit code."""
    try:
        return _main()
    except KeyboardInterrupt as error:
        # Interrupted while the command was still loading.
        return interrupted(error, sys.argv[1:])


def _main() -> int:
    with Interrupts():
        try:
            import click  # noqa: F401
            import rich  # noqa: F401
        except ImportError:
            print(
                "only the light client is installed; the understudy command needs the platform: "
                "pip install 'understudy[platform]'",
                file=sys.stderr,
            )
            return 2
        from understudy.cli.root import run

    code = run(sys.argv[1:])
    if "--json" in sys.argv:
        # The JSON is printed; a game may still print while the interpreter ends.
        sys.stdout = sys.stderr
        with contextlib.suppress(OSError):
            os.dup2(2, 1)
    if code == INTERRUPTED:
        # Cleanup is complete: ignore further Ctrl-C.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if code == INTERRUPTED and "jax" in sys.modules:
        # Every command has cleaned up by now, but JAX may still be compiling in its own threads,
        # and shutting down the interpreter under them crashes.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


if __name__ == "__main__":
    raise SystemExit(main())
