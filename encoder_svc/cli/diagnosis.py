"""What works on this machine: one function for each finding of ``encoder-svc doctor``.

What may crash or be broken (torch, transformers, torchvision, Mooncake) is tried in a process of its own.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module, util
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from encoder_svc.errors import SetupError

_TRIAL_SECONDS = 120
_DEV_SHM = "/dev/shm"  # noqa: S108 (looked at, never written)
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


class State(StrEnum):
    """How a check ended."""

    WORKS = "works"
    """As it should be."""
    OFF = "off"
    """Something optional is not there; the service runs without it."""
    BROKEN = "broken"
    """The service cannot run, or not as it is set up."""


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    check: str
    state: State
    found: str
    """What is there."""
    remedy: str = ""
    """What to do about it. Empty where nothing is to be done."""


def diagnose(model: Path | None, begin: Callable[[str], None] = lambda _: None) -> Iterator[Finding]:
    """Checks everything, one finding after another.

    Args:
        model: a checkpoint's folder to check too.
        begin: told the name of a check before it runs.
    """
    checks: list[tuple[str, Callable[[str], Finding]]] = [
        ("Python", _python),
        ("torch", _torch),
        ("transformers", _transformers),
        ("torchvision", _torchvision),
        ("gRPC and protobuf", _grpc),
        ("image decoders", _images),
        ("video decoders", _videos),
        ("sound decoders", _sounds),
        ("shared memory", _shared_memory),
        ("memory", _memory),
        (_DEV_SHM, _dev_shm),
        ("port", _port),
        ("transport inline", _inline),
        ("transport shared memory", _transport_shared_memory),
        ("transport ZeroMQ", _transport_zeromq),
        ("transport Mooncake", _mooncake),
        ("libibverbs", _libibverbs),
        ("RDMA devices", _rdma),
        ("ZeroMQ", _zeromq),
    ]
    if model is not None:
        checks.append(("model", lambda name: _model(name, model)))
    for name, check in checks:
        begin(name)
        try:
            yield check(name)
        except Exception as error:  # a doctor works where nothing else does
            text = f"cannot be checked: {type(error).__name__}: {error}"
            yield Finding(name, State.BROKEN, text, "report this, with the whole output")


def _python(name: str) -> Finding:
    return Finding(name, State.WORKS, f"{platform.python_version()} at {sys.prefix}")


_TORCH = """
import json, torch
print(json.dumps({
    "version": torch.__version__, "threads": torch.get_num_threads(), "cuda": torch.version.cuda,
    "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
    "product": float((torch.ones(8, 8) @ torch.ones(8, 8)).sum()),
}))
"""


def _torch(name: str) -> Finding:
    from encoder_svc.models.dtypes import resolve_dtype

    succeeded, told = _try(_TORCH)
    if not succeeded:
        return Finding(
            name, State.BROKEN, _last_line(told), "install it again: `pip install --force-reinstall torch==2.13.0`"
        )
    facts: dict[str, Any] = json.loads(told)
    fast = resolve_dtype("auto", "bfloat16", "cpu") == "bfloat16"
    cpu = f"cpu with {facts['threads']} threads, bfloat16 {'fast' if fast else 'slow'}"
    found = f"{facts['version']}, {', '.join([*facts['devices'], cpu])}"
    if Path("/dev/nvidiactl").exists() and not facts["devices"]:
        remedy = "this host has an NVIDIA driver that torch cannot use; " + (
            "its CUDA build needs a newer driver" if facts["cuda"] else "install a CUDA build of torch 2.13.0"
        )
        return Finding(name, State.OFF, found, remedy)
    return Finding(name, State.WORKS, found)


def _transformers(name: str) -> Finding:
    program = (
        "import transformers.models.qwen2_5_vl.modeling_qwen2_5_vl as m, transformers; print(transformers.__version__)"
    )
    succeeded, told = _try(program)
    if succeeded:
        return Finding(name, State.WORKS, f"{told.strip()}, models can be imported")
    if "torchvision" in told:
        return Finding(
            name, State.BROKEN, "models cannot be imported, because torchvision is broken", _REMOVE_TORCHVISION
        )
    return Finding(name, State.BROKEN, _last_line(told), "install it again: `pip install transformers==5.24.0`")


_REMOVE_TORCHVISION = (
    "the service does not need it: `pip uninstall torchvision`; or install the build that belongs to this torch"
)


def _torchvision(name: str) -> Finding:
    if util.find_spec("torchvision") is None:
        return Finding(name, State.WORKS, "not installed, and not needed")
    succeeded, told = _try("import torchvision; print(torchvision.__version__)")
    if succeeded:
        return Finding(name, State.WORKS, f"{told.strip()}, not needed")
    return Finding(name, State.BROKEN, _last_line(told), _REMOVE_TORCHVISION)


def _grpc(name: str) -> Finding:
    found = ", ".join(f"{package} {_version(package)}" for package in ("grpcio", "protobuf"))
    try:
        # Generated code refuses a runtime that is older than its generator, with errors of several kinds.
        import_module("epd.encoder.v1.encoder_service_pb2_grpc")
        import_module("epd.internal.v1.engine_pb2")
    except Exception as error:
        return Finding(
            name,
            State.BROKEN,
            f"{found}: {_last_line(str(error))}",
            "the stubs need newer ones: `pip install 'protobuf>=7.35.1,<8' 'grpcio>=1.85.1,<2'`",
        )
    return Finding(name, State.WORKS, f"{found}, the stubs fit")


def _images(name: str) -> Finding:
    from PIL import features

    lacking = [
        kind for kind, feature in (("JPEG", "jpg"), ("PNG", "zlib"), ("WebP", "webp")) if not features.check(feature)
    ]
    found = f"Pillow {_version('pillow')}" + (", AVIF" if features.check("avif") else ", no AVIF")
    if lacking:
        return Finding(
            name, State.BROKEN, f"{found}, no {', '.join(lacking)}", "install a wheel: `pip install -U pillow`"
        )
    return Finding(
        name,
        State.WORKS,
        found
        + (", simplejpeg for JPEG" if _version("simplejpeg") else "")
        + (", HEIC" if _version("pillow-heif") else ""),
    )


_VIDEOS = """
import av
missing = {"h264", "hevc", "vp9", "av1"} - av.codecs_available
print(f"PyAV {av.__version__}" + (f", without {', '.join(sorted(missing))}" if missing else ""))
"""

_SOUNDS = """
import numpy, soundfile, soxr
assert len(soxr.resample(numpy.zeros(4410, numpy.float32), 44100, 16000, quality="HQ")) == 1600
print(f"soundfile {soundfile.__version__} ({soundfile.__libsndfile_version__}), soxr {soxr.__version__}")
"""


def _videos(name: str) -> Finding:
    succeeded, told = _try(_VIDEOS)
    remedy = "" if succeeded else "videos cannot be encoded; install a wheel: `pip install -U av`"
    return Finding(name, State.WORKS if succeeded else State.BROKEN, _last_line(told), remedy)


def _sounds(name: str) -> Finding:
    succeeded, told = _try(_SOUNDS)
    remedy = "" if succeeded else "sound cannot be encoded; install wheels: `pip install -U soundfile soxr`"
    return Finding(name, State.WORKS if succeeded else State.BROKEN, _last_line(told), remedy)


def _shared_memory(name: str) -> Finding:
    from encoder_svc.shared_memory import SharedMemory

    try:
        block = SharedMemory.create("doctor", 1 << 20)
    except (OSError, AttributeError) as error:
        return Finding(name, State.BROKEN, _last_line(str(error)), "a Linux kernel with memfd_create (3.17) is needed")
    block.view[-1] = 1
    block.close()
    return Finding(name, State.WORKS, "memfd: arenas have no names and leave nothing behind")


def _memory(name: str) -> Finding:
    from encoder_svc.settings import Settings

    settings = Settings(model=Path())
    arenas = settings.arena_bytes + settings.input_arena_bytes
    limit = next((value for path in _CGROUP_LIMITS if (value := _read_limit(path))), None)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    allowed = min(limit or physical, physical)
    found = f"{_gib(allowed)} ({'limit of the container' if allowed < physical else 'no limit below the machine'})"
    found += f"; the default arenas take {_gib(arenas)}"
    if allowed < 2 * arenas:
        return Finding(name, State.OFF, found, "set --arena-bytes and --input-arena-bytes lower, or give more memory")
    return Finding(name, State.WORKS, found)


def _dev_shm(name: str) -> Finding:
    try:
        facts = os.statvfs(_DEV_SHM)
    except OSError:
        return Finding(name, State.WORKS, "not mounted, and not needed: arenas are anonymous")
    return Finding(name, State.WORKS, f"{_gib(facts.f_blocks * facts.f_frsize)}, not needed: arenas are anonymous")


def _port(name: str) -> Finding:
    from encoder_svc.settings import Settings
    from epd.addresses import split_address

    address = str(Settings.model_fields["listen"].default)
    host, port = split_address(address)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return Finding(name, State.BROKEN, f"{address} cannot be used: {error.strerror}", "set --listen")
            return Finding(name, State.OFF, f"{address} is taken", f"set --listen {host}:0 for a free one")
    return Finding(name, State.WORKS, f"{address} is free")


def _inline(name: str) -> Finding:
    return Finding(name, State.WORKS, "works wherever gRPC does")


_SERVES = """
import tempfile
from pathlib import Path
from encoder_svc.shared_memory import SharedMemory
from encoder_svc.transports import TransportUnavailableError
from encoder_svc.transports.shared_memory import serve_by_shared_memory
from encoder_svc.transports.zeromq import serve_by_zeromq
arena = SharedMemory.create("doctor", 1 << 20)
with tempfile.TemporaryDirectory() as folder:
    try:
        print("serves", {serve}.locator.WhichOneof("location"), folder)
    except TransportUnavailableError as error:
        print(error)
