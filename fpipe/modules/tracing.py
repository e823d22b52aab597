"""The forward of a module while it is traced: what it is told of that, and why it is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

from fpipe.errors import StageError
from fpipe.stage.explain import place


@contextmanager
def explaining(name: str, *, is_compiling: bool) -> Iterator[None]:
    """Run a forward within it, while it is traced.

    Args:
        name: of the module's class.
        is_compiling: what `torch.compiler.is_compiling` says meanwhile, as where `torch.export`
            traces.

    Raises:
        StageError: the forward cannot be traced, for a reason with a known way round.
    """
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = is_compiling or before
    try:
        yield
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        told = (
            "" if is_compiling else ", or trace it with is_compiling=True, so that it does not look"
        )
        raise StageError(
            f"{name} branches on data ({error}){place(error)}, which a pipeline that is traced "
            "once cannot: use torch.where or a mask in code of your own; of a Hugging Face model "
            "this is most often the padding mask: pass the mask with four "
            "dimensions, bool[batch, 1, query, key], load a decoder with "
            'attn_implementation="eager" (experts: experts_implementation="batched_mm")' + told
        ) from error
    except Exception as error:
        if "transformers/integrations/moe.py:" not in place(error):
            raise
        raise StageError(
            f"{name} chose an implementation of its experts that cannot be traced{place(error)} "
            f"({type(error).__name__}: {error}): load the model with "
            'experts_implementation="batched_mm", or call '
            'module.set_experts_implementation("batched_mm")'
        ) from error
    finally:
        torch.compiler._is_compiling_flag = before
