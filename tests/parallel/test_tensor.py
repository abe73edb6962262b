"""Tensor and sequence parallelism against the plain model on one device in float64, and at its edges."""

from __future__ import annotations

import functools
import itertools
import math
import random

import pytest
import torch

from meshwright.model.build import build
from meshwright.model.init import initialise_
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec, RopeScaling
from meshwright.spec.run import Batch, Data, LrSchedule, Optimizer, RunSpec
from meshwright.train.trainer import Trainer
from meshwright.verify.compare import bound_of, is_narrow
from meshwright.verify.evidence import Evidence
from meshwright.verify.narrow import compare_run, expected_of
from meshwright.verify.reference import reference
from meshwright.verify.unequal import proof_data
from meshwright.verify.worker import collect

# 101 words over 2, 3 or 4 ranks: some are filled up.
LLAMA = ModelSpec(family="llama", vocab=101, hidden=24, layers=2, heads=4, ffn=24, max_seq=32)
GPT2 = ModelSpec(family="gpt2", vocab=101, hidden=24, layers=2, heads=4, max_seq=32)
BIASES = {"qkv_bias": True, "out_bias": True, "mlp_bias": True}
DROPS = {"embd_dropout": 0.2, "attn_dropout": 0.1, "resid_dropout": 0.3}
MODELS = {
    "llama": LLAMA,
    "kv 2": LLAMA.model_copy(update={"kv_heads": 2}),
    "kv 2, all": LLAMA.model_copy(update={"kv_heads": 2, "qk_norm": True, "tied": True, **BIASES}),
    "kv 1": LLAMA.model_copy(update={"kv_heads": 1, "tied": True}),
    "kv 1, all": LLAMA.model_copy(update={"kv_heads": 1, "qk_norm": True, **BIASES}),
    "kv 1 of 3": LLAMA.model_copy(update={"heads": 3, "kv_heads": 1, "qk_norm": True}),
    "kv 3 of 6": LLAMA.model_copy(update={"heads": 6, "kv_heads": 3, "head_dim": 6, "qkv_bias": True}),
    "window": LLAMA.model_copy(update={"window": 5, "rope_scaling": RopeScaling(kind="linear", factor=2.0)}),
    "not causal": LLAMA.model_copy(update={"causal": False}),
    "gpt2": GPT2,
    "gpt2 untied": GPT2.model_copy(update={"tied": False}),
    "gpt2 drops": GPT2.model_copy(update=DROPS),
    "gpt2 of 3": GPT2.model_copy(update={"heads": 3, **DROPS}),
}
FULL = {"recompute": "full"}
EVERY = {"recompute": "full", "recompute_every": 2}
KEEP = {"recompute": "selective"}
SP = {"sp": True}
ZERO = [{"zero": 0, "zero_join": 0}, {"zero": 1, "zero_join": 0}, {"zero": 2}, {"zero": 3}]
STEPS = 2


def make_run(name: str, tp: int, *layouts: dict[str, object], dp: int = 1, **options: object) -> RunSpec:
    layout = Layout(**{"dp": dp, "tp": tp} | {key: value for each in layouts for key, value in each.items()})
    return RunSpec(
        model=MODELS[name],
        data=Data(seq_len=12),
        batch=Batch(sequences=options.pop("sequences", 7), micro=options.pop("micro", 2)),
        layout=layout,
        precision=options.pop("precision", "float64"),
        attention=options.pop("attention", "explicit" if MODELS[name].drops else "sdpa"),
        optimizer=Optimizer(clip=options.pop("clip", 0.5)),
        lr_schedule=LrSchedule(warmup=2),
        **options,
    )


def on_ranks(ranks, run: RunSpec, function, *args, **options):
    axes = {"tp": run.layout.tp, "dp": run.layout.data_ranks}
    return ranks.run(run.layout.world, function, run, *args, axes=axes, order=run.layout.order, **options)


def evidence(mesh, run: RunSpec) -> Evidence:
    found = collect(run, mesh, proof_data(run), STEPS)
    found.traffic.clear()
    found.activations.clear()
    return found


@functools.cache
def expected(name: str, attention: str, loss: str, sequences: int, clip: float | None, precision: str) -> Evidence:
    run = make_run(name, 1, attention=attention, loss=loss, sequences=sequences, clip=clip, precision=precision)
    return reference(run, proof_data(run), STEPS)


