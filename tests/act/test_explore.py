"""The ladder of epsilons."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.act.explore import epsilon_of, ladder
from understudy.core.errors import ConfigError


def test_the_ladder_is_the_papers():
    np.testing.assert_allclose(ladder(3), [0.4, 0.4**4.5, 0.4**8], rtol=1e-6)
    assert ladder(3).dtype == np.float32
    np.testing.assert_allclose(ladder(2, base=0.5, alpha=1.0), [0.5, 0.25])


def test_one_env_explores_with_the_base():
    assert ladder(1).tolist() == [np.float32(0.4)]


@given(st.integers(1, 300), st.integers(0, 1000))
def test_a_place_keeps_its_epsilon_whoever_comes_and_goes(n: int, index: int):
    assert np.float32(epsilon_of(index, n)) == ladder(n)[index % n]


@pytest.mark.parametrize(
    ("index", "n", "settings"), [(0, 0, {}), (-1, 3, {}), (0, 1, {"base": 0}), (0, 1, {"alpha": -1})]
)
def test_places_and_settings_that_cannot_be_are_refused(index: int, n: int, settings: dict[str, float]):
    with pytest.raises(ConfigError, match="give"):
        epsilon_of(index, n, **settings)
