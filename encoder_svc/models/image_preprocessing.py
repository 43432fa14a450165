"""Images as transformers' own image processors make them, still uint8.

A processor resizes, cuts and pads; normalising, which makes four bytes of one, is left to the tower, where it gives the
same values bit for bit (:class:`Normalisation`). The processors that are used need no torchvision: their names end in
``Pil``. Those that do need it give other pixels, by one or two of 255 levels.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from encoder_svc.errors import Reason, ServiceError, SetupError
from encoder_svc.models.checkpoint import Checkpoint
from encoder_svc.models.image_rows import Inputs
from epd.encoder.v1.media_pb2 import ImageDetail, ImageOptions

if TYPE_CHECKING:
    from encoder_svc.models.image_families import ImageFamily

log = logging.getLogger(__name__)

MAX_ASPECT_RATIO = 200
"""A longer side of more than so many shorter sides is refused: resizing by the shorter side would blow it up."""


@dataclass(frozen=True)
class Normalisation:
    """What an image processor does last, on values from 0 to 255."""

    factor: float | None
    """Values are multiplied with it. None: they are not."""
    mean: tuple[float, ...] | None
    """Taken from each channel. None: nothing is."""
    deviation: tuple[float, ...] | None
    """What each channel is divided by then."""
    fused: bool = False
    """The factor is part of mean and deviation, as processors with torchvision have it."""

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """uint8, shape (n, channels, ...) → float32 of the same shape, equal to transformers' bit for bit."""
        fused = self.fused and self.factor is not None and self.mean is not None
        # As transformers does it: the product in double precision, what follows in single.
        values = pixels.float() if fused or self.factor is None else (pixels.double() * self.factor).float()
        if self.mean is None or self.deviation is None:
            return values
        shape = (1, -1, *[1] * (pixels.dim() - 2))
        scale = 1.0 / self.factor if fused and self.factor is not None else 1.0
        mean, deviation = (
            (torch.tensor(constants, dtype=torch.float32, device=pixels.device) * scale).view(shape)
            for constants in (self.mean, self.deviation)
        )
        return (values - mean) / deviation

    @staticmethod
    def read(settings: Any, *, fused: bool = False) -> Normalisation:
        """From a processor's attributes.

        Args:
            settings: the processor, or its constants.
            fused: as :attr:`fused`.

        Raises:
            SetupError: there is no mean or deviation for each of three channels.
        """
        factor = float(settings.rescale_factor) if settings.do_rescale else None
        if not settings.do_normalize:
            return Normalisation(factor, None, None)
        mean, deviation = (
            tuple(float(value) for value in (constants if isinstance(constants, list | tuple) else [constants] * 3))
            for constants in (settings.image_mean, settings.image_std)
        )
        if len(mean) != 3 or len(deviation) != 3 or not all(deviation):
            raise SetupError("preprocessor_config.json: image_mean and image_std need three values, none of them 0")
        return Normalisation(factor, mean, deviation, fused)


class ImageInputs(Protocol):
    """Turns pixels into a tower's input."""

    @property
    def normalisation(self) -> Normalisation:
        """What is left to the tower."""
        ...

    @property
    def constants(self) -> Mapping[str, Any]:
        """All that decides the input; JSON."""
        ...

    def __call__(self, pixels: torch.Tensor, options: ImageOptions) -> Inputs:
        """Prepares one image.

        Args:
            pixels: uint8, shape (height, width, 3), RGB.
            options: the caller's.

        Returns:
            ``pixel_values``, uint8, the channels in the second dimension, and what else the processor gives: int64, the
            first dimension for the image or its slices.

        Raises:
            ServiceError: the image or an option is beyond what the family takes.
        """
        ...


