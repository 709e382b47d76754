"""Make torchvision importable where its compiled operators do not load.

The package index has no CPU wheel of torchvision, and the compiled part of the CUDA wheel does not
load with a CPU-only torch; then `import torchvision` fails when it registers fake kernels for
missing operators (non-maximum suppression). Declaring them without an implementation is enough for
what timm and transformers use: image transforms, which are pure Python.
"""

from torch.library import Library

OPERATORS = [
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
]

try:
    import torchvision  # noqa: F401
except RuntimeError:
    # The operators are removed along with this object, so keep a reference.
    _declared = Library("torchvision", "DEF")
    for operator in OPERATORS:
        _declared.define(operator)
