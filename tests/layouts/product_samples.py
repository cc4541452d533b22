"""Ways to call reductions, orders and products."""

import torch

from virtual_ranks import bools, floats, ints, sample

A, B = floats(3, 4, 3), floats(3, 1, 3)
X, Y, Z = floats(4, 6), floats(4, 6), floats(2, 4, 6)


def on(name, *tensors, args=(), kwargs=None, **more):
    """Called with these arguments behind the tensors."""
    return sample(
        name, *tensors, program=lambda op, *own: op(*own, *args, **(kwargs or {})), **more
    )


def lower(*shape):
    """Triangular matrices that can be solved."""
    size = shape[-1]
    return (0.1 * floats(*shape, size)).tril(-1) + torch.eye(size, dtype=torch.float64)


def spectral(name, x, **more):
    """By windows of 8."""

    def program(op, x, window):
        return op(x, 8, 4, None, window, **more)

    return sample(name, x, torch.hann_window(8).double() + 0.1, program=program, takes_empty=False)


def over(name, *more_args, x=X, dims=(0, -1), **kwargs):
    """Along some dims, with and without ``keepdim``."""
    return [
        on(name, x, args=(*more_args, dim), kwargs={**kwargs, "keepdim": keepdim})
        for dim in dims
        for keepdim in (False, True)
    ]


def along(name, x=X, dims=(0, 1, -1), **kwargs):
    return [on(name, x, args=(dim,), kwargs=kwargs) for dim in dims]


REDUCTIONS = [
    sample("sum", X),
    sample("sum", bools(4, 6)),
    *over("sum.dim_IntList", x=Z, dims=([0], [-1], [0, 2], [1, 2], [0, 1, 2], None, [])),
    on("sum.dim_IntList", X, args=([1],), kwargs={"dtype": torch.float32}),
    on("sum.dim_IntList", X * 9, args=([1],), kwargs={"dtype": torch.int64}),
    sample("nansum", X),
    *over("nansum", x=Z, dims=([0], [2])),
    sample("mean", X),
    *over("mean.dim", x=Z, dims=([0], [-1], [1, 2], None)),
    sample("count_nonzero", bools(4, 6)),
    on("count_nonzero", X, args=(0,)),
    on("count_nonzero.dim_IntList", Z, args=([0, 2],)),
    *over("amax", x=Z, dims=([0], [1, 2], [])),
    *over("amin", dims=([0], [1])),
    *[
        on("aminmax", X, kwargs={"dim": d, "keepdim": k})
        for d in (0, 1, None)
        for k in (True, False)
    ],
    sample("max", X),
    sample("min", X),
    *over("max.dim"),
    *over("min.dim"),
    sample("argmax", X),
    *over("argmax"),
    *over("argmin"),
    on("argmax", X, kwargs={"keepdim": True}),
    sample("all", bools(4, 6)),
    *over("all.dim", x=bools(4, 6)),
    *over("any.dim", x=bools(4, 6)),
    *over("all.dims", x=bools(2, 4, 6), dims=([0, 1], None, [])),
    *over("any.dims", x=bools(2, 4, 6), dims=([0, 1], None, [])),
    sample("any", bools(4, 6)),
    sample("prod", X),
    *over("prod.dim_int"),
    on("var", X, args=(True,)),
    *over("var.correction", x=Z, dims=([0], [1, 2], None), correction=1),
    *over("std.correction", dims=([0], [1])),
    *over("var_mean.correction", dims=([0], [1])),
    *over("std_mean.correction", dims=([0], [1])),
    on("linalg_vector_norm", X, args=(2,)),
    *over("linalg_vector_norm", 2, dims=([0], [1])),
    *over("norm.ScalarOpt_dim", 2, dims=([0], [1])),
    on("norm.Scalar", X, args=(2,)),
    *over("logsumexp", x=Z, dims=([0], [1, 2])),
    *over("special_logsumexp", dims=([0], [1])),
    sample("median", X),
    *over("median.dim"),
    sample("nanmedian", X),
    *over("nanmedian.dim"),
    *over("kthvalue", 2),
    *over("mode", dims=(0, 1)),
    *over("nanmean", dims=([0], [1])),
    sample("trace", X),
]

