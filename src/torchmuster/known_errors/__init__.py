"""The meaning of error texts: the cause, how to confirm it, and how to fix it. See README.md here."""
