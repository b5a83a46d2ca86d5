"""Makes .venv ready for the extras asked for: one line per stage, nothing to do when nothing
changed.

Runs before anything is installed, so it uses the standard library alone. A stamp inside .venv says
what was finished; it is removed before work starts and written last, so an interrupted run is seen
and made anew.
"""

import sys

if sys.version_info < (3, 11):
    found = "{}.{}".format(*sys.version_info[:2])
    sys.exit(
        "understudy needs Python 3.11 or newer; this is "
        + found
        + ". Name another: make setup PYTHON=python3.12"
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
    """A stage failed; the text is what its command printed."""


@dataclass(frozen=True)
class Stamp:
    """What a finished set-up was made from."""

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
        "--any-python", action="store_true", help="keep a finished .venv made by another Python"
    )
    args = parser.parse_args()
    try:
        with one_at_a_time():
            prepare(set(args.extras), any_python=args.any_python)
    except StageError as error:
        print(
            f"{error}\nThe set-up did not finish. Mend the cause above and run it again.",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted. The next run repairs what is half done.", file=sys.stderr)
        return 130
    return 0


def prepare(asked: set[str], *, any_python: bool) -> None:
    """Bring .venv to a state that holds the extras asked for and those installed before."""
    started_s = time.monotonic()
    done = read_stamp()
    if done is not None and done.python != platform.python_version() and not any_python:
        done = None
    extras = tuple(sorted(asked | set(done.extras if done else ())))
    python = done.python if done else platform.python_version()
    wanted = Stamp(folder=str(ROOT), python=python, inputs=hash_of_inputs(), extras=extras)
    if done == wanted:
        print(f"  nothing changed ({', '.join(extras)})")
        return
    STAMP.unlink(missing_ok=True)
    if done is None:
        stage("venv", make_venv)
        stage("uv", lambda: call(BIN / "python", "-m", "pip", "install", "--quiet", "uv"))
    stage("packages", lambda: install(extras), note=", ".join(extras))
    write_stamp(wanted)
    print(f"  {'ready':<10}{time.monotonic() - started_s:6.1f} s  in {VENV.name}")


def make_venv() -> None:
    # What an unfinished run left is not trusted: a package may be there in part.
    shutil.rmtree(VENV, ignore_errors=True)
    call(getattr(sys, "_base_executable", sys.executable), "-m", "venv", VENV)


def install(extras: tuple[str, ...]) -> None:
    target = f"{ROOT}[{','.join(extras)}]"
    call(
        BIN / "uv", "pip", "install", "--python", VENV, "-c", ROOT / "constraints.txt", "-e", target
    )


def stage(name: str, work: Callable[[], None], *, note: str = "") -> None:
    """Do the work, then say in one line how long it took."""
    started_s = time.monotonic()
    print(f"  {name:<10}", end="", flush=True)
    try:
        work()
    except BaseException:
        print("failed", flush=True)
        raise
    print(f"{time.monotonic() - started_s:6.1f} s  {note}".rstrip(), flush=True)


def call(*command: str | Path) -> None:
    """Run quietly; what was printed is shown only when it failed."""
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
    """Changes when a new installation could differ from the last."""
    digest = hashlib.sha256()
    for name in ("pyproject.toml", "constraints.txt"):
        digest.update(b"\0" + (ROOT / name).read_bytes())
    return digest.hexdigest()


def read_stamp() -> Stamp | None:
    """The last finished set-up; None where there is none, its Python is gone or the folder was
    moved."""
    if not shutil.which("python", path=str(BIN)):
        return None
    try:
        fields = json.loads(STAMP.read_text())
        stamp = Stamp(**fields | {"extras": tuple(fields["extras"])})
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return (
        stamp if stamp.folder == str(ROOT) else None
    )  # scripts in .venv name the folder they were made in


def write_stamp(stamp: Stamp) -> None:
    draft = STAMP.with_suffix(".draft")
    draft.write_text(json.dumps(stamp.__dict__, indent=1) + "\n")
    os.replace(draft, STAMP)


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Wait while another set-up of this folder runs (where the system has file locks)."""
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
