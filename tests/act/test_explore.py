"""The exploration ladder of epsilons."""

import numpy as np
import pytest

from understudy.act.actor import epsilon_ladder
from understudy.core.errors import ConfigError


def test_the_ladder_equals_that_of_the_paper():
    np.testing.assert_allclose(epsilon_ladder(3), [0.4, 0.4**4.5, 0.4**8], rtol=1e-6)
    assert epsilon_ladder(3).dtype == np.float32
    np.testing.assert_allclose(epsilon_ladder(2, base=0.5, alpha=1.0), [0.5, 0.25])


def test_one_env_explores_with_the_base():
    assert epsilon_ladder(1).tolist() == [np.float32(0.4)]


@pytest.mark.parametrize(("n", "settings"), [(0, {}), (1, {"base": 0}), (1, {"alpha": -1})])
def test_invalid_settings_are_rejected(n: int, settings: dict[str, float]):
    with pytest.raises(ConfigError, match="exploration ladder"):
        epsilon_ladder(n, **settings)
