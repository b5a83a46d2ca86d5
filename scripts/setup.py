"""Installs understudy with extras into .venv; if nothing changed, it does nothing.

Runs before anything is installed, so it uses the standard library only. A stamp in .venv records
the finished set-up; it is removed before work starts and written last, so that an interrupted run
is detected and repeated.
"""

import sys

if sys.version_info < (3, 11):
    version = "{}.{}".format(*sys.version_info[:2])
    sys.exit(
        "understudy needs Python 3.11 or newer; this is "
        + version
        + ". Choose another: make setup PYTHON=python3.12"
    )

import argparse
import contextlib
import hashlib
import json
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "understudy-setup.json"
BIN = VENV / ("Scripts" if os.name == "nt" else "bin")


class StageError(Exception):
    """A stage failed; the text is its command with the command's output."""


@dataclass(frozen=True)
class Stamp:
    """The inputs of a finished set-up."""

    folder: str
    python: str
    inputs: str
    extras: tuple[str, ...]


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Install understudy and the named extras into .venv."
    )
    parser.add_argument(
        "extras",
        nargs="*",
        default=["platform"],
        help="extras of pyproject.toml (default: platform)",
    )
    parser.add_argument(
        "--any-python", action="store_true", help="keep a finished .venv of another Python version"
    )
    args = parser.parse_args()
    try:
        with one_at_a_time():
            prepare(set(args.extras), any_python=args.any_python)
    except StageError as error:
        print(
            f"{error}\nThe set-up did not finish. Fix the error above and run it again.",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted. The next run starts over.", file=sys.stderr)
        return 130
    return 0


def prepare(requested: set[str], *, any_python: bool) -> None:
    """Install the requested extras, and those that .venv already has, into .venv."""
    started_s = time.monotonic()
    done = read_stamp()
    if done is not None and done.python != platform.python_version() and not any_python:
        done = None
    extras = tuple(sorted(requested | set(done.extras if done else ())))
    python = done.python if done else platform.python_version()
    stamp = Stamp(folder=str(ROOT), python=python, inputs=hash_of_inputs(), extras=extras)
    if done == stamp:
        print(f"  nothing changed ({', '.join(extras)})")
        return
    STAMP.unlink(missing_ok=True)
    if done is None:
        stage("venv", create_venv)
        stage("uv", lambda: call(BIN / "python", "-m", "pip", "install", "--quiet", "uv"))
    stage("packages", lambda: install(extras), note=", ".join(extras))
    write_stamp(stamp)
    print(f"  {'ready':<10}{time.monotonic() - started_s:6.1f} s  in {VENV.name}")


def create_venv() -> None:
    # The .venv of an unfinished run is not trusted: a package may be installed in part.
    shutil.rmtree(VENV, ignore_errors=True)
    call(getattr(sys, "_base_executable", sys.executable), "-m", "venv", VENV)


def install(extras: tuple[str, ...]) -> None:
    target = f"{ROOT}[{','.join(extras)}]"
    call(
        BIN / "uv", "pip", "install", "--python", VENV, "-c", ROOT / "constraints.txt", "-e", target
    )


def stage(name: str, work: Callable[[], None], *, note: str = "") -> None:
    """Run `work` and print its name and duration in one line."""
    started_s = time.monotonic()
    print(f"  {name:<10}", end="", flush=True)
    try:
        work()
    except BaseException:
        print("failed", flush=True)
        raise
    print(f"{time.monotonic() - started_s:6.1f} s  {note}".rstrip(), flush=True)


def call(*command: str | Path) -> None:
    """Run a command; its output is shown only if it fails."""
    words = [str(word) for word in command]
    finished = subprocess.run(
        words,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if finished.returncode != 0:
        raise StageError(f"$ {' '.join(words)}\n{finished.stdout.decode(errors='replace')}")


def hash_of_inputs() -> str:
    """A digest of the files that determine what is installed."""
    digest = hashlib.sha256()
    for name in ("pyproject.toml", "constraints.txt"):
        digest.update(b"\0" + (ROOT / name).read_bytes())
    return digest.hexdigest()


def read_stamp() -> Stamp | None:
    """The last finished set-up; None if there is none, or its Python or its folder has moved."""
    if not shutil.which("python", path=str(BIN)):
        return None
    try:
        fields = json.loads(STAMP.read_text())
        stamp = Stamp(**fields | {"extras": tuple(fields["extras"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None
    # Scripts in .venv contain the path of the folder that they were created in.
    return stamp if stamp.folder == str(ROOT) else None


def write_stamp(stamp: Stamp) -> None:
    draft = STAMP.with_suffix(".draft")
    draft.write_text(json.dumps(stamp.__dict__, indent=1) + "\n")
    os.replace(draft, STAMP)


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Wait while another set-up of this folder runs, if the system has file locks."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with (ROOT / ".setup.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    sys.exit(main())
