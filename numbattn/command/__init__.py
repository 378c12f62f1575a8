"""What `python -m numbattn` does: what this machine has, and compiling ahead of a call."""
