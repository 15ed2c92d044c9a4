"""Compiled functions that only compiled code calls: parts of their callers, without machine code of their own.

Numba optimises each function together with everything that it calls, makes machine code of it, and does the same again
for each of its callers. For a function that is not called from outside that work is wasted, and for the core's
functions it was more than half of the compilation time. So a part has only LLVM's code, which is optimised where it is
linked in.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding as llvm
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompileResult

KIND = "part"
"""The kind of a kept part, in place of Numba's "object"."""


class _Codegen:
    """Numba's code generator for a part, which has no variables in memory yet."""

    def __init__(self, codegen: Any) -> None:
        self._codegen = codegen

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codegen, name)

    def set_env(self, name: str, env: object) -> None:
        """Do nothing: an environment is for code that raises errors that it makes while it runs, and parts do not."""


class PartLibrary(JITCodeLibrary):  # type: ignore[misc]
    """The code of a part."""

    _shared_module: Any

    @property
    def codegen(self) -> Any:
        """The code generator."""
        return _Codegen(self._codegen)

    def _optimize_final_module(self) -> None:
        """Do nothing: a part is optimised where it is linked in."""

    def _finalize_final_module(self) -> None:
        """End the module without making machine code of it."""
        self._finalize_dynamic_globals()
        self._verify_declare_only_symbols()
        self._finalized = True

    def _get_module_for_linking(self) -> Any:
        """Return the module, which every caller may have a copy of."""
        self._ensure_finalized()
        if self._shared_module is None:
            self._shared_module = self._final_module
            for function in self._shared_module.functions:
                if not function.is_declaration and function.linkage == llvm.Linkage.external:
                    function.linkage = "linkonce_odr"
        return self._shared_module

    def get_pointer_to_function(self, name: str) -> int:
        """Return 0: a part is not called by its address."""
        return 0

    def serialize_using_object_code(self) -> tuple[str, str, bytes]:
        """Return the content that is kept of a part: only LLVM's code."""
        return self.name, KIND, self._get_module_for_linking().as_bitcode()


def rebuilt(target_context: Any, payload: Any) -> Any:
    """Return a compiled function from its kept content, a part or another."""
    (name, kind, data), described, env, signature, objectmode, lifted, annotation, reload_init, envs = payload
    if kind != KIND:
        return CompileResult._rebuild(target_context, *payload)
    # Do as Numba does with an object file, but with LLVM's code.
    for initialise in reload_init:
        initialise()
    library = PartLibrary(target_context.codegen(), name)
    library._final_module = llvm.parse_bitcode(data)
    library._finalize_final_module()
    return CompileResult(
        target_context=target_context,
        typing_context=target_context.typing_context,
        library=library,
        environment=env,
        entry_point=target_context.get_executable(library, described, env),
        fndesc=described,
        type_annotation=annotation,
        signature=signature,
        objectmode=objectmode,
        lifted=lifted,
        typing_error=None,
        call_helper=None,
        metadata=None,
        reload_init=reload_init,
        referenced_envs=envs,
    )


def bitcode_of(payload: Any) -> bytes:
    """Return LLVM's code from kept content."""
    _, kind, data = payload[0]
    bitcode: bytes = data if kind == KIND else data[1]
    return bitcode