"""


def _transport_shared_memory(name: str) -> Finding:
    told = _serve('serve_by_shared_memory(arena, "0" * 32, Path(folder) / "doctor" / "arena")')
    if not told.startswith("serves"):
        return Finding(name, State.OFF, "cannot hand out an arena", told)
    folder = Path(told.split()[-1]).parent
    return Finding(name, State.WORKS, f"hands out arenas in {folder} to processes of this user")


def _transport_zeromq(name: str) -> Finding:
    told = _serve('serve_by_zeromq(arena, lambda _: None, "127.0.0.1", 0, "127.0.0.1", None)')
    if not told.startswith("serves"):
        return Finding(name, State.OFF, "cannot serve", told)
    import zmq

    if not zmq.has("curve"):
        return Finding(
            name, State.OFF, "serves, but cannot encrypt: no CURVE", "install a wheel: `pip install -U pyzmq`"
        )
    return Finding(name, State.WORKS, "serves by TCP, and can encrypt (CURVE)")


def _serve(expression: str) -> str:
    """What a process of its own tells that serves an arena; it begins with `serves` if it does."""
    succeeded, told = _try(_SERVES.replace("{serve}", expression))
    return told.strip() if succeeded else _last_line(told)


_MOONCAKE = """
from encoder_svc.shared_memory import SharedMemory
from encoder_svc.transports.mooncake import TransportUnavailableError, serve_by_mooncake
try:
    print("serves", serve_by_mooncake(SharedMemory.create("doctor", 1 << 20), "127.0.0.1", "tcp", "").session)
