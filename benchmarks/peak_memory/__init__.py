"""What the benchmarks of planned memory share: cases, the measured truth, and what peers say."""
