"""Where a run's numbers go besides its folder: files that other programs read, and trackers."""
