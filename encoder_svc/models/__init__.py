"""Model families: what can be served, and for each family its preprocessing and its towers. Knows nothing of slots.

:mod:`~encoder_svc.models.registry`, :mod:`~encoder_svc.models.checkpoint` and :mod:`~encoder_svc.models.dtypes` are free
of torch.
"""
