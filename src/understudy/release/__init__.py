"""The learner service: turns stored experience into champions, by a schedule and through a gate."""
