"""A checkpoint's folder in the layout of the hub, read without torch.

``config.json``, ``preprocessor_config.json``, and either ``model.safetensors`` or shards with
``model.safetensors.index.json``. What can be wrong with a folder is found here, before a child process is started.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from encoder_svc.errors import SetupError

CONFIG = "config.json"
PREPROCESSOR_CONFIG = "preprocessor_config.json"
VIDEO_PREPROCESSOR_CONFIG = "video_preprocessor_config.json"
PROCESSOR_CONFIG = "processor_config.json"
INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as a file's header tells it."""

    name: str
    file: str
    """The name of the file in the folder."""
    dtype: str
    """As safetensors names it: ``F32``, ``BF16``, ..."""
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose configuration was read and whose files were found. No tensor was read."""

    path: Path
    config: dict[str, Any]
    preprocessor: dict[str, Any] = field(repr=False)
    """The image processor's settings, or those of a feature extractor for sound. Empty: the folder has none."""
    video_preprocessor: dict[str, Any] = field(repr=False)
    """The video processor's settings. Empty: the folder has none."""
    feature_extractor: dict[str, Any] = field(repr=False)
    """The feature extractor's settings. Empty: the folder has none."""
    files: dict[str, str] = field(repr=False)
    """The file of each tensor, by the tensor's name."""

    @property
    def name(self) -> str:
        """The last part of the path: what callers may know of it."""
        return self.path.resolve().name

    @property
    def model_type(self) -> str:
        """``model_type`` of the config; empty if it has none."""
        return str(self.config.get("model_type", ""))

    @property
    def architectures(self) -> tuple[str, ...]:
        """``architectures`` of the config."""
        return tuple(str(name) for name in self.config.get("architectures") or ())

    @property
    def dtype(self) -> str:
        """The dtype that the config names: ``bfloat16``, ...; empty if it names none."""
        return str(self.config.get("dtype") or self.config.get("torch_dtype") or "").removeprefix("torch.")

    def folder(self, name: str) -> Checkpoint:
        """A folder of the checkpoint that has a config and weights of its own.

        Raises:
            SetupError: it is missing, or cannot be read.
        """
        if not (self.path / name).is_dir():
            raise SetupError(f"{self.path} has no folder {name}, which {self.model_type} needs; download it too")
        return open_checkpoint(self.path / name)

    def names(self, prefixes: Iterable[str]) -> list[str]:
        """The sorted names of the tensors that begin with one of ``prefixes``."""
        starts = tuple(prefixes)
        return sorted(name for name in self.files if name.startswith(starts))

    def shards(self, prefixes: Iterable[str]) -> dict[str, list[str]]:
        """The tensors that begin with one of ``prefixes``: file → their sorted names.

        Raises:
            SetupError: there is no such tensor, or one of the files is missing.
        """
        prefixes = tuple(prefixes)
        shards: dict[str, list[str]] = {}
        for name in self.names(prefixes):
            shards.setdefault(self.files[name], []).append(name)
        if not shards:
            raise SetupError(
                f"{self.path} holds no tensor named {' or '.join(prefix + '*' for prefix in prefixes)}: it has no "
                "tower that this model type needs; download the whole checkpoint, not its language half"
            )
        for file, names in sorted(shards.items()):
            if not (self.path / file).is_file():
                raise SetupError(
                    f"shard {file} named in the index is missing; it holds {len(names)} tensors of the towers, such as "
                    f"{names[0]}; download it again into {self.path}"
                )
        return dict(sorted(shards.items()))

    def stored(self, prefixes: Iterable[str]) -> list[StoredTensor]:
        """Reads the headers of the files that hold these tensors, and no tensor.

        Raises:
            SetupError: a file is missing, damaged, or lacks a tensor that the index puts there.
        """
        tensors: list[StoredTensor] = []
        for file, names in self.shards(prefixes).items():
            with _open_header(self.path / file) as reader:
                lacking = set(names) - set(reader.keys())
                if lacking:
                    raise SetupError(
                        f"shard {file} lacks the tensor {min(lacking)}, which the index puts there; download {file} "
                        f"and {INDEX} again"
                    )
                for name in names:
                    part = reader.get_slice(name)
                    tensors.append(StoredTensor(name, file, part.get_dtype(), tuple(part.get_shape())))
        return tensors


def open_checkpoint(path: Path) -> Checkpoint:
    """Reads what a checkpoint's folder says of itself.

    Raises:
        SetupError: the folder, its config or its weights are missing or unreadable.
    """
    if not path.is_dir():
        what = "is a file, not a folder" if path.is_file() else "does not exist"
        raise SetupError(
            f"the checkpoint {path} {what}; give the folder of a checkpoint as on the hub, or make one with "
            "`encoder-svc tiny-checkpoint qwen2_5_vl DIR`"
        )
    if not (path / CONFIG).is_file():
        raise SetupError(f"{path} has no {CONFIG}; give the folder of a checkpoint as on the hub")
    config = _read_object(path / CONFIG)
    return Checkpoint(
        path=path,
        config=config,
        preprocessor=_read_preprocessor(path, "image_processor", PREPROCESSOR_CONFIG),
        video_preprocessor=_read_preprocessor(path, "video_processor", VIDEO_PREPROCESSOR_CONFIG),
        feature_extractor=_read_preprocessor(path, "feature_extractor", PREPROCESSOR_CONFIG),
        files=_list_tensors(path),
    )


def _read_preprocessor(path: Path, section: str, file: str) -> dict[str, Any]:
    """Settings in a section of the one file that transformers 5 writes, or in a file of their own."""
    if (path / PROCESSOR_CONFIG).is_file():
        nested = _read_object(path / PROCESSOR_CONFIG).get(section)
        if isinstance(nested, dict):
            return nested
    return _read_object(path / file) if (path / file).is_file() else {}


def _list_tensors(path: Path) -> dict[str, str]:
    if (path / INDEX).is_file():
        weight_map = _read_object(path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise SetupError(f"{path / INDEX} has no weight_map; download it again")
        files = {str(name): str(file) for name, file in weight_map.items()}
        for file in set(files.values()):
            # A name with a folder in it would let an index point at files outside the checkpoint.
            if Path(file).name != file:
                raise SetupError(f"{path / INDEX} names {file!r}, which is not a file of the folder")
        return files
    if (path / SINGLE_FILE).is_file():
        with _open_header(path / SINGLE_FILE) as reader:
            return dict.fromkeys(reader.keys(), SINGLE_FILE)
    raise SetupError(
        f"{path} has neither {SINGLE_FILE} nor {INDEX}; weights must be safetensors (pickled .bin files are not read)"
    )


@contextmanager
def _open_header(file: Path) -> Iterator[Any]:
    # Not at the top: the front starts without tensor libraries. With "numpy", safetensors imports no torch.
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as reader:
            yield reader
    except (SafetensorError, OSError):
        raise SetupError(f"{file} is no whole safetensors file; it was cut off or damaged: download it again") from None


def _read_object(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SetupError(f"cannot read {file}: {error.strerror}") from None
    except ValueError:
        raise SetupError(f"{file} is not JSON; download it again") from None
    if not isinstance(value, dict):
        raise SetupError(f"{file} is not a JSON object; download it again")
    return value
