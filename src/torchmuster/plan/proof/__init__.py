"""Compare forecasts with real steps."""
