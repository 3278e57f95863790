"""What the Triton kernels of the cross-entropy loss do with one row of logits, of `V` classes.

With `y` the scores that enter the softmax (logits, scaled, then capped) and `w` the class weights (1 without), a row of
target `t` has

    m    = max_c y_c,  s = sum_c exp(y_c - m),  lse = m + log s
    loss = (1 - e) w_t (lse - y_t)  +  (e / V) sum_c w_c (lse - y_c)

for label smoothing `e`. Its gradient in `y_c`, with `a` the factor of the loss and `b` that of the z-loss term `lse**2`, is

    exp(y_c - m) / s (a ((1 - e) w_t + (e / V) sum w) + 2 b lse)  -  a (e / V) w_c  -  [c = t] a (1 - e) w_t

and the chain rule through the cap and the scale follows. `m` and `s` are kept, not `lse`: its rounding would be an error of
every probability of the row. Scores are computed and summed in ACC (FP32; FP64 for FP64 logits) whatever the dtype of the
logits, and the gradient is rounded once, when it is stored.

A row is walked tile by tile, a tile being `BLOCK` columns as `BLOCK / LANES` groups of `LANES` neighbours. Each group keeps a
maximum and a sum of its own until the row has been read, so that no tile waits for a reduction over the whole program, and one
exponential a column is enough.
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
def _columns(start, stride, BLOCK: tl.constexpr, LANES: tl.constexpr, WIDE: tl.constexpr):
    """Column numbers of a tile and their offsets in a row; 64-bit where a column stride could overflow 32."""
    cols = start + tl.arange(0, BLOCK // LANES)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    offsets = cols.to(tl.int64) * stride if WIDE else cols
    return cols, offsets


@triton.jit
def _absorb_tile(
    maximum,  # of each group so far
    total,
    smooth,
    start,
    row_ptr,
    stride_col,
    weight_ptr,
    V,
    LABEL_SMOOTHING: tl.constexpr,
    LOGIT_SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    WIDE: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    MASKED: tl.constexpr,  # whether the row ends in this tile
):
    """Maximum and sum of each group (Milakov and Gimelshein, arXiv:1805.02867) with one more tile of the row."""
    cols, offsets = _columns(start, stride_col, BLOCK, LANES, WIDE)
    inside = cols < V
    # The row is read again, from the L2 if it is still there.
    if MASKED:
        logits = tl.load(row_ptr + offsets, mask=inside, other=0.0, eviction_policy="evict_last")
    else:
        logits = tl.load(row_ptr + offsets, eviction_policy="evict_last")
    y = _scores(logits, LOGIT_SCALE, SOFTCAP, ACC)
    if LABEL_SMOOTHING > 0.0:
        weighted = y
        if HAS_WEIGHT:
            weighted = y * tl.load(weight_ptr + cols, mask=inside, other=0.0)
        smooth += tl.sum(tl.where(inside, weighted, 0.0), 1)
    if MASKED:
        # Lanes past the row's end are masked here, after the cap: a capped -inf is a finite -cap and would take part.
        y = tl.where(inside, y, float("-inf"))
    new_maximum = tl.maximum(maximum, tl.max(y, 1))
    # While every score so far is -inf, any finite base will do; (-inf) - (-inf) would be NaN.
    base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    total = total * tl.exp(maximum - base) + tl.sum(tl.exp(y - base[:, None]), 1)
    return new_maximum, total, smooth


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
    LANES: tl.constexpr,
):
    """Loss, maximum and sum of one row that counts; reads it once."""
    # A target outside [0, V) is reported by the launcher; here it must only not be read from.
    known = (target >= 0) & (target < V)
    at_target = tl.load(row_ptr + target * stride_col, mask=known, other=float("nan"))
    maxima = tl.full((BLOCK // LANES,), float("-inf"), ACC)
    totals = tl.zeros((BLOCK // LANES,), ACC)
    smooths = tl.zeros((BLOCK // LANES,), ACC)
    whole = V // BLOCK * BLOCK
    for start in range(0, whole, BLOCK):
        maxima, totals, smooths = _absorb_tile(
            maxima, totals, smooths, start, row_ptr, stride_col, weight_ptr, V,
            LABEL_SMOOTHING, LOGIT_SCALE, SOFTCAP, HAS_WEIGHT, WIDE, ACC, BLOCK, LANES, MASKED=False,
        )  # fmt: skip
    if whole < V:
        maxima, totals, smooths = _absorb_tile(
            maxima, totals, smooths, whole, row_ptr, stride_col, weight_ptr, V,
            LABEL_SMOOTHING, LOGIT_SCALE, SOFTCAP, HAS_WEIGHT, WIDE, ACC, BLOCK, LANES, MASKED=True,
        )  # fmt: skip
    maximum = tl.max(maxima, 0)
    base = tl.where(maximum == float("-inf"), 0.0, maximum)
    total = tl.sum(totals * tl.exp(maxima - base), 0)
    log_total = tl.log(total)

    # Not lse - score: where both are large and close, their difference has lost its digits.
    loss = log_total + (maximum - _scores(at_target, LOGIT_SCALE, SOFTCAP, ACC))
    if HAS_WEIGHT:
        loss = loss * tl.load(weight_ptr + target, mask=known, other=0.0)
    if LABEL_SMOOTHING > 0.0:
        mass = V.to(ACC)
        if HAS_WEIGHT:
            mass = tl.load(weight_sum_ptr)
        smooth = mass * (maximum + log_total) - tl.sum(smooths, 0)
        loss = (1.0 - LABEL_SMOOTHING) * loss + LABEL_SMOOTHING / V * smooth
    return loss, maximum, total


@triton.jit
def _write_gradient_tile(
    start,
    grad_ptr,
    grad_stride_col,
    row_ptr,
    stride_col,
    weight_ptr,
    target,
    maximum,
    on_probability,
    on_target,
    on_all,
    V,
    LABEL_SMOOTHING: tl.constexpr,
    LOGIT_SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    WIDE: tl.constexpr,
    ACC: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
    MASKED: tl.constexpr,
):
    cols, offsets = _columns(start, stride_col, BLOCK, LANES, WIDE)
    inside = cols < V
    if MASKED:
        logits = tl.load(row_ptr + offsets, mask=inside, other=0.0, eviction_policy="evict_first")
    else:
        logits = tl.load(row_ptr + offsets, eviction_policy="evict_first")
    y = _scores(logits, LOGIT_SCALE, SOFTCAP, ACC)
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
    _, grad_offsets = _columns(start, grad_stride_col, BLOCK, LANES, WIDE)
    # Streamed: nothing reads it before the L2 has been through many other rows.
    if MASKED:
        tl.store(grad_ptr + grad_offsets, d.to(grad_ptr.dtype.element_ty), mask=inside, cache_modifier=".cs")
    else:
        tl.store(grad_ptr + grad_offsets, d.to(grad_ptr.dtype.element_ty), cache_modifier=".cs")


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
    LANES: tl.constexpr,
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
    # Backwards: what the loss read last is the likeliest to be in the L2 still.
    whole = V // BLOCK * BLOCK
    if whole < V:
        _write_gradient_tile(
            whole, grad_ptr, grad_stride_col, row_ptr, stride_col, weight_ptr, target, maximum, on_probability, on_target,
            on_all, V, LABEL_SMOOTHING, LOGIT_SCALE, SOFTCAP, HAS_WEIGHT, WIDE, ACC, BLOCK, LANES, MASKED=True,
        )  # fmt: skip
    for start in range(0, whole, BLOCK):
        _write_gradient_tile(
            whole - BLOCK - start, grad_ptr, grad_stride_col, row_ptr, stride_col, weight_ptr, target, maximum,
            on_probability, on_target, on_all, V,
            LABEL_SMOOTHING, LOGIT_SCALE, SOFTCAP, HAS_WEIGHT, WIDE, ACC, BLOCK, LANES, MASKED=False,
        )  # fmt: skip


@triton.jit
def _write_row_zeros(grad_ptr, grad_stride_col, V, WIDE: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr):
    zeros = tl.zeros((BLOCK // LANES, LANES), grad_ptr.dtype.element_ty)
    for start in range(0, V, BLOCK):
        cols, offsets = _columns(start, grad_stride_col, BLOCK, LANES, WIDE)
        tl.store(grad_ptr + offsets, zeros, mask=cols < V, cache_modifier=".cs")
