"""Guess a number: a game of its own. `understudy up`, its two exports, then `python
examples/guess.py friend 400`."""

import random
import sys

import understudy

# who: person, friend (plays for you), script or bot
who = sys.argv[1]
rounds = int(sys.argv[2])
game = understudy.connect("guess", obs=["low", "high"], actions=16, consent="granted")
if who == "bot":
    game.wait_for_bot(600)
won = 0
for _ in range(rounds):
    secret = random.randrange(16)
    low = 0
    high = 15
    ep = game.episode()
    while True:
        if who == "bot":
            guess = ep.act([low, high])
        else:
            guess = int(input(f"{low} to {high}? ")) if who == "person" else (low + high) // 2
            ep.acted([low, high], guess, by="script" if who == "script" else "person")
        if guess == secret or not low <= guess <= high:
            break
        ep.reward(-0.1)
        low, high = (guess + 1, high) if guess < secret else (low, guess - 1)
    ep.reward(1.0 if guess == secret else -1.0)
    ep.end([low, high])
    won += guess == secret
game.close()
print(f"{who} won {won} of {rounds} rounds; the bot is {game.stats().bot or 'not there yet'}")
