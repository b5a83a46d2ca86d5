"""Workers: actors on other machines that join a run over HTTP; importing this imports nothing."""
