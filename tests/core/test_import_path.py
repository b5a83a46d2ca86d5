"""Plug-ins by import path, and what is said where there is none."""

import math

import pytest

from understudy.core.errors import ConfigError
from understudy.core.import_path import load


def test_a_path_leads_to_what_it_names():
    assert load("math:pi", what="number") == math.pi


@pytest.mark.parametrize(
    ("path", "says"),
    [
        ("dqm", "no algorithm 'dqm'; did you mean 'dqn'"),
        ("alphazero", "known are dqn, ppo"),
        ("math:nothing", "cannot be imported: .*; give module:Class"),
        ("nowhere_at_all:Thing", "cannot be imported: .*; give module:Class"),
        (":Thing", "cannot be imported: .*; give module:Class"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused_in_one_line(path: str, says: str):
    with pytest.raises(ConfigError, match=says) as caught:
        load(path, what="algorithm", known=("ppo", "dqn"))
    assert "\n" not in str(caught.value)