def assert_equals_the_plain_model(ranks, name: str, run: RunSpec) -> None:
    """Gradients, moments, weights, losses, tokens and norms, of every rank and step."""
    clip = run.optimizer.clip
    found = on_ranks(ranks, run, evidence)
    if is_narrow(run):
        plain = expected_of(run, STEPS, found)
    else:
        plain = expected(name, run.attention, run.loss, run.batch.sequences, clip, run.precision)
    bound = bound_of(run)
    tensors = compare_run(run, STEPS, found, plain)
    assert all(c.passed for c in tensors), [c for c in tensors if not c.passed][:5]
    for each in found:
        assert each.tokens == plain.tokens
        assert each.losses == pytest.approx(plain.losses, rel=bound)
        assert each.norms == pytest.approx(plain.norms, rel=bound)
        assert (each.losses, each.norms) == (found[0].losses, found[0].norms)
    if run.precision != "float64":
        assert tensors[0].difference > 1e-10  # what is narrow was


CASES = [
    # The plain strategy, by family and degree.
    ("llama", 2, {}, {}),
    ("llama", 4, SP, {}),
    ("gpt2", 2, {}, {"attention": "explicit"}),
    ("gpt2", 4, SP, {"loss": "chunked"}),
    ("gpt2 untied", 2, SP, {}),
    ("gpt2 untied", 4, {}, {"loss": "chunked"}),
    # Key-value heads that several ranks hold, norms of heads, biases of all sorts.
    ("kv 2, all", 2, {}, {}),
    ("kv 2, all", 2, SP, {"loss": "chunked"}),
    ("kv 2, all", 4, {}, {"loss": "chunked", "attention": "explicit"}),
    ("kv 2, all", 4, SP, {}),
    ("kv 1, all", 2, SP, {"attention": "explicit"}),
    ("kv 1, all", 4, {}, {}),
    ("kv 1", 4, SP, {"loss": "chunked"}),
    # Three ranks.
    ("kv 3 of 6", 3, SP, {}),
    ("kv 1 of 3", 3, {}, {"loss": "chunked"}),
    ("gpt2 of 3", 3, SP, {}),
    # Options of the model that the strategy must leave alone.
    ("window", 2, SP, {}),
    ("not causal", 4, SP, {"attention": "explicit"}),
    # Dropout of the sequence's parts, of heads, and of both.
    ("gpt2 drops", 2, {}, {}),
    ("gpt2 drops", 4, SP, {"loss": "chunked"}),
    # Recompute.
    ("kv 2, all", 2, FULL, {}),
    ("kv 2, all", 4, SP | EVERY, {"loss": "chunked"}),
    ("kv 1, all", 4, SP | KEEP, {}),
    ("llama", 2, KEEP | {"recompute_keep": ("attention", "activation")}, {"attention": "explicit"}),
    ("gpt2 drops", 2, SP | FULL, {}),
    ("gpt2 drops", 2, KEEP, {}),
    ("gpt2 drops", 4, SP | KEEP | {"recompute_keep": ("linear", "softmax")}, {}),
    # Data ranks beside tensor ranks, on the whole ladder.
    ("kv 2, all", 2, SP | ZERO[0], {"dp": 2}),
    ("kv 1, all", 2, ZERO[1], {"dp": 2, "loss": "chunked"}),
    ("gpt2 drops", 2, SP | ZERO[2], {"dp": 2}),
    ("kv 2, all", 2, SP | ZERO[3], {"dp": 2}),
    ("gpt2", 2, {"zero": 1, "zero_join": 5000}, {"dp": 2}),
    ("kv 1, all", 2, {"zero": 0, "zero_join": 5000} | FULL, {"dp": 2}),
    ("kv 1, all", 2, SP | ZERO[1] | KEEP, {"dp": 2}),
    ("gpt2", 2, ZERO[2] | FULL, {"dp": 2, "loss": "chunked"}),
    ("kv 2, all", 2, SP | ZERO[3] | EVERY, {"dp": 2}),
    ("gpt2 drops", 2, SP | ZERO[3] | KEEP | {"zero_gather": "step"}, {"dp": 2}),
    ("kv 2, all", 2, {"zero": 2, "zero_shard": 1}, {"dp": 2}),
    ("kv 2, all", 2, SP | {"zero": 3, "zero_shard": 1}, {"dp": 2}),
]


