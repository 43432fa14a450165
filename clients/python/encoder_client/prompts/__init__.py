"""The parts of a prompt put together."""
