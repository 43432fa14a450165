"""What a named receiver is told by its encoders, over lost connections."""
