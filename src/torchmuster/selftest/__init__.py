"""``muster selftest``: checks what has never run on a GPU, on the hardware that is here."""
