"""The C function with which a compiled library runs a step: like AOTInductor's own, but it prints nothing.

A step throws a C++ exception for rows that it refuses, such as a token outside the vocabulary. AOTInductor's function
writes it to the standard error, with a page of C++ frames. That is not needed here: the module runs the same rows
again, and raises the error that users see.

This file imports nothing of cellrt, as the compiler's process loads it alone.
"""

from __future__ import annotations

RUN = "cellrt_run"
"""The function's name. It takes the arguments of ``AOTInductorModelContainerRun``, and returns its error codes."""

_DECLARED = (
    "AOTIRuntimeError RUN(AOTInductorModelContainerHandle, AtenTensorHandle*, size_t, AtenTensorHandle*, size_t, "
    "AOTInductorStreamHandle, AOTIProxyExecutorHandle)"
)
_DEFINED = """
__attribute__((visibility("default"))) AOTIRuntimeError RUN(
    AOTInductorModelContainerHandle container, AtenTensorHandle* inputs, size_t num_inputs, AtenTensorHandle* outputs,
    size_t num_outputs, AOTInductorStreamHandle stream, AOTIProxyExecutorHandle proxy) {
  try {
    auto* its = reinterpret_cast<torch::aot_inductor::AOTInductorModelContainer*>(container);
    if (num_inputs != its->num_inputs() || num_outputs != its->num_outputs()) {
      return AOTI_RUNTIME_FAILURE;
    }
    AOTINoGradGuard guard;
    its->run(inputs, outputs, reinterpret_cast<torch::aot_inductor::DeviceStreamType>(stream), proxy);
  } catch (...) {
    return AOTI_RUNTIME_FAILURE;
  }
  return AOTI_RUNTIME_SUCCESS;
}
"""


def c_functions() -> dict[str, list[str]]:
    """Return the function's declaration and definition, in the form in which AOTInductor takes C functions."""
    return {RUN: [f"{_DECLARED};\n{_DEFINED}".replace("RUN(", f"{RUN}(")]}
