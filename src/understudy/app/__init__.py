"""The running platform: which part goes where."""
