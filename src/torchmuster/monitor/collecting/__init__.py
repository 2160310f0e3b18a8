"""From what a machine and its runs' folders tell to samples."""
