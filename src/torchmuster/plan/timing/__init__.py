"""How long a step takes, and what a whole training costs."""
