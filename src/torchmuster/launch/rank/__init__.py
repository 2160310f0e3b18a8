"""What runs inside a rank before and next to the user's script."""
