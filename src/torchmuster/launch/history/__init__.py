"""What a run leaves in its folder, and what is read from it: state, timeline, root cause."""
