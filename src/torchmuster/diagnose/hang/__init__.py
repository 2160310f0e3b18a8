"""``muster hang``: find the rank that blocks a job which Muster did not start."""
