"""The Triton kernels of the cross-entropy loss: one program per row of logits, `N` rows, `V` classes. See `_rows.py`."""

import triton
import triton.language as tl

from ._rows import _columns, _row_loss, _write_row_gradient, _write_row_zeros


@triton.jit
def _ce_count_kernel(
    target_ptr,  # (N,) int64
    target_stride,
    weight_ptr,  # (V,) ACC or None
    divisors_ptr,  # (2,) ACC out: what the mean of the loss, of the z-loss divides by
    valid_ptr,  # () int32 out: 1 when every target is in range
    N,
    V,
    ignore_index,
    HAS_WEIGHT: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Counts (or weighs) the targets that are not ignored and checks their range; one program, no atomics."""
    count = tl.full((), 0.0, ACC)
    mass = tl.full((), 0.0, ACC)
    wrong = tl.full((), 0, tl.int32)
    for start in range(0, N, BLOCK):
        rows = start + tl.arange(0, BLOCK)
        target = tl.load(target_ptr + rows.to(tl.int64) * target_stride, mask=rows < N, other=ignore_index)
        counts = target != ignore_index
        known = (target >= 0) & (target < V)
        count += tl.sum(counts.to(ACC), 0)
        wrong += tl.sum((counts & ~known).to(tl.int32), 0)
        if HAS_WEIGHT:
            mass += tl.sum(tl.load(weight_ptr + target, mask=counts & known, other=0.0), 0)
    if not HAS_WEIGHT:
        mass = count
    tl.store(divisors_ptr, mass)
    tl.store(divisors_ptr + 1, count)
    tl.store(valid_ptr, (wrong == 0).to(tl.int32))


@triton.jit
def _ce_forward_kernel(
    logits_ptr,  # (N, V)
    logits_stride_row,
    logits_stride_col,
    target_ptr,  # (N,) int64
    target_stride,
    weight_ptr,  # (V,) ACC or None
    weight_sum_ptr,  # () ACC or None
    loss_ptr,  # (N,) ACC out
    maximum_ptr,  # (N,) ACC out
    total_ptr,  # (N,) ACC out
    V,
    ignore_index,
    LABEL_SMOOTHING: tl.constexpr,
    LOGIT_SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    WIDE: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """Loss, maximum and sum of each row; 0, 0 and 1 where the target is ignored, and such a row is not read."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row * target_stride)
    loss = tl.full((), 0.0, ACC)
    maximum = tl.full((), 0.0, ACC)
    total = tl.full((), 1.0, ACC)
    if target != ignore_index:
        loss, maximum, total = _row_loss(
            logits_ptr + row * logits_stride_row, logits_stride_col, weight_ptr, weight_sum_ptr, target, V,
            LABEL_SMOOTHING, LOGIT_SCALE, SOFTCAP, HAS_WEIGHT, WIDE, ACC, BLOCK, LANES,
        )  # fmt: skip
    tl.store(loss_ptr + row, loss)
    tl.store(maximum_ptr + row, maximum)
    tl.store(total_ptr + row, total)


@triton.jit
def _ce_backward_kernel(
    grad_ptr,  # (N, V) out
    grad_stride_row,
    grad_stride_col,
    grad_loss_ptr,  # (N,) or, with stride 0, ()
    grad_loss_stride,
    logits_ptr,  # (N, V)
    logits_stride_row,
    logits_stride_col,
    target_ptr,  # (N,) int64
    target_stride,
    weight_ptr,  # (V,) ACC or None
    weight_sum_ptr,  # () ACC or None
    maximum_ptr,  # (N,) ACC
    total_ptr,  # (N,) ACC
    divisors_ptr,  # (2,) ACC
    V,
    ignore_index,
    LABEL_SMOOTHING: tl.constexpr,
    LOGIT_SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    Z_LOSS: tl.constexpr,
    WIDE: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """Gradient of each row, the incoming gradient and the divisor applied before rounding."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row * target_stride)
    grad_ptr += row * grad_stride_row
    if target == ignore_index:
        _write_row_zeros(grad_ptr, grad_stride_col, V, WIDE, BLOCK, LANES)
    else:
        grad_loss = tl.load(grad_loss_ptr + row * grad_loss_stride).to(ACC)
        loss_factor = grad_loss / tl.load(divisors_ptr)
        z_factor = grad_loss / tl.load(divisors_ptr + 1) * Z_LOSS
        _write_row_gradient(
            grad_ptr, grad_stride_col, logits_ptr + row * logits_stride_row, logits_stride_col,
            weight_ptr, weight_sum_ptr, target, tl.load(maximum_ptr + row), tl.load(total_ptr + row), loss_factor,
            z_factor, V,
            LABEL_SMOOTHING, LOGIT_SCALE, SOFTCAP, HAS_WEIGHT, Z_LOSS, WIDE, ACC, BLOCK, LANES,
        )  # fmt: skip


@triton.jit
def _ce_fused_kernel(
    grad_ptr,  # (N, V) out; may be logits_ptr
    grad_stride_row,
    grad_stride_col,
    logits_ptr,  # (N, V)
    logits_stride_row,
    logits_stride_col,
    target_ptr,  # (N,) int64
    target_stride,
    weight_ptr,  # (V,) ACC or None
    weight_sum_ptr,  # () ACC or None
    divisors_ptr,  # (2,) ACC
    loss_ptr,  # (N,) ACC out
    maximum_ptr,  # (N,) ACC out
    total_ptr,  # (N,) ACC out
    V,
    ignore_index,
    LABEL_SMOOTHING: tl.constexpr,
    LOGIT_SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    Z_LOSS: tl.constexpr,
    WIDE: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """Loss of each row, and its gradient for an incoming gradient of 1, which may take the place of the logits."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row * target_stride)
    logits_ptr += row * logits_stride_row
    grad_ptr += row * grad_stride_row
    loss = tl.full((), 0.0, ACC)
    maximum = tl.full((), 0.0, ACC)
    total = tl.full((), 1.0, ACC)
    if target == ignore_index:
        _write_row_zeros(grad_ptr, grad_stride_col, V, WIDE, BLOCK, LANES)
    else:
        loss, maximum, total = _row_loss(
            logits_ptr, logits_stride_col, weight_ptr, weight_sum_ptr, target, V,
            LABEL_SMOOTHING, LOGIT_SCALE, SOFTCAP, HAS_WEIGHT, WIDE, ACC, BLOCK, LANES,
        )  # fmt: skip
        # Every thread of this program has read the target's score before any of them overwrites it.
        tl.debug_barrier()
        _write_row_gradient(
            grad_ptr, grad_stride_col, logits_ptr, logits_stride_col, weight_ptr, weight_sum_ptr, target,
            maximum, total, 1.0 / tl.load(divisors_ptr), 1.0 / tl.load(divisors_ptr + 1) * Z_LOSS, V,
            LABEL_SMOOTHING, LOGIT_SCALE, SOFTCAP, HAS_WEIGHT, Z_LOSS, WIDE, ACC, BLOCK, LANES,
        )  # fmt: skip
    tl.store(loss_ptr + row, loss)
    tl.store(maximum_ptr + row, maximum)
    tl.store(total_ptr + row, total)


@triton.jit
def _ce_rescale_kernel(
    grad_ptr,  # (N, V) in and out
    grad_stride_row,
    grad_stride_col,
    grad_loss_ptr,  # (N,) or, with stride 0, ()
    grad_loss_stride,
    V,
    WIDE: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """Multiplies a finished gradient by the incoming one; touches nothing where that is 1, found out on the device."""
    row = tl.program_id(0).to(tl.int64)
    grad_loss = tl.load(grad_loss_ptr + row * grad_loss_stride).to(ACC)
    if grad_loss != 1.0:
        grad_ptr += row * grad_stride_row
        for start in range(0, V, BLOCK):
            cols, offsets = _columns(start, grad_stride_col, BLOCK, LANES, WIDE)
            d = tl.load(grad_ptr + offsets, mask=cols < V, other=0.0).to(ACC)
            d = tl.where(d == 0.0, 0.0, d * grad_loss)  # zeros of ignored rows stay, also by inf
            tl.store(grad_ptr + offsets, d.to(grad_ptr.dtype.element_ty), mask=cols < V)
