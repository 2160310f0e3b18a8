"""What the ranks themselves run; the one folder of ``launch/`` in which torch is imported."""
