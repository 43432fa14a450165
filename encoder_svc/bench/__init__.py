"""Measures a server beside its reference, in one run: ``encoder-svc bench``.

Each module named as a sub-command measures one thing, and gives a result of :mod:`encoder_svc.bench.result`. The server
is a process of its own, the caller is this one, and the plain loop that it is compared with is a third.
"""
