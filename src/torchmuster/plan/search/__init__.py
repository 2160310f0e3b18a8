"""The ways to train a model here, and the choice among them."""
