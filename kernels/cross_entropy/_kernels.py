"""The Triton kernels of the cross-entropy loss: one program per row of logits, `N` rows, `V` classes.

With `y` the scores that enter the softmax (logits, scaled, then capped) and `w` the class weights (1 without), a row of
target `t` has

    m    = max_c y_c,  s = sum_c exp(y_c - m),  lse = m + log s
    loss = (1 - e) w_t (lse - y_t)  +  (e / V) sum_c w_c (lse - y_c)

for label smoothing `e`. Its gradient in `y_c`, with `a` the factor of the loss and `b` that of the z-loss term `lse**2`, is

    exp(y_c - m) / s (a ((1 - e) w_t + (e / V) sum w) + 2 b lse)  -  a (e / V) w_c  -  [c = t] a (1 - e) w_t

and the chain rule through the cap and the scale follows. `m` and `s` are kept, not `lse`: its rounding would be an error of
every probability of the row. Scores are computed and summed in ACC (FP32; FP64 for FP64 logits) whatever the dtype of the
logits, and the gradient is rounded once, when it is stored.
"""

import triton
import triton.language as tl


@triton.jit
def _tanh(u, ACC: tl.constexpr):
    """Hyperbolic tangent to about one unit in the last place of FP32; in FP64 to 1e-16 absolute.

    `libdevice` moved between Triton releases and is missing in some builds, so the two usual ranges are written out: a
    polynomial near zero (coefficients of Cephes' `tanhf`, S. Moshier) and the exponential form beyond.
    """
    t = tl.exp(-2.0 * tl.abs(u))
    result = 1.0 - 2.0 * t / (1.0 + t)
    result = tl.where(u < 0, -result, result)
    if tl.float32 == ACC:
        z = u * u
        p = -5.70498872745e-3 * z + 2.06390887954e-2
        p = p * z - 5.37397155531e-2
        p = p * z + 1.33314422036e-1
        p = p * z - 3.33332819422e-1
        result = tl.where(tl.abs(u) < 0.625, p * z * u + u, result)
    return result


@triton.jit
def _scores(logits, LOGIT_SCALE: tl.constexpr, SOFTCAP: tl.constexpr, ACC: tl.constexpr):
    """Logits as loaded -> the scores that enter the softmax, in ACC."""
    y = logits.to(ACC)
    if LOGIT_SCALE != 1.0:
        y = y * LOGIT_SCALE
    if SOFTCAP > 0.0:
        y = SOFTCAP * _tanh(y / SOFTCAP, ACC)
    return y


