"""How machines see each other before anything starts: addresses, ports, firewalls, who reaches whom."""
