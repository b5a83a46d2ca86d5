"""Entry point of the `understudy` command; says what to install when the platform extra is missing."""

import sys


def main() -> int:
    """Run the command line and give its exit code."""
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

    return run(sys.argv[1:])


if __name__ == "__main__":
    raise SystemExit(main())
