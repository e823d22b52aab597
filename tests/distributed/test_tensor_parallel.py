"""Tensor and sequence parallel modules, as `parallelize_module` makes them, in pipelines."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed import tensor_parallel
from tests.distributed.crew import Crew, values

PP_TP, TP_PP = ("pp", "tp"), ("tp", "pp")


def check(crew: Crew, kind: str, dims: tuple[str, ...], family: str, **options: Any) -> None:
    parts = values(crew.run(tensor_parallel.errors, kind, dims, family, options))
    assert len(parts) == 4
    for loss, gradients, count in parts:
        assert loss < 1e-10
        assert gradients < 1e-10
        assert count > 0


@pytest.mark.parametrize("family", ["gpipe", "zb_h1", "zbv"])
def test_sequence_parallel_module_has_the_gradients_of_one_process(crew: Crew, family: str) -> None:
    check(crew, "gpt", PP_TP, family)


@pytest.mark.parametrize("family", ["one_f_one_b", "zbv"])
def test_unmodified_llama_has_the_gradients_of_one_process(crew: Crew, family: str) -> None:
    check(crew, "llama", TP_PP, family)


def test_sequence_parallel_module_is_computed_again(crew: Crew) -> None:
    check(crew, "gpt", TP_PP, "zb_h1", remat="full")


@pytest.mark.inductor
def test_sequence_parallel_module_is_compiled(crew: Crew) -> None:
    check(crew, "gpt", PP_TP, "one_f_one_b", compile=True)
