"""What is trained on: cards, machines, links; as people write them, and as they are here."""
