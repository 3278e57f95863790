"""The kernels compile for a GPU, without one: the interpreter accepts Python that Triton's compiler does not."""

import subprocess
import sys

import pytest

from liger_compat import kernels

CODE = """
import inspect, itertools, warnings
warnings.simplefilter("ignore")
import triton.language as tl, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from liger_compat.kernels.cross_entropy import _kernels

POINTERS = {"logits_ptr": "*{}", "grad_ptr": "*{}", "target_ptr": "*i64", "valid_ptr": "*i32"}

def compile_kernel(kernel, dtype, constants):
    signature, constexprs = {}, {}
    for name in kernel.arg_names:
        if name in constants:
            signature[name], constexprs[name] = "constexpr", constants[name]
        elif name.endswith("_ptr"):
            signature[name] = POINTERS.get(name, "*fp64" if dtype == "fp64" else "*fp32").format(dtype)
        else:
            signature[name] = "i32"
    triton.compile(ASTSource(fn=kernel, signature=signature, constexprs=constexprs), target=GPUTarget("cuda", 90, 32))

count = 0
for name, value in vars(_kernels).items():
    if not name.endswith("_kernel"):
        continue
    kernel = value if isinstance(value, triton.JITFunction) else value.fn
    for dtype, options, weighted, wide in itertools.product(("bf16", "fp64"), (False, True), (False, True), (False, True)):
        constants = {
            "LABEL_SMOOTHING": 0.1 * options, "LOGIT_SCALE": 0.5 if options else 1.0, "SOFTCAP": 30.0 * options,
            "Z_LOSS": 0.1 * options,
            "HAS_WEIGHT": weighted, "WIDE": wide, "ACC": tl.float64 if dtype == "fp64" else tl.float32, "BLOCK": 1024,
            "LANES": 8,
        }
        if not weighted:
            constants |= {"weight_ptr": None, "weight_sum_ptr": None}
        compile_kernel(kernel, dtype, constants)
        count += 1
print(count)
"""


def test_every_kernel_compiles() -> None:
    problem = kernels.triton_problem()
    if problem is not None:
        pytest.skip(f"na: {problem}")
    done = subprocess.run([sys.executable, "-I", "-c", CODE], capture_output=True, text=True, check=False, env={})
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) >= 5 * 16
