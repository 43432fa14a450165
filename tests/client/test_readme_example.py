"""The example in the client's README runs as it stands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tests.photograph import photo
from tests.server_process import ServerProcess

README = Path(__file__).parents[2] / "clients" / "python" / "README.md"


def test_the_readmes_example_runs(mooncake_server: ServerProcess, tmp_path: Path) -> None:
    example = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[0]
    script, file = tmp_path / "example.py", tmp_path / "cat.jpg"
    script.write_text(example)
    file.write_bytes(photo(140, 112))
    answer = subprocess.run(
        [sys.executable, script, mooncake_server.target, file], check=True, capture_output=True, text=True, timeout=120
    )
    assert answer.stdout == "part 0 will have 20 rows\n(20, 256) by shared_memory\n"
