"""``muster hang``: which rank keeps a job waiting that muster did not start."""
