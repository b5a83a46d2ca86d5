"""The commands of docs/scale.md, by the section they stand in."""

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "scale.md"


class Command(NamedTuple):
    """A line of a console block, and the comment above it, which says where it runs."""

    place: str
    text: str


def commands_of(section: str) -> list[Command]:
    """The commands below the heading that begins with this text, in the order of the page."""
    (part,) = [part for part in PAGE.read_text().split("\n## ") if part.startswith(section)]
    found = []
    for block in re.findall(r"^```console\n(.*?)^```", part, re.MULTILINE | re.DOTALL):
        place = ""
        for line in block.splitlines():
            if line.startswith("# "):
                place = line.removeprefix("# ")
            else:
                found.append(Command(place, line))
    assert found, f"{PAGE.name} shows no command in {section}"
    return found
