"""Traces of training steps, made in processes of their own and kept."""
