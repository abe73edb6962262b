"""What adapters beside frozen weights take on one device."""

import pytest

from meshwright.predict.adapters import adapter, adapter_parameters
from meshwright.predict.params import count
from meshwright.predict.rules import lora_weights
from meshwright.spec.presets import PRESETS
from meshwright.spec.run import Batch, Data, RunSpec

SEVEN = RunSpec(model=PRESETS["llama2-7b"], data=Data(seq_len=4096), batch=Batch(sequences=8, micro=1))


def test_lora_keeps_the_weights_in_sixteen_bits() -> None:
    one = adapter(SEVEN, 16)
    assert one.base == 2 * count(SEVEN.model) == pytest.approx(lora_weights(6.74e9), rel=1e-3)
    assert f"{one.base / 1e9:.1f}" == "13.5"
    assert one.states == 18 * one.trained


def test_qlora_keeps_the_products_weights_in_four_and_fits_24_gigabytes() -> None:
    one = adapter(SEVEN, 4)
    # Dettmers et al. 2023, section 3: with double quantisation the scales take 0.127 bits a weight.
    products = 32 * (4 * 4096**2 + 3 * 4096 * 11008)
    assert one.base == pytest.approx(products * 4.127 / 8 + 2 * (count(SEVEN.model) - products), rel=1e-4)
    assert one.total < 24e9 < adapter(SEVEN, 16).total + 24e9


def test_adapters_are_counted_as_peft_counts_them() -> None:
    """39,976,960 trainable parameters: what `peft` prints for Llama 2 7B with r=16 beside all linear layers."""
    assert adapter_parameters(SEVEN.model, 16) == 39_976_960
    assert adapter_parameters(SEVEN.model, 8) == 39_976_960 // 2
