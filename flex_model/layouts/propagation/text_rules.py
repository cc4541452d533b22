"""The rules that are text; see `text_forms`."""

from __future__ import annotations

from flex_model.layouts.propagation.operation import rule
from flex_model.layouts.propagation.text_forms import as_dims, form, operand_of, sizes_along

_POINTWISE = {
    "_fused_dropout native_dropout": ":... -> ...+",
    "feature_dropout feature_alpha_dropout": "input:nc_ -> nc_",  # drops whole channels
    "view_as_real": "self:... -> ...* = self",
    "view_as_complex": "self:...* -> ... = self",
}

_REDUCTIONS = {
    "sum": "self:... -> ...[-dim] = self",
    "nansum count_nonzero": "self:... -> ...[-dim] = !self",
    "mean": "self:...[dim] -> ...[-dim] = self",
    "max min amax amin argmax argmin all any prod var std var_mean std_mean linalg_vector_norm "
    "logsumexp median nanmedian kthvalue mode aminmax nanmean special_logsumexp norm": (
        ":...[dim] -> ...[-dim]+"
    ),
    "trace": "self:** -> = self",
    "multinomial": "self:...* -> ...*",
}

_SCANS = {
    "cumprod cummax cummin logcumsumexp sort argsort topk log_softmax softmax special_softmax "
    "special_log_softmax _softmax _log_softmax _safe_softmax glu": ":...[dim] -> ...[dim]+",
    "cumsum _fft_c2c _fft_r2c _fft_c2r": "self:...[dim] -> ...[dim] = self",
    "stft": "self:...* window?:* -> ...** = self*!window",
    "istft": "self:...** window?:* -> ...* = self*!window",
    "flip roll rot90": "self:...[dims] -> ...[dims] = self",
    "searchsorted": (
        "sorted_sequence:* self:... sorter?:* -> ... | "
        "sorted_sequence:...* self:...v sorter?:...* -> ...v"
    ),
    "bucketize": "self:... boundaries:* -> ...",
    "isin": "elements:... test_elements?:_ -> ...",
}

_PRODUCTS = {
    "mm": "self:ij mat2:jk -> ik = self*mat2",
    "bmm": "self:bij mat2:bjk -> bik = self*mat2",
    "mv": "self:ij vec:j -> i = self*vec",
    "dot": "self:i tensor:i -> = self*tensor",
    "vdot": "self:i other:i -> = self*other",
    "_addmm_activation": "self:~i* mat1:i* mat2:** -> i*",
    "linear": "input:...i weight:oi bias?:o -> ...o = input*weight + bias",
    "bilinear": (
        "input1:...i input2:...j weight:oij bias?:o -> ...o = input1*input2*weight + bias"
    ),
    "linalg_cross": "self:~...[dim] other:~...[dim] -> ...[dim] = self*other",
    # Groups of rows or columns end at ``offs``.
    "_grouped_mm": (
        "self:*j mat2:*jk offs?:* -> *k = self*mat2*!offs | "
        "self:*ij mat2:j* offs?:* -> i* = self*mat2*!offs | "
        "self:gij mat2:gjk offs?:* -> gik = self*mat2*!offs | "
        "self:i* mat2:*k offs?:* -> *ik = self*mat2*!offs"
    ),
    # Of 4-bit weights, which must be whole: the blocks that share a scale don't follow their rows.
    "bitsandbytes::dequantize_blockwise": "A:* absmax:* code:* -> *",
    "bitsandbytes::dequantize_4bit": "A:** absmax:* -> **",
    "bitsandbytes::gemm_4bit": (
        "A:...* B:** absmax:* bias?:* absmax_8bit?:* absmax_code?:* absmax_offset?:_ -> ...*"
    ),
}

_SHAPES = {
    "t": "self:ab -> ba = self | self:a -> a = self",
    "transpose": "self:...[dim0:a,dim1:b] -> ...[dim0:b,dim1:a] = self",
    "unsqueeze": "self:...[-dim] -> ...[dim] = self",
    "pad_sequence": "sequences:*... -> **...",
    "stack": "tensors:...[-dim] -> ...[dim] = tensors",
    "select unbind": "self:...[dim] -> ...[-dim]+ = self",
    "diagonal": "self:...[dim1,dim2] -> ...[-dim1,-dim2]* = self",
    "diag_embed": "self:...[-dim1,-dim2]* -> ...[dim1,dim2] = self",
    "unfold": "self:...[dimension] -> ...[dimension]* = self",
    "tril triu": "self:...** -> ...** = self",
    "slice_scatter": "self:...[dim] src:...[dim] -> ...[dim] = self + src",
    "slice_backward": "grad_output:...[dim] -> ...[dim] = grad_output",
    "select_backward": "grad_output:...[-dim] -> ...[dim] = grad_output",
    "select_scatter": "self:...[dim] src:...[-dim] -> ...[dim] = self + src",
}

