"""Create models and transform them before a strategy distributes them."""
