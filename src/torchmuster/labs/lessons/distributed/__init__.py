"""Lab: distributed training, scaling and accumulation."""
