"""Ring attention (context parallelism) with attn_pass: `torchrun --nproc-per-node 2 examples/context_parallel.py`.

Needs two CUDA devices and NCCL: torch has no ring attention for CPU tensors (2.13). Every rank holds half of the
sequence inside the region. Calls of scaled_dot_product_attention are ring attention there, on DTensors, and are left by
attn_pass; so is attention by hand, which is over a shard's positions. Layers without attention are compiled as usual.
The example prints the largest difference from the whole sequence on one device, and the report.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import context_parallel_unshard

import attn_pass

SHAPE = (1, 8, 2048, 64)  # batch, heads, positions, head dim


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q * 0.5, k, v, is_causal=True) + v


def main() -> None:
    """Runs on every rank."""
    if torch.cuda.device_count() < 2 or "RANK" not in os.environ:
        sys.exit("this needs two CUDA devices and torchrun: torchrun --nproc-per-node 2 examples/context_parallel.py")
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl")
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    torch.manual_seed(0)
    inputs = [torch.randn(SHAPE, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    wanted = attend(*inputs)
    compiled = torch.compile(attend, backend=attn_pass.backend)
    with context_parallel(mesh, buffers=inputs, buffer_seq_dims=[2, 2, 2]), attn_pass.record() as report:
        (found,) = context_parallel_unshard(mesh, [compiled(*inputs)], [2])
    if rank == 0:
        print(f"largest difference {(found - wanted).abs().max().item():.3g}")
        print(report)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
