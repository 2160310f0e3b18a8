"""Hang detection: what each rank is doing, and which rank keeps the others waiting."""
