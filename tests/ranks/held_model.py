"""A model that does not run away from whoever kills it or waits for it, which takes long on a busy machine."""

_SOURCE = """
class Held(nn.Linear):
    calls = 0
    def forward(self, x):
        Held.calls += 1
        for steps, file in {stops}:
            while Held.calls > steps and not os.path.exists(file):
                time.sleep(0.05)
        return super().forward(x)

def held():
    return Held(4, 3)
"""


def held_model(*stops: tuple[int, str]) -> str:
    """Return source of ``held()``: after so many calls its model waits for a file, for each of them in turn."""
    return _SOURCE.format(stops=stops)
