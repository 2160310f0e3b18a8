"""Where the time of a training goes: recorded, analysed, and what would make it faster."""
