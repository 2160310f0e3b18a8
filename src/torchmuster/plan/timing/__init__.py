"""Forecast the time of a step, and the cost of a whole training run."""
