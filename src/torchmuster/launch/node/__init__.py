"""The node agent: our one process on each host of a run."""
