"""A whole model as one ONNX graph: the encoder of `onnx_graph`, every pooling that is used, the common layer, all heads.

    build_multitask(model, pooling="mean").SerializeToString()

Inputs and outputs are those that anyone with a tokenizer can make and read:

* `input_ids`, `attention_mask`, `token_type_ids`, (sequences, tokens): a padded batch, as transformers names it;
* `embedding`, (sequences, width): their vectors; where tasks pool in other ways too, `embedding_HOW` beside it;
* for a task whose head reads one sequence (a text, or a pair as one input) its name, (sequences, outputs);
* for a task whose head reads two, its name too, (pairs, outputs), and the input `pairs`, (pairs, 2): which two sequences
  of the batch each of its rows compares.

`known`, (vectors, width), are vectors of an earlier run, numbered on from the batch's own: heads answer for them without
encoding them again; `known_HOW` likewise. `pairs` and `known` may be left out, and are then empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

from minbert.data.tokenizer import Tokens
from minbert.delivery.int8 import Floats, measure_ranges
from minbert.delivery.onnx_graph import EncoderGraph, Shape, as_model
from minbert.delivery.onnx_names import EMBEDDING, IDS, KNOWN, MASK, PAIRS, SEGMENTS, output_name
from minbert.errors import MinbertError
from minbert.model.encoder import POOLINGS, Pooling
from minbert.model.multitask import MultitaskModel

SMALLEST = 1e-8  # length of a vector for a cosine, as torch has it


def build_multitask(
    model: MultitaskModel,
    *,
    pooling: Pooling,
    precision: Literal["fp32", "int8"] = "fp32",
    calibration: Tokens | None = None,
) -> onnx.ModelProto:
    """The model, on the CPU and in eval mode, as a graph.

    Args:
        pooling: of `embedding`.
        precision: of the encoder's products; the heads are in fp32 always.
        calibration: see `onnx_graph.write_onnx`.
    """
    config = model.encoder.config
    graph = EncoderGraph(model.encoder, measure_ranges(model.encoder, calibration) if precision == "int8" else {})
    graph.ids, graph.segments = IDS, SEGMENTS
    graph.mask = graph.add("Cast", MASK, to=TensorProto.BOOL)
    tasks = [task for task in model.tasks.values() if not task.is_masked]
    poolings = list(dict.fromkeys([pooling, *(model.poolings[task.name] for task in tasks)]))
    if unknown := [how for how in poolings if how not in POOLINGS]:
        raise MinbertError(
            f'pooling is "{unknown[0]}", which reads more than the tokens; for ONNX expected {", ".join(POOLINGS)}'
        )
    # All three for MPNet too, which does not read the last: the same call for every model.
    inputs: dict[str, Shape] = dict.fromkeys((IDS, MASK, SEGMENTS), (TensorProto.INT64, "sequences", "tokens"))
    outputs: dict[str, Shape] = {}
    found: dict[str, str] = {}
    pooled = graph.pooled(graph.hidden(), poolings)
    vectors: dict[tuple[str, bool], str] = {}  # by pooling, and whether they went through the common layer
    for how in poolings:
        own = "" if how == pooling else f"_{how}"
        found[EMBEDDING + own] = pooled[how]
        outputs[EMBEDDING + own] = TensorProto.FLOAT, "sequences", config.width
        inputs[KNOWN + own] = TensorProto.FLOAT, "vectors", config.width
        _default(graph, KNOWN + own, np.zeros((0, config.width), np.float32))
        vectors[how, False] = graph.add("Concat", pooled[how], KNOWN + own, axis=0)
    sides: list[str] = []
    if any(len(task.answer_views) == 2 for task in tasks):
        inputs[PAIRS] = TensorProto.INT64, "pairs", 2
        _default(graph, PAIRS, np.zeros((0, 2), np.int64))
        sides = [graph.add("Gather", PAIRS, graph.constant(np.int64(side)), axis=1) for side in (0, 1)]
    common = Head(graph, _weights(model.common)) if model.common is not None else None
    for task in tasks:
        how, both = model.poolings[task.name], len(task.answer_views) == 2
        head = Head(graph, _weights(model.heads[task.name]), task.scale)
        read = vectors[how, False]
        if common is not None and task.name in model.common_tasks:
            if task.head in ORDERS:  # the layer begins each branch, that of the difference too
                head.first = partial(_through, common)
            else:
                if (how, True) not in vectors:
                    vectors[how, True] = _through(common, read)
                read = vectors[how, True]
        views = [graph.add("Gather", read, side) for side in sides] if both else [read]
        name = output_name(task)
        found[name] = HEADS[task.head](head, *views)
        outputs[name] = TensorProto.FLOAT, "pairs" if both else "answers", task.outputs
    graph.name_outputs(found)
    return as_model(graph, inputs, outputs)


def _default(graph: EncoderGraph, name: str, value: np.ndarray[Any, Any]) -> None:
    """What an input is where nothing is given: a constant of its name."""
    graph.constants.append(numpy_helper.from_array(value, name))


def _weights(module: Any) -> dict[str, Floats]:
    return {name: weight.detach().float().numpy() for name, weight in module.state_dict().items()}


# --- the heads, node by node: see model/heads.py ----------------------------------------------------------------------


class Head:
    """A graph to add to, a head's weights, the scale of its answers, and what each of its branches begins with."""

    def __init__(self, graph: EncoderGraph, weights: Mapping[str, Floats], scale: float = 1.0) -> None:
        self.add, self.constant, self.axes = graph.add, graph.constant, graph.axes
        self.weights, self.scale = weights, scale
        self.first: Callable[[str], str] = lambda view: view
        self.layers: dict[str, tuple[str, str]] = {}  # that are in the graph already: weight and bias

    def linear(self, name: str, x: str) -> str:
        """(rows, inputs) to (rows, outputs)."""
        if name not in self.layers:
            weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
            self.layers[name] = self.constant(weight.T), self.constant(bias)
        return self.add("Gemm", x, *self.layers[name])

    def relu(self, x: str) -> str:
        return self.add("Relu", x)

    def join(self, *parts: str) -> str:
        return self.add("Concat", *parts, axis=1)

    def dot(self, u: str, v: str) -> str:
        return self.add("ReduceSum", self.add("Mul", u, v), self.axes(1), keepdims=1)  # (rows, 1)

    def cosine(self, u: str, v: str) -> str:
        smallest = self.constant(np.float32(SMALLEST))
        lengths = [self.add("Max", self.add("ReduceL2", x, self.axes(1), keepdims=1), smallest) for x in (u, v)]
        return self.dot(self.add("Div", u, lengths[0]), self.add("Div", v, lengths[1]))

    def scaled(self, x: str) -> str:
        return self.add("Mul", x, self.constant(np.float32(self.scale)))


