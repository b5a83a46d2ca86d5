"""The client of the seed's pipeline: plays CartPole, sends what it saw, fetches the newest bot,
draws its returns.

`stack.py` beside it starts Kinesis, Cassandra, S3 and the platform, and then this with its address
and key; or run it against any platform: UNDERSTUDY_URL and UNDERSTUDY_KEY set, then `python
examples/seed_pipeline/client.py`.
"""

import argparse
import time
from pathlib import Path

import gymnasium
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

import understudy
from understudy.client.connect import Game

SLOPE = np.array([0.0, 0.2, 1.0, 0.6])
"""A person who watches the pole and, now and then, looks away."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--episodes", type=int, default=10_000, help="how many to play")
    parser.add_argument("--seconds", type=float, default=600.0, help="when to stop at the latest")
    parser.add_argument(
        "--until", type=float, default=float("inf"), help="stop at this mean return of the bot"
    )
    parser.add_argument("--window", type=int, default=20, help="episodes in the mean that is drawn")
    parser.add_argument("--plot", type=Path, default=Path("returns.png"), help="the picture")
    asked = parser.parse_args()
    env = gymnasium.make("CartPole-v1")
    rng = np.random.default_rng(0)
    game = understudy.connect("seed-pipeline", obs=4, actions=["left", "right"], consent="granted")
    returns: dict[str, list[float]] = {"person": [], "bot": []}
    began_s = time.monotonic()
    for number in range(asked.episodes):
        who = "bot" if number % 2 else "person"
        returns[who].append(play(env, game, who, rng))
        mean = float(np.mean(returns["bot"][-asked.window :] or [0.0]))
        if number % 20 == 19:
            draw(returns, asked.plot, asked.window)
            print(
                f"{number + 1} episodes; the bot's last {asked.window} returned {mean:.0f}",
                flush=True,
            )
        is_good = len(returns["bot"]) >= asked.window and mean >= asked.until
        if is_good or time.monotonic() - began_s > asked.seconds:
            break
    game.close()
    draw(returns, asked.plot, asked.window)
    print(
        f"person {np.mean(returns['person'][-asked.window :]):.0f}, bot {mean:.0f}; drawn in "
        f"{asked.plot}"
    )


def play(env: gymnasium.Env, game: Game, who: str, rng: np.random.Generator) -> float:
    """One episode by a person or by the newest bot, which decides at random until there is one;
    its return."""
    episode = game.episode(player=f"somebody-{int(rng.integers(8))}")
    total = 0.0
    obs, _ = env.reset(seed=int(rng.integers(2**31)))
    while True:
        if who == "bot":
            action = episode.act(obs)
        else:
            action = int(rng.integers(2)) if rng.random() < 0.5 else int(obs @ SLOPE > 0)
            episode.acted(obs, action)
        obs, reward, terminated, truncated, _ = env.step(action)
        episode.reward(float(reward))
        total += float(reward)
        if terminated or truncated:
            episode.end(obs, truncated=truncated)
            return total


def draw(returns: dict[str, list[float]], path: Path, window: int) -> None:
    """The mean over the last episodes of each, as a picture."""
    figure, axes = plt.subplots(figsize=(7, 3.5))
    for who, values in returns.items():
        if values:
            means = [
                np.mean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)
            ]
            axes.plot(means, label=who)
    axes.set(xlabel="episodes of each", ylabel=f"return, mean of {window}", title="seed-pipeline")
    axes.legend()
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)


if __name__ == "__main__":
    main()
