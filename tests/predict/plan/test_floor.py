"""What is said of a block before its cost is asked for is never above that."""

from itertools import product

import pytest
from tests.predict.plan.cases import GPT2, LLAMA, cluster

from meshwright.predict.cost.parts import Parts, Shard
from meshwright.predict.plan.space import RECOMPUTE
from meshwright.spec.cluster import Cluster
from meshwright.spec.devices import cluster as named
from meshwright.spec.model import ModelSpec


@pytest.mark.parametrize("on", [cluster(), named("2x8xa100"), named("2x8xh100"), cluster(kind="cpu")], ids=range(4))
@pytest.mark.parametrize("model", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_floor(model: ModelSpec, on: Cluster) -> None:
    parts = Parts(model, 512, "bf16", on)
    for (recompute, keep), sp, tp, cp in product(RECOMPUTE, (True, False), (1, 2, 8), (1, 2)):
        if sp and tp == 1:
            continue
        shard = Shard(tp=tp, sp=sp, cp=cp, recompute=recompute, recompute_keep=keep)
        one, more = parts.floor(shard)
        for micro in (1, 2, 3, 5, 8, 64):
            assert one + (micro - 1) * more <= parts.block(shard._replace(micro=micro)).total * (1 + 1e-9)
