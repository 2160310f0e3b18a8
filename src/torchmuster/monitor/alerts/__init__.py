"""When somebody should look: conditions over metrics, for Prometheus and for those who run none."""
