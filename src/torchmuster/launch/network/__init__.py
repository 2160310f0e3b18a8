"""Network checks between hosts before a run starts: addresses, ports, firewalls, reachability."""
