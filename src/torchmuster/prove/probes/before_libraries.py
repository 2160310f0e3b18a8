"""Wrap functions that libraries import by name, before a library is imported; the trial is chosen later.

Imported by the process from which ranks are forked.
"""

from torchmuster.prove.probes import isolation

isolation.block_uploads()
isolation.watch_safetensors()
