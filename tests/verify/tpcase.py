import sys
sys.path.insert(0, "tests")
import torch
from ranks import Ranks
from meshwright.spec.load import load_run
from meshwright.verify.reference import reference
from meshwright.verify.small import small_run
from meshwright.verify.unequal import proof_data
from meshwright.verify.compare import compare_tensors, bound_of, least_sizes
from meshwright.verify.worker import collect

def work(mesh, run, steps):
    return collect(run, mesh, proof_data(run), steps)

def case(words, ranks, show=4):
    run = small_run(load_run(None, ["device=cpu", "precision=float64", *words]))
    axes = {"tp": run.layout.tp, "dp": run.layout.data_ranks}
    found = ranks.run(run.layout.world, work, run, 2, axes=axes)
    exp = reference(run, proof_data(run), 2)
    cs = compare_tensors(found, exp, bound_of(run), least_sizes(run))
    print(words, "worst", [(c.kind, c.name, c.step, f"{c.difference:.1e}", f"{c.ratio:.3f}") for c in cs[:show] ])
    print("  losses", [abs(a-b) for a,b in zip(found[0].losses, exp.losses)], "norms", [abs(a-b) for a,b in zip(found[0].norms, exp.norms)])
    return found, run

if __name__ == "__main__":
    import tests.verify.tpcase as me
    with Ranks() as ranks:
        for words in sys.argv[1:]:
            me.case(words.split(), ranks)
