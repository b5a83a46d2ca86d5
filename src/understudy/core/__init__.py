"""The words every stage shares; read `ports.py` first."""
