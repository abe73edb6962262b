"""Everything a run is: model, data, batch, layout, optimizer and the rest, each with a default."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from meshwright.spec.context import check as check_context
from meshwright.spec.layout import Layout
from meshwright.spec.model import ModelSpec
from meshwright.spec.pipeline import check as check_pipeline
from meshwright.spec.presets import PRESETS
from meshwright.spec.splitting import check as check_split

Count = Annotated[int, Field(gt=0, lt=2**31)]
Text = Annotated[str, Field(min_length=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]

LOSS_ROWS = 256
"""Tokens whose logits the chunked loss holds at once."""
UNDER_WAY = 2
"""Reductions of gradients that hold buffers of their own at once."""
WIDENED = 1 << 22
"""Elements of a gradient narrower than the master weights that the optimizer widens at once."""
GRAD_DTYPES: dict[str, tuple[str, ...]] = {
    "fp32": ("auto", "fp32"),
    "bf16": ("auto", "fp32", "bf16"),
    "fp16": ("auto", "fp32", "fp16"),
    "float64": ("auto",),
}
"""What gradients may accumulate in, by precision."""
NOTHING_TO_OFFLOAD = (
    "offload=activations moves what an accelerator saves to the host's memory; on the CPU it is there already: "
    "use offload=none"
)


class Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Data(Part):
    """Where tokens come from."""

    path: Text = Field("stdlib", description="stdlib, a text file, a folder of text files, or a .npy token file")
    seq_len: Count = Field(256, description="tokens in a sequence")
    tokenizer: Text = Field("bytes", description="bytes, or a path to a tokenizer.json")
    held_out: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.05, description="part kept for validation: files, or the end of one file"
    )
    packing: Literal["none", "documents"] = Field(
        "none",
        description="documents: attention and positions stay inside a text (a file), and the last token of each has no "
        "target; none: sequences are cut from one stream of all texts",
    )


class Batch(Part):
    """How many sequences a step holds."""

    sequences: Count = Field(32, description="sequences in the global batch")
    micro: Count = Field(4, description="sequences a rank computes at once")


class Optimizer(Part):
    """AdamW."""

    lr: Annotated[float, Field(gt=0)] = Field(
        3e-3, description="highest learning rate; the default suits the demo's small model, large ones want a tenth"
    )
    weight_decay: Annotated[float, Field(ge=0)] = Field(0.1, description="decay of matrices; vectors never decay")
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = Field(
        (0.9, 0.95), description="decay of the two moments"
    )
    eps: Annotated[float, Field(gt=0)] = Field(1e-8, description="added to the root of the second moment")
    clip: Annotated[float, Field(gt=0)] | None = Field(
        1.0, description="largest global gradient norm; null: no clipping"
    )


class LrSchedule(Part):
    """Linear warm-up, then a decay to `floor` × lr at the last step."""

    warmup: Annotated[int, Field(ge=0)] = Field(20, description="steps of linear warm-up")
    decay: Literal["cosine", "constant"] = Field(
        "cosine", description="cosine, or constant and a linear decay at the end"
    )
    decay_steps: Annotated[int, Field(ge=0)] | None = Field(
        None, description="constant: length of the final decay; 0 for none"
    )
    floor: Fraction = Field(0.1, description="last learning rate as a part of the highest")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.decay == "cosine" and self.decay_steps is not None:
            raise ValueError("decay_steps belongs to decay: constant; the cosine spans all steps after warm-up")
        if self.decay == "constant" and self.decay_steps is None:
            raise ValueError("decay: constant needs decay_steps (0 for none)")
        return self


class Validation(Part):
    """How often the held-out text is scored."""

    every: Annotated[int, Field(ge=0)] = Field(
        25, description="steps between validations, and after the last; 0: never"
    )
    sequences: Count = Field(64, description="held-out sequences scored, always the same ones")


class Checkpoint(Part):
    """When the run is saved, and whether it goes on from what is saved."""

    every: Annotated[int, Field(ge=0)] = Field(
        25, description="steps between checkpoints, and after the last; 0: never"
    )
    keep: Count = Field(2, description="newest checkpoints kept")
    keep_every: Annotated[int, Field(ge=0)] = Field(
        0, description="steps that this divides are kept beside the newest; 0: none"
    )
    background: bool = Field(
        True, description="write while training goes on, from a copy in the host's memory; false: training waits"
    )
    resume: Literal["auto", "never"] | Annotated[int, Field(ge=0)] = Field(
        "auto", description="auto: from the newest whole one, if any; never; or a step"
    )


class RunSpec(Part):
    """One run, whole. `meshwright train --show` prints it; the run's folder keeps it as run.yaml."""

    model: ModelSpec = Field(PRESETS["llama-tiny"], description="preset, fields over a preset, or a config.json")
    data: Data = Field(Data(), description="where tokens come from")
    batch: Batch = Field(Batch(), description="sequences in a step")
    layout: Layout = Field(Layout(), description="ranks on each axis, ZeRO stage, recompute; auto: planned")
    cluster: Text | None = Field(
        None, description="layout=auto: what to plan for, 8x8xh100 or a cluster file; null: this machine"
    )
    precision: Literal["fp32", "bf16", "fp16", "float64"] = Field(
        "fp32", description="dtype of parameters and compute; bf16 and fp16 keep master weights and moments in fp32"
    )
    grad_dtype: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto", description="dtype that gradients accumulate in; auto: fp32, or float64 with precision=float64"
    )
    reduce_dtype: Literal["auto", "fp32", "bf16", "fp16"] = Field(
        "auto", description="dtype that gradients are summed over ranks in; auto: that of the gradients"
    )
    attention: Literal["sdpa", "explicit"] = Field("sdpa", description="torch's fused attention, or written out")
    loss: Literal["full", "chunked"] = Field(
        "full", description="all logits at once, or never more than a chunk of them"
    )
    compile: Literal["none", "block"] = Field("none", description="block: torch.compile each transformer block")
    dropout: Literal["counter", "torch"] = Field(
        "counter",
        description="masks that are a function of seed, step and element, alike in every layout; or torch's own",
    )
    optimizer: Optimizer = Field(Optimizer(), description="AdamW")
    lr_schedule: LrSchedule = Field(LrSchedule(), description="learning rate by step")
    steps: Count = Field(100, description="optimizer steps")
    max_skips: Annotated[int, Field(ge=0)] = Field(
        3, description="non-finite steps skipped in a row before the run stops"
    )
    validation: Validation = Field(Validation(), description="scores on held-out text")
    checkpoint: Checkpoint = Field(Checkpoint(), description="saving and resuming")
    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="auto: the accelerator torch reports, else the CPU"
    )
    comm_timeout: Annotated[float, Field(ge=1, le=365 * 86400)] = Field(
        600.0, description="seconds a collective may wait for a rank"
    )
    trace: bool = Field(
        False,
        description="record who does what when in steps 3 to 5 of those to come, or the last of fewer, as trace.json; "
        "and tell where they went",
    )
    out: Text = Field("runs/demo", description="folder of this run: checkpoints, metrics, run.yaml")
    seed: Annotated[int, Field(ge=0, lt=2**63)] = Field(
        1, description="weights, order of samples and dropout follow from it"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.grad_dtype not in GRAD_DTYPES[self.precision]:
            right = " or ".join(GRAD_DTYPES[self.precision])
            raise ValueError(f"grad_dtype={self.grad_dtype} does not go with precision={self.precision}; use {right}")
        if self.precision == "fp16" and self.loss == "chunked":
            raise ValueError(
                "loss=chunked does not go with precision=fp16: it makes gradients before the loss scale lifts them; "
                "use loss=full, or precision=bf16"
            )
        if self.layout.offload != "none" and self.device == "cpu":
            raise ValueError(NOTHING_TO_OFFLOAD)
        if self.compile == "block" and self.layout.recompute == "selective":
            raise ValueError(
                "recompute=selective does not go with compile=block, which merges the operators that it would keep; "
                "use recompute=full or none, or compile=none"
            )
        check_split(self.model, self.layout, self.data.seq_len)
        check_context(self.model, self.layout, self.data.seq_len)
        check_pipeline(self.model, self.layout)
        for axis in ("tp", "cp"):
            if self.layout.size(axis) > 1:
                self._in_parts(axis)
        scaling = self.model.rope_scaling
        if self.data.packing == "documents" and scaling is not None and scaling.kind == "dynamic":
            raise ValueError(
                "data.packing=documents does not go with dynamic rope_scaling, whose frequencies depend on the length "
                "of what is attended to, and documents in one sequence have several; use data.packing=none, or another "
                "rope_scaling"
            )
        if self.reduce_dtype != "auto" and self.precision == "float64":
            raise ValueError("reduce_dtype does not go with precision=float64, which is for proofs; use auto")
        if self.model.family == "gpt2" and self.data.seq_len > self.model.max_seq:
            raise ValueError(
                f"data.seq_len={self.data.seq_len} is longer than the model's {self.model.max_seq} learned positions; "
                f"use data.seq_len={self.model.max_seq} or less, or model.max_seq={self.data.seq_len}"
            )
        if self.model.attn_dropout and self.attention == "sdpa":
            self._fused_dropout()
        if self.trace and self.steps == 1:
            raise ValueError("trace=true records no first step, which warms up; use steps=2 or more, or trace=false")
        # A run may well end within its warm-up (a trial of a long run does), but not before its decay begins.
        warmup, decay = self.lr_schedule.warmup, self.lr_schedule.decay_steps or 0
        if decay and warmup + decay > self.steps:
            raise ValueError(
                f"lr_schedule.warmup={warmup} + decay_steps={decay} is longer than steps={self.steps}; use "
                f"steps={warmup + decay} or more, or shorten lr_schedule.warmup or lr_schedule.decay_steps"
            )
        return self

    def _in_parts(self, axis: Literal["tp", "cp"]) -> None:
        """What does not go with several ranks that compute one sequence."""
        if self.compile == "block":
            raise ValueError(f"compile=block does not go with {axis} above 1; use compile=none, or {axis}=1")
        if self.dropout == "torch" and self.model.drops:
            explicit = " (with attention=explicit where model.attn_dropout is above 0)" if axis == "tp" else ""
            raise ValueError(
                f"dropout=torch does not go with {axis} above 1: torch's generators know nothing of who holds which "
                f"part; use dropout=counter{explicit}"
            )
        if axis == "cp" and self.attention == "explicit":
            raise ValueError(
                "attention=explicit does not go with cp above 1, where kernels that compute attention in parts take "
                "its place; use attention=sdpa, or cp=1"
            )

    def _fused_dropout(self) -> None:
        if self.dropout == "counter":
            raise ValueError(
                f"model.attn_dropout={self.model.attn_dropout} cannot be had with attention=sdpa and dropout=counter: "
                "the fused attention draws masks of its own; write attention=explicit to keep the masks alike in every "
                "layout, dropout=torch to let torch draw them (then no proof can compare them), or "
                "model.attn_dropout=0 to train without it"
            )
        if self.layout.recompute == "selective" and "attention" in self.layout.recompute_keep:
            raise ValueError(
                "layout.recompute_keep with attention does not go with attention=sdpa, dropout=torch and "
                f"model.attn_dropout={self.model.attn_dropout}: what is kept draws no masks again, so those behind it "
                "would differ; leave attention out of it, or use attention=explicit"
            )

    def dtypes(self, precision: str | None = None) -> dict[str, str]:
        """The dtypes beside the precision that were asked for by name; with `precision` only those that go with it."""
        asked = {"grad_dtype": self.grad_dtype, "reduce_dtype": self.reduce_dtype}
        fit = {
            "grad_dtype": precision is None or self.grad_dtype in GRAD_DTYPES[precision],
            "reduce_dtype": precision != "float64",
        }
        return {name: dtype for name, dtype in asked.items() if dtype != "auto" and fit[name]}
