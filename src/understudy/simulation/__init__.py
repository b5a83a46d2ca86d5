"""Simulated people that play through the real client, and a ledger of every ack they got."""
