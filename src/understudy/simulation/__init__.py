"""Simulated people who play through the real client, and a ledger of every acknowledgement."""