ALONG = [
    *along("cumsum", Z),
    *along("cumprod"),
    *along("cummax"),
    *along("cummin"),
    *along("logcumsumexp"),
    *along("softmax.int"),
    *along("special_softmax"),
    *along("log_softmax.int"),
    *along("special_log_softmax"),
    *[on(n, X, args=(d, False)) for n in ("_softmax", "_log_softmax") for d in (0, 1)],
    *along("_safe_softmax"),
    *along("glu"),
    sample("sort", X),
    *along("sort"),
    on("sort.stable", X, kwargs={"stable": True, "dim": 0}),
    *along("argsort"),
    sample("msort", X),
    on("topk", Z, args=(2,)),
    on("topk", Z, args=(2, 0)),
    *[on("renorm", Z, args=(2, dim, 0.5)) for dim in (0, 1, 2)],
    sample("searchsorted.Tensor", X[0].sort().values, Y),
    sample("searchsorted.Tensor", X.sort().values, Y),
    sample("bucketize.Tensor", X, Y[0].sort().values),
    on("histc", X, args=(5, -2, 2)),
    on("histc", X, args=(5,)),
    sample("isin.Tensor_Tensor", ints(9, 4, 6), ints(9, 3)),
    on("isin.Tensor_Scalar", ints(9, 4, 6), args=(3,)),
    on("rot90", Z, args=(1, [1, 2])),
    on("rot90", Z, args=(2, [0, 1])),
    *[on("linalg_cross", A, B, kwargs={"dim": d}) for d in (0, -1)],
    on("multinomial", torch.rand(4, 6), args=(2,), is_random=True),
    *[on("_fft_c2c", torch.complex(Z, Z), args=([d], 0, True)) for d in (0, 2)],
    *[on("_fft_r2c", Z, args=([d], 0, True)) for d in (0, 2)],
    *[on("_fft_c2r", torch.complex(Z, Z), args=([d], 0, n)) for d, n in ((0, 2), (2, 10))],
    spectral("stft", floats(16), return_complex=True),
    spectral("stft", X.repeat(1, 3), return_complex=True),
    spectral("istft", torch.complex(floats(4, 5, 6), floats(4, 5, 6))),
]


def einsum(equation, *tensors):
    return sample("einsum", *tensors, program=lambda op, *own: op(equation, list(own)))


def grouped_mm(a, b, ends):
    ends = torch.tensor(ends, dtype=torch.int32)
    return sample(
        "_grouped_mm",
        a.bfloat16(),
        b.bfloat16(),
        ends,
        program=lambda op, a, b, ends: op(a, b, ends),
        atol=0.5,
    )


