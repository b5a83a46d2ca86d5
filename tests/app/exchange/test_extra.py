"""A missing package is named with the command that installs it."""

import sys

import pytest

from understudy.app.exchange.extra import extra, one_line
from understudy.core.errors import MissingExtra


@pytest.mark.parametrize("module", ["pyarrow.parquet", "minari", "h5py"])
def test_a_missing_package_gives_one_line_with_the_install_command(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingExtra, match=r"needs the package .*; pip install 'understudy\[export\]'$"):
        extra(module)


def test_what_a_library_said_becomes_one_line() -> None:
    assert one_line(ValueError("a\n  b\tc")) == "a b c"
    assert one_line(KeyError("rewards")) == "'rewards' is missing"
    assert one_line(AssertionError()) == "it is not as the library wants it (AssertionError)"
    assert len(one_line(ValueError("x" * 999))) == 160
