"""Lets torchvision be imported where its compiled operators do not load.

The package index has no CPU wheel of torchvision, and the compiled part of the CUDA wheel does not
load beside a CPU-only torch; then `import torchvision` fails while it describes operators (box
suppression for detectors) that are not there. Declaring them, without a body, is enough for what
timm and transformers use of it: transforms of images, all Python.
"""

from torch.library import Library

OPERATORS = [
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
]

try:
    import torchvision  # noqa: F401
except RuntimeError:
    # The library goes out of existence with the object, so it has to stay.
    _declared = Library("torchvision", "DEF")
    for operator in OPERATORS:
        _declared.define(operator)
