"""Bench reports: terminal output, HTML page with charts, result folder."""
