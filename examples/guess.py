"""Guess a number: `understudy up`, its two exports, then `python examples/guess.py friend 400`."""

import random
import sys

import understudy

player, rounds = sys.argv[1:]  # the player: person, friend (plays for you), script or bot
won = 0
with understudy.connect("guess", obs=["low", "high"], actions=16, consent="granted") as game:
    if player == "bot":
        game.wait_for_bot(600)
    for _ in range(int(rounds)):
        secret = random.randrange(16)
        bounds = [0, 15]
        ep = game.episode()
        while True:
            if player == "bot":
                guess = ep.act(bounds)
            else:
                guess = int(input(f"{bounds}? ")) if player == "person" else sum(bounds) // 2
                ep.acted(bounds, guess, by="script" if player == "script" else "person")
            if guess == secret or not bounds[0] <= guess <= bounds[1]:
                break
            ep.reward(-0.1)
            bounds = [guess + 1, bounds[1]] if guess < secret else [bounds[0], guess - 1]
        ep.reward(1.0 if guess == secret else -1.0)
        ep.end(bounds)
        won += guess == secret
print(f"{player} won {won} of {rounds} rounds; bot: {game.stats().bot or 'none yet'}")
