"""The keeper: the one process of ours on each machine that takes part in a run."""