PRODUCTS = [
    sample("mm", floats(4, 6), floats(6, 8)),
    sample("bmm", floats(4, 3, 6), floats(4, 6, 2)),
    sample("mv", floats(4, 6), floats(6)),
    sample("dot", floats(6), floats(6)),
    sample("vdot", floats(6), floats(6)),
    sample("ger", floats(4), floats(6)),
    sample("outer", floats(4), floats(6)),
    sample("addmm", floats(8), floats(4, 6), floats(6, 8)),
    sample("addmm", floats(4, 8), floats(4, 6), floats(6, 8)),
    on("addmm", floats(4, 8), floats(4, 6), floats(6, 8), kwargs={"beta": 2, "alpha": 3}),
    sample("_addmm_activation", floats(8), floats(4, 6), floats(6, 8)),
    sample("addmv", floats(4), floats(4, 6), floats(6)),
    sample("addr", floats(4, 6), floats(4), floats(6)),
    sample("baddbmm", floats(4, 3, 2), floats(4, 3, 6), floats(4, 6, 2)),
    sample("baddbmm", floats(1, 2), floats(4, 3, 6), floats(4, 6, 2)),
    sample("addbmm", floats(3, 2), floats(4, 3, 6), floats(4, 6, 2)),
    *[
        on("linalg_solve_triangular", a, b, kwargs={"upper": False, "left": left})
        for a, b, left in (
            (lower(4), floats(4, 6), True),
            (lower(4), floats(6, 4), False),
            (lower(2, 4), floats(2, 4, 6), True),
            (lower(4), floats(2, 4, 6), True),
            (lower(2, 4), floats(3, 1, 6, 4), False),
        )
    ],
    *[
        sample(name, lower(*sizes) @ lower(*sizes).mT)
        for name in (
            *("linalg_inv_ex", "linalg_cholesky_ex", "_linalg_det", "_linalg_slogdet"),
            *("_linalg_eigh", "_linalg_svd", "linalg_qr", "linalg_lu_factor_ex"),
        )
        for sizes in ((4,), (2, 4), (3, 2, 4))
    ],
    sample("_linalg_solve_ex", lower(2, 4), floats(2, 4, 6)),
    sample("_linalg_solve_ex", lower(2, 4), floats(2, 4)),
    sample("_linalg_solve_ex", lower(4), floats(4, 6)),
    sample("_linalg_solve_ex", lower(2, 4), floats(4, 6)),
    sample("cholesky_solve", floats(2, 4, 6), lower(2, 4)),
    sample("linalg_matrix_exp", lower(4, 3)),
    sample("linalg_pinv.atol_rtol_tensor", floats(4, 3, 2)),
    sample("linalg_lstsq", floats(4, 3, 2), floats(4, 3, 5)),
    sample("linalg_lstsq", floats(4, 3, 2), floats(4, 3)),
    sample("bilinear", Z, floats(2, 4, 3), floats(8, 6, 3)),
    sample("bilinear", X, floats(4, 3), floats(8, 6, 3), floats(8)),
    sample("linear", floats(2, 4, 6), floats(8, 6)),
    sample("linear", floats(4, 6), floats(8, 6), floats(8)),
    sample("linear", floats(6), floats(8, 6), floats(8)),
    sample("matmul", floats(6), floats(6)),
    sample("matmul", floats(4, 6), floats(6)),
    sample("matmul", floats(6), floats(2, 6, 4)),
    sample("matmul", floats(2, 4, 6), floats(6, 8)),
    sample("matmul", floats(2, 1, 4, 6), floats(3, 6, 8)),
    sample("matmul", floats(4, 2), floats(2, 4)),
    einsum("ij,jk->ik", floats(4, 6), floats(6, 8)),
    einsum("bhqd,bhkd->bhqk", floats(2, 4, 3, 6), floats(2, 4, 5, 6)),
    einsum("bsd,hdk->bshk", floats(2, 4, 6), floats(4, 6, 2)),
    einsum("...i,oi->...o", floats(2, 4, 6), floats(8, 6)),
    einsum("ij,ij", floats(4, 6), floats(4, 6)),
    einsum("ij->ji", floats(4, 6)),
    einsum("ij->i", floats(4, 6)),
    einsum("ii->i", floats(4, 4)),
    einsum("i,j->ij", floats(4), floats(6)),
    einsum("ij,jk,kl->il", floats(4, 6), floats(6, 3), floats(3, 2)),
    einsum("bij,ij->b", floats(2, 4, 6), floats(1, 6)),
    sample("inner", Z, floats(3, 6)),
    sample("inner", floats(6), floats(6)),
    on("tensordot", Z, floats(6, 4, 8), args=([1, -1], [1, 0])),
    on("tensordot", Z, floats(1, 6, 3), args=([1, 2], [0, 1])),
    on("tensordot", X, floats(3, 2), args=([], [])),
    grouped_mm(floats(32, 16), floats(4, 16, 32), [8, 16, 24, 32]),
    grouped_mm(floats(4, 16, 32), floats(32, 32), [8, 16, 24, 32]),
    sample("_grouped_mm", floats(4, 16, 32).bfloat16(), floats(4, 32, 16).bfloat16(), atol=0.5),
    grouped_mm(floats(16, 32), floats(32, 16), [8, 16, 24, 32]),
]

SAMPLES = [*REDUCTIONS, *ALONG, *PRODUCTS]
