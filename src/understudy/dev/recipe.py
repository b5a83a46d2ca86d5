"""What the start of every server has in common: a place with ports and credentials, and the steps of a recipe."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from understudy.dev.ports import HOST


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one server lives: its data, its ports, its credentials, and the resolved package it is run from."""

    folder: Path
    package: Path
    ports: Mapping[str, int]
    credentials: Mapping[str, str]
    credentials_file: Path

    @property
    def address(self) -> str:
        return f"{HOST}:{self.ports['client']}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"


@dataclass(frozen=True, slots=True)
class Launch:
    """A command line, and what its environment has beyond ours; secrets stand in files or there, never in words."""

    words: Sequence[str | Path]
    env: Mapping[str, str] = field(default_factory=dict)


class Recipe(Protocol):
    """How one kind of server is made ready, run and asked."""

    @property
    def ports(self) -> Sequence[str]:
        """Names of the ports it needs; "client" is the one that clients speak to."""
        ...

    @property
    def keeps_data(self) -> bool:
        """Whether what it acknowledged outlives its process."""
        ...

    def trouble(self) -> str | None:
        """Why it cannot run here, whatever was downloaded; None when it can."""
        ...

    def prepare(self, place: Place) -> None:
        """Write its settings, before every start; what is there already stays."""
        ...

    def launch(self, place: Place) -> Launch:
        """The command that runs it in the foreground."""
        ...

    def ask(self, place: Place) -> None:
        """Have a real request answered; raises whatever its client raises while that does not work."""
        ...

    def welcome(self, place: Place) -> None:
        """What is done as soon as it answers, once for the life of its data."""
        ...
