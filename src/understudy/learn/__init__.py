"""Learning: replay, networks, algorithms and the learner."""
