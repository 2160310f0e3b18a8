"""Lab: training with DistributedDataParallel."""
