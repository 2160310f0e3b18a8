"""Traces of training steps, made in separate processes and cached."""
