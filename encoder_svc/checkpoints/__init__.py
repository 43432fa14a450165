"""Writes random checkpoints in the layout of the hub: for tests, demonstrations and benchmarks without a download."""
