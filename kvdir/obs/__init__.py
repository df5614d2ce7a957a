"""Logs and metrics. Import it from shells only; the cores know nothing of it."""
