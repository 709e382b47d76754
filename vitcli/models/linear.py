"""Linear layers with the bias fused into the matrix multiplication, for bf16 training on a CPU.

Under autocast on a CPU, `nn.Linear` copies its bias into every row of the result before
multiplying, which takes a tenth of a training step. oneDNN adds it during the multiplication.
"""

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Linear(nn.Linear):
    """A linear layer, (..., in) -> (..., out)."""

    def __init__(self, inputs: int, outputs: int, bias: bool = True) -> None:
        super().__init__(inputs, outputs, bias)
        self.lora: nn.Module | None = None
        """An update that is added to the output (`lora.py`)."""

    def forward(self, x: Tensor) -> Tensor:
        output = self._project(x)
        return output if self.lora is None else output + self.lora(x)

    def _project(self, x: Tensor) -> Tensor:
        bias = self.effective_bias()
        if bias is not None and torch.is_grad_enabled() and _is_bf16_on_cpu(x):
            output: Tensor = _Multiply.apply(x, self.weight, bias)  # type: ignore[no-untyped-call]
            return output
        return F.linear(x, self.weight, bias)

    def effective_bias(self) -> Tensor | None:
        """Return the bias."""
        return self.bias


class QueryKeyValue(Linear):
    """The projection to queries, keys and values, (..., D) -> (..., 3 D)."""

    def __init__(self, width: int, bias: bool, key_bias: bool) -> None:
        super().__init__(width, 3 * width, bias=bias)
        self.key_bias = key_bias

    def effective_bias(self) -> Tensor | None:
        """Return the bias; if keys have none, their part is 0 and is not trained."""
        if self.bias is None or self.key_bias:
            return self.bias
        query, key, value = self.bias.chunk(3)
        return torch.cat([query, torch.zeros_like(key), value])


def _is_bf16_on_cpu(x: Tensor) -> bool:
    """Whether this is eager bf16 autocast on a CPU; torch.compile fuses on its own."""
    return (
        x.device.type == "cpu"
        and torch.is_autocast_enabled("cpu")
        and torch.get_autocast_dtype("cpu") is torch.bfloat16
        and not torch.compiler.is_compiling()
        and _operator_works()
    )


@functools.cache
def _operator_works() -> bool:
    """Whether oneDNN's operator, which is private to torch, exists and is correct."""
    x = torch.eye(16, dtype=torch.bfloat16)
    try:
        return torch.equal(_multiply(x, x, x[0]), x + x[0])
    except (AttributeError, RuntimeError, TypeError):
        return False


def _multiply(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    operators: Any = torch.ops.mkldnn
    output: Tensor = operators._linear_pointwise.default(x, weight, bias, "none", [], "")
    return output


class _Multiply(torch.autograd.Function):
    """x W^T + b in bf16, and its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        x, weight, bias = (t.to(torch.bfloat16) for t in (x, weight, bias))
        ctx.save_for_backward(x, weight)
        return _multiply(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_rows = grad.flatten(0, -2)
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            (grad_rows @ weight).view(x.shape) if needs_x else None,
            grad_rows.mT @ x.flatten(0, -2) if needs_weight else None,
            grad_rows.sum(0) if needs_bias else None,
        )
