"""The node agent: the one process of ours on each machine that takes part in a run."""
