"""Training throughput compared with timm, on a CPU: `python tests/bench/run.py --only train`.

    python training.py [--turns N] [--steps N] [--against DIR]

Both train the same model from random weights on the same JPEGs, with bf16 autocast (float32 on a
CPU without bf16), AdamW, gradient clipping at norm 1, inception crops and flips, and one worker
process that decodes images. vit runs as `vit pretrain`; timm as in its train.py (version 1.0.31,
not part of its wheel): `train_one_epoch` with `create_loader`, `create_optimizer_v2` and
`dispatch_clip_grad`, without mixup, called as
`--amp --amp-dtype bfloat16 --opt adamw --clip-grad 1 --workers 1`. The two alternate, the first 10
steps are not counted, and ratios are taken within a round.

Then two ranks of vit (`--devices 2`), each with half of the cores, alternate with one rank that
has all of them, at the same global batch size.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

from run import HERE, ROOT, ratio, run

CASES = {"Ti/16 at 64 px": ("Ti/16", 64, 64), "S/16 at 128 px": ("S/16", 128, 32)}
"""(variant, resolution, batch size)."""
TIMM = {"Ti/16": "vit_tiny_patch16_224", "S/16": "vit_small_patch16_224"}
RANKS = "Ti/16 at 64 px"
"""The case that is also trained with two ranks."""
CLASSES, PER_CLASS, BAR, RANKS_BAR, UNCOUNTED = 4, 64, 1.5, 0.9, 10


def write_images(root: Path) -> None:
    """Write 256 x 256 JPEG crops of the photographs in the repository, a directory for each."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    for name in ("astronaut", "cat", "coffee", "rocket"):
        photograph = Image.open(ROOT / "tests" / "images" / f"{name}.jpg").convert("RGB")
        (root / name).mkdir(parents=True)
        for i in range(PER_CLASS):
            side = int(rng.integers(120, min(photograph.size)))
            left, top = (int(rng.integers(length - side + 1)) for length in photograph.size)
            crop = photograph.crop((left, top, left + side, top + side)).resize((256, 256))
            crop.save(root / name / f"{i}.jpg", quality=92)


