"""What the benchmarks of planned memory share: cases, and the measured truth."""
