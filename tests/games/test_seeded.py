"""Many generators' first numbers at once are NumPy's own."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from understudy.games.seeded import first_uniforms


def test_numbers_have_numpys_bits():
    seeds = np.concatenate([[0, 1, 1 << 31, (1 << 32) - 1], np.random.default_rng(0).integers(1 << 32, size=2_000)])
    wanted = np.array([np.random.default_rng(int(seed)).random(4) for seed in seeds])
    assert first_uniforms(seeds, 4).T.tobytes() == wanted.tobytes()


@given(st.integers(0, (1 << 32) - 1), st.integers(1, 20))
def test_any_seed_and_any_count_work(seed: int, n: int):
    got = first_uniforms(np.array([seed]), n)
    assert got[:, 0].tobytes() == np.random.default_rng(seed).random(n).tobytes()
