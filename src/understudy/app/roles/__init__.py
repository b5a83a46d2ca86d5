"""Roles as processes: what each one does, who starts and watches them, and how a command reaches them."""
