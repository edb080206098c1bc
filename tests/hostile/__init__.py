"""Attacks on a server, all that we know of: ``make hostile``."""
