"""Serving engines whose language side takes embeddings from encoder-svc. Each needs its engine to be installed."""
