"""Training steps on a GPU compared with timm: `make bench-gpu`.

    python gpu.py [--turns N]

B/16 and L/16 at 224 px, with bf16 autocast, eager and compiled, on images on the device: forward,
cross-entropy, backward, gradient clipping at norm 1, fused AdamW. The step is the same for both
models, which alternate. Prints images per second and MFU: FLOPs (3 x forward) relative to the
throughput of an 8,192 x 8,192 matrix product. The target is 55% when compiled.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import nn

from vitcli.config import model_config
from vitcli.evaluation import speed
from vitcli.models.vit import ViT

CASES = {"B/16": ("vit_base_patch16_224", 128), "L/16": ("vit_large_patch16_224", 64)}
"""(timm's model name, batch size)."""
STEPS = 20
DEVICE = torch.device("cuda")


def training_step(model: nn.Module, batch: int, compiled: bool) -> Callable[[], object]:
    """Return a function that trains for one step."""
    model = model.to(DEVICE).train()
    trained = torch.compile(model) if compiled else model
    step = speed.training_step(trained, 1000, DEVICE, torch.bfloat16)
    return partial(step, torch.randn(batch, 3, 224, 224, device=DEVICE))


def seconds(step: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / STEPS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    turns = parser.parse_args().turns
    if not torch.cuda.is_available():
        sys.exit("no CUDA device")
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import timm

    from peers import torchvision_operators  # noqa: F401  (before timm)

    ceiling = speed.matrix_flops(DEVICE, torch.bfloat16)
    name = torch.cuda.get_device_name()
    print(
        f"{name}, torch {torch.__version__}, timm {timm.__version__}; bf16 matrix product: ", end=""
    )
    print(f"{ceiling / 1e12:.0f} TFLOP/s", flush=True)
    for variant, (theirs, batch) in CASES.items():
        config = model_config(variant, num_classes=1000)
        for compiled in (False, True):
            ours = ViT(config)
            ours.init_weights(0)
            steps = {
                "vit": training_step(ours, batch, compiled),
                "timm": training_step(timm.create_model(theirs), batch, compiled),
            }
            for step in steps.values():
                seconds(step)  # warms up and compiles
            times = {who: [] for who in steps}
            for _ in range(turns):
                for who, step in steps.items():
                    times[who].append(seconds(step))
            print(f"\n{variant}, batch {batch}, {'compiled' if compiled else 'eager'}")
            for who, found in times.items():
                rate = batch / statistics.median(found)
                share = rate * 6 * config.macs() / ceiling
                ratio = statistics.median(a / b for a, b in zip(times["timm"], found, strict=True))
                print(f"  {who:<6}{rate:>8.0f} images/s{share:>7.0%} MFU{ratio:>7.2f} of timm")
            del steps, ours
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
