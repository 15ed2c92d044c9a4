"""Fewer examples where the core's functions are not compiled, as they are a hundred times slower then."""

import hypothesis
import numba

if numba.config.DISABLE_JIT:
    hypothesis.settings.register_profile(
        "interpreted", parent=hypothesis.settings.get_profile("cellrt"), max_examples=4
    )
    hypothesis.settings.load_profile("interpreted")
    # `make mutants`: that one example fails is enough, whichever is the smallest.
    hypothesis.settings.register_profile(
        "mutants",
        parent=hypothesis.settings.get_profile("interpreted"),
        derandomize=True,
        max_examples=8,
        report_multiple_bugs=False,
        phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate),
    )
