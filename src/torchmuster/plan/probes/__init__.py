"""What needs torch: the trace of a training step, and real steps to compare it with."""