@triton.jit
def _columns(start, stride, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Column numbers of a tile and their offsets in a row; 64-bit where a column stride could overflow 32."""
    cols = start + tl.arange(0, BLOCK)
    offsets = cols.to(tl.int64) * stride if WIDE else cols
    return cols, offsets


@triton.jit
def _row_loss(
    row_ptr,  # logits of this row
    stride_col,
    weight_ptr,  # (V,) or None
    weight_sum_ptr,  # () or None
    target,
    V,
    LABEL_SMOOTHING: tl.constexpr,
    LOGIT_SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    WIDE: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Loss, maximum and sum of one row that counts; reads it once (Milakov and Gimelshein, arXiv:1805.02867)."""
    maximum = tl.full((), float("-inf"), ACC)
    total = tl.full((), 0.0, ACC)
    smooth = tl.full((), 0.0, ACC)
    for start in range(0, V, BLOCK):
        cols, offsets = _columns(start, stride_col, BLOCK, WIDE)
        inside = cols < V
        y = _scores(tl.load(row_ptr + offsets, mask=inside, other=0.0), LOGIT_SCALE, SOFTCAP, ACC)
        if LABEL_SMOOTHING > 0.0:
            weighted = y
            if HAS_WEIGHT:
                weighted = y * tl.load(weight_ptr + cols, mask=inside, other=0.0)
            smooth += tl.sum(tl.where(inside, weighted, 0.0), 0)
        # Lanes past the row's end are masked here, after the cap: a capped -inf is a finite -cap and would take part.
        y = tl.where(inside, y, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(y, 0))
        # While every score so far is -inf, any finite base will do; (-inf) - (-inf) would be NaN.
        base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        total = total * tl.exp(maximum - base) + tl.sum(tl.exp(y - base), 0)
        maximum = new_maximum
    log_total = tl.log(total)

    # A target outside [0, V) is reported by the launcher; here it must only not be read from.
    known = (target >= 0) & (target < V)
    at_target = tl.load(row_ptr + target * stride_col, mask=known, other=float("nan"))
    # Not lse - score: where both are large and close, their difference has lost its digits.
    loss = log_total + (maximum - _scores(at_target, LOGIT_SCALE, SOFTCAP, ACC))
    if HAS_WEIGHT:
        loss = loss * tl.load(weight_ptr + target, mask=known, other=0.0)
    if LABEL_SMOOTHING > 0.0:
        mass = V.to(ACC)
        if HAS_WEIGHT:
            mass = tl.load(weight_sum_ptr)
        loss = (1.0 - LABEL_SMOOTHING) * loss + LABEL_SMOOTHING / V * (mass * (maximum + log_total) - smooth)
    return loss, maximum, total


@triton.jit
def _write_row_gradient(
    grad_ptr,  # gradient of this row; may be row_ptr
    grad_stride_col,
    row_ptr,
    stride_col,
    weight_ptr,
    weight_sum_ptr,
    target,
    maximum,
    total,
    loss_factor,
    z_factor,
    V,
    LABEL_SMOOTHING: tl.constexpr,
    LOGIT_SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    Z_LOSS: tl.constexpr,
    WIDE: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Gradient of one row that counts, in the logits' dtype."""
    on_target = loss_factor
    if HAS_WEIGHT:
        known = (target >= 0) & (target < V)
        on_target = loss_factor * tl.load(weight_ptr + target, mask=known, other=0.0)
    on_all = loss_factor * 0.0
    if LABEL_SMOOTHING > 0.0:
        mass = V.to(ACC)
        if HAS_WEIGHT:
            mass = tl.load(weight_sum_ptr)
        on_target = (1.0 - LABEL_SMOOTHING) * on_target
        on_all = LABEL_SMOOTHING / V * loss_factor
        on_probability = on_target + on_all * mass
    else:
        on_probability = on_target
    if Z_LOSS != 0.0:
        on_probability += 2.0 * z_factor * (maximum + tl.log(total))
    on_probability = on_probability / total
    for start in range(0, V, BLOCK):
        cols, offsets = _columns(start, stride_col, BLOCK, WIDE)
        inside = cols < V
        y = _scores(tl.load(row_ptr + offsets, mask=inside, other=0.0), LOGIT_SCALE, SOFTCAP, ACC)
        d = tl.exp(y - maximum) * on_probability
        if LABEL_SMOOTHING > 0.0:
            if HAS_WEIGHT:
                d -= on_all * tl.load(weight_ptr + cols, mask=inside, other=0.0)
            else:
                d -= on_all
        d = tl.where(cols == target, d - on_target, d)
        if SOFTCAP > 0.0:
            r = y / SOFTCAP
            d = d * (1.0 - r * r)
        if LOGIT_SCALE != 1.0:
            d = d * LOGIT_SCALE
        _, grad_offsets = _columns(start, grad_stride_col, BLOCK, WIDE)
        tl.store(grad_ptr + grad_offsets, d.to(grad_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _write_row_zeros(grad_ptr, grad_stride_col, V, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    zeros = tl.zeros((BLOCK,), grad_ptr.dtype.element_ty)
    for start in range(0, V, BLOCK):
        cols, offsets = _columns(start, grad_stride_col, BLOCK, WIDE)
        tl.store(grad_ptr + offsets, zeros, mask=cols < V)


@triton.heuristics({"HAS_WEIGHT": lambda args: args["weight_ptr"] is not None})
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


@triton.heuristics({"HAS_WEIGHT": lambda args: args["weight_ptr"] is not None})
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
            LABEL_SMOOTHING, LOGIT_SCALE, SOFTCAP, HAS_WEIGHT, WIDE, ACC, BLOCK,
        )  # fmt: skip
    tl.store(loss_ptr + row, loss)
    tl.store(maximum_ptr + row, maximum)
    tl.store(total_ptr + row, total)


@triton.heuristics({"HAS_WEIGHT": lambda args: args["weight_ptr"] is not None})
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
):
    """Gradient of each row, the incoming gradient and the divisor applied before rounding."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row * target_stride)
    grad_ptr += row * grad_stride_row
    if target == ignore_index:
        _write_row_zeros(grad_ptr, grad_stride_col, V, WIDE, BLOCK)
    else:
        grad_loss = tl.load(grad_loss_ptr + row * grad_loss_stride).to(ACC)
        loss_factor = grad_loss / tl.load(divisors_ptr)
        z_factor = grad_loss / tl.load(divisors_ptr + 1) * Z_LOSS
        _write_row_gradient(
            grad_ptr, grad_stride_col, logits_ptr + row * logits_stride_row, logits_stride_col,
            weight_ptr, weight_sum_ptr, target, tl.load(maximum_ptr + row), tl.load(total_ptr + row), loss_factor,
            z_factor, V,
            LABEL_SMOOTHING, LOGIT_SCALE, SOFTCAP, HAS_WEIGHT, Z_LOSS, WIDE, ACC, BLOCK,
        )  # fmt: skip


@triton.heuristics({"HAS_WEIGHT": lambda args: args["weight_ptr"] is not None})
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
        _write_row_zeros(grad_ptr, grad_stride_col, V, WIDE, BLOCK)
    else:
        loss, maximum, total = _row_loss(
            logits_ptr, logits_stride_col, weight_ptr, weight_sum_ptr, target, V,
            LABEL_SMOOTHING, LOGIT_SCALE, SOFTCAP, HAS_WEIGHT, WIDE, ACC, BLOCK,
        )  # fmt: skip
        # Every thread of this program has read the target's score before any of them overwrites it.
        tl.debug_barrier()
        _write_row_gradient(
            grad_ptr, grad_stride_col, logits_ptr, logits_stride_col, weight_ptr, weight_sum_ptr, target,
            maximum, total, 1.0 / tl.load(divisors_ptr), 1.0 / tl.load(divisors_ptr + 1) * Z_LOSS, V,
            LABEL_SMOOTHING, LOGIT_SCALE, SOFTCAP, HAS_WEIGHT, Z_LOSS, WIDE, ACC, BLOCK,
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
):
    """Multiplies a finished gradient by the incoming one; touches nothing where that is 1, found out on the device."""
    row = tl.program_id(0).to(tl.int64)
    grad_loss = tl.load(grad_loss_ptr + row * grad_loss_stride).to(ACC)
    if grad_loss != 1.0:
        grad_ptr += row * grad_stride_row
        for start in range(0, V, BLOCK):
            cols, offsets = _columns(start, grad_stride_col, BLOCK, WIDE)
            d = tl.load(grad_ptr + offsets, mask=cols < V, other=0.0).to(ACC) * grad_loss
            tl.store(grad_ptr + offsets, d.to(grad_ptr.dtype.element_ty), mask=cols < V)
