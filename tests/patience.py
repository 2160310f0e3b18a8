"""How long tests wait: a time after which one gives up says nothing about how long something may take."""

import os

# For what must come at last, also on a machine that is many times slower than usual.
GIVE_UP_S = 480.0
# Beyond what is promised in seconds, while other tests use the machine; one by one (-n 0) nothing.
BUSY_S = 45.0 if "PYTEST_XDIST_WORKER" in os.environ else 0.0
