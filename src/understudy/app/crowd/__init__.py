"""Simulated people: whole loops and simulations, with a ledger of what they were promised."""
