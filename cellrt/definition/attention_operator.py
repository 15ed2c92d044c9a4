"""The operators that a step's program calls for attention over pages and spans, and their C functions in a library.

It needs nothing of cellrt: the compiler, a process of its own, reads this file by itself. The kernels are called by
their addresses, which the loader of the library writes to the variables ``ATTEND`` and ``APPEND``.

To the compiler the operators write to nothing, so that it copies no pages. What must come before another is said by
``after``: any tensor of which it makes the earlier one first (``traced_pages.py``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

ATTEND, APPEND = "cellrt_attend_kernel", "cellrt_append_kernel"
"""The library's variables, each with the address of ``int64 (int64 constants, int64 task)``."""

_PAGES = "Tensor pages, Tensor tables, Tensor lengths, Tensor offsets, Tensor positions, Tensor after, int layer"
_MASK = "Tensor bias, int causal, int window, float scale"
_LIBRARY = torch.library.Library("cellrt", "FRAGMENT")
_LIBRARY.define(f"append_and_attend(Tensor query, Tensor key, Tensor value, {_PAGES}, {_MASK}) -> Tensor")
_LIBRARY.define(f"attend_pages(Tensor query, {_PAGES}, {_MASK}) -> Tensor")
_LIBRARY.define(f"append_pages(Tensor key, Tensor value, {_PAGES}) -> Tensor")
_LIBRARY.define(
    f"attend_span(Tensor query, Tensor key, Tensor value, Tensor offsets, Tensor positions, {_MASK}) -> Tensor"
)
_LIBRARY.define("made_after(Tensor value, Tensor after) -> Tensor")


def _as_first(first: Tensor, *_: object) -> Tensor:
    return torch.empty(first.shape, dtype=first.dtype, device=first.device)


def _as_token(first: Tensor, *_: object) -> Tensor:
    return torch.empty(1, dtype=first.dtype, device=first.device)


for _name in ("append_and_attend", "attend_pages", "attend_span", "made_after"):
    torch.library.register_fake(f"cellrt::{_name}", _as_first, lib=_LIBRARY)
torch.library.register_fake("cellrt::append_pages", _as_token, lib=_LIBRARY)

APPEND_AND_ATTEND = torch.ops.cellrt.append_and_attend.default
"""Appends rows of keys and values to pages, then reads: what each query sees, ``[rows, heads, head_dim]``."""
ATTEND_PAGES = torch.ops.cellrt.attend_pages.default
"""The operator that only reads. ``bias`` is that of ``Mask``, or a tensor of integers for none."""
APPEND_PAGES = torch.ops.cellrt.append_pages.default
"""The operator that only appends; returns one number that means nothing."""
ATTEND_SPAN = torch.ops.cellrt.attend_span.default
"""Reads the rows of the own node in the batch."""
MADE_AFTER = torch.ops.cellrt.made_after.default
"""A copy of ``value``, made after ``after``."""


def implement(operator: Any, function: Callable[..., Tensor]) -> None:
    """Have a function compute an operator where a program runs in Python, with what it writes to pages."""
    for key in ("CPU", "CUDA"):
        _LIBRARY.impl(operator, function, key)


ALL = (APPEND_AND_ATTEND, ATTEND_PAGES, APPEND_PAGES, ATTEND_SPAN, MADE_AFTER)