def train_with_timm(images: Path, variant: str, pixels: int, batch: int, steps: int) -> float:
    """Train with timm's loop; return images per second."""
    import timm
    import torch
    from timm.data import create_dataset, create_loader
    from timm.optim import create_optimizer_v2
    from timm.scheduler import CosineLRScheduler
    from timm.utils import AverageMeter, dispatch_clip_grad

    from vitcli.devices import multiplies_bf16

    device = torch.device("cpu")
    model = timm.create_model(TIMM[variant], img_size=pixels, num_classes=CLASSES).train()
    loader = create_loader(
        create_dataset("", root=str(images)),
        input_size=(3, pixels, pixels),
        batch_size=batch,
        is_training=True,
        scale=(0.05, 1.0),
        color_jitter=0.0,
        interpolation="bicubic",
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.5, 0.5),
        num_workers=1,
        device=device,
    )
    optimizer = create_optimizer_v2(model, "adamw", lr=1e-3, weight_decay=0.1)
    scheduler = CosineLRScheduler(optimizer, steps, warmup_t=steps // 10, t_in_epochs=False)
    loss_fn, losses, step, start = torch.nn.CrossEntropyLoss(), AverageMeter(), 0, 0.0
    while True:
        for inputs, targets in loader:
            if step == UNCOUNTED:
                start = time.perf_counter()
            if step == steps:
                return (steps - UNCOUNTED) * batch / (time.perf_counter() - start)
            optimizer.zero_grad()
            with torch.autocast(device.type, torch.bfloat16, multiplies_bf16(device)):
                loss = loss_fn(model(inputs), targets)
            loss.backward()
            dispatch_clip_grad(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            losses.update(loss.item(), len(inputs))
            scheduler.step_update(step)


def train_with_vit(
    checkout: Path, images: Path, variant: str, pixels: int, batch: int, steps: int, *more: str
) -> float:
    """Train with `vit pretrain`; return the images per second it reports, over all ranks."""
    with tempfile.TemporaryDirectory() as output:
        command = [
            *(sys.executable, "-m", "vitcli", "pretrain", "--data", str(images), "--json"),
            *("--variant", variant, "--resolution", str(pixels), "--batch-size", str(batch)),
            *("--steps", str(steps), "--log-every", str(UNCOUNTED), "--val-fraction", "0"),
            *("--workers", "1", "--grad-accum", "1", "--output", output),
            *("--device", "cpu", "--save-every", str(2 * steps), "--force"),
            *more,
        ]
        events = [json.loads(line) for line in output_lines(command, checkout)]
    rates = [e["images_per_second"] for e in events if e["event"] == "train" and e["step"] > 10]
    return statistics.harmonic_mean(rates)


def output_lines(command: list[str], checkout: Path) -> list[str]:
    result = run(command, checkout, capture_output=True)
    if result.returncode:
        sys.exit(f"{' '.join(command)}\n{result.stderr}")
    return result.stdout.splitlines()


def compare(name: str, images: Path, turns: int, steps: int, against: Path | None) -> None:
    """Train a case with timm and vit, and print the throughput of both."""
    args = [str(images), *map(str, (*CASES[name], steps))]
    rates: dict[str, list[float]] = {"timm": [], "vit": []}
    for _ in range(turns):
        theirs = output_lines([sys.executable, str(HERE / "training.py"), "timm", *args], ROOT)
        rates["timm"].append(float(theirs[-1]))
        rates["vit"].append(train_with_vit(ROOT, images, *CASES[name], steps))
        if against:
            before = train_with_vit(against, images, *CASES[name], steps)
            rates.setdefault("vit, before", []).append(before)
    report(f"Training {name}, batch {CASES[name][2]}, {turns} turns of {steps} steps", rates, BAR)


def compare_ranks(images: Path, turns: int, steps: int) -> None:
    """Train a case with one rank and with two, and print the throughput of both."""
    rates: dict[str, list[float]] = {"one rank": [], "two ranks": []}
    for _ in range(turns):
        for name, more in zip(rates, ((), ("--devices", "2")), strict=True):
            rates[name].append(train_with_vit(ROOT, images, *CASES[RANKS], steps, *more))
    batch = CASES[RANKS][2]
    report(f"{RANKS} by ranks, batch {batch}, {turns} turns of {steps} steps", rates, RANKS_BAR)


def report(title: str, rates: dict[str, list[float]], bar: float) -> None:
    """Print rates, their ratios to the first, and whether the second reaches the bar."""
    print(f"\n{title}")
    first, second = list(rates)[:2]
    ratios = {name: ratio(found, rates[first]) for name, found in rates.items()}
    for name, found in rates.items():
        print(f"  {name:<12}{statistics.median(found):>8.1f} images/s", end="")
        print(f"{ratios[name]:>8.2f} of {first}   ({min(found):.1f} to {max(found):.1f})")
    verdict = "met" if ratios[second] >= bar else "MISSED"
    print(f"  at least {bar}: {verdict}", flush=True)


def main() -> None:
    if sys.argv[1:2] == ["timm"]:
        sys.path.insert(0, str(HERE.parent))
        from peers import torchvision_operators  # noqa: F401  (before timm)

        images, variant, *numbers = sys.argv[2:]
        print(train_with_timm(Path(images), variant, *map(int, numbers)))
        return
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40, help="of each run, 10 of them uncounted")
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout of vit")
    parser.add_argument("--only", choices=[*CASES, "ranks"], metavar="CASE")
    arguments = parser.parse_args()
    against = arguments.against and arguments.against.resolve()
    with tempfile.TemporaryDirectory() as directory:
        images = Path(directory) / "photographs"
        write_images(images)
        for name in [arguments.only] if arguments.only else [*CASES, "ranks"]:
            if name == "ranks":
                compare_ranks(images, arguments.turns, arguments.steps)
            else:
                compare(name, images, arguments.turns, arguments.steps, against)


if __name__ == "__main__":
    main()
