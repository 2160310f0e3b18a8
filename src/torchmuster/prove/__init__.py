"""``muster prove``: show that a training script resumes and scales correctly."""
