"""``muster rehearse``: a run on hosts that do not exist, to see what it would need."""
