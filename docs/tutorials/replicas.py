import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import fpipe


def stage(w, x):
    return torch.tanh(x @ w)


def loss(y, batch):
    return y.square().mean()


def step(schedule, rows, place, **mesh):
    pipe = fpipe.pipeline([stage] * 4, loss, schedule, compile=False, **mesh)
    trainer = fpipe.train(pipe, torch.optim.AdamW, lr=1e-2)
    held = getattr(pipe, place)(params)
    state = trainer.init(held)
    return trainer.step(held, state, rows)[:3]


def here(tensors):
    """MiB of them on this process; those that are divided are DTensors."""
    own = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    return sum(t.nbytes for t in own) / 2**20


torch.manual_seed(0)
torch.set_num_threads(1)
params = [torch.randn(256, 256, dtype=torch.float64) / 16 for _ in range(4)]
rows = torch.randn(48, 256, dtype=torch.float64)
forwards = [f"{stage}F{m}" for m in range(4) for stage in (0, 1, 2, 3)]
backwards = [f"{stage}B{m}" for m in range(4) for stage in (3, 2, 1, 0)]
schedule = fpipe.Schedule.from_text(" ".join(forwards + backwards))
alone, expected, _ = step(schedule, rows, "local")

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "pp"))
mine = rows[:32] if mesh.get_local_rank("dp") == 0 else rows[32:]  # 32 rows and 16

for name, order, place in (
    ("whole", schedule, "replicate"),
    ("divided", schedule.sharded(gather=1, reduce=2), "shard"),
):
    value, after, state = step(order, mine, place, mesh=mesh, data="dp")
    torch.testing.assert_close(value, alone)
    whole = [w.full_tensor() if place == "shard" else w for w in after]
    torch.testing.assert_close(whole, expected)
    if dist.get_rank() == 0:
        moments = [m for stage in state.moments for m in stage.values()]
        print(f"{name:8} {here(after):.1f} MiB of parameters, {here(moments):.1f} MiB of moments")
dist.destroy_process_group()
