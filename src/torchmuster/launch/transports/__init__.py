"""How the launcher reaches node agents: a pipe, ssh, srun, TLS."""
