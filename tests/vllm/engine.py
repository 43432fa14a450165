"""A real ``vllm serve``, with its own towers or with the connector."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from tests.ports import free_port

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "PYTHONPATH": str(ROOT / "clients" / "python"), "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
}  # fmt: skip
"""Of vLLM."""
START_SECONDS = 400.0
"""Importing vLLM three times, in as many processes, takes a minute on two free cores."""
ANSWER_SECONDS = 120.0
_READY = "Application startup complete"
"""Its web server says so when it takes requests."""
SHARED_MEMORY = Path("/dev/shm")
LEFT_BY_VLLM = "vllm_dist_*"
"""Its tensor-parallel CPU workers, which it kills, leave these behind."""


class RefusedError(Exception):
    """vLLM answered with an error.

    Args:
        status: the HTTP status.
        body: what it says.
    """

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"HTTP {status}: {body}")
        self.status = status


class Engine:
    """A vLLM server process with its children.

    Args:
        vllm: the command, in an environment of its own.
        model: folder of the checkpoint.
        connector: ``ec_connector_extra_config``. None: vLLM loads its own towers, and takes media.
        options: of the command.
        architecture: in the place of the checkpoint's.
        towers: modalities whose towers are not loaded if there is a connector.
    """

    def __init__(
        self, vllm: Path, model: Path, connector: dict[str, Any] | None = None, *options: str, architecture: str = "",
        towers: Sequence[str] = ("image", "video"),
    ) -> None:  # fmt: skip
        self.port = free_port()
        arguments = ["--served-model-name=m", f"--port={self.port}", "--host=127.0.0.1", "--dtype=float32",
                     "--max-model-len=4096", "--enforce-eager", *options]  # fmt: skip
        if connector is not None:
            config = {
                "ec_role": "ec_consumer",
                "ec_connector": "EncoderServiceConnector",
                "ec_connector_module_path": "encoder_client.integrations.vllm.connector",
                "ec_connector_extra_config": connector,
            }
            limits = dict.fromkeys(towers, 0)
            arguments += [f"--limit-mm-per-prompt={json.dumps(limits)}", f"--ec-transfer-config={json.dumps(config)}"]
        if architecture:
            arguments += ["--hf-overrides", json.dumps({"architectures": [architecture]})]
        self._left_before = set(SHARED_MEMORY.glob(LEFT_BY_VLLM))
        self._lines: list[str] = []
        self._ready = threading.Event()
        self._ended = False
        self._folder = tempfile.TemporaryDirectory()
        self.process = psutil.Popen(
            [str(vllm), "serve", str(model), *arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            text=True, errors="replace", cwd=self._folder.name, env=os.environ | ENVIRONMENT,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def log(self) -> str:
        """What it said until now."""
        return "".join(self._lines)

    def wait_ready(self) -> Engine:
        """Waits until it answers."""
        end = time.monotonic() + START_SECONDS
        self._ready.wait(START_SECONDS)
        while self.process.poll() is None and time.monotonic() < end:
            # It says so a moment before it listens.
            with contextlib.suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", self.port)):
                return self
            time.sleep(0.01)
        raise AssertionError(f"vLLM does not serve; it said:\n{self.log[-8000:]}")

    def chat(self, content: list[dict[str, Any]], *, port: int = 0, **more: Any) -> dict[str, Any]:
        """Asks for a greedy answer to one message; the first choice, with token ids and log probabilities.

        Args:
            content: of the message.
            port: of a proxy before it. 0: its own.
            more: of the request.

        Raises:
            RefusedError: it answered with an error.
        """
        body = {"model": "m", "max_tokens": 8, "temperature": 0, "logprobs": True, "return_token_ids": True,
                "messages": [{"role": "user", "content": content}], **more}  # fmt: skip
        request = urllib.request.Request(
            f"http://127.0.0.1:{port or self.port}/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
                choice: dict[str, Any] = json.load(answer)["choices"][0]
                return choice
        except urllib.error.HTTPError as error:
            with error:
                raise RefusedError(error.code, error.read().decode(errors="replace")) from None

    def close(self) -> None:
        """Ends it, and waits until it and its children are gone. Idempotent."""
        if self._ended:
            return
        self._ended = True
        family = [self.process, *self.process.children(recursive=True)] if self.process.poll() is None else []
        if family:
            self.process.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(family, timeout=30)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(alive, timeout=10)
        self._reader.join()
        self.process.stdout.close()
        for file in set(SHARED_MEMORY.glob(LEFT_BY_VLLM)) - self._left_before:
            file.unlink()
        print(f"--- log of vLLM ---\n{self.log[-20000:]}")
        self._folder.cleanup()

    def _read(self) -> None:
        """Keeps what it says, until it and its children have ended."""
        for line in self.process.stdout:
            self._lines.append(line)
            if _READY in line:
                self._ready.set()
        self._ready.set()
