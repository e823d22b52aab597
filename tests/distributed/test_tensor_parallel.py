"""Tensor and sequence parallel modules, as `parallelize_module` makes them, in pipelines."""

from __future__ import annotations

from pathlib import Path
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


@pytest.mark.parametrize("dims", [PP_TP, TP_PP])
def test_divided_parameters_are_trained_clipped_and_loaded(
    crew: Crew, dims: tuple[str, ...]
) -> None:
    for part in values(crew.run(tensor_parallel.trained, dims)):
        assert max(part["norms"]) < 1e-12
        assert part["params"] < 1e-10
        assert part["placed"]
        assert part["loaded"] < 1e-10
        assert part["same"] < 1e-10


def test_divided_parameters_are_drawn_saved_and_read_as_whole_ones(
    crew: Crew, tmp_path: Path
) -> None:
    for part in values(crew.run(tensor_parallel.saved, str(tmp_path / "checkpoint"))):
        assert part
        assert max(part) == 0.0


def test_what_cannot_be_divided_is_refused(crew: Crew) -> None:
    for outcomes in values(crew.run(tensor_parallel.refused)):
        partial, over_pp, batch, muon, abroad, other, good = outcomes
        assert "a sum that is not yet taken: redistribute it to Replicate()" in partial.error.text
        assert "the dimension 'pp' divides stages and no tensors" in over_pp.error.text
        assert "batch is a DTensor: rows are split into microbatches" in batch.error.text
        assert "which is a DTensor of which this process has a part" in muon.error.text
        assert "no part of the pipeline's mesh: make the pipeline with mesh=" in abroad.error.text
        assert "dimension 'tp' has a batch of another shape than the others" in other.error.text
        assert good.failure is None


def test_parameters_in_rows_over_replicas_are_gathered(crew: Crew) -> None:
    assert max(values(crew.run(tensor_parallel.sharded_over_replicas))) < 1e-12


def test_a_divided_state_is_threaded(crew: Crew) -> None:
    for *differences, placed in values(crew.run(tensor_parallel.with_state)):
        assert max(differences) < 1e-12
        assert placed


def test_transforms_refuse_what_is_divided(crew: Crew) -> None:
    for *refused, good in values(crew.run(tensor_parallel.transformed)):
        for outcome in refused:
            assert "DTensors among the arguments of a" in outcome.error.text
        assert good.failure is None


def test_adapters_tied_tables_and_uneven_parts(crew: Crew) -> None:
    for loss, gradients, count in values(crew.run(tensor_parallel.adapted)):
        assert loss < 1e-12
        assert gradients < 1e-12
        assert count
