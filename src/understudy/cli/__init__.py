"""The `understudy` command: one thin file per command group."""
