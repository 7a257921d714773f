"""Every method through the front half of the compiler, which needs no GPU: the same numbers, and one compilation."""

import copy
import warnings

import pytest
import torch

from onecrop.methods import METHODS
from tests.contract.test_methods import build, objective


@pytest.mark.parametrize("method", METHODS)
def test_a_compiled_method_computes_the_same_and_is_compiled_once(method):
    made, loader = build(method)
    plain = copy.deepcopy(made)
    torch.compiler.reset()
    compiled = torch.compile(made, dynamic=False, backend="aot_eager")
    with warnings.catch_warnings():  # as in a run: compilers warn about what a user cannot mend
        warnings.simplefilter("ignore")
        objective(compiled, loader.batch(0)).backward()
        objective(plain, loader.batch(0)).backward()
        for (name, p), q in zip(made.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, msg=lambda m, name=name: f"{name}: {m}")
        with torch.compiler.set_stance("fail_on_recompile"):
            terms = compiled(loader.batch(1))
    for name, value in plain(loader.batch(1)).items():
        torch.testing.assert_close(terms[name], value, msg=lambda m, name=name: f"{name}: {m}")
    for (name, b), q in zip(made.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(b, q, msg=lambda m, name=name: f"{name}: {m}")
