"""Search: the candidates to train a model, and the choice among them."""