def label(case: tuple[str, int, dict[str, object], dict[str, object]]) -> str:
    name, tp, layout, options = case
    return ", ".join([name, f"tp {tp}", *(f"{k}={v}" for k, v in (layout | options).items())])


@pytest.mark.parametrize("case", CASES, ids=label)
def test_equals_the_plain_model(ranks, case):
    name, tp, layout, options = case
    assert_equals_the_plain_model(ranks, name, make_run(name, tp, layout, **options))


@pytest.mark.parametrize(("name", "zero"), [("kv 2, all", 0), ("gpt2 drops", 1), ("kv 2, all", 3)])
def test_data_ranks_that_are_neighbours(ranks, name, zero):
    """The order of axes dp, tp: ranks 0 and 1 share their tensor part and not their sequences."""
    run = make_run(name, 2, SP | ZERO[zero], {"order": ("dp", "tp", "cp", "pp")}, dp=2)
    assert_equals_the_plain_model(ranks, name, run)


@pytest.mark.parametrize(("zero", "sp"), [(0, False), (1, True), (2, False), (3, False), (3, True)])
def test_a_data_rank_without_a_sequence(ranks, zero, sp):
    """One sequence for two data ranks: the second pair of ranks computes nothing, or a token that does not count."""
    run = make_run("kv 2, all", 2, ZERO[zero], {"sp": sp}, dp=2, sequences=1, loss="chunked" if sp else "full")
    assert_equals_the_plain_model(ranks, "kv 2, all", run)


def test_no_clipping(ranks):
    assert_equals_the_plain_model(ranks, "kv 1, all", make_run("kv 1, all", 2, SP, clip=None))


def test_clipping_is_active_in_these_proofs():
    for name in ("llama", "kv 2, all", "kv 1, all", "gpt2"):
        assert min(expected(name, "sdpa", "full", 7, 0.5, "float64").norms) > 0.5


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "fp32"},
        {"precision": "fp32", "loss": "chunked"},
        {"precision": "bf16"},
        {"precision": "bf16", "loss": "chunked"},
        {"precision": "bf16", "grad_dtype": "bf16"},
        {"precision": "fp16"},
    ],
    ids=str,
)
@pytest.mark.parametrize(("name", "layout"), [("kv 1, all", SP | ZERO[3]), ("gpt2", ZERO[0])], ids=["llama", "gpt2"])
def test_narrow_precisions_keep_to_their_bounds(ranks, name, layout, options):
    assert_equals_the_plain_model(ranks, name, make_run(name, 2, layout, dp=2, **options))