except TransportUnavailableError as error:
    print(error)
"""


def _mooncake(name: str) -> Finding:
    succeeded, told = _try(_MOONCAKE)
    if not succeeded:
        return Finding(name, State.OFF, f"crashes: {_last_line(told)}", "try another build: extras cpu, cuda12, cuda13")
    if not told.startswith("serves"):
        return Finding(name, State.OFF, "cannot be loaded", told.strip())
    packages = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine", "mooncake-transfer-engine-cuda13")
    package = next((f"{package} {_version(package)}" for package in packages if _version(package)), "mooncake")
    return Finding(name, State.WORKS, f"{package} serves memory by TCP")


def _libibverbs(name: str) -> Finding:
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        return Finding(name, State.OFF, "missing; Mooncake needs it, even for TCP", "`apt-get install libibverbs1`")
    return Finding(name, State.WORKS, "loads")


def _rdma(name: str) -> Finding:
    devices = sorted(path.name for path in Path("/sys/class/infiniband").glob("*"))
    if not devices:
        return Finding(name, State.OFF, "none: Mooncake moves bytes by TCP")
    return Finding(name, State.WORKS, ", ".join(devices))


def _zeromq(name: str) -> Finding:
    import zmq

    return Finding(name, State.WORKS, f"pyzmq {zmq.__version__}, libzmq {zmq.zmq_version()}")


def _model(name: str, path: Path) -> Finding:
    from encoder_svc.models.registry import check_servable

    try:
        summary = check_servable(path)
    except SetupError as error:
        return Finding(name, State.BROKEN, str(path), str(error))
    return Finding(name, State.WORKS, f"{summary.name}: {summary.model_type}, {summary.dtype or 'no dtype named'}")


def _try(program: str) -> tuple[bool, str]:
    """Runs a program in a process of its own; returns whether it succeeded and what it told."""
    try:
        result = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", program],
            capture_output=True,
            text=True,
            check=False,
            timeout=_TRIAL_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return False, f"no answer within {_TRIAL_SECONDS} s"
    if result.returncode < 0:
        return False, f"{result.stderr}\ndied by signal {-result.returncode}"
    return result.returncode == 0, result.stdout if result.returncode == 0 else result.stderr


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no reason given"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _read_limit(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.1f} GiB"
