"""The seed's pipeline on this machine: Kinesis → ingest → Cassandra → learner → S3, and a client.

    python examples/seed_pipeline/stack.py --seconds 120 --until 150

Each step is a command that you could also type; all servers are real, listen on loopback, and are
stopped at the end, also if this program is killed.
"""

import argparse
import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

UNDERSTUDY = [sys.executable, "-m", "understudy.cli.main"]
# A shell beside each command reads a pipe, which closes when this program ends, even by a kill, and
# then terminates the command. A line ends the shell alone.
WATCHED = 'exec 3<&0 </dev/null; ((read -r _ <&3 || kill "$$") >&2 &); exec 3<&-; exec "$@"'
AT_THE_END = 'read -r _; exec "$@"'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--seconds", default="240", help="stop the client after this time")
    parser.add_argument("--until", default="150", help="stop at this mean return of the bot")
    parser.add_argument("--plot", default="returns.png", help="file for the plot of the returns")
    parser.add_argument(
        "--ingest",
        default="native",
        choices=["native", "spark"],
        help="which ingest stores the stream",
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="seed-pipeline-") as folder:
        servers = Path(folder) / "servers"
        stop = [*UNDERSTUDY, "dev", "servers", "stop", "--folder", str(servers)]
        with subprocess.Popen(
            ["sh", "-c", AT_THE_END, "sh", *stop],
            stdin=subprocess.PIPE,
            # Its output may be a pipe that is closed by then.
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ):
            return play(Path(folder), servers, args)


def play(folder: Path, servers: Path, args: argparse.Namespace) -> int:
    """Start the servers and the platform, then run the client."""
    running = understudy(
        "dev",
        "servers",
        "start",
        "kinesalite",
        "cassandra",
        "s3",
        "--folder",
        str(servers),
        "--json",
    )
    kinesis = running["kinesalite"]
    cassandra = running["cassandra"]
    s3 = running["s3"]
    name = secrets.token_hex(4)
    stream = f"kinesis://steps-{name}?region=us-east-1&{aws(kinesis)}"
    store = f"cassandra://{cassandra['address']}/seed_{name}?replication=1&credentials={cassandra['credentials_file']}"
    models = f"s3://understudy/seed-{name}?region=us-east-1&{aws(s3)}"
    understudy("stream", "init", stream, "--partitions", "2", "--json")
    understudy("store", "init", store, "--json")
    up = [
        "up",
        "--data",
        str(folder / "data"),
        "--port",
        "0",
        "--json-ready",
        "--ingest",
        args.ingest,
    ]
    up += ["--stream", stream, "--store", store, "--models", models]
    with watched([*UNDERSTUDY, *up], stdout=subprocess.PIPE) as platform:
        assert platform.stdout is not None
        ready = json.loads(platform.stdout.readline())
        print(f"the platform runs at {ready['url']}", flush=True)
        client = [sys.executable, str(Path(__file__).with_name("client.py")), "--plot", args.plot]
        client += ["--seconds", args.seconds, "--until", args.until]
        env = {**os.environ, "UNDERSTUDY_URL": ready["url"], "UNDERSTUDY_KEY": ready["key"]}
        with watched(client, env=env) as done:
            done.wait()
    stored = understudy("data", "stats", "--data", str(folder / "data"), "--store", store, "--json")
    print(f"{stored['steps']} steps are in Cassandra, each stored once")
    return done.returncode


def aws(server: dict[str, Any]) -> str:
    """Return the URL options for an AWS-compatible server."""
    return f"endpoint=http://{server['address']}&credentials={server['credentials_file']}"


def understudy(*arguments: str) -> dict[str, Any]:
    """Run a command with --json; return the JSON object that it prints last."""
    with watched([*UNDERSTUDY, *arguments], stdout=subprocess.PIPE) as done:
        assert done.stdout is not None
        lines = done.stdout.read().splitlines()
        if code := done.wait():
            raise SystemExit(f"understudy {' '.join(arguments[:2])} failed with exit code {code}")
    return json.loads(lines[-1])


@contextlib.contextmanager
def watched(command: list[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Start a command, and terminate it at the end of the block or of this program."""
    shell = ["sh", "-c", WATCHED, "sh"]
    with subprocess.Popen(
        [*shell, *command], stdin=subprocess.PIPE, text=True, **options
    ) as process:
        try:
            yield process
        finally:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write("\n")
                process.stdin.close()
            process.terminate()
            process.wait()


if __name__ == "__main__":
    raise SystemExit(main())
