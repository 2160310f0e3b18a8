"""What kinds of parallelism that are not trained here would take."""
