"""The receiver's memory for embeddings: one arena, and how it is shared out and opened by others."""