def drawn(seed: int) -> tuple[str, RunSpec]:
    """A case that nobody thought of."""
    draw = random.Random(seed)
    tp, name = draw.choice([2, 4]), draw.choice(["kv 2, all", "kv 1, all", "gpt2 drops", "gpt2 untied"])
    recompute = draw.choice([{}, FULL, EVERY, KEEP])
    sizes = {"sequences": draw.randint(1, 6), "micro": draw.randint(1, 3), "loss": draw.choice(["full", "chunked"])}
    run = make_run(name, tp, draw.choice(ZERO), recompute, {"sp": draw.random() < 0.5}, dp=4 // tp, **sizes)
    return name, run


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_drawn(ranks, seed):
    assert_equals_the_plain_model(ranks, *drawn(seed))


# -- weights and replicas ----------------------------------------------------------------------------------------------


def initial_weights(mesh, run: RunSpec) -> dict[str, torch.Tensor]:
    return {placement.name: weight.clone() for placement, weight in Trainer(run, mesh).sharded.named_parameters()}


@pytest.mark.parametrize(
    ("name", "tp", "dp", "zero"),
    [
        ("kv 2, all", 2, 1, 0),
        ("kv 2, all", 4, 1, 0),
        ("kv 1", 2, 2, 3),
        ("gpt2", 2, 2, 1),
        ("gpt2", 4, 1, 0),
        ("kv 3 of 6", 3, 1, 2),
    ],
)
def test_initial_weights_are_those_of_one_rank(ranks, name, tp, dp, zero):
    plain = build(MODELS[name], dtype=torch.float32)
    initialise_(plain, seed=1)
    for found in on_ranks(ranks, make_run(name, tp, ZERO[zero], dp=dp, precision="fp32"), initial_weights):
        assert found.keys() == {key for key, _ in plain.named_parameters()}
        for key, weight in plain.named_parameters():
            assert torch.equal(found[key], weight), key


def replicas(mesh, run: RunSpec, steps: int) -> dict[str, torch.Tensor]:
    """After `steps` steps this rank's own part of every parameter, by name and by which part it is."""
    trainer, data = Trainer(run, mesh), proof_data(run)
    for step in range(steps):
        assert not trainer.update(step, trainer.accumulate(data, step)).skipped
    trainer.sharded.settle()
    found = {}
    for name, placement in trainer.sharded.placements.items():
        index = placement.cuts[0].index if placement.cuts else "whole"
        found[f"{name} part {index}"] = trainer.model.get_parameter(name).detach().clone()
    return found


@pytest.mark.parametrize(
    ("name", "tp", "layout", "whole"),
    [
        # Norms and heads' norms, row biases; and k and v of one head, or of two, that all or two ranks hold.
        ("kv 1, all", 4, SP, 2 * 6 + 1),
        ("kv 2, all", 4, {}, 2 * 6 + 1),
        ("kv 2, all", 2, SP | {"zero": 1}, 2 * 6 + 1),
        ("gpt2 drops", 4, SP, 2 * 6 + 2 + 1),
        ("gpt2", 2, {"zero": 2}, 2 * 6 + 2 + 1),
        ("kv 2, all", 2, SP, 2 * 6 + 1),  # and data ranks that hold all: of one norm, or they would drift apart
    ],
)
def test_replicas_are_the_same_bits_after_20_steps(ranks, name, tp, layout, whole):
    run = make_run(name, tp, layout, dp=4 // tp, precision="fp32", sequences=3)
    parts: dict[str, list[torch.Tensor]] = {}
    ends = on_ranks(ranks, run, replicas, 20)
    for each in ends:
        for key, weight in each.items():
            parts.setdefault(key, []).append(weight)
    assert sum(key.endswith("whole") for key in parts) == whole
    for key, held in parts.items():
        if key.endswith("whole"):
            assert len(held) == 4
        elif "k_proj" in key and name != "gpt2":
            assert len(held) == 4 // min(MODELS[name].num_kv_heads, tp)
        assert all(torch.equal(weight, held[0]) for weight in held), key


# -- norms -------------------------------------------------------------------------------------------------------------


def norm_of_ones(mesh, run: RunSpec) -> float:
    """Every gradient that there is set to 1: not what is filled up, which no gradient reaches."""
    trainer = Trainer(run, mesh)
    finish = trainer.sharded.finish

    def ones():
        for unit in finish():
            shard = unit.gradient_shard
            for piece in unit.pieces:
                piece.of(shard).zero_()
                for _, elements in piece.boxes(piece.of(shard)):
                    elements.fill_(1.0)
            yield unit

    trainer.sharded.finish = ones
    return trainer.accumulate(proof_data(run), 0).gradient_norm


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize(
    ("name", "tp", "dp", "zero"),
    [("kv 2, all", 2, 1, 0), ("kv 1, all", 4, 1, 0), ("kv 1, all", 2, 2, 0), ("kv 1, all", 2, 2, 1), ("gpt2", 2, 2, 3)],
)
def test_the_norm_counts_each_distinct_parameter_once(ranks, name, tp, dp, zero, sp):
    count = sum(p.numel() for p in build(MODELS[name], device="meta").parameters())
    norms = on_ranks(ranks, make_run(name, tp, ZERO[zero], {"sp": sp}, dp=dp, precision="fp32"), norm_of_ones)
    assert norms == pytest.approx([math.sqrt(count)] * len(norms), rel=1e-6)
    assert len(set(norms)) == 1


def filled_up(mesh, run: RunSpec) -> list[float]:
    """The largest weight, moment and gradient of words that there are not, after steps that move all others."""
    trainer, data = Trainer(run, mesh), proof_data(run)
    for step in range(3):
        trainer.update(step, trainer.accumulate(data, step))
    trainer.sharded.settle()
    found = [0.0]
    moments = trainer.optimizer.shards()
    for unit in trainer.sharded.units:
        for shard in (unit.master, unit.gradient_shard, *moments[unit].values()):
            for piece in unit.pieces:
                rest = piece.of(shard).clone()
                for _, elements in piece.boxes(rest):
                    elements.zero_()
                found.append(rest.abs().max().item())
    return found


@pytest.mark.parametrize(("name", "zero"), [("kv 1", 0), ("gpt2 untied", 2), ("gpt2", 3)])
@pytest.mark.parametrize("loss", ["full", "chunked"])
def test_what_is_filled_up_stays_zero(ranks, name, zero, loss):
    run = make_run(name, 4, ZERO[zero], loss=loss, precision="fp32")
    assert all(max(found) == 0.0 for found in on_ranks(ranks, run, filled_up))


# -- bad numbers, and stopping -----------------------------------------------------------------------------------------


def step_with_poison(mesh, run: RunSpec, name: str, rank: int) -> list[tuple[bool, bool]]:
    """One rank's gradient of one tensor is not a number in the second step of three."""
    trainer, data = Trainer(run, mesh), proof_data(run)
    history = []
    for step in range(3):
        handle = None
        if step == 1 and mesh.rank == rank:
            weight = trainer.model.get_parameter(name)
            handle = weight.register_hook(lambda gradient: torch.full_like(gradient, math.nan))
        before = [unit.master.clone() for unit in trainer.sharded.units]
        update = trainer.update(step, trainer.accumulate(data, step))
        same = all(torch.equal(a, unit.master) for a, unit in zip(before, trainer.sharded.units, strict=True))
        history.append((update.skipped, same))
        if handle:
            handle.remove()
    return history


@pytest.mark.parametrize(("rank", "zero"), [(1, 0), (2, 2), (3, 0)])
@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.up_proj.weight",
        "model.norm.weight",  # with sp: else the same on all tensor ranks, of which norms count the first one's
        "model.layers.0.self_attn.k_proj.weight",
    ],
)
def test_one_ranks_bad_number_skips_the_step_on_all(ranks, name, rank, zero):
    sp = {"sp": name == "model.norm.weight"}
    run = make_run("kv 1, all", 2, ZERO[zero], sp, dp=2, precision="fp32")
    for history in on_ranks(ranks, run, step_with_poison, name, rank):
        assert history == [(False, False), (True, True), (False, False)]


