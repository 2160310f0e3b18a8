"""Views of a run: terminal, browser, report, ``muster top``."""
