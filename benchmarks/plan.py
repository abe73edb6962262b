"""How long searches take, what memory, and over how many layouts.

    python benchmarks/plan.py [NAME]...

One process a search, without torch: GPT-3 175B on 1,024 devices with a batch of 1,536, a model of a trillion parameters
on 3,072 (both of Narayanan et al. 2021), and 7 billion on 8. Times are of the process from its start to the answer, and
of the search inside it; run on an idle machine.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time

CASES = {
    "7b": ("llama2-7b", "1x8xh100", 4096, 1024),
    "gpt3-175b": ("gpt3-175b", "128x8xa100-80", 2048, 1536),
    "1t": ("1t", "384x8xa100-80", 2048, 3072),
}
ROW = "{:12} {:>10} {:>10} {:>10} {:>9} {:>9} {:>9}"


def search(name: str) -> dict[str, float]:
    """One search in this process."""
    from meshwright.predict.plan.answer import plan
    from meshwright.spec.devices import cluster
    from meshwright.spec.presets import PRESETS
    from meshwright.spec.run import RunSpec

    model, on, seq, sequences = CASES[name]
    spec = PRESETS["gpt3-175b"].model_copy(update={"layers": 128, "hidden": 25600, "heads": 160})
    spec = PRESETS.get(model, spec)
    batch = {"sequences": sequences, "micro": 1}
    run = RunSpec.model_validate({"model": spec, "data": {"seq_len": seq}, "batch": batch, "precision": "bf16"})
    begun = time.perf_counter()
    found = plan(run, cluster(on), top=10)
    took = time.perf_counter() - begun
    assert "torch" not in sys.modules
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result = found.result
    return {
        "search": took, "peak": peak, "layouts": result.layouts, "fitting": result.fitting,
        "simulated": result.simulated, "best": found.best.time.seconds,
    }  # fmt: skip


def main(names: list[str]) -> None:
    print(ROW.format("model", "layouts", "fit", "simulated", "search", "process", "peak"))
    for name in names:
        begun = time.perf_counter()
        done = subprocess.run([sys.executable, __file__, "--one", name], capture_output=True, text=True, check=True)
        whole = time.perf_counter() - begun
        row = json.loads(done.stdout)
        print(
            ROW.format(
                name, f"{row['layouts']:,}", f"{row['fitting']:,}", row["simulated"], f"{row['search']:.2f} s",
                f"{whole:.2f} s", f"{row['peak'] / 1e6:.0f} MB",
            )
        )  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(search(sys.argv[2])))
    else:
        main(sys.argv[1:] or list(CASES))
