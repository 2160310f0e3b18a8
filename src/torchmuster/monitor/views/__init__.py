"""Views of a run: terminal, browser, report."""
