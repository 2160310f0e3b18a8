"""How a model is spread over the ranks: one file for each way, one protocol for all."""
