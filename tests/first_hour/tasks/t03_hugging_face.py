"""A Hugging Face model with a padding mask and labels of -100, unmodified, with its own loss."""

import torch
from torch.func import functional_call, grad_and_value
from transformers import LlamaConfig, LlamaForCausalLM

import fpipe

torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=128,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=32,
        bos_token_id=None,
        eos_token_id=None,
    )
)
lengths = torch.tensor([12, 3, 7, 12, 9, 2, 12, 5])
mask = (torch.arange(12) < lengths[:, None]).long()
tokens = torch.randint(128, (8, 12))
batch = {
    "input_ids": tokens,
    "attention_mask": mask,
    "labels": tokens.masked_fill(mask == 0, -100),
}
pipe = fpipe.from_module(
    model,
    schedule=fpipe.schedules.one_f_one_b(ranks=2, microbatches=4),
    cuts=["model.layers.1"],
    compile=False,
)
params = {name: parameter.detach() for name, parameter in model.named_parameters()}
value, grads = pipe.step(params, batch)
expected_grads, expected = grad_and_value(lambda own: functional_call(model, own, (), batch).loss)(
    params
)
torch.testing.assert_close(value, expected)
torch.testing.assert_close(grads, expected_grads, rtol=1e-4, atol=1e-6)
print(f"loss {value:.4f}, the model's own {expected:.4f}; {len(grads)} gradients agree")
