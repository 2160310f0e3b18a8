"""Code that runs inside a rank, before and alongside the user's script."""
