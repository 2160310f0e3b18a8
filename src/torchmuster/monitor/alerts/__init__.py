"""Alerts: conditions over metrics, evaluated by Prometheus or by Muster itself."""
