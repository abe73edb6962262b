"""Memory of one rank: states exactly as a run holds them, and the terms that others forgot."""

import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.model.build import build
from meshwright.predict import activations
from meshwright.predict.memory import memory
from meshwright.predict.params import buffer_count, count
from meshwright.predict.peak import loss_workspace, moments, saved
from meshwright.predict.reductions import kept, on_their_way, wholes
from meshwright.predict.states import states
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec, RopeScaling
from meshwright.spec.presets import PRESETS
from meshwright.spec.run import LOSS_ROWS, Batch, Checkpoint, Data, RunSpec

DTYPES = {"fp32": torch.float32, "float64": torch.float64}
GPT2 = ModelSpec(family="gpt2", vocab=33, hidden=16, layers=2, heads=4, max_seq=256)
LLAMA = ModelSpec(family="llama", vocab=33, hidden=16, layers=2, heads=4, kv_heads=2, ffn=24, max_seq=40)
DYNAMIC = LLAMA.model_copy(
    update={"rope_scaling": RopeScaling(kind="dynamic", factor=2.0, original_max_seq=16), "head_dim": 6}
)


@pytest.mark.parametrize("precision", ["fp32", "float64"])
@pytest.mark.parametrize("spec", [GPT2, LLAMA, GPT2.model_copy(update={"tied": False})])
def test_states_are_the_storages_a_fused_adamw_holds(spec: ModelSpec, precision: str) -> None:
    run = RunSpec.model_validate({"model": spec, "precision": precision})
    flat = torch.nn.Parameter(torch.zeros(count(spec), dtype=DTYPES[precision]))
    flat.grad = torch.zeros_like(flat)
    adam = torch.optim.AdamW([flat], fused=True)
    adam.step()
    state = adam.state[flat]
    assert states(run, Layout(dp=1)) == {
        "parameters": flat.untyped_storage().nbytes(),
        "gradients": flat.grad.untyped_storage().nbytes(),
        "master weights": 0,
        "adam moments": sum(state[kind].untyped_storage().nbytes() for kind in ("exp_avg", "exp_avg_sq")),
        "scalars": state["step"].untyped_storage().nbytes(),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spec", [GPT2, LLAMA, DYNAMIC, PRESETS["llama3-8b"], PRESETS["qwen3-8b"]])
def test_buffers_are_the_models(spec: ModelSpec, dtype: torch.dtype) -> None:
    model = build(spec, dtype=dtype, device="meta")
    assert buffer_count(spec, 1) * dtype.itemsize == sum(b.untyped_storage().nbytes() for b in model.buffers())


def test_fp32_adam_is_sixteen_bytes_a_parameter() -> None:
    # Rajbhandari et al. 2020 (arXiv 1910.02054), section 3.1: two moments beside parameters and gradients.
    held = states(RunSpec(model=PRESETS["llama2-7b"]), Layout(dp=1))
    assert sum(held.values()) - held["scalars"] == 16 * 6_738_415_616
    assert held["scalars"] == 4


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120.0), (1, 31.4), (2, 16.6), (3, 1.88)])
def test_the_stages_of_zero_hold_what_the_paper_says(stage: int, gigabytes: float) -> None:
    """Rajbhandari et al. 2020, figure 1: 7.5 billion parameters on 64 ranks, 2 + 2 + 12 bytes each.

    Adam's second gradient copy is 16 bits there, as with grad_dtype=bf16 here. The model is one of 7.5 billion, so
    what is compared is bytes a parameter.
    """
    run = RunSpec(model=PRESETS["llama2-7b"], precision="bf16", grad_dtype="bf16")
    held = sum(states(run, Layout(dp=64, zero=stage)).values())
    assert held / count(run.model) == pytest.approx(gigabytes / 7.5, rel=0.003)


def test_the_loss_counts_every_copy_of_the_logits() -> None:
    # Qwen3's vocabulary, 8,192 tokens, float32: 4.64 GiB a copy, three of them at the peak.
    spec = PRESETS["qwen3-8b"]
    workspace = loss_workspace(spec, tokens=8192, dtype_bytes=4, loss="full")
    kept = {s.what: s.bytes for s in activations.saved(spec, batch=2, seq=4096)}["log-softmax"]
    for size in (*workspace.values(), kept):
        assert size / 2**30 == pytest.approx(4.64, abs=0.005)


