"""Every propagation rule, and operations without one that are decomposed, against the operation
itself: shards in, claims out, put together, compared.

See `virtual_ranks`. The samples are in one file for each family of operations.
"""

import pytest

import device_samples
import indexing_samples
import kernel_samples
import loss_samples
import model_samples
import pointwise_samples
import product_samples
import shape_samples
import window_samples
from flex_model.layouts.propagation import rules
from flex_model.layouts.propagation.text_forms import form
from tiers import grid_but
from virtual_ranks import P, check_all

FAMILIES = {
    "pointwise": pointwise_samples.SAMPLES,
    "products": product_samples.SAMPLES,
    "shapes": shape_samples.SAMPLES,
    "indexing": indexing_samples.SAMPLES,
    "models": model_samples.SAMPLES,
    "windows": window_samples.SAMPLES,
    "losses": loss_samples.SAMPLES,
    "devices": device_samples.SAMPLES,
    "kernels": kernel_samples.SAMPLES,
}
SAMPLES = [(family, s) for family, samples in FAMILIES.items() for s in samples]
BY_NAME: dict[str, list] = {}
for _family, _sample in SAMPLES:
    BY_NAME.setdefault(_sample.name, []).append((_family, _sample))

# Rules of operations that CPU has no kernel of, or that only other devices reach, and those of
# bitsandbytes, which tests/integrations/test_quantized.py runs where it is installed.
WITHOUT_SAMPLE = {
    "bitsandbytes::dequantize_4bit",
    "bitsandbytes::dequantize_blockwise",
    "bitsandbytes::gemm_4bit",
    "_fused_dropout",
    "cudnn_batch_norm",
    "miopen_batch_norm",
    "_scaled_dot_product_attention_math_for_mps",
}


@pytest.mark.filterwarnings("ignore")  # torch's own, about degenerate shards
@pytest.mark.parametrize("name", sorted(BY_NAME))
@pytest.mark.parametrize("limit", grid_but([10, 40], 10))
def test_what_a_rule_claims_holds(name, limit):
    """It says something where an operand is split or partial, and all that it says is right."""
    found = []
    for family, each in BY_NAME[name]:
        # One rule serves all pointwise operations; two ranks show what its table adds.
        counts = (2,) if family == "pointwise" else (2, 3, 4)
        found += check_all(each, limit=4 if family == "devices" else limit, counts=counts)
    assert found, f"the rule of {name} never says anything of operands that are split"


def test_every_rule_has_a_sample():
    without = set(rules.RULES) | pointwise_samples.names()
    without -= set(BY_NAME)
    assert without == WITHOUT_SAMPLE


@pytest.mark.parametrize(
    "name, wrong",
    [
        ("softmax", lambda operation: operation["self"].placement),
        ("mm", form("self:ij mat2:jk -> ki = self*mat2")),
        ("amax", lambda operation: P),
        ("view", lambda operation: operation["self"].placement),
        ("cat", lambda operation: operation["tensors"][0].placement),
        ("gelu", lambda operation: operation["self"].placement),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_wrong_rule_is_caught(name, wrong):
    """The check itself: it would not pass what is wrong."""

    def ask(operation):
        found = wrong(operation)
        return found if isinstance(found, list) else [found] * len(operation.outputs)

    def check_samples():
        for _, each in BY_NAME[name]:
            check_all(each, ask)

    with pytest.raises(AssertionError, match="is not"):
        check_samples()
