"""In and out again: every bit of the weights and what config.json means; and what transformers makes of the result."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from meshwright.convert.exporting import export
from meshwright.convert.importing import import_folder
from meshwright.model.build import build
from meshwright.spec.huggingface import from_config
from meshwright.spec.layout import Layout
from meshwright.spec.run import Batch, Data, LrSchedule
from meshwright.train import checkpoint

sys.path.insert(0, str(Path(__file__).parent))
from hf import CONFIGS, make, settings, step_from, tensors

transformers = pytest.importorskip("transformers")


def meaning(folder: Path) -> dict:
    """What a config.json says once transformers has filled in what it leaves out, but for who wrote it."""
    plain = transformers.AutoConfig.from_pretrained(folder).to_dict()
    return {key: value for key, value in plain.items() if key not in ("transformers_version", "_name_or_path")}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in CONFIGS),
        *(("qwen2", dtype) for dtype in (torch.bfloat16, torch.float16, torch.float64)),
    ],
)
def test_import_then_export_is_bitwise(tmp_path, name, dtype):
    make(tmp_path / "in", CONFIGS[name], dtype)
    done = import_folder(tmp_path / "in", tmp_path / "run")
    assert done.parameters == sum(t.numel() for t in tensors(tmp_path / "in").values())
    export(tmp_path / "run", tmp_path / "out")
    before, after = tensors(tmp_path / "in"), tensors(tmp_path / "out")
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        assert after[key].dtype == dtype and torch.equal(after[key], tensor), key
    spec = from_config(settings(tmp_path / "in"))
    again = from_config(settings(tmp_path / "out"))
    sizes = {"head_dim": spec.head_width, "kv_heads": spec.num_kv_heads, "tied": spec.is_tied}
    assert again.model_copy(update=sizes) == spec.model_copy(update=sizes)
    there, here = meaning(tmp_path / "in"), meaning(tmp_path / "out")
    if name != "gpt2":
        there["head_dim"] = spec.head_width  # may be left out where it is hidden / heads
    differ = {key for key in there if there[key] != here.get(key)}
    assert not differ, {key: (there[key], here.get(key)) for key in differ}


def test_config_for_programs_that_read_the_older_keys(tmp_path):
    """Base and scaling of rotary positions also stand where transformers 4 looks for them."""
    make(tmp_path / "in", CONFIGS["llama"])
    import_folder(tmp_path / "in", tmp_path / "run")
    export(tmp_path / "run", tmp_path / "out", dtype="bf16")
    found, wanted = settings(tmp_path / "out"), dict(CONFIGS["llama"]["rope_parameters"])
    assert found["rope_theta"] == wanted.pop("rope_theta") and found["rope_scaling"] == wanted
    assert (found["torch_dtype"], found["architectures"]) == ("bfloat16", ["LlamaForCausalLM"])


@pytest.mark.parametrize(
    ("name", "dp", "zero"),
    [("gpt2", 2, 0), ("gpt2", 3, 3), ("llama", 3, 1), ("qwen2", 2, 2), ("qwen3", 2, 3), ("mistral", 3, 0)],
)
def test_logits_of_what_ranks_have_saved(ranks, tmp_path, name, dp, zero):
    source = make(tmp_path / "in", CONFIGS[name])
    done = import_folder(tmp_path / "in", tmp_path / "run")
    run = done.run.model_copy(
        update={
            "layout": Layout(dp=dp, zero=zero), "data": Data(seq_len=10), "batch": Batch(sequences=7, micro=2),
            "lr_schedule": LrSchedule(warmup=0),
        }
    )  # fmt: skip
    ranks.run(dp, step_from, run, tmp_path / "run")
    told = export(tmp_path / "run", tmp_path / "out", shard_size=40_000)
    assert told.step == 1 and told.files > 2
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    found, _ = checkpoint.load(tmp_path / "run" / "checkpoints" / "step-00000001")
    ours = build(run.model, attention=run.attention).eval()
    ours.load_state_dict(
        {k.removeprefix("model/"): t for k, t in found.items() if k.startswith("model/")}, strict=False
    )
    tokens = torch.randint(97, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = ours(tokens)
        assert (theirs(tokens).logits - expected).abs().max() < 1e-5
        assert (source(tokens).logits - expected).abs().max() > 1e-3  # a step was made


@pytest.mark.parametrize(
    ("dtype", "wanted"), [(None, torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)]
)
def test_a_dtype_that_was_asked_for(tmp_path, dtype, wanted):
    make(tmp_path / "in", CONFIGS["qwen2"])
    import_folder(tmp_path / "in", tmp_path / "run")
    export(tmp_path / "run", tmp_path / "out", dtype=dtype)
    for key, tensor in tensors(tmp_path / "in").items():
        assert torch.equal(tensors(tmp_path / "out")[key], tensor.to(wanted))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == wanted


def test_shards_as_transformers_cuts_them(tmp_path):
    """Whatever the files are called: several in, several out, none larger than asked."""
    make(tmp_path / "in", CONFIGS["llama"], max_shard_size="50KB")
    assert len(list((tmp_path / "in").glob("*.safetensors"))) > 3
    import_folder(tmp_path / "in", tmp_path / "run")
    told = export(tmp_path / "run", tmp_path / "out", shard_size=60_000)
    files = list((tmp_path / "out").glob("model-*-of-*.safetensors"))
    assert len(files) == told.files > 2 and not (tmp_path / "out" / "model.safetensors").exists()
    assert all(file.stat().st_size < 62_000 for file in files)
    before, after = tensors(tmp_path / "in"), tensors(tmp_path / "out")
    assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)


def test_a_tokenizer_goes_along(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    make(tmp_path / "in", CONFIGS["llama"])
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.train_from_iterator(["one two three"] * 9, tokenizers.trainers.BpeTrainer(vocab_size=90))
    made.save(str(tmp_path / "in" / "tokenizer.json"))
    (tmp_path / "in" / "generation_config.json").write_text('{"eos_token_id": 3}')
    said = settings(tmp_path / "in") | {"eos_token_id": 3}
    (tmp_path / "in" / "config.json").write_text(json.dumps(said))
    done = import_folder(tmp_path / "in", tmp_path / "run")
    assert f"data.tokenizer={tmp_path / 'in' / 'tokenizer.json'}" in done.fields
    export(tmp_path / "run", tmp_path / "out")
    there = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert there("two  one").input_ids == made.encode("two  one").ids
    assert settings(tmp_path / "out")["eos_token_id"] == 3
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == 3
    export(tmp_path / "run", tmp_path / "without", tokenizer="none")
    assert {path.name for path in (tmp_path / "without").iterdir()} == {"config.json", "model.safetensors"}
