"""Will it fit, how should it be split, how fast will it be."""
