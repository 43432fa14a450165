"""Model families: what can be served, and for each family its preprocessing and its towers. Knows nothing of slots.

The modules ``registry``, ``checkpoint`` and ``dtypes`` are free of torch.
"""
