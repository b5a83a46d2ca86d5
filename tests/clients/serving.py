"""A gateway process to kill: `python -m tests.clients.serving FOLDER PORT`; prints "ready"."""

import sys
import time
from pathlib import Path

from tests.serve.gateways import running
from understudy.serve.server import Listen


def main(folder: str, port: str) -> None:
    with running(Path(folder), listen=Listen(port=int(port))):
        print("ready", flush=True)
        while True:
            time.sleep(60)


if __name__ == "__main__":
    main(*sys.argv[1:])