def test_a_chunked_loss_holds_no_more_than_a_chunk_of_logits() -> None:
    spec = PRESETS["qwen3-8b"]
    logits = [
        loss_workspace(spec, tokens=tokens, dtype_bytes=4, loss="chunked")["logits"] for tokens in (64, LOSS_ROWS, 8192)
    ]
    assert logits == [64 * spec.vocab * 4, LOSS_ROWS * spec.vocab * 4, LOSS_ROWS * spec.vocab * 4]


@pytest.mark.parametrize("loss", ["full", "chunked"])
def test_the_peak_beside_the_states_is_close_to_what_tensors_take(loss: str) -> None:
    """With a large vocabulary the peak of live storages over a forward and backward is what is predicted."""
    spec = GPT2.model_copy(update={"vocab": 2000, "hidden": 32})
    run = RunSpec.model_validate(
        {"model": spec, "loss": loss, "data": Data(seq_len=256), "batch": Batch(sequences=4, micro=4)}
    )
    model = build(spec, loss=loss)  # type: ignore[arg-type]
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    tokens = torch.randint(spec.vocab, (4, 256))
    with _Live() as live:
        model(tokens, tokens).backward()
    foretold = memory(run, Layout(dp=1), 0).categories
    beside = sum(foretold[name] for name in ("activations", "logits", "loss workspace"))
    assert live.most == pytest.approx(beside, rel=0.03)


