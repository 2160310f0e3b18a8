"""What a run says of itself: the banner, lines from time to time, a bar, files of numbers."""
