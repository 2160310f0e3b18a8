"""Hardware of a plan: GPUs, machines and links, from user input or from this machine."""
