"""What error texts mean: cause, how to confirm it, and how to mend it. See README.md here."""