def hears(mesh, run: RunSpec, rank: int) -> tuple[float, float]:
    trainer, data = Trainer(run, mesh), proof_data(run)
    stop = lambda: float(mesh.rank == rank)  # noqa: E731
    totals = trainer.accumulate(data, 0, stop)
    trainer.update(0, totals)
    return totals.stop, trainer.evaluate(data, data.ids(1, 5), stop).stop


@pytest.mark.parametrize("rank", range(4))
def test_everyone_hears_of_one_tensor_ranks_stop(ranks, rank):
    run = make_run("kv 1", 2, dp=2)
    assert on_ranks(ranks, run, hears, rank) == [(1.0, 1.0)] * 4


def evaluated(mesh, run: RunSpec) -> tuple[float, int]:
    totals = Trainer(run, mesh).evaluate(proof_data(run), torch.arange(5))
    return totals.loss_sum, totals.tokens


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize(("name", "sp"), [("kv 2, all", True), ("gpt2 drops", True), ("gpt2", False)])
def test_evaluation(ranks, name, sp, zero):
    run = make_run(name, 2, ZERO[zero], {"sp": sp}, dp=2)
    plain = build(run.model, attention=run.attention, dtype=torch.float64)
    initialise_(plain, run.seed)
    with torch.no_grad():
        loss = plain.eval()(*proof_data(run).batch(torch.arange(5))).item()
    for found, tokens in on_ranks(ranks, run, evaluated):
        assert found == pytest.approx(loss, rel=1e-12)
        assert tokens == int((proof_data(run).batch(torch.arange(5))[1] != -100).sum())


def logits(mesh, run: RunSpec) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """All words' logits on every rank, and what a loss of the caller's own makes of them."""
    trainer = Trainer(run, mesh)
    tokens, _ = proof_data(run).batch(torch.arange(3))
    trainer.sharded.begin()
    trainer.sharded.micro(last=True)
    out = trainer.model(tokens)
    out.square().sum().backward()
    list(trainer.sharded.finish())
    return out.detach(), {placement.name: g.clone() for placement, g in trainer.sharded.named_gradients()}