_INDEXING = {
    # Any index may occur, so all rows must be there.
    "embedding": "weight:*f indices:... -> ...f = weight*!indices",
    "index_select": "self:...[dim] index:i -> ...[dim:i] = self*!index",
    # Other dims must have the same sizes: a shorter index would read the first rank's elements.
    "gather": "self:...[dim] index:...[dim:i] -> ...[dim:i] = self*!index",
    "take": "self:_ index:... -> ... = self*!index",
    "index_add index_copy index_fill": (
        "self:...[dim] index:_ source?:...[dim] value?:_ -> ...[dim] "
        "= self*!index + source*!index + value*!index"
    ),
    "index_reduce": "self:...[dim] index:_ source:...[dim] -> ...[dim]",
}

_LAYERS = {
    # Torch would decompose them, too, but the first operation that it decomposes imports sympy or
    # dynamo, 500 or 900 modules, where nothing else has.
    "group_norm": "input:n_ weight?:_ bias?:_ -> n_+",
    "instance_norm": "input:nc_ weight?:c bias?:c -> nc_",
    "max_pool2d_with_indices adaptive_max_pool2d": ":...** -> ...**+",
    "max_pool3d_with_indices adaptive_max_pool3d": ":...*** -> ...***+",
    "avg_pool2d _adaptive_avg_pool2d reflection_pad2d replication_pad2d upsample_nearest2d "
    "_upsample_nearest_exact2d upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa "
    "_upsample_bicubic2d_aa": ":...** -> ...** = self + input",
    "avg_pool3d _adaptive_avg_pool3d reflection_pad3d replication_pad3d upsample_nearest3d "
    "_upsample_nearest_exact3d upsample_trilinear3d": ":...*** -> ...*** = self + input",
    "reflection_pad1d replication_pad1d upsample_nearest1d _upsample_nearest_exact1d "
    "upsample_linear1d": ":...* -> ...* = self + input",
    "max_unpool2d": "self:...** indices:...** -> ...** = self*!indices",
    "max_unpool3d": "self:...*** indices:...*** -> ...*** = self*!indices",
    "fractional_max_pool2d": "self:...** random_samples:...* -> ...**+",
    "fractional_max_pool3d": "self:...*** random_samples:...* -> ...***+",
    "im2col": "self:...*** -> ...** = self",
    "col2im": "self:...** -> ...*** = self",
    "pixel_shuffle pixel_unshuffle": "self:...*** -> ...*** = self",
    "channel_shuffle native_channel_shuffle": "self:n*... -> n*... = self",
    "grid_sampler_2d grid_sampler_3d": "input:nc_ grid:n...* -> nc... = input*!grid",
    "_cdist_forward": "x1:~...p* x2:~...r* -> ...pr",
    # One step of a recurrent layer on a GPU. The gates are (rows, features).
    "_thnn_fused_lstm_cell": (
        "input_gates:b* hidden_gates:b* cx:b* input_bias?:* hidden_bias?:* -> b*+"
    ),
    "_thnn_fused_gru_cell": (
        "input_gates:b* hidden_gates:b* hx:b* input_bias?:* hidden_bias?:* -> b*+"
    ),
}

_OF_COMPUTED_DIMS = {
    "layer_norm native_layer_norm rms_norm _fused_rms_norm": form(
        "input:...[normalized] weight?:_ bias?:_ -> ...[normalized]+",
        normalized=lambda operation, n: range(n - len(operation["normalized_shape"]), n),
    ),
    "renorm": form(
        "self:...[others] -> ...[others]",
        others=lambda operation, n: [dim for dim in range(n) if dim != operation["dim"] % n],
    ),
    # Dims of size 1: a split one has this size only on the ranks, so then nothing is known.
    "squeeze": form(
        "self:...[ones] -> ...[-ones] = self",
        ones=lambda operation, n: [
            dim
            for dim in as_dims(operation.get("dim"), n)
            if 1 in sizes_along(operand_of(operation), dim)
        ],
    ),
    "constant_pad_nd pad": form(
        "self:...[padded] -> ...[padded] = self + value",
        padded=lambda operation, n: [
            n - 1 - i // 2 for i, width in enumerate(operation["pad"]) if width != 0
        ],
    ),
}


_TEXTS = _POINTWISE | _REDUCTIONS | _SCANS | _PRODUCTS | _SHAPES | _INDEXING | _LAYERS

for names, text in _TEXTS.items():
    rule(names)(form(text))
for names, function in _OF_COMPUTED_DIMS.items():
    rule(names)(function)
# It is passed the number of rows, which is the rank's own.
rule("native_group_norm", "N")(form(_LAYERS["group_norm"]))
