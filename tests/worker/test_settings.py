"""What the driver's script set globally counts in the workers too."""

import logging
import subprocess
import sys

import pytest

SCRIPT = """
import logging, sys
import torch
from torch.utils.data import DataLoader, TensorDataset
import distsdk

torch.set_default_dtype(torch.float64)
torch.use_deterministic_algorithms(True, warn_only=True)
logging.basicConfig(level=logging.INFO, format="%(name)s says %(message)s")

@distsdk.distributed(workers=2, gpu=False)
def train():
    logging.getLogger("mine").info("hello")
    return torch.zeros(1).dtype, torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()

print(train().values == [(torch.float64, True, "highest")] * 2)
"""


@pytest.mark.slow
def test_torch_flags_and_logging(tmp_path):
    done = subprocess.run([sys.executable, "-c", SCRIPT], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout == "True\n", done.stderr
    assert done.stderr.count("mine says hello") == 1  # rank 0's


def test_a_loader_read_with_persistent_workers_can_be_shipped():
    script = """
import torch
from torch.utils.data import DataLoader, TensorDataset
import distsdk

if __name__ == "__main__":
    loader = DataLoader(TensorDataset(torch.arange(8)), batch_size=2, num_workers=1, persistent_workers=True)
    next(iter(loader))
    print(distsdk.distributed(workers=1, gpu=False)(lambda loader: len(list(loader)))(loader).value)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "4\n", done.stderr


def test_logging_of_this_process_is_untouched():
    from distsdk.worker.settings import captured_settings

    before = (logging.getLogger().level, list(logging.getLogger().handlers))
    assert captured_settings()["logging"]["root"] == before[0]
    assert (logging.getLogger().level, list(logging.getLogger().handlers)) == before
