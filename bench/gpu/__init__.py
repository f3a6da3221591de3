"""Loading to a GPU: checks on the real driver, and measurements against the peers and the hardware's limits."""
