"""The whole way of a user, through the command line: import, the command that it prints, export, transformers."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from meshwright.cli.main import run as command
from meshwright.train import checkpoint

sys.path.insert(0, str(Path(__file__).parent))
from folders import GPT2, folder, weights


def test_two_ranks_go_on_from_imported_weights(tmp_path, monkeypatch, capsys):
    """With a learning rate that rounding swallows, the weights after two steps are those that came in."""
    config = GPT2 | {"vocab_size": 256, "attn_pdrop": 0.1}
    folder(tmp_path / "hub model", config, weights(config, torch.bfloat16))
    (tmp_path / "text.txt").write_text("".join(f"line {i}\n" for i in range(900)))
    monkeypatch.chdir(tmp_path)
    assert command(["checkpoint", "import", "hub model", "run"]) == 0
    (line,) = re.findall(r"meshwright (train .*) data\.path=… optimizer\.lr=…\n", capsys.readouterr().out)
    words = shlex.split(line)
    assert words == [
        "train", "model=hub model/config.json", "precision=bf16", "out=run", "data.seq_len=16", "attention=explicit",
    ]  # fmt: skip
    more = ["data.path=text.txt", "steps=2", "batch.sequences=4", "batch.micro=2", "layout.dp=2", "layout.zero=2"]
    done = subprocess.run(
        [sys.executable, "-m", "meshwright", *words, *more, "optimizer.lr=1e-30"],
        env=os.environ | {"NO_COLOR": "1"}, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    told = done.stderr
    assert done.returncode == 0, told
    assert f"begins with the weights of {tmp_path / 'hub model'}\n" in told
    assert "changed since that checkpoint" not in told and "set aside" not in told
    _, meta = checkpoint.load(tmp_path / "run" / "checkpoints" / "step-00000002")
    assert meta["updates"] == 2
    assert command(["checkpoint", "verify", "run"]) == 0
    assert command(["checkpoint", "export", "run", "out"]) == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    before = weights(config, torch.bfloat16)
    assert found.keys() == before.keys()
    assert all(torch.equal(found[name], before[name]) for name in before)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "bfloat16"
