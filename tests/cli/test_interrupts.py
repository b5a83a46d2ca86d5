"""Ctrl-C where third-party code catches it."""

import contextlib
import gc
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from understudy.cli import root
from understudy.cli.interrupts import Interrupts, stop_signals


def ctrl_c() -> None:
    signal.raise_signal(signal.SIGINT)


def test_an_interrupt_ends_the_block_and_restores_the_handlers():
    before = (
        [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        sys.unraisablehook,
    )
    with pytest.raises(KeyboardInterrupt), Interrupts():
        signal.raise_signal(signal.SIGTERM)
    assert (
        [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        sys.unraisablehook,
    ) == before


@pytest.mark.usefixtures("sighup")
def test_sighup_interrupts_unless_it_is_ignored():
    assert signal.SIGHUP in stop_signals()
    with pytest.raises(KeyboardInterrupt), Interrupts():
        signal.raise_signal(signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    assert stop_signals() == (signal.SIGINT, signal.SIGTERM)


def test_with_hurry_only_the_first_interrupt_is_raised():
    hurried = list[bool]()
    cleaned = list[bool]()

    def working() -> None:
        with Interrupts(hurry=lambda: hurried.append(True)):
            try:
                ctrl_c()
            finally:
                ctrl_c()
                signal.raise_signal(signal.SIGTERM)
                cleaned.append(True)

    with pytest.raises(KeyboardInterrupt):
        working()
    assert (hurried, cleaned) == ([True, True], [True])


def test_a_swallowed_interrupt_is_raised_at_the_next_check():
    def swallowing() -> None:
        with Interrupts() as interrupts:
            interrupts.check()
            with contextlib.suppress(BaseException):  # as some packages do
                ctrl_c()
            interrupts.check()
            pytest.fail("the check let it pass")

    with pytest.raises(KeyboardInterrupt):
        swallowing()


def test_an_interrupt_that_became_another_error_is_raised_as_an_interrupt():
    def converting() -> None:
        with Interrupts():
            try:
                ctrl_c()
            except KeyboardInterrupt:
                raise ImportError("half a package") from None

    with pytest.raises(KeyboardInterrupt):
        converting()


def test_an_interrupt_inside_the_garbage_collector_is_raised_again():
    def at_collection(phase: str, info: dict[str, int]) -> None:
        gc.callbacks.remove(at_collection)
        ctrl_c()

    def collecting() -> None:
        with Interrupts():
            gc.callbacks.append(at_collection)
            gc.collect()
            for _ in range(10**10):
                pass

    with pytest.raises(KeyboardInterrupt):
        collecting()


def test_other_unraisable_errors_reach_the_previous_hook(monkeypatch: pytest.MonkeyPatch):
    lost: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lost.append)

    class Bad:
        def __del__(self) -> None:
            raise ValueError("of no interest here")

    with Interrupts():
        Bad()
    assert [one.exc_type for one in lost] == [ValueError]


@pytest.fixture
def handlers() -> Iterator[None]:
    """The command line takes over signals; the tests' own process takes them back."""
    before = {number: signal.getsignal(number) for number in stop_signals()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize(
    ("command", "number", "code"),
    [
        ("demo", signal.SIGINT, 130),
        ("demo", signal.SIGTERM, 130),
        ("up", signal.SIGINT, 130),
        ("up", signal.SIGTERM, 0),
    ],
)
def test_a_signal_is_not_lost_while_a_command_is_imported(
    command: str, number: int, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "catches_all.py").write_text(
        "import signal, click\n"
        f"try:\n    signal.raise_signal({int(number)})\nexcept BaseException:\n    pass\n"
        "@click.command()\ndef run():\n    print('ran')\n    return 7\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(root._COMMANDS, command, ("catches_all:run", "as some packages do"))
    monkeypatch.delitem(sys.modules, "catches_all", raising=False)
    assert root.run([command]) == code


@pytest.mark.parametrize(
    ("error", "code"),
    [
        # What Python raises if a function in C returns a result although a signal handler has
        # raised, and what Kafka's client raises instead while it reads its settings.
        ("SystemError('returned a result with an exception set') from KeyboardInterrupt()", 130),
        ("TypeError('expected configuration property value as type unicode string')", 130),
        ("SystemError('returned a result with an exception set') from ValueError()", None),
        ("TypeError('unsupported operand')", None),
    ],
)
def test_an_interrupt_inside_a_c_library_ends_a_command_as_usual(
    error: str, code: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "in_c.py").write_text(
        f"import click\n@click.command()\ndef run():\n    raise {error}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(root._COMMANDS, "demo", ("in_c:run", "as Kafka's client does"))
    monkeypatch.delitem(sys.modules, "in_c", raising=False)
    if code is None:
        with pytest.raises((SystemError, TypeError)):
            root.run(["demo"])
    else:
        assert root.run(["demo"]) == code
