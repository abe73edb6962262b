"""Rules of thumb: the figures that papers and lectures print, from rounded inputs and closed forms.

They are for the back of an envelope, and to be compared with: whoever shows one beside a prediction calls this one the
rule and the other exact. Rules know the number of parameters and nothing else of a model: 16 bytes a parameter where
Adam trains in 16 bits, six FLOPs a parameter and token, stages of equal size, rings at a link's full bandwidth.

    =================  ==================================================  ==========================================
    rule               says                                                what it leaves out
    =================  ==================================================  ==========================================
    16 bytes           weights 2, gradients 2, Adam 12 (ZeRO, section 3)   gradients kept in float32; activations
    6 N D              FLOPs of training (Kaplan et al. 2020)              attention's scores, the head's share
    even stages        1/p of the states on each of p pipeline ranks       the embedding, the head, odd layers
    (p−1)/(m+p−1)      of the time a pipeline waits (GPipe; 1F1B too)      uneven stages, messages
    2 (n−1)/n          of a payload is sent for an all-reduce in a ring    latency, hierarchy, overlap
    =================  ==================================================  ==========================================

Times are in seconds, sizes in bytes, rates in FLOP/s and bytes/s.
"""

from __future__ import annotations

from typing import Literal

WEIGHT, GRADIENT, ADAM = 2, 2, 12
"""Bytes a parameter in 16 bits: the optimizer holds a float32 copy and two moments (Rajbhandari et al. 2020,
section 3.1)."""
STATE = WEIGHT + GRADIENT + ADAM
YEAR, DAY = 365 * 86400, 86400
Zero = Literal[0, 1, 2, 3]


def states(parameters: float, *, zero: Zero = 0, dp: int = 1, tp: int = 1, pp: int = 1) -> float:
    """Bytes of weights, gradients and optimizer on one device: even parts over tensor and pipeline ranks, and what the
    ZeRO stage shards over data ranks (Rajbhandari et al. 2020, figure 1 and table 1)."""
    whole = {0: STATE, 1: WEIGHT + GRADIENT, 2: WEIGHT, 3: 0}[zero]
    return (whole + (STATE - whole) / dp) * parameters / (tp * pp)


def unsharded(parameters: float) -> float:
    """Bytes below which ZeRO 1 never comes: weights and gradients."""
    return (WEIGHT + GRADIENT) * parameters


def training_flops(parameters: float, tokens: float) -> float:
    """6 N D: two FLOPs a parameter and token forward, twice that backward (Kaplan et al. 2020, section 2.1)."""
    return 6 * parameters * tokens


def training_time(parameters: float, tokens: float, *, devices: int, rate: float, bubble: float = 0.0) -> float:
    """Seconds, where a device does `rate` FLOP/s and waits for the part `bubble` of its time."""
    return training_flops(parameters, tokens) / (devices * rate) / (1 - bubble)


def gradients(parameters: float) -> float:
    """Bytes of 16-bit gradients."""
    return GRADIENT * parameters


def all_reduce_sent(payload: float, ranks: int) -> float:
    """Bytes that each rank of a ring sends (Patarasuk and Yuan 2009)."""
    return 2 * (ranks - 1) / ranks * payload


def data_parallel_sent(parameters: float, dp: int, *, zero: Zero = 0) -> float:
    """Bytes a rank sends in a step: an all-reduce of the gradients, and half as much again at ZeRO 3, which gathers
    weights twice and scatters gradients once (Rajbhandari et al. 2020, section 7)."""
    return all_reduce_sent(gradients(parameters), dp) * (1.5 if zero == 3 else 1)


def layer_parameters(hidden: int, ffn: int) -> int:
    """Of a Llama block without grouped heads: q, k, v and o, and three matrices of the feed-forward."""
    return 4 * hidden**2 + 3 * hidden * ffn


def tensor_sent(hidden: int, tokens: int, tp: int) -> float:
    """Bytes a tensor rank sends for a layer: two all-reduces of 16-bit activations each way (Shoeybi et al.
    2019, figure 4)."""
    return 4 * all_reduce_sent(activations(hidden, tokens), tp)


def activations(hidden: int, tokens: int) -> float:
    """Bytes of 16-bit hidden states, as pipeline stages hand them on."""
    return 2 * hidden * tokens


def layer_time(hidden: int, ffn: int, tokens: int, tp: int, *, rate: float) -> float:
    """Seconds of a layer's forward and backward on a tensor rank."""
    return training_flops(layer_parameters(hidden, ffn), tokens) / (tp * rate)


def bubble(pp: int, micros: int) -> float:
    """The part of its time that a pipeline rank waits, of even stages (Huang et al. 2019, section 2.3)."""
    return (pp - 1) / (micros + pp - 1)


def pipeline_units(pp: int, micros: int) -> int:
    """Units of time of a step, where a stage's forward takes one and its backward two."""
    return 3 * (micros + pp - 1)


def even_stages(layers: int, pp: int) -> list[range]:
    """The layers of each stage, where they are dealt out evenly."""
    each = layers // pp
    return [range(stage * each, (stage + 1) * each) for stage in range(pp)]


def lora_weights(parameters: float, *, bits: int = 16) -> float:
    """Bytes of frozen weights, beside which an adapter's own states are small (Hu et al. 2021; in 4 bits Dettmers et
    al. 2023)."""
    return parameters * bits / 8
