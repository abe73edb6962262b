"""What is taken for which parameter, and what is refused, in words and before anything is written."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch

from meshwright.convert.importing import import_folder
from meshwright.spec.errors import RunError, UserError
from meshwright.train import checkpoint

sys.path.insert(0, str(Path(__file__).parent))
from folders import GPT2, LLAMA, folder, parted, weights

UNTIED, TIED = LLAMA, LLAMA | {"tie_word_embeddings": True}


def imported(source: Path, *fields: str) -> dict[str, torch.Tensor]:
    done = import_folder(source, source.parent / "run", fields)
    found, meta = checkpoint.load(done.where)
    assert (meta["step"], meta["updates"], meta["imported"]) == (0, 0, str(source))
    return found


@pytest.mark.parametrize("config", [GPT2, UNTIED, TIED], ids=["gpt2", "untied", "tied"])
def test_weights_become_master_weights_and_moments_are_zero(tmp_path, config):
    tensors = weights(config, torch.bfloat16)
    found = imported(folder(tmp_path / "in", config, tensors))
    assert len(found) == 3 * len(tensors)
    for name, tensor in tensors.items():
        assert found[f"model/{name}"].dtype == torch.float32
        assert torch.equal(found[f"model/{name}"], tensor.float())
        for kind in ("exp_avg", "exp_avg_sq"):
            moment = found[f"{kind}/{name}"]
            assert moment.shape == tensor.shape and moment.dtype == torch.float32 and not moment.any()


def test_a_tensor_of_several_runs(tmp_path, monkeypatch):
    """Blocks of 64 bytes and runs of 64 elements: tensors have several, the last not whole."""
    for where in ("train.tensorfile.BLOCK", "train.manifest.BLOCK", "convert.importing.RUN"):
        monkeypatch.setattr(f"meshwright.{where}", 64)
    tensors = weights(LLAMA, torch.float16)
    found = imported(folder(tmp_path / "in", LLAMA, tensors))
    assert all(torch.equal(found[f"model/{name}"], tensor.float()) for name, tensor in tensors.items())


def test_several_files(tmp_path):
    found = imported(parted(tmp_path / "in", GPT2))
    assert all(torch.equal(found[f"model/{name}"], tensor) for name, tensor in weights(GPT2).items())


def test_gpt2_as_it_lies_on_the_hub(tmp_path):
    """Saved from the model without its head, with the masks that older versions of transformers kept."""
    tensors = weights(GPT2)
    old = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
    assert "h.0.attn.c_attn.bias" in old
    for layer in range(2):
        old[f"h.{layer}.attn.bias"] = torch.ones(1, 1, 16, 16).tril().to(torch.uint8)
        old[f"h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    done = import_folder(folder(tmp_path / "in", GPT2, old), tmp_path / "run")
    found, _ = checkpoint.load(done.where)
    assert len(done.passed_over) == 4 and len(found) == 3 * len(tensors)
    assert all(torch.equal(found[f"model/{name}"], tensor) for name, tensor in tensors.items())


def test_rotary_frequencies_are_passed_over(tmp_path):
    old = weights(LLAMA) | {"model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(3)}
    assert len(imported(folder(tmp_path / "in", LLAMA, old))) == 3 * len(weights(LLAMA))


def test_a_tied_head(tmp_path):
    tensors = weights(TIED)
    embedding = tensors["model.embed_tokens.weight"]
    both = folder(tmp_path / "both", TIED, tensors | {"lm_head.weight": embedding.clone()})
    assert import_folder(both, tmp_path / "one").parameters == sum(t.numel() for t in tensors.values())
    alone = {("lm_head.weight" if t is embedding else name): t for name, t in tensors.items()}
    done = import_folder(folder(tmp_path / "alone", TIED, alone), tmp_path / "two")
    assert torch.equal(checkpoint.load(done.where)[0]["model/model.embed_tokens.weight"], embedding)
    other = embedding.clone()
    other[-1, -1] += 1
    apart = folder(tmp_path / "apart", TIED, tensors | {"lm_head.weight": other})
    with pytest.raises(UserError, match=r"apart: lm_head.weight differs from model.embed_tokens.weight, though"):
        import_folder(apart, tmp_path / "three")
    assert not (tmp_path / "three").exists()


def test_precision_is_that_of_the_weights(tmp_path):
    bf16 = folder(tmp_path / "bf16", LLAMA, weights(LLAMA, torch.bfloat16))
    assert import_folder(bf16, tmp_path / "1").run.precision == "bf16"
    assert import_folder(bf16, tmp_path / "2", ["precision=fp32"]).run.precision == "fp32"
    mixed = weights(LLAMA, torch.bfloat16) | {"model.norm.weight": torch.ones(12, dtype=torch.float16)}
    assert import_folder(folder(tmp_path / "mixed", LLAMA, mixed), tmp_path / "3").run.precision == "fp32"
    wide = import_folder(folder(tmp_path / "wide", LLAMA, weights(LLAMA, torch.float64)), tmp_path / "4")
    assert {t.dtype for t in checkpoint.load(wide.where)[0].values()} == {torch.float64}


def test_fields_that_the_run_must_have(tmp_path):
    gpt2 = folder(tmp_path / "a b", GPT2 | {"attn_pdrop": 0.1})
    done = import_folder(gpt2, tmp_path / "run")
    assert done.fields == (
        f"model={gpt2}/config.json", "precision=fp32", f"out={tmp_path}/run", "data.seq_len=16", "attention=explicit",
    )  # fmt: skip
    done = import_folder(gpt2, tmp_path / "other", ["model.attn_dropout=0"])
    assert "model.attn_dropout=0" in done.fields and "attention=explicit" not in done.fields
    assert done.run.model.attn_dropout == 0
    with pytest.raises(UserError, match=r"seed=3: an import takes model.NAME=… and precision=… only"):
        import_folder(gpt2, tmp_path / "third", ["seed=3"])


def without(name):
    return lambda tensors: {key: t for key, t in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("model.norm.weight"), "lacks model.norm.weight"),
        (lambda t: t | {"model.extra": torch.ones(1)}, "has unexpected model.extra"),
        (
            lambda t: t | {"model.norm.weight": torch.ones(13)},
            r"has misshapen model.norm.weight is \[13\], .* is \[12\]",
        ),
        (lambda t: {}, r"lacks model.embed_tokens.weight; .* and 16 more"),
        (lambda t: t | {"model.norm.weight": torch.ones(12, dtype=torch.int8)}, "norm.weight is of dtype torch.int8"),
        (lambda t: t | {"model.norm.weight": torch.ones(12).to(torch.float8_e5m2)}, "norm.weight is of dtype F8_E5M2"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path, change, message):
    with pytest.raises(UserError, match=message):
        import_folder(folder(tmp_path / "in", LLAMA, change(weights(LLAMA))), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_what_is_not_finite_is_not_imported(tmp_path):
    tensors = weights(LLAMA)
    tensors["model.norm.weight"][-1] = float("nan")
    with pytest.raises(RunError, match=r"model.norm.weight is not finite"):
        import_folder(folder(tmp_path / "in", LLAMA, tensors), tmp_path / "run")
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def test_pickles_are_refused(tmp_path):
    source = folder(tmp_path / "in", LLAMA)
    os.rename(source / "model.safetensors", source / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"only pickled weights \(pytorch_model.bin\), which may run any code"):
        import_folder(source, tmp_path / "run")
    os.rename(source / "pytorch_model.bin", source / "other.safetensors")
    with pytest.raises(UserError, match=r"only other.safetensors; rename"):
        import_folder(source, tmp_path / "run")


@pytest.mark.parametrize("cut", [0, 4, 100, -1])
def test_a_damaged_file(tmp_path, cut):
    source = folder(tmp_path / "in", LLAMA)
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(UserError, match=r"model.safetensors: is damaged"):
        import_folder(source, tmp_path / "run")


def test_a_header_that_lies(tmp_path):
    source = folder(tmp_path / "in", LLAMA)
    file = source / "model.safetensors"
    content = file.read_bytes()
    for here, there in ((b'"F32"', b'"F64"'), (b"[12,12]", b"[12,13]"), (b'"shape":', b'"shale":')):
        file.write_bytes(content.replace(here, there, 1))
        with pytest.raises(UserError, match=r"model.safetensors: is damaged"):
            import_folder(source, tmp_path / "run")


@pytest.mark.parametrize("place", ["../secret.safetensors", "/etc/passwd", 5])
def test_an_index_that_points_elsewhere(tmp_path, place):
    source = parted(tmp_path / "in", LLAMA)
    index = source / "model.safetensors.index.json"
    plain = json.loads(index.read_text())
    plain["weight_map"]["lm_head.weight"] = place
    index.write_text(json.dumps(plain))
    with pytest.raises(UserError, match="is no index of safetensors files"):
        import_folder(source, tmp_path / "run")


def test_an_index_that_does_not_fit(tmp_path):
    source = parted(tmp_path / "in", LLAMA)
    index = source / "model.safetensors.index.json"
    plain = json.loads(index.read_text())
    plain["weight_map"]["model.more"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(plain))
    with pytest.raises(UserError, match=r"says that model.more is in model-00001-of-00002.safetensors, and it is not"):
        import_folder(source, tmp_path / "run")
    os.remove(source / "model-00002-of-00002.safetensors")
    with pytest.raises(UserError, match=r"model-00002-of-00002.safetensors: cannot be read: no such file"):
        import_folder(source, tmp_path / "run")


def test_a_run_that_has_checkpoints_is_left_alone(tmp_path):
    source = folder(tmp_path / "in", LLAMA)
    import_folder(source, tmp_path / "run")
    with pytest.raises(UserError, match=r"run/checkpoints has checkpoints, the newest of step 0; name another folder"):
        import_folder(source, tmp_path / "run")
    assert sorted(os.listdir(tmp_path / "run" / "checkpoints")) == ["latest", "step-00000000"]


def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("meshwright.train.folders.os.fsync", full)
    with pytest.raises(RunError, match="step-00000000 could not be written: No space left on device"):
        import_folder(folder(tmp_path / "in", LLAMA), tmp_path / "run")
    assert os.listdir(tmp_path / "run" / "checkpoints") == []
