"""The learner as a service: from stored experience to a champion, by a schedule and through a
gate."""
