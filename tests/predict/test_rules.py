"""Rules of thumb print what papers and an explainer for students print: Llama 2 7B taken as 6.74 billion parameters."""

import pytest

from meshwright.predict import rules
from meshwright.predict.flops import model_flops
from meshwright.predict.params import count
from meshwright.predict.states import states
from meshwright.schedule import bubble
from meshwright.spec.layout import Layout
from meshwright.spec.presets import PRESETS
from meshwright.spec.run import RunSpec

P = 6.74e9
RATE = 150e12
GB, MB = 1e9, 1e6
NVLINK, NETWORK = 450e9, 50e9
TOKENS = 4096
GLOBAL = 1024 * TOKENS
LAYER = {"hidden": 4096, "ffn": 11008, "tokens": TOKENS}

ZERO_TABLE_1 = {
    # Rajbhandari et al. 2020 (arXiv 1910.02054), table 1: GB a device at stages 1, 2 and 3.
    (7.5, 1): ("120", "120", "120"),
    (7.5, 4): ("52.5", "41.3", "30"),
    (7.5, 16): ("35.6", "21.6", "7.5"),
    (7.5, 64): ("31.4", "16.6", "1.88"),
    (7.5, 256): ("30.4", "15.4", "0.47"),
    (7.5, 1024): ("30.1", "15.1", "0.12"),
    (128, 1): ("2048", "2048", "2048"),
    (128, 4): ("896", "704", "512"),
    (128, 16): ("608", "368", "128"),
    (128, 64): ("536", "284", "32"),
    (128, 256): ("518", "263", "8"),
    (128, 1024): ("513", "257", "2"),
    (1000, 1): ("16000", "16000", "16000"),
    (1000, 4): ("7000", "5500", "4000"),
    (1000, 16): ("4750", "2875", "1000"),
    (1000, 64): ("4187", "2218", "250"),
    (1000, 256): ("4046", "2054", "62.5"),
    (1000, 1024): ("4011", "2013", "15.6"),
}


def digits(text: str) -> float:
    """A unit of the last digit that is printed."""
    return 10.0 ** -len(text.partition(".")[2])


@pytest.mark.parametrize(("model", "printed"), ZERO_TABLE_1.items(), ids=str)
def test_zero_table_1_to_its_printed_digits(model: tuple[float, int], printed: tuple[str, str, str]) -> None:
    billions, dp = model
    for zero, text in zip((1, 2, 3), printed, strict=True):
        held = rules.states(billions * 1e9, zero=zero, dp=dp) / GB  # type: ignore[arg-type]
        assert abs(held - float(text)) < digits(text), (zero, held, text)  # the paper rounds some down


