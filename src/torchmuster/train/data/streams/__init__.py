"""Sources of samples without an index: files, object storage, iterables; read in lanes."""
