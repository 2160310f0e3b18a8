"""The modules that need torch: the trace of a training step, and real steps to compare."""
