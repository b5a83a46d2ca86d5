"""Property tests are about values, not about how loaded the machine is: no deadline per example."""

from hypothesis import settings

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
