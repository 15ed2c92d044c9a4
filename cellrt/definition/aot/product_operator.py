"""The operator that a step's program calls for a product with a packed weight, and its C function in a library.

It needs nothing of cellrt: the compiler, a process of its own, reads this file by itself. The kernel
(``products/packed.py``) is called by its address, which is written to ``KERNEL`` when the library is loaded.
"""

from __future__ import annotations

from typing import Any

import torch

KERNEL = "cellrt_product_kernel"
"""The library's variable with the address of ``void (int64 x, stride, rows, depth, weight, bias, columns, out)``."""

_LIBRARY = torch.library.Library("cellrt", "FRAGMENT")
_LIBRARY.define("product(Tensor x, Tensor weight, int columns) -> Tensor")
_LIBRARY.define("product_add(Tensor x, Tensor weight, Tensor bias, int columns) -> Tensor")


def _shape_of_product(x: torch.Tensor, weight: torch.Tensor, columns: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], columns))


def _shape_of_product_add(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, columns: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], columns))


torch.library.register_fake("cellrt::product", _shape_of_product, lib=_LIBRARY)
torch.library.register_fake("cellrt::product_add", _shape_of_product_add, lib=_LIBRARY)
PRODUCT = torch.ops.cellrt.product.default
"""The product ``x [..., depth] @ weight.T``: ``[..., columns]``; ``weight`` has any shape, and the memory of a packed
one.
"""
PRODUCT_ADD = torch.ops.cellrt.product_add.default
"""The product ``x [..., depth] @ weight.T + bias [columns]``."""

_DECLARED = "AOTITorchError aoti_torch_cpu_product(AtenTensorHandle, AtenTensorHandle, int64_t, AtenTensorHandle*)"
_DECLARED_ADD = (
    "AOTITorchError aoti_torch_cpu_product_add"
    "(AtenTensorHandle, AtenTensorHandle, AtenTensorHandle, int64_t, AtenTensorHandle*)"
)
_DEFINED = """
__attribute__((visibility("default"))) void* KERNEL = nullptr;

static AOTITorchError cellrt_product_of(
    AtenTensorHandle x, AtenTensorHandle weight, void* bias, int64_t columns, AtenTensorHandle* result) {
  int64_t dims, *sizes, *strides;
  void *x_at, *weight_at, *result_at;
  if (KERNEL == nullptr || aoti_torch_get_dim(x, &dims) || aoti_torch_get_sizes(x, &sizes) ||
      aoti_torch_get_strides(x, &strides) || aoti_torch_get_data_ptr(x, &x_at) ||
      aoti_torch_get_data_ptr(weight, &weight_at)) {
    return 1;
  }
  const int64_t depth = sizes[dims - 1];
  std::vector<int64_t> shape(sizes, sizes + dims), steps(dims);
  shape[dims - 1] = columns;
  int64_t rows = 1, step = 1, expected = depth, stride = depth;
  bool is_packed = strides[dims - 1] == 1 || depth == 1;
  for (int64_t k = dims - 1; k >= 0; --k) {
    steps[k] = step;
    step *= shape[k];
    if (k < dims - 1) {
      rows *= sizes[k];
      is_packed = is_packed && (dims == 2 || strides[k] == expected || sizes[k] == 1);
      expected *= sizes[k];
    }
  }
  if (dims == 2 && sizes[0] > 1) {
    stride = strides[0];
  }
  if (aoti_torch_empty_strided(
          dims, shape.data(), steps.data(), aoti_torch_dtype_float32(), aoti_torch_device_type_cpu(), -1, result) ||
      aoti_torch_get_data_ptr(*result, &result_at)) {
    return 1;
  }
  std::vector<float> copied;
  if (!is_packed) {
    copied.resize(rows * depth);
    stride = depth;
    for (int64_t row = 0; row < rows; ++row) {
      int64_t rest = row, at = 0;
      for (int64_t k = dims - 2; k >= 0; --k) {
        at += rest % sizes[k] * strides[k];
        rest /= sizes[k];
      }
      for (int64_t k = 0; k < depth; ++k) {
        copied[row * depth + k] = static_cast<const float*>(x_at)[at + k * strides[dims - 1]];
      }
    }
    x_at = copied.data();
  }
  using Kernel = void (*)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t);
  reinterpret_cast<Kernel>(KERNEL)(
      reinterpret_cast<int64_t>(x_at), stride, rows, depth, reinterpret_cast<int64_t>(weight_at),
      reinterpret_cast<int64_t>(bias), columns, reinterpret_cast<int64_t>(result_at));
  return 0;
}

AOTITorchError aoti_torch_cpu_product(
    AtenTensorHandle x, AtenTensorHandle weight, int64_t columns, AtenTensorHandle* result) {
  return cellrt_product_of(x, weight, nullptr, columns, result);
}

AOTITorchError aoti_torch_cpu_product_add(
    AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle bias, int64_t columns, AtenTensorHandle* result) {
  void* bias_at;
  return aoti_torch_get_data_ptr(bias, &bias_at) || cellrt_product_of(x, weight, bias_at, columns, result);
}
""".replace("KERNEL", KERNEL)


def c_functions() -> dict[Any, list[str]]:
    """Return the C declarations of the operators for AOTInductor; the last one is followed by their definition."""
    return {PRODUCT: [_DECLARED], PRODUCT_ADD: [f"{_DECLARED_ADD};\n{_DEFINED}"]}
