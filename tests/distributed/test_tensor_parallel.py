"""Tensor and sequence parallel modules, as `parallelize_module` makes them, in pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed import tensor_parallel
from tests.distributed.crew import Crew, values

PP_TP, TP_PP = ("pp", "tp"), ("tp", "pp")


def check_divided(
    crew: Crew,
    kind: str,
    dims: tuple[str, ...],
    *families: str,
    **options: Any,
) -> None:
    arguments = (kind, dims, families, options)
    parts = values(crew.run(tensor_parallel.errors, *arguments, timeout=120.0))
    assert len(parts) == 4
    for results in parts:
        assert [family for family, *_ in results] == list(families)
        for family, loss, gradients, count, orders in results:
            assert loss < 1e-10, family
            assert gradients < 1e-10, family
            assert count > 0, family
            # Collectives of a group run in one order.
            assert orders[0] or "compile" in options, family
            assert orders[0] == orders[1], family


# With what is computed again below, each module is divided in two and in four over each order of
# dimensions. Schedules of as many stages share a recording, which takes most of the time.
@pytest.mark.parametrize(
    ("kind", "dims", "families"),
    [
        ("gpt", PP_TP, ("gpipe", "one_f_one_b", "zb_h1")),
        ("gpt", TP_PP, ("zbv",)),
        ("llama", TP_PP, ("gpipe", "one_f_one_b", "zb_h1")),
    ],
)
def test_divided_module_has_the_gradients_of_one_process_by_collectives_in_one_order(
    crew: Crew, kind: str, dims: tuple[str, ...], families: tuple[str, ...]
) -> None:
    check_divided(crew, kind, dims, *families)


@pytest.mark.parametrize(
    ("kind", "dims", "family"), [("gpt", TP_PP, "zb_h1"), ("llama", PP_TP, "zbv")]
)
def test_divided_module_is_computed_again(
    crew: Crew, kind: str, dims: tuple[str, ...], family: str
) -> None:
    check_divided(crew, kind, dims, family, remat="full")


@pytest.mark.inductor
def test_divided_module_is_compiled(crew: Crew) -> None:
    """An embedding and a head gather, reduce and scatter; layers have the same collectives.

    A backward that is cut in two, of layers that are divided, is compiled in `test_sharded`.
    """
    check_divided(crew, "ends", PP_TP, "one_f_one_b", compile=True)


@pytest.mark.parametrize("family", ["one_f_one_b", "zb_h1"])
def test_a_dtensor_travels_between_stages_and_is_redistributed_in_one(
    crew: Crew, family: str
) -> None:
    for arrived, error in values(crew.run(tensor_parallel.crossing, family)):
        assert arrived
        assert error < 1e-12


def test_divided_parameters_are_trained_clipped_and_loaded(crew: Crew) -> None:
    for part in values(crew.run(tensor_parallel.trained, PP_TP)):
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
        assert "has a batch of another shape than others of the processes" in other.error.text
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


def test_a_sum_over_processes_is_taken_once_a_step(crew: Crew) -> None:
    few = values(crew.run(tensor_parallel.reductions, 2))
    many = values(crew.run(tensor_parallel.reductions, 8))
    assert [number for number, _ in few] == [number for number, _ in many]
    assert max(error for _, error in (*few, *many)) < 1e-12
