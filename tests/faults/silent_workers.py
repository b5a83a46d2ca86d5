"""Workers that hold a lease and then send nothing, and connections that stay half open.

Run as `python -m tests.faults.silent_workers PORT KEY WORKERS CONNECTIONS`; prints a line of JSON
once all are there, then stops itself (SIGSTOP), as a suspended machine does.
"""

import json
import os
import signal
import socket
import sys

import understudy
from understudy.act.vector import game_of, make_envs
from understudy.client.http import Connection
from understudy.core.canonical import canonical_json
from understudy.workers.wire import (
    MAX_POLICY_BYTES,
    PROTOCOL,
    JoinAnswer,
    RunInfo,
    read_object,
    unpack,
)


def main(port: int, key: str, n_workers: int, n_connections: int) -> None:
    link = Connection("learner", "127.0.0.1", port, is_tls=False, key=key, timeout_s=30.0)
    info = read_object(RunInfo, link.request("GET", "/v1/runs")[1])
    request = {
        "protocol": PROTOCOL,
        "understudy": understudy.__version__,
        "spec": game_of(make_envs(info.name, 1)).to_json().decode(),
    }
    path = f"/v1/runs/{info.run}"
    sockets = []
    for _ in range(n_workers):
        raw = link.request(
            "POST", f"{path}/join", canonical_json(request), max_bytes=MAX_POLICY_BYTES
        )[1]
        lease = read_object(JoinAnswer, unpack(raw)[0]).lease
        head = f"Host: x\r\nAuthorization: Bearer {key}\r\n"
        # It waits for weights that it never reads, and has sent half of a round.
        poll = f"GET {path}/weights?lease={lease}&after=1&wait_s=10 HTTP/1.1\r\n{head}\r\n"
        body = f"POST {path}/chunks HTTP/1.1\r\n{head}Content-Length: 4000\r\n\r\n" + "x" * 2000
        sockets += [_opened(port, text.encode()) for text in (poll, body)]
    sockets += [_opened(port, b"GET /v1/runs HTTP/1.1\r\nHost: ") for _ in range(n_connections)]
    print(json.dumps({"workers": n_workers, "connections": n_connections}), flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)


def _opened(port: int, text: bytes) -> socket.socket:
    opened = socket.create_connection(("127.0.0.1", port), timeout=30.0)
    opened.sendall(text)
    return opened


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
