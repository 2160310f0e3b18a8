"""What people look at: a run on a terminal."""
