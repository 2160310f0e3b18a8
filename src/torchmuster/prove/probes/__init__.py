"""The parts of ``muster prove`` that run in each rank."""