_ROWS, _TABLES = ", ".join(["AtenTensorHandle"] * 3), ", ".join(["AtenTensorHandle"] * 6)
_MASK_TYPES, _RESULT = "AtenTensorHandle, int64_t, int64_t, double", "AtenTensorHandle*"
_DECLARED = {
    APPEND_AND_ATTEND: f"append_and_attend({_ROWS}, {_TABLES}, int64_t, {_MASK_TYPES}, {_RESULT})",
    ATTEND_PAGES: f"attend_pages(AtenTensorHandle, {_TABLES}, int64_t, {_MASK_TYPES}, {_RESULT})",
    APPEND_PAGES: f"append_pages(AtenTensorHandle, AtenTensorHandle, {_TABLES}, int64_t, {_RESULT})",
    ATTEND_SPAN: f"attend_span({_ROWS}, AtenTensorHandle, AtenTensorHandle, {_MASK_TYPES}, {_RESULT})",
    MADE_AFTER: f"made_after(AtenTensorHandle, AtenTensorHandle, {_RESULT})",
}
_DEFINED = """
__attribute__((visibility("default"))) void* ATTEND = nullptr;
__attribute__((visibility("default"))) void* APPEND = nullptr;

struct CellrtTensor {
  int64_t dims = 0, *sizes = nullptr, *strides = nullptr;
  int32_t dtype = 0;
  void* at = nullptr;
  bool is_whole = false;

  explicit CellrtTensor(AtenTensorHandle handle) {
    if (aoti_torch_get_dim(handle, &dims) || aoti_torch_get_sizes(handle, &sizes) ||
        aoti_torch_get_strides(handle, &strides) || aoti_torch_get_dtype(handle, &dtype) ||
        aoti_torch_get_data_ptr(handle, &at)) {
      return;
    }
    int64_t expected = 1;
    is_whole = true;
    for (int64_t k = dims - 1; k >= 0; --k) {
      is_whole = is_whole && (strides[k] == expected || sizes[k] == 1);
      expected *= sizes[k];
    }
  }

  bool is_rows(int64_t rows, int64_t heads, int64_t head_dim, int32_t kind) const {
    return is_whole && dims == 3 && sizes[0] == rows && sizes[1] == heads && sizes[2] == head_dim && dtype == kind;
  }

  bool is_numbers(int64_t count) const {
    return is_whole && dims == 1 && sizes[0] == count && dtype == aoti_torch_dtype_int32();
  }
};

struct CellrtAttention {
  // As attend_task takes them: see _paged_attention.py.
  int64_t constants[9] = {0, 0, 0, 0, 1, 0, 0, 0, 0}, task[15] = {};
  int64_t nodes = 0, rows = 0;
  int32_t dtype = 0;

  bool set_kind(int32_t of) {
    dtype = of;
    constants[3] = of == aoti_torch_dtype_float32() ? 0 : of == aoti_torch_dtype_bfloat16() ? 1 : 2;
    return constants[3] < 2 || of == aoti_torch_dtype_float16();
  }

  bool set_spans(AtenTensorHandle offsets_of, AtenTensorHandle positions_of) {
    CellrtTensor offsets(offsets_of), positions(positions_of);
    if (offsets.dims != 1 || positions.dims != 1) {
      return false;
    }
    nodes = offsets.sizes[0] - 1;
    rows = positions.sizes[0];
    task[0] = nodes;
    task[1] = reinterpret_cast<int64_t>(offsets.at);
    task[2] = reinterpret_cast<int64_t>(positions.at);
    return offsets.is_numbers(nodes + 1) && positions.is_numbers(rows);
  }

  bool set_pages(AtenTensorHandle pages_of, AtenTensorHandle tables_of, AtenTensorHandle lengths_of, int64_t layer) {
    CellrtTensor pages(pages_of), tables(tables_of), lengths(lengths_of);
    const int64_t more = layer < 0 ? 0 : 1;
    if (!pages.is_whole || pages.dims != 5 + more || !set_kind(pages.dtype) || !tables.is_whole || tables.dims != 2 ||
        tables.dtype != aoti_torch_dtype_int32() || tables.sizes[0] != nodes || !lengths.is_numbers(nodes)) {
      return false;
    }
    const int64_t size = dtype == aoti_torch_dtype_float32() ? 4 : 2;
    const int64_t first = reinterpret_cast<int64_t>(pages.at) + (more ? size * layer * pages.strides[1] : 0);
    constants[1] = pages.sizes[3 + more];
    constants[2] = pages.sizes[4 + more];
    task[7] = first;
    task[8] = first + size * pages.strides[1 + more];
    task[9] = pages.sizes[2 + more];
    task[10] = pages.strides[0];
    task[11] = reinterpret_cast<int64_t>(tables.at);
    task[12] = tables.sizes[1];
    task[13] = reinterpret_cast<int64_t>(lengths.at);
    return true;
  }

  bool set_rows(AtenTensorHandle key_of, AtenTensorHandle value_of) {
    CellrtTensor key(key_of), value(value_of);
    task[5] = reinterpret_cast<int64_t>(key.at);
    task[6] = reinterpret_cast<int64_t>(value.at);
    const int64_t heads = constants[1], head_dim = constants[2];
    return key.is_rows(rows, heads, head_dim, dtype) && value.is_rows(rows, heads, head_dim, dtype);
  }

  bool run(void* kernel) const {
    using Kernel = int64_t (*)(int64_t, int64_t);
    return kernel != nullptr && reinterpret_cast<Kernel>(kernel)(
        reinterpret_cast<int64_t>(constants), reinterpret_cast<int64_t>(task)) == 0;
  }

  AOTITorchError attend(
      AtenTensorHandle query_of, AtenTensorHandle bias_of, int64_t causal, int64_t window, double scale,
      AtenTensorHandle* out) {
    CellrtTensor query(query_of), bias(bias_of);
    void* out_at = nullptr;
    if (query.dims != 3 || constants[1] == 0 || query.sizes[1] % constants[1] != 0 ||
        !query.is_rows(rows, query.sizes[1], constants[2], dtype)) {
      return 1;
    }
    if (cellrt_new_like(query, out) || aoti_torch_get_data_ptr(*out, &out_at)) {
      return 1;
    }
    if (bias.dtype == aoti_torch_dtype_float32()) {
      if (!bias.is_whole || bias.dims != 2 || bias.sizes[0] != query.sizes[1] || bias.sizes[1] % 2 == 0) {
        return 1;
      }
      constants[7] = reinterpret_cast<int64_t>(bias.at);
      constants[8] = bias.sizes[1] / 2;
    }
    constants[0] = query.sizes[1];
    constants[4] = causal;
    constants[5] = window;
    std::memcpy(&constants[6], &scale, sizeof(scale));
    task[3] = reinterpret_cast<int64_t>(query.at);
    task[4] = reinterpret_cast<int64_t>(out_at);
    return run(ATTEND) ? 0 : 1;
  }

  static AOTITorchError cellrt_new_like(const CellrtTensor& like, AtenTensorHandle* out) {
    std::vector<int64_t> strides(like.dims);
    int64_t step = 1;
    for (int64_t k = like.dims - 1; k >= 0; --k) {
      strides[k] = step;
      step *= like.sizes[k];
    }
    return aoti_torch_empty_strided(
        like.dims, like.sizes, strides.data(), like.dtype, aoti_torch_device_type_cpu(), -1, out);
  }
};

AOTITorchError aoti_torch_cpu_append_and_attend(
    AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, AtenTensorHandle pages,
    AtenTensorHandle tables, AtenTensorHandle lengths, AtenTensorHandle offsets, AtenTensorHandle positions,
    AtenTensorHandle, int64_t layer, AtenTensorHandle bias, int64_t causal, int64_t window, double scale,
    AtenTensorHandle* out) {
  CellrtAttention made;
  if (!made.set_spans(offsets, positions) || !made.set_pages(pages, tables, lengths, layer) ||
      !made.set_rows(key, value) || !made.run(APPEND)) {
    return 1;
  }
  return made.attend(query, bias, causal, window, scale, out);
}

AOTITorchError aoti_torch_cpu_attend_pages(
    AtenTensorHandle query, AtenTensorHandle pages, AtenTensorHandle tables, AtenTensorHandle lengths,
    AtenTensorHandle offsets, AtenTensorHandle positions, AtenTensorHandle, int64_t layer, AtenTensorHandle bias,
    int64_t causal, int64_t window, double scale, AtenTensorHandle* out) {
  CellrtAttention made;
  if (!made.set_spans(offsets, positions) || !made.set_pages(pages, tables, lengths, layer)) {
    return 1;
  }
  return made.attend(query, bias, causal, window, scale, out);
}

AOTITorchError aoti_torch_cpu_append_pages(
    AtenTensorHandle key, AtenTensorHandle value, AtenTensorHandle pages, AtenTensorHandle tables,
    AtenTensorHandle lengths, AtenTensorHandle offsets, AtenTensorHandle positions, AtenTensorHandle, int64_t layer,
    AtenTensorHandle* out) {
  CellrtAttention made;
  if (!made.set_spans(offsets, positions) || !made.set_pages(pages, tables, lengths, layer) ||
      !made.set_rows(key, value) || !made.run(APPEND)) {
    return 1;
  }
  const int64_t one = 1;
  return aoti_torch_empty_strided(1, &one, &one, made.dtype, aoti_torch_device_type_cpu(), -1, out);
}

AOTITorchError aoti_torch_cpu_attend_span(
    AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, AtenTensorHandle offsets,
    AtenTensorHandle positions, AtenTensorHandle bias, int64_t causal, int64_t window, double scale,
    AtenTensorHandle* out) {
  CellrtAttention made;
  CellrtTensor keys(key), values(value);
  if (!made.set_spans(offsets, positions) || keys.dims != 3 || !made.set_kind(keys.dtype)) {
    return 1;
  }
  made.constants[1] = keys.sizes[1];
  made.constants[2] = keys.sizes[2];
  if (!made.set_rows(key, value)) {
    return 1;
  }
  // One page has the rows of all nodes.
  const int32_t* starts = reinterpret_cast<const int32_t*>(made.task[1]);
  std::vector<int32_t> tables(made.nodes, 0), lengths(made.nodes);
  for (int64_t node = 0; node < made.nodes; ++node) {
    lengths[node] = starts[node + 1] - starts[node];
  }
  made.task[7] = reinterpret_cast<int64_t>(keys.at);
  made.task[8] = reinterpret_cast<int64_t>(values.at);
  made.task[9] = made.rows;
  made.task[11] = reinterpret_cast<int64_t>(tables.data());
  made.task[12] = 1;
  made.task[13] = reinterpret_cast<int64_t>(lengths.data());
  made.task[14] = made.task[1];
  return made.attend(query, bias, causal, window, scale, out);
}

AOTITorchError aoti_torch_cpu_made_after(AtenTensorHandle value_of, AtenTensorHandle, AtenTensorHandle* out) {
  CellrtTensor value(value_of);
  return !value.is_whole || CellrtAttention::cellrt_new_like(value, out) || aoti_torch_copy_(*out, value_of, 0);
}
""".replace("ATTEND", ATTEND).replace("APPEND", APPEND)


def c_functions() -> dict[Any, list[str]]:
    """Return the C declarations that AOTInductor needs for the operators, the last one followed by their definition."""
    declared = {operator: [f"AOTITorchError aoti_torch_cpu_{what}"] for operator, what in _DECLARED.items()}
    declared[MADE_AFTER][0] += f";\n{_DEFINED}"
    return declared