@pytest.mark.parametrize(("name", "tp", "sp"), [("kv 2, all", 2, False), ("kv 1, all", 4, True), ("gpt2", 4, True)])
def test_gathered_logits_and_gradients_through_them(ranks, name, tp, sp):
    run = make_run(name, tp, {"sp": sp})
    plain = build(run.model, dtype=torch.float64)
    initialise_(plain, run.seed)
    whole = plain(proof_data(run).batch(torch.arange(3))[0])
    whole.square().sum().backward()
    for found, gradients in on_ranks(ranks, run, logits):
        assert found.shape == whole.shape
        assert (found - whole).abs().max() < 1e-12
        for key, parameter in plain.named_parameters():
            torch.testing.assert_close(gradients[key], parameter.grad, rtol=1e-10, atol=1e-12)


# -- recompute ---------------------------------------------------------------------------------------------------------


def gradients_and_rows(mesh, run: RunSpec):
    trainer, data = Trainer(run, mesh), proof_data(run)
    mesh.ledger.clear()
    trainer.accumulate(data, 0)
    rows = [(r.key.reason, r.key.operation, r.key.phase, r.key.micro, r.count) for r in mesh.ledger.rows()]
    return [unit.gradient_shard.clone() for unit in trainer.sharded.units], rows


def sent(rows, *phases: str) -> dict[tuple[str, str, str], int]:
    """How often, over all micro-batches, by reason, operation and phase, of what tensor ranks send in a block."""
    counts: dict[tuple[str, str, str], int] = {}
    for reason, operation, phase, _, count in rows:
        if reason in ("tp.attn", "tp.mlp") and phase in phases:
            counts[reason, operation, phase] = counts.get((reason, operation, phase), 0) + count
    return counts


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("name", ["kv 2, all", "gpt2", "gpt2 drops"])
def test_recompute_gives_the_same_bits_and_sends_what_it_must(ranks, name, sp):
    blocks, micros = 2, 2
    seen = {}
    for words, recompute in {"none": {}, "full": FULL, "every": EVERY, "keep": KEEP}.items():
        run = make_run(name, 2, {"sp": sp}, recompute, sequences=3)
        seen[words] = on_ranks(ranks, run, gradients_and_rows)
        for (gradients, _), (plain, _) in zip(seen[words], seen["none"], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(gradients, plain, strict=True)), words
    gather, scatter = ("all_gather", "reduce_scatter") if sp else ("", "all_reduce")
    each = blocks * micros
    forward = {(r, scatter, "forward"): each for r in ("tp.attn", "tp.mlp")}
    backward = {(r, scatter, "backward"): each for r in ("tp.attn", "tp.mlp")}
    if sp:
        forward |= {(r, gather, "forward"): each for r in ("tp.attn", "tp.mlp")}
        backward |= {(r, gather, "backward"): 2 * each for r in ("tp.attn", "tp.mlp")}
    drops = name == "gpt2 drops"  # the mask of what the last product put out is kept too
    again = {("tp.attn", scatter, "recompute"): each}
    if sp:
        again |= {("tp.attn", gather, "recompute"): each, ("tp.mlp", gather, "recompute"): each}
    for words in seen:
        for _, rows in seen[words]:
            assert sent(rows, "forward") == forward, words
            assert sent(rows, "backward") == backward, words
            # Between two blocks of a region the last reduction is needed, behind the region it is not.
            last = {"full": each if drops else 0, "every": each if drops else each // 2}.get(words, 0)
            needed = again | ({("tp.mlp", scatter, "recompute"): last} if last else {})
            assert sent(rows, "recompute") == ({} if words in ("none", "keep") else needed), words


def test_reasons_and_micro_batches_are_told(ranks):
    run = make_run("gpt2", 2, SP | FULL, sequences=3, micro=1)
    for _, rows in on_ranks(ranks, run, gradients_and_rows):
        inside = [row for row in rows if row[2] != "step"]
        assert {reason for reason, *_ in inside} == {"tp.attn", "tp.mlp", "tp.embed", "tp.head", "tp.loss"}
        for micro, (reason, phase) in itertools.product(range(3), {(row[0], row[2]) for row in inside}):
            assert any(row[0] == reason and row[2] == phase and row[3] == micro for row in inside), (micro, reason)
