"""What is in flight on a pipeline's ranks, against the walk of the schedule's lists."""

import numpy as np
import pytest
from tests.predict.plan.cases import GPT2, run

from meshwright.predict.flight import Flight
from meshwright.predict.micros import hidden_bytes
from meshwright.predict.plan.places import Kind, flying, places
from meshwright.predict.plan.space import Pipe
from meshwright.predict.stages import stages_of
from meshwright.spec.layout import Layout

PIPES = [Pipe("1f1b"), Pipe("gpipe"), Pipe("interleaved", 2), Pipe("interleaved", 3)]


@pytest.mark.parametrize("pipe", PIPES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("micros", [1, 2, 3, 4, 5, 9, 16, 40])
def test_in_flight(pipe: Pipe, ranks: int, micros: int) -> None:
    model = GPT2.model_copy(update={"layers": ranks * pipe.chunks})
    layout = Layout(dp=1, pp=ranks, pp_schedule=pipe.schedule, pp_chunks=pipe.chunks, pp_split="layers")
    asked = run(model, 64, micros, layout=layout)
    stages = stages_of(model, layout, 64)
    for place in places(pipe, ranks, stages):
        flight = Flight(asked, layout, place.rank, cpu=False)
        index = place.chunk * ranks + place.rank
        loads = [load for load in flight._loads() if load.stage.index == index]
        most = max(load.others for load in loads)
        hidden = hidden_bytes(asked, layout, loads[0].micro)
        messages = max(load.received + load.sent for load in loads if load.others == most) / hidden
        found = flying(place, np.array([float(micros)]))
        assert found.others[0] == most
        assert found.messages[0] <= messages <= found.messages[0] + found.spare[0]
        assert found.begun[0] <= len(flight.begun) <= found.begun[0] + found.spare_begun[0]
        if pipe.schedule != "interleaved":
            assert found.spare[0] <= 2 and found.spare_begun[0] <= 2


def test_one_of_alike_ranks_stands_for_all() -> None:
    layout = Layout(dp=1, pp=8, pp_split=(4, 4, 4, 4, 4, 5, 5, 2))
    stages = stages_of(GPT2.model_copy(update={"layers": 32}), layout, 64)
    assert [(place.rank, place.stage) for place in places(Pipe(), 8, stages)] == [
        (0, Kind(4, True, False)), (1, Kind(4, False, False)), (5, Kind(5, False, False)), (7, Kind(2, False, True)),
    ]  # fmt: skip
