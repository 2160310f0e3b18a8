"""Programs that run in the ranks; the only folder of ``launch/`` that imports torch."""
