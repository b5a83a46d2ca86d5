"""Network namespaces that stand for machines: each has its own address, ports and host names."""

import os
import secrets
import shutil
import subprocess
import sys
from pathlib import Path

ETC = Path("/etc/netns")
"""`ip netns exec NAME` shows the files of the folder NAME in it as those of /etc."""


def unavailable_reason() -> str:
    """Why namespaces cannot be created here; empty if they can."""
    if sys.platform != "linux" or shutil.which("ip") is None:
        return "network namespaces need Linux and the command ip"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"us-{secrets.token_hex(3)}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode == 0:
        entered = ["ip", "netns", "exec", name, "true"]
        tried = subprocess.run(entered, capture_output=True, text=True)
        _ip("netns", "del", name)
    return f"network namespaces cannot be created here: {tried.stderr}" if tried.returncode else ""


class Machines:
    """Machines on one network, which know each other by name; `close` removes all of it.

    Each has a folder of its own, in which its commands run.
    """

    def __init__(self, folder: Path, *names: str) -> None:
        self._folder = folder
        self._id = secrets.token_hex(3)
        self._started: list[subprocess.Popen[bytes]] = []
        self._spaces = [self._space("switch"), *map(self._space, names)]
        addresses = {name: f"10.77.0.{number}" for number, name in enumerate(names, start=1)}
        hosts = "127.0.0.1 localhost\n" + "".join(
            f"{address} {name}\n" for name, address in addresses.items()
        )
        try:
            _ip("netns", "add", self._space("switch"))
            _ip("-n", self._space("switch"), "link", "add", "bridge", "type", "bridge")
            _ip("-n", self._space("switch"), "link", "set", "bridge", "up")
            for name, address in addresses.items():
                (folder / name).mkdir()
                self._connect(name, address)
                (ETC / self._space(name)).mkdir(parents=True)
                (ETC / self._space(name) / "hosts").write_text(hosts)
        except BaseException:
            self.close()
            raise

    def _space(self, name: str) -> str:
        return f"us-{self._id}-{name}"

    def _connect(self, name: str, address: str) -> None:
        """A cable from the machine to the switch."""
        space = self._space(name)
        port = f"p{address.rpartition('.')[2]}"
        switch = self._space("switch")
        _ip("netns", "add", space)
        _ip(
            *("-n", switch, "link", "add", port, "type", "veth"),
            *("peer", "name", "eth0", "netns", space),
        )
        _ip("-n", switch, "link", "set", port, "master", "bridge", "up")
        _ip("-n", space, "address", "add", f"{address}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", space, "link", "set", device, "up")

    def folder(self, name: str) -> Path:
        return self._folder / name

    def start(self, name: str, command: str) -> "subprocess.Popen[bytes]":
        """A command on a machine, in place of its shell; what it prints is in `output`."""
        with (self._folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self._space(name), "sh", "-c", f"exec env {command}"],
                cwd=self.folder(name),
                env=environment(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._started.append(process)
        return process

    def run(self, name: str, command: str) -> str:
        """The output of a command that must succeed."""
        done = subprocess.run(
            ["ip", "netns", "exec", self._space(name), "sh", "-c", command],
            cwd=self.folder(name),
            env=environment(),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, f"{name}: {command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def output(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()

    def close(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()
        for space in self._spaces:
            # Not all of them exist if the constructor failed. Cables end with their namespaces.
            subprocess.run(["ip", "netns", "del", space], capture_output=True)
            shutil.rmtree(ETC / space, ignore_errors=True)


def environment() -> dict[str, str]:
    """That of this process, with the commands of its Python first."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path}


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
