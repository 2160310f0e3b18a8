"""One reader per kind of hardware: each turns what the machine says into ``Device`` records."""
