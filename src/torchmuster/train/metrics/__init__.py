"""Reports of a run: banner, step lines, progress bar and metrics files."""
