"""The first layer of a vision tower as one linear layer on uint8 patches, with normalisation folded in."""

from __future__ import annotations

import torch

from encoder_svc.models.image_patches import ImagePreprocessing
from encoder_svc.models.linear import Linear

CENTER = 128
"""Taken from every value before the product: values are then whole numbers that bfloat16 and float16 hold exactly,
small on average, so that little is lost by rounding the weights."""


class PatchEmbedding:
    """Patches → hidden states.

    A tower's convolution has the stride of its kernel, so it is a matrix product. The frames of a still image's patch
    are equal, so for those the weights are summed over the frames. With ``x = scale·u + shift`` and ``u`` from 0 to
    255, in float64::

        W·x = (W·scale)·(u − 128) + W·(shift + 128·scale)

    In float32 the result differs from the convolution on normalised pixels by about 1e-6 of its size.

    Args:
        convolution: the checkpoint's layer; its weight has the shape (hidden, channels, frames, patch, patch).
        preprocessing: the normalisation.
        device: where the layer runs.
        still: patches hold one frame, of a still image, and not as many as the kernel.
    """

    def __init__(
        self, convolution: torch.nn.Conv3d, preprocessing: ImagePreprocessing, device: torch.device, *, still: bool
    ) -> None:
        self._dtype = convolution.weight.dtype
        kernel = convolution.weight.detach().double()
        kernel = (kernel.sum(dim=2) if still else kernel).flatten(2)
        scale, shift = (torch.tensor(values, dtype=torch.float64) for values in preprocessing.scale_and_shift)
        weight = (kernel * scale[:, None]).flatten(1)
        bias = (kernel * (shift + CENTER * scale)[:, None]).flatten(1).sum(dim=1)
        if convolution.bias is not None:
            bias += convolution.bias.detach().double()
        self.values: int = weight.shape[1]
        """Of a patch."""
        self._linear = Linear(weight.to(device, self._dtype), bias.to(device, self._dtype))

    def __call__(self, patches: torch.Tensor) -> torch.Tensor:
        """``patches``: uint8, shape (n, values) → shape (n, hidden)."""
        return self._linear(patches.to(self._dtype).sub_(CENTER))
