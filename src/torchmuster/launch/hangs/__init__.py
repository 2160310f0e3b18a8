"""Who keeps whom waiting: what each rank is doing, and what that says of all of them."""
