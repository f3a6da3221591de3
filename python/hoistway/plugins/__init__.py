"""Plug-ins that load weights for programs that others wrote; each is found by its entry point."""
