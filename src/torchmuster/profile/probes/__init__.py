"""What runs inside a profiled rank."""