EXPLAINER: list[tuple[str, float]] = [
    # What an interactive explainer of distributed training prints, and the rule that makes it.
    ("107.8", rules.states(P) / GB),
    ("1.35", rules.states(P) / (80 * GB)),
    ("17.1", rules.training_time(P, 2e12, devices=1, rate=RATE) / rules.YEAR),
    ("98", rules.training_time(P, 2e12, devices=64, rate=RATE) / rules.DAY),
    ("6", rules.training_time(P, 2e12, devices=1024, rate=RATE) / rules.DAY),
    ("156", rules.training_time(P, 50e9, devices=1, rate=RATE) / rules.DAY),
    ("13.5", rules.gradients(P) / GB),
    ("23.6", rules.data_parallel_sent(P, 8) / GB),
    ("0.47", rules.data_parallel_sent(P, 8) / NETWORK),
    ("0", rules.data_parallel_sent(P, 1) / GB),
    ("26.5", rules.data_parallel_sent(P, 64) / GB),
    ("35.4", rules.data_parallel_sent(P, 8, zero=3) / GB),
    ("2.4", rules.training_time(P, GLOBAL, devices=8, rate=RATE) / 60),
    ("18.8", rules.training_time(P, GLOBAL, devices=1, rate=RATE) / 60),
    ("17.7", rules.training_time(P, GLOBAL, devices=64, rate=RATE)),
    ("37.1", rules.states(P, zero=1, dp=8) / GB),
    ("25.3", rules.states(P, zero=2, dp=8) / GB),
    ("13.5", rules.states(P, zero=3, dp=8) / GB),
    ("2.9", rules.states(P) / rules.states(P, zero=1, dp=8)),
    ("27.0", rules.unsharded(P) / GB),
    ("80.9", rules.ADAM * P / GB),
    ("10.1", rules.ADAM * P / 8 / GB),
    ("1.9", rules.states(7.5e9, zero=3, dp=64) / GB),
    ("31.4", rules.states(7.5e9, zero=1, dp=64) / GB),
    ("16.6", rules.states(7.5e9, zero=2, dp=64) / GB),
    ("50.6", rules.layer_parameters(4096, 11008) / 4 / 1e6),
    ("27.0", rules.states(P, tp=4) / GB),
    ("201", rules.tensor_sent(4096, TOKENS, 4) / MB),
    ("134", rules.tensor_sent(4096, TOKENS, 2) / MB),
    ("235", rules.tensor_sent(4096, TOKENS, 8) / MB),
    ("0.45", rules.tensor_sent(4096, TOKENS, 4) / NVLINK * 1e3),
    ("4.0", rules.tensor_sent(4096, TOKENS, 4) / NETWORK * 1e3),
    ("8.3", rules.layer_time(**LAYER, tp=4, rate=RATE) * 1e3),
    ("0.05", rules.tensor_sent(4096, TOKENS, 4) / NVLINK / rules.layer_time(**LAYER, tp=4, rate=RATE)),
    ("0.16", rules.tensor_sent(4096, TOKENS, 2) / NETWORK / rules.layer_time(**LAYER, tp=2, rate=RATE)),
    ("1.13", rules.tensor_sent(4096, TOKENS, 8) / NETWORK / rules.layer_time(**LAYER, tp=8, rate=RATE)),
    ("21", rules.pipeline_units(4, 4)),
    ("42.9", 100 * rules.bubble(4, 4)),
    ("15.8", 100 * rules.bubble(4, 16)),
    ("46.7", 100 * rules.bubble(8, 8)),
    ("3.0", 100 * rules.bubble(2, 32)),
    ("27.0", rules.states(P, pp=4) / GB),
    ("34", rules.activations(4096, TOKENS) / MB),
    ("3.37", rules.states(P, tp=8, pp=4) / GB),
    ("13.5", rules.lora_weights(P) / GB),
]


@pytest.mark.parametrize(("printed", "value"), EXPLAINER)
def test_the_explainers_figures(printed: str, value: float) -> None:
    assert f"{value:.{len(printed.partition('.')[2])}f}" == printed


@pytest.mark.parametrize(
    ("dp", "gigabytes", "waits", "days"),
    [
        (1, "3.37", "0.3", "195.6"), (8, "1.16", "2.3", "24.9"), (16, "1.00", "4.5", "12.8"),
        (64, "0.88", "15.8", "3.6"), (128, "0.86", "27.3", "2.1"), (256, "0.85", "42.9", "1.3"),
    ],
)  # fmt: skip
def test_tensor_pipeline_and_data_ranks_together(dp: int, gigabytes: str, waits: str, days: str) -> None:
    """tp=8, pp=4, ZeRO 1, micro-batches of one of 1,024 sequences; the days include the bubble."""
    bubble_ = rules.bubble(4, 1024 // dp)
    time = rules.training_time(P, 2e12, devices=32 * dp, rate=RATE, bubble=bubble_)
    assert f"{rules.states(P, zero=1, dp=dp, tp=8, pp=4) / GB:.2f}" == gigabytes
    assert f"{100 * bubble_:.1f}" == waits
    assert f"{time / rules.DAY:.1f}" == days


def test_stages_are_even() -> None:
    assert [(stage[0], stage[-1]) for stage in rules.even_stages(32, 4)] == [(0, 7), (8, 15), (16, 23), (24, 31)]


def test_rules_are_near_what_is_exact() -> None:
    """And where they are not, it is for the reasons that the table gives."""
    model = PRESETS["llama2-7b"]
    run = RunSpec(model=model, precision="bf16", grad_dtype="bf16")
    assert sum(states(run, Layout(dp=1)).values()) == pytest.approx(rules.states(count(model)), rel=1e-6)
    assert model_flops(model, seq=4096) == pytest.approx(rules.training_flops(count(model), 1), rel=0.1)
    assert float(bubble("1f1b", 4, 16)) == rules.bubble(4, 16)
