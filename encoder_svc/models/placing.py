"""Puts the weights of a tower into modules of our own, with the checks that transformers makes for its models."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from encoder_svc.errors import SetupError
from encoder_svc.models.weights import TowerWeights, check_fit

log = logging.getLogger(__name__)

Module = TypeVar("Module", bound=torch.nn.Module)


def place_weights(make: Callable[[], Module], weights: TowerWeights, prefixes: Sequence[str]) -> Module:
    """Makes a module whose parameters are the tensors that were read: no memory is taken for others.

    Args:
        make: makes the module; called where new tensors have a shape and no memory.
        weights: what was read.
        prefixes: what stands before the module's own names in the checkpoint, such as ``visual.``: checkpoints that
            were written by different releases of transformers differ in it.

    Returns:
        The module, in evaluation mode, on the host.

    Raises:
        SetupError: a weight is missing, has no place in the module, or has the wrong shape; or none can be made.
    """
    try:
        with torch.device("meta"):
            module = make()
    except (RuntimeError, TypeError, OverflowError):
        log.debug("the tower cannot be made", exc_info=True)
        raise SetupError(
            "config.json asks for a tower of an impossible size; --log-level debug tells which; download it again"
        ) from None
    places = module.state_dict()
    prefix = _prefix(prefixes, next(iter(weights.state)))
    stored = {name.removeprefix(_prefix(prefixes, name)): name for name in weights.state}
    check_fit(
        {
            "mismatched_keys": [
                (stored[name], weights.state[stored[name]].shape, place.shape)
                for name, place in places.items()
                if name in stored and weights.state[stored[name]].shape != place.shape
            ],
            "missing_keys": [prefix + name for name in places.keys() - stored.keys()],
            # A name that is there with two prefixes has one place.
            "unexpected_keys": list(weights.state.keys() - {stored[name] for name in stored.keys() & places.keys()}),
        }
    )
    module.load_state_dict({name: weights.state[stored[name]] for name in places}, assign=True)
    return module.eval().requires_grad_(False)


def _prefix(prefixes: Sequence[str], name: str) -> str:
    return next(prefix for prefix in prefixes if name.startswith(prefix))