class _Live(TorchDispatchMode):
    """Follows the storages that operations make, from birth to death."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.alive: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        given = {key for key, _ in _storages((args, kwargs))}
        out = func(*args, **(kwargs or {}))
        for key, storage in _storages(out):
            if key not in given and key not in self.alive:
                self.alive.add(key)
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._end, key, storage.nbytes())
        return out

    def _end(self, key: int, size: int) -> None:
        self.alive.discard(key)
        self.now -= size


def _storages(tree: object) -> list[tuple[int, torch.UntypedStorage]]:
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return [(t.untyped_storage()._cdata, t.untyped_storage()) for t in tensors]


def test_attention_memory_is_linear_when_fused_and_quadratic_when_written_out() -> None:
    spec = LLAMA.model_copy(update={"max_seq": 4096})

    def at(seq: int, attention: str) -> int:
        rows = activations.saved(spec, batch=2, seq=seq, attention=attention)  # type: ignore[arg-type]
        return sum(s.bytes for s in rows if s.where.endswith("core"))

    assert at(2048, "sdpa") == 2 * at(1024, "sdpa")
    square = spec.layers * 2 * spec.heads * 4
    assert at(2048, "explicit") - 2 * at(1024, "explicit") == square * (2048**2 - 2 * 1024**2)


def test_kv_memory_follows_the_kv_heads() -> None:
    def kv(heads: int) -> int:
        rows = activations.saved(PRESETS["llama2-70b"].model_copy(update={"kv_heads": heads}), batch=1, seq=128)
        return sum(s.bytes for s in rows if s.what in ("k", "v"))

    assert kv(64) == 8 * kv(8) == 80 * 2 * 128 * 8192 * 4


def test_the_largest_micro_batch_counts_and_a_rank_without_a_sequence_has_no_activations() -> None:
    run = RunSpec(batch=Batch(sequences=5, micro=2))
    layout = Layout(dp=8)
    first, last = memory(run, layout, 0), memory(run, layout, 7)
    assert (first.sequences, last.sequences) == (1, 0)
    assert last.categories["activations"] == last.categories["loss workspace"] == last.categories["logits"] == 0
    assert last.total == last.states + last.categories["buffers"]
    assert first.states == last.states == 16 * count(run.model) + first.categories["scalars"]
    assert memory(run, Layout(dp=1), 0).sequences == 2  # parts of 2, 2 and 1


def test_the_peak_is_the_fullest_moment_and_its_lines_are_the_memory() -> None:
    run = RunSpec(layout=Layout(dp=4, zero=3), device="cpu", checkpoint=Checkpoint(every=0))
    found = memory(run, run.layout, 0)
    fullest = max(moments(run, run.layout, 4, cpu=True), key=lambda moment: moment.total)
    assert found.moment == fullest.what == "MLP of block 3"
    assert found.total == found.states + found.categories["buffers"] + found.categories["inputs"] + fullest.total


def test_few_tokens_put_the_peak_where_the_gradients_of_weights_are() -> None:
    few = RunSpec(model=PRESETS["qwen3-8b"], batch=Batch(sequences=1, micro=1), data=Data(seq_len=64))
    assert memory(few, Layout(dp=1), 0).moment == "head"
    assert memory(few, Layout(dp=1), 0).categories["fresh gradients"] == 4 * few.model.vocab * few.model.hidden
    many = few.model_copy(update={"data": Data(seq_len=8192)})
    assert memory(many, Layout(dp=1), 0).moment == "loss"


def test_a_tied_weights_gradient_waits_for_the_embedding() -> None:
    run = RunSpec(model=GPT2.model_copy(update={"vocab": 4000}), data=Data(seq_len=16), batch=Batch(sequences=1))
    table = 4 * 4000 * 16
    at = {m.what: m.lines["fresh gradients"] for m in moments(run, Layout(dp=1), 1, cpu=False)}
    assert at["head"] == at["final norm"] == at["attention of block 1"] == table
    assert at["embedding"] == 2 * table


def test_only_the_cpu_keeps_copies_for_reductions() -> None:
    run = RunSpec(model=LLAMA, batch=Batch(sequences=2, micro=1))
    block = 4 * 1952  # bytes of its parameters; head and embedding are smaller
    one, two = Layout(dp=2, zero=1, zero_join=0), Layout(dp=2, zero=2)
    assert kept(run, Layout(dp=2)) == 0
    assert kept(run, one) == 2 * block
    assert memory(run, one, 0, "cuda").categories["reductions"] == 0
    assert memory(run, one, 0, "cpu").categories["reductions"] == kept(run, one) > 0
    joined = Layout(dp=2, zero=1)
    assert kept(run, joined) == wholes(run, joined)[0] == 4 * count(LLAMA)
    assert on_their_way(run, one, wholes(run, one), 2) == 0
    # Backward is in the first of two blocks: its gradients fill, those of the other block and of the head travel.
    head = 4 * (33 * 16 + 16)
    assert on_their_way(run, two, wholes(run, two), 2) == 2 * block + head
    assert on_their_way(run, two, wholes(run, two), 0) == head


def test_the_copy_of_a_checkpoint_is_on_the_host_and_that_is_the_device_where_it_is_the_cpu() -> None:
    run = RunSpec(model=GPT2, layout=Layout(dp=2))
    copy = 3 * 4 * count(GPT2) // 2  # the ranks share the writing
    there, here = memory(run, run.layout, 0, "cuda"), memory(run, run.layout, 0, "cpu")
    assert there.host == here.host
    assert there.host["checkpoint copy"] == pytest.approx(copy, abs=3 * 4 * 8)
    assert there.total == sum(there.categories.values())
    assert here.total == sum(here.categories.values()) + here.host["checkpoint copy"]
    for options in (Checkpoint(every=0), Checkpoint(background=False)):
        none = run.model_copy(update={"checkpoint": options})
        assert memory(none, run.layout, 0, "cpu").host == {"checkpoint copy": 0}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_each_stage_of_a_large_model_holds_less(precision: str, device: str) -> None:
    run = RunSpec.model_validate(
        {"model": PRESETS["llama2-7b"], "precision": precision, "batch": Batch(sequences=16, micro=1)}
    )
    zero, one, two, three = (memory(run, Layout(dp=8, zero=z), 0, device).total for z in range(4))  # type: ignore[arg-type]
    assert three < two < one < zero


@pytest.mark.parametrize("recompute", [{}, {"recompute": "full"}, {"recompute": "full", "recompute_every": 2}])
def test_offloaded_activations_wait_on_the_host(recompute: dict[str, Any]) -> None:
    """The device keeps at most those of the region that backward is in, the host what forward keeps in all."""
    run = RunSpec(model=PRESETS["llama-tiny"], layout=Layout(dp=1, **recompute), device="cuda")
    here = memory(run, run.layout, 0)
    away = memory(run, run.layout.model_copy(update={"offload": "activations"}), 0)
    kept = activations.total(saved(run, run.layout, 4, cpu=False))
    assert away.host["offloaded activations"] == kept
    assert "offloaded activations" not in here.host
    per_layer = activations.total(saved(run, Layout(dp=1), 4, cpu=False)) / run.model.layers
    region = 2 if "recompute_every" in recompute else 1
    assert away.categories["activations"] <= region * per_layer < here.categories["activations"] + per_layer
    assert away.total < here.total
