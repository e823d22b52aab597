"""Some of the tests of CUDA where there is no device, on two that are made of the CPU."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
import torch

ROOT: Final = Path(__file__).parents[2]

# Two ranks; where everything lies, that nobody waits, that copies overlap; `make emulate` runs all.
CHOSEN: Final = (
    "test_offload.py::test_gradients_come_to_the_cpu[zbv]",
    "test_offload.py::test_an_optimizer_updates_on_the_cpu[options1]",
    "test_offload.py::test_one_function_whose_stages_share_a_parameter",
    "test_over_ranks.py::test_ranks[2]",
    "test_over_ranks.py::test_the_device_that_a_group_is_bound_to",
    "test_over_ranks.py::test_a_transport_that_is_dropped_waits_for_its_last_messages",
    "test_one_process.py::test_a_device_for_each_rank",
    "test_one_process.py::test_a_leaf_that_all_read_is_copied_once",
    "test_one_process.py::test_a_step_waits_for_nothing",
    "test_one_process.py::test_two_devices_compute_at_once[zbv]",
    "test_whole_models.py::test_module[zbv-none]",
    "test_whole_models.py::test_parameters_are_placed",
    "test_whole_models.py::test_state[microbatch]",
    "test_whole_models.py::test_what_is_no_copy_of_itself",
)


@pytest.mark.skipif(torch.version.cuda is not None, reason="torch is built for real devices")
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, to make a device")
def test_some_on_emulated_devices() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "tests.device.emulated", "-p", "no:xdist"]
    tests = [f"tests/device/{name}" for name in CHOSEN]
    done = subprocess.run(
        [*command, "-o", "addopts=", *tests], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(CHOSEN)} passed" in done.stdout, done.stdout
