"""The cache contains a server completely or not at all."""

import errno
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from understudy.core.errors import ServerFailed, StorageFull
from understudy.dev import packages as cache
from understudy.dev.packages import PACKAGES, OnPart, Package
from understudy.dev.process import identify


@dataclass(frozen=True, slots=True)
class FakePackage(Package):
    """A package that is resolved without a tool, or fails in the middle."""

    error: BaseException | None = None

    def problem(self) -> str | None:
        return None

    def resolve(self, into: Path, on_part: OnPart) -> None:
        on_part("one.jar")
        (into / "lib").mkdir()
        (into / "lib" / "one.jar").write_bytes(b"one" * 1000)
        with (into.parent / "count").open("a") as file:
            file.write("x")
        if self.error is not None:
            raise self.error
        (into / "lib" / "two.jar").write_bytes(b"two" * 1000)


def fake_package(error: BaseException | None = None) -> FakePackage:
    return FakePackage(PACKAGES["kafka"].version, "mvn", [], 1, error)


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("UNDERSTUDY_SERVERS_CACHE", str(tmp_path))
    return tmp_path


def test_a_fetched_server_is_cached_and_not_fetched_again(root):
    assert cache.cached("kafka") is None
    assert cache.fetch("kafka", package=fake_package())
    assert cache.cached("kafka") == root / f"kafka-{PACKAGES['kafka'].version}"
    assert not cache.fetch("kafka", package=fake_package())


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ServerFailed("no network")])
def test_a_failed_download_leaves_nothing(root, error):
    with pytest.raises(type(error)):
        cache.fetch("kafka", package=fake_package(error))
    assert cache.cached("kafka") is None
    assert [path for path in root.iterdir() if path.is_dir()] == []


def test_a_full_disk_is_reported_with_the_next_step():
    with pytest.raises(StorageFull, match="UNDERSTUDY_SERVERS_CACHE"):
        cache.fetch("kafka", package=fake_package(OSError(errno.ENOSPC, "No space left on device")))


def test_the_files_of_a_killed_fetch_are_removed(root):
    left = root / f".kafka-{PACKAGES['kafka'].version}.abcdef"
    left.mkdir()
    cache.fetch("kafka", package=fake_package())
    assert not left.exists()


def test_a_server_with_a_short_or_missing_file_is_incomplete():
    cache.fetch("kafka", package=fake_package())
    jar = cache.cache_folder("kafka") / "lib" / "two.jar"
    jar.write_bytes(b"two")
    assert cache.cached("kafka") is None
    assert cache.fetch("kafka", package=fake_package())
    jar.unlink()
    assert cache.cached("kafka") is None
    assert cache.fetch("kafka", package=fake_package())


def test_a_changed_byte_is_found_by_the_next_fetch():
    cache.fetch("kafka", package=fake_package())
    jar = cache.cache_folder("kafka") / "lib" / "two.jar"
    right = jar.read_bytes()
    jar.write_bytes(b"x" + right[1:])
    assert cache.fetch("kafka", package=fake_package())
    assert jar.read_bytes() == right


def test_concurrent_fetches_download_once(root):
    threads = [
        threading.Thread(target=cache.fetch, args=("kafka",), kwargs={"package": fake_package()})
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (root / "count").read_text() == "x"


def test_a_missing_tool_is_named_with_the_next_step(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(
        ServerFailed, match=r"kafka 4\.\S+ cannot be fetched: mvn is not installed; install Maven"
    ):
        cache.fetch("kafka")


def tool(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    """Replace `mvn` and `java` with this script."""
    programs = folder / "bin"
    programs.mkdir()
    for name in ("mvn", "java"):
        (programs / name).write_text(f"#!/bin/sh\n{script}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")


def test_a_tool_that_fails_is_quoted(monkeypatch, tmp_path):
    tool(monkeypatch, tmp_path, "echo 'Could not transfer artifact'\nexit 1")
    with pytest.raises(
        ServerFailed, match=r"check the network and try again(.|\n)*Could not transfer artifact"
    ):
        cache.fetch("kafka")
    assert cache.cached("kafka") is None


def test_a_tool_that_takes_too_long_is_stopped_and_the_limit_is_reported(monkeypatch, tmp_path):
    tool(monkeypatch, tmp_path, "echo 'Downloading from central'\nsleep 300")
    monkeypatch.setattr("understudy.dev.packages._FETCH_S", 6.0)
    with pytest.raises(
        ServerFailed,
        match=r"^[^-]*mvn did not finish within 0\.1 minutes(.|\n)*Downloading from central",
    ):
        cache.fetch("kafka")
    assert cache.cached("kafka") is None


def test_each_downloaded_part_is_reported(monkeypatch, tmp_path):
    said = "\n".join(
        f"echo '[INFO] Downloaded from central: https://repo/a/{n}.jar (9 kB at 1 MB/s)'"
        for n in "ab"
    )
    tool(monkeypatch, tmp_path, f"{said}\nmkdir lib\necho x > lib/a.jar")
    parts: list[str] = []
    assert cache.fetch("kafka", on_part=parts.append)
    assert parts == ["a.jar", "b.jar"]


def test_a_tool_ends_when_its_fetch_is_interrupted(monkeypatch, tmp_path):
    tool(
        monkeypatch,
        tmp_path,
        f"sleep 300 & echo $! > {tmp_path}/pid\necho Downloaded from x: /one.jar\nwait",
    )

    def interrupted(part: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.fetch("kafka", on_part=interrupted)
    deadline = time.monotonic() + 60.0
    while (alive := identify(int((tmp_path / "pid").read_text()))) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert alive is None
    assert [path for path in tmp_path.glob(".kafka*") if path.is_dir()] == []


@pytest.mark.parametrize("name", ["mvn", "java"])
def test_a_missing_requirement_of_a_tool_is_named(monkeypatch, tmp_path, name):
    tool(monkeypatch, tmp_path, "exit 0")
    (tmp_path / "bin" / name).unlink()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(
        ServerFailed, match=rf"kafka 4\S+ cannot be fetched: {name} is not installed; install"
    ):
        cache.fetch("kafka")
