"""An unmodified Hugging Face Llama learns Python's manual, byte by byte, in four stages.

    pip install fpipe-torch "transformers>=5,<6"
    python examples/huggingface.py             # compiles first; under two minutes on two cores
    python examples/huggingface.py --smoke     # seconds: a tiny model, a few steps, uncompiled

The model is whatever `transformers` makes of a configuration, with random weights; nothing is
downloaded. `fpipe.from_module` chooses four stages of even cost, and the loss is the model's own.
Before it is trained, the pipeline's loss and gradients are held against the model's.
"""

import sys
import time
from pydoc_data.topics import topics

import torch
from torch.func import functional_call, grad_and_value
from transformers import LlamaConfig, LlamaForCausalLM

import fpipe

SMOKE = "--smoke" in sys.argv
WIDTH, LAYERS, LENGTH, ROWS, STEPS = (16, 3, 16, 8, 2) if SMOKE else (64, 7, 64, 16, 240)

# Every Python carries its language reference, for `help("if")`. A token is a byte.
TEXT = torch.tensor(list("\n\n".join(topics[name] for name in sorted(topics)).encode()))


def draw():
    """Rows cut from the text; Hugging Face models shift the labels themselves."""
    tokens = TEXT[torch.randint(len(TEXT) - LENGTH, (ROWS, 1)) + torch.arange(LENGTH)]
    return {"input_ids": tokens, "labels": tokens}


torch.manual_seed(0)
torch.set_num_threads(1)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=256,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        initializer_range=0.12,  # the usual 0.02 is for models that are much wider
        bos_token_id=None,
        eos_token_id=None,
    )
)
pipe = fpipe.from_module(
    model,
    schedule=fpipe.schedules.zbv(ranks=2, microbatches=4),
    stages=4,
    example=draw(),
    compile=not SMOKE,
)
print(f"{type(model).__name__} with {model.num_parameters():,} parameters")
print(pipe.balance)

# The same as without a pipeline.
params = {name: parameter.detach() for name, parameter in model.named_parameters()}
batch = draw()
loss, grads = pipe.step(params, batch)
expected_grads, expected = grad_and_value(lambda own: functional_call(model, own, (), batch).loss)(
    params
)
torch.testing.assert_close(loss, expected)
torch.testing.assert_close(grads, expected_grads, rtol=1e-3, atol=1e-5)
print(f"loss {loss:.5f}, without a pipeline {expected:.5f}; all gradients agree")

optimizer = torch.optim.Adam(params.values(), lr=5e-3, betas=(0.9, 0.98))
start = time.perf_counter()
for step in range(1, STEPS + 1):
    loss, grads = pipe.step(params, draw())
    for name, leaf in params.items():
        leaf.grad = grads[name]
    optimizer.step()
    if step == 1 or step % 40 == 0 or step == STEPS:
        print(f"step {step:4}   loss {loss:.3f}   {time.perf_counter() - start:5.1f} s")
assert SMOKE or loss < 0.5 * expected, "the model has learnt nothing"

# Back into the module, which is an ordinary Hugging Face model again.
pipe.load_into(model, params)
prompt = torch.tensor([list(b"The ")])
mask = torch.ones_like(prompt)
written = model.eval().generate(
    prompt, attention_mask=mask, max_new_tokens=LENGTH - 4, do_sample=True, top_k=3, pad_token_id=0
)
print(bytes(written[0].tolist()).decode(errors="replace"))
