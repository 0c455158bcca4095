"""The contract of all adapters on a GPU, with kernels and without."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CONTRACT = Path(__file__).parents[1] / "contracts" / "test_adapters.py"


@pytest.mark.parametrize("kernels", ["on", "off"])
def test_the_contract_holds_on_a_gpu(kernels: str) -> None:
    environment = os.environ | {"TESTTIME_TEST_DEVICE": "cuda", "TESTTIME_KERNELS": kernels}
    # Long streams, which watch the memory of the process, are left out.
    long = "hundred_thousand or process_does_not_grow or leaves_nothing_behind"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CONTRACT), "-k", f"not ({long})"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
