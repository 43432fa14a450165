"""A process that opens handles: reads one in hexadecimal per line, tells the sum of the rows, and holds them all."""

from __future__ import annotations

import sys

from encoder_client import EmbeddingHandle

held = []
for line in sys.stdin:
    embedding = EmbeddingHandle.from_bytes(bytes.fromhex(line)).open()
    rows = embedding.numpy()
    rows += 0  # a write here is nobody else's business
    held.append(rows)
    print(rows.sum(), flush=True)
