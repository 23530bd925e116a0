"""Matrix products of the decoder, with weights laid out once for the layout that multiplies fastest.

Measured on a 2-core AVX-512 CPU with the shapes of a 135M model: in fp32, MKL on a transposed weight [in,
out] beats both `linear` and oneDNN's packed form from batch 1 to 1,024; for the wide output head at 1 to 16
rows, and for bf16 anywhere, the packed form wins (bf16: 1.5x). Only the transposed form is used in `exact`
mode: with MKL_CBWR set to a STRICT branch, a row of its product does not depend on the other rows.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Linear(Protocol):
    """y = x W^T (+ bias), W being [out, in]."""

    def __call__(self, x: Tensor) -> Tensor:
        """[rows, in] -> [rows, out]."""

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """Adds the product for `x` [rows, in] to `residual` [rows, out] in place."""


class TransposedLinear:
    """Holds W^T as a contiguous [in, out] tensor."""

    __slots__ = ("_bias", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self._weight = weight.t().contiguous()
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        if self._bias is None:
            return torch.mm(x, self._weight)
        return torch.mm(x, self._weight).add_(self._bias)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        residual.addmm_(x, self._weight)
        if self._bias is not None:
            residual.add_(self._bias)


class PackedLinear:
    """Holds W in oneDNN's blocked layout, made once for products of about `rows` rows (any number works)."""

    __slots__ = ("_bias", "_multiply", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, rows: int) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), rows)
        self._bias = bias
        self._multiply = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, x: Tensor) -> Tensor:
        return self._multiply(x, self._weight, self._bias, "none", [], "")

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        residual.add_(self(x))


def layer_linear(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """The form for weights inside the layers."""
    if weight.dtype == torch.float32 or not torch.backends.mkldnn.is_available():
        return TransposedLinear(weight, bias)
    return PackedLinear(weight, bias, rows=256)


def head_linear(weight: Tensor, mode: str) -> Linear:
    """The form for the output head, which sees few rows."""
    if mode == "exact" or not torch.backends.mkldnn.is_available():
        return TransposedLinear(weight)
    return PackedLinear(weight, rows=4)
