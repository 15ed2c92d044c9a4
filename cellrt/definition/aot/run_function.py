"""The C function of a library that runs its step: like AOTInductor's own, but it prints nothing.

A step refuses rows by an exception, such as that of a token outside the vocabulary. AOTInductor's function writes that
to the standard error, with a page of C++ frames; here the module, which then runs the same rows, raises the error that
users see.

This file needs nothing of cellrt: the compiler, a process of its own, reads it by itself.
"""

from __future__ import annotations

RUN = "cellrt_run"
"""The function's name. It takes the arguments of ``AOTInductorModelContainerRun``, and returns whether it failed."""

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
    """Return the function's declaration and definition for AOTInductor; they belong to no operator."""
    return {RUN: [f"{_DECLARED};\n{_DEFINED}".replace("RUN(", f"{RUN}(")]}
