"""The client stands on its own: it needs neither torch nor the service."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("torch", "transformers", "mooncake", "encoder_svc", "safetensors")


def test_the_client_imports_nothing_heavy() -> None:
    code = (
        "import sys, encoder_client, encoder_client.transports.mooncake;"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    answer = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert answer.stdout.strip() == "[]"


def test_the_client_works_without_them() -> None:
    code = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {HEAVY!r}:
            raise ImportError(f"{{name}} is not installed")
sys.meta_path.insert(0, Refuse())
import asyncio, encoder_client
async def main():
    async with encoder_client.EncoderClient("127.0.0.1:1") as client:
        print(client.transports)
asyncio.run(main())
"""
    answer = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert answer.stdout.strip() == "('shared_memory', 'zeromq', 'inline')"
