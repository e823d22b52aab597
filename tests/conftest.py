"""What every test file shares."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that need a CUDA device where there is none."""
    marked = [item for item in items if item.get_closest_marker("cuda")]
    if not marked:
        return  # the schedule side's tests start without the second that importing torch takes

    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