class LibraryInputs:
    """The family's image processor of transformers.

    Args:
        checkpoint: the checkpoint.
        family: its family.
        config: its configuration, as transformers reads it.

    Raises:
        SetupError: there is no such processor, or its settings are wrong.
    """

    def __init__(self, checkpoint: Checkpoint, family: ImageFamily, config: Any) -> None:
        self._details = {
            ImageDetail.IMAGE_DETAIL_LOW: family.low_detail,
            ImageDetail.IMAGE_DETAIL_HIGH: family.high_detail,
        }
        self._low_is_one_of_several = family.low_is_one_of_several
        self._arguments = dict(family.processing(config))
        self._processor = _make_processor(checkpoint, family.processor)
        self._told = {name: torch.tensor([int(getattr(self._processor, name))]) for name in family.settings}
        self.normalisation = Normalisation.read(self._processor)
        self.constants = {
            "processor": type(self._processor).__name__,
            "settings": {
                name: value
                for name, value in self._processor.to_dict().items()
                if not name.startswith(("_", "processor"))
            },
            "arguments": self._arguments,
        }

    def __call__(self, pixels: torch.Tensor, options: ImageOptions) -> Inputs:
        """See :meth:`ImageInputs.__call__`."""
        height, width = pixels.shape[:2]
        if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
            raise ServiceError(
                Reason.MEDIA_UNSUPPORTED,
                f"the image is {width}×{height} pixels; this model takes aspect ratios up to {MAX_ASPECT_RATIO}:1: "
                "crop it",
            )
        detail = self._detail(options)
        arguments = {**self._arguments, **detail, "do_rescale": False, "do_normalize": False}
        image: Any = pixels.numpy()
        if self._low_is_one_of_several and options.detail == ImageDetail.IMAGE_DETAIL_LOW:
            image = [[image, image]]
        try:
            given = self._processor(image, input_data_format="channels_last", return_tensors="pt", **arguments)
        except (ValueError, ZeroDivisionError):
            log.debug("the image processor refuses an image of %d×%d pixels", width, height, exc_info=True)
            raise ServiceError(
                Reason.MEDIA_UNSUPPORTED,
                f"this model's preprocessing cannot take an image of {width}×{height} pixels; crop or resize it",
            ) from None
        inputs = {name: _as_integers(value) for name, value in given.items() if name != "pixel_values"} | self._told
        values = given["pixel_values"]
        if values.dtype != torch.uint8:
            raise AssertionError(f"{type(self._processor).__name__} gives {values.dtype} without normalising")
        # Some processors give tiles for each of several images.
        inputs["pixel_values"] = (values.flatten(0, 1) if values.dim() == 5 else values).contiguous()
        return {name: value[:1] for name, value in inputs.items()} if isinstance(image, list) else inputs

    def _detail(self, options: ImageOptions) -> Mapping[str, Any]:
        for name in ("min_pixels", "max_pixels"):
            if getattr(options, name):
                raise ServiceError(
                    Reason.REQUEST_INVALID,
                    f"this model resizes images to sizes of its own; leave `{name}` out",
                    field=f"options.{name}",
                )
        if options.detail == ImageDetail.IMAGE_DETAIL_UNSPECIFIED:
            return {}
        if not any(self._details.values()) and not self._low_is_one_of_several:
            raise ServiceError(
                Reason.REQUEST_INVALID, "this model has no levels of detail; leave `detail` out", field="options.detail"
            )
        return self._details.get(options.detail) or {}


def _make_processor(checkpoint: Checkpoint, default: str) -> Any:
    import transformers  # takes seconds, and only workers and engines need it

    named = str(checkpoint.preprocessor.get("image_processor_type") or default)
    name = named.removesuffix("Fast").removesuffix("Pil") + "Pil"
    found = getattr(transformers, name, None)
    if not inspect.isclass(found) or not issubclass(found, transformers.BaseImageProcessor):
        raise SetupError(
            f"preprocessor_config.json of {checkpoint.path} names the image processor {named}, of which transformers "
            f"has no form without torchvision ({name}); this checkpoint cannot be served"
        )
    try:
        return found(**checkpoint.preprocessor)
    except (TypeError, ValueError, KeyError, AttributeError):
        log.debug("transformers refuses the settings", exc_info=True)
        raise SetupError(
            f"transformers cannot make {name} of preprocessor_config.json of {checkpoint.path}: a value in it is "
            "wrong; --log-level debug tells which"
        ) from None


def _as_integers(value: Any) -> torch.Tensor:
    tensor = torch.as_tensor(value).to(torch.int64)
    return tensor if tensor.dim() else tensor[None]
