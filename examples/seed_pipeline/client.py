"""Plays CartPole as a client of the seed's pipeline, with the newest bot, and plots the returns.

`stack.py` in this folder starts Kinesis, Cassandra, S3 and the platform, then this program with the
platform's address and key. To run it against any platform, set UNDERSTUDY_URL and UNDERSTUDY_KEY,
then run `python examples/seed_pipeline/client.py`.
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
"""The simulated person pushes to where the pole falls, and half of the time at random."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--episodes", type=int, default=10_000, help="number of episodes to play")
    parser.add_argument("--seconds", type=float, default=600.0, help="stop after this time")
    parser.add_argument(
        "--until", type=float, default=float("inf"), help="stop at this mean return of the bot"
    )
    parser.add_argument("--window", type=int, default=20, help="episodes in the plotted mean")
    parser.add_argument("--plot", type=Path, default=Path("returns.png"), help="file for the plot")
    args = parser.parse_args()
    env = gymnasium.make("CartPole-v1")
    rng = np.random.default_rng(0)
    game = understudy.connect("seed-pipeline", obs=4, actions=["left", "right"], consent="granted")
    returns: dict[str, list[float]] = {"person": [], "bot": []}
    began_s = time.monotonic()
    for number in range(args.episodes):
        player = "bot" if number % 2 else "person"
        returns[player].append(play(env, game, player, rng))
        mean = float(np.mean(returns["bot"][-args.window :] or [0.0]))
        if number % 20 == 19:
            draw(returns, args.plot, args.window)
            print(
                f"{number + 1} episodes; mean return of the bot's last {args.window}: {mean:.0f}",
                flush=True,
            )
        is_good = len(returns["bot"]) >= args.window and mean >= args.until
        if is_good or time.monotonic() - began_s > args.seconds:
            break
    game.close()
    draw(returns, args.plot, args.window)
    print(
        f"person {np.mean(returns['person'][-args.window :]):.0f}, bot {mean:.0f}; plot saved to "
        f"{args.plot}"
    )


def play(env: gymnasium.Env, game: Game, player: str, rng: np.random.Generator) -> float:
    """Play one episode and return its return; the bot acts at random until there is a model."""
    episode = game.episode(player=f"player-{int(rng.integers(8))}")
    total = 0.0
    obs, _ = env.reset(seed=int(rng.integers(2**31)))
    while True:
        if player == "bot":
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
    """Plot the mean return over the last episodes of each player."""
    figure, axes = plt.subplots(figsize=(7, 3.5))
    for player, values in returns.items():
        if values:
            means = [
                np.mean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)
            ]
            axes.plot(means, label=player)
    axes.set(xlabel="episodes of each", ylabel=f"return, mean of {window}", title="seed-pipeline")
    axes.legend()
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)


if __name__ == "__main__":
    main()
