"""Records CartPole played by its bot: run `understudy up`, its two exports, then this file."""

import gymnasium

from understudy.client.gym import record

env = record(gymnasium.make("CartPole-v1"), consent="granted")
obs, _ = env.reset(seed=0)
for _ in range(2000):
    obs, _, terminated, truncated, _ = env.step(env.act(obs))
    if terminated or truncated:
        obs, _ = env.reset()
env.close()