def _interaction(head: Head, u: str, v: str) -> str:
    both = head.join(head.add("Abs", head.add("Sub", u, v)), head.add("Mul", u, v))
    return head.linear("out", head.relu(head.linear("hidden", both)))


def _projected(head: Head, *views: str) -> list[str]:
    return [head.linear("projection", view) for view in views]


def _through(common: Head, vectors: str) -> str:
    """The layer that tasks share."""
    return common.add("Tanh", common.linear("0", vectors))


def _both_orders(head: Head, joint: str, other: str, *, difference: bool = False, activation: bool = False) -> str:
    views = [joint, other, head.add("Sub", joint, other)] if difference else [joint, other]
    logits = head.join(*(head.linear(f"branches.{number}", head.first(view)) for number, view in enumerate(views)))
    return head.linear("out", head.add("Tanh", logits) if activation else logits)


ORDERS: dict[str, Callable[..., str]] = {
    "ph": _both_orders,
    "dph": partial(_both_orders, difference=True),
    "dpha": partial(_both_orders, difference=True, activation=True),
}


HEADS: dict[str, Callable[..., str]] = {
    "linear": lambda head, u: head.linear("out", u),
    "mlp": lambda head, u: head.linear("out", head.relu(head.linear("hidden", u))),
    "concat": lambda head, u, v: head.linear("out", head.join(u, v)),
    "difference": lambda head, u, v: head.linear("out", head.add("Sub", u, v)),
    "absolute-difference": lambda head, u, v: head.linear("out", head.add("Abs", head.add("Sub", u, v))),
    "interaction": _interaction,
    "cosine": lambda head, u, v: head.scaled(head.cosine(u, v)),
    "projected-dot": lambda head, u, v: head.dot(*_projected(head, u, v)),
    "projected-cosine": lambda head, u, v: head.scaled(head.relu(head.cosine(*_projected(head, u, v)))),
    "simcse": lambda head, u, v: head.scaled(head.cosine(u, v)),
    "cosine-1d": lambda head, u, v: head.scaled(head.cosine(*_projected(head, u, v))),
    **ORDERS,
}
