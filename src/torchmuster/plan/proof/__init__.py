"""Forecasts beside what real steps take."""
