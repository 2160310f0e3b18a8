"""One reader per kind of hardware: each turns driver output into ``Device`` records."""
