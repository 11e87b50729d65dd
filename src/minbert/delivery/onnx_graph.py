"""An encoder as an ONNX file, built node by node from its weights: no exporter, no tracing.

    write_onnx(encoder, Path("encoder.onnx"), precision="int8", calibration=tokens)

Inputs are a padded batch (ids, mask, segments), outputs its pooled vectors. The operators are those that ONNX Runtime
has fast kernels for; docs/lab-log.md has the figures. Of them SkipLayerNormalization is left out on purpose: its CPU
kernel takes five times as long as Add and LayerNormalization.

int8 means weights of one scale per output channel, and activations of one range per product, measured beforehand on a
few texts (`minbert.delivery.int8`): a sequence's vector does not depend on what else is in its batch. Three things keep it
close to fp32, and each costs next to nothing:

* a weight's scale is the finest at which two neighbouring products cannot overflow the 16 bits in which CPUs without
  VNNI add them, instead of the usual 7-bit range;
* a few channels of every LayerNorm's output are ten times the others; they are divided by a factor that the next weights
  are multiplied by (SmoothQuant, Xiao et al. 2022, arXiv:2211.10438), and the residual gets it back;
* the one or two units of a feed-forward layer that do the same are computed aside, in fp32.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from minbert import __version__
from minbert.atomic import written
from minbert.data.tokenizer import Tokens
from minbert.delivery.int8 import Floats, Ranges, balance, measure_ranges, outliers, quantize
from minbert.model.encoder import POOLINGS, Encoder, Pooling, relative_buckets

OPSET, IR_VERSION = 23, 10  # Attention is an operator since opset 23, which ONNX Runtime 1.23 reads
MICROSOFT = "com.microsoft"

NOTHING = np.zeros(0, np.intp)
Array = NDArray[Any]
Bytes = tuple[str, str, str]
"""Names: of numbers as bytes, of their scale, and of the byte that stands for 0."""


def write_onnx(
    encoder: Encoder,
    path: Path,
    *,
    precision: Literal["fp32", "int8"] = "fp32",
    poolings: Iterable[Pooling] = POOLINGS,
    calibration: Tokens | None = None,
) -> None:
    """Write the file in one step.

    Args:
        encoder: on the CPU.
        path: the file.
        precision: of the products with weights; everything else is fp32 in both.
        poolings: the outputs, each (batch, width).
        calibration: typical sequences, for int8. Without them ranges are measured on tokens of the whole vocabulary, and it is
            less exact.
    """
    model = build_onnx(encoder, precision=precision, poolings=poolings, calibration=calibration)
    with written(path) as file:
        file.write(model.SerializeToString())


def build_onnx(
    encoder: Encoder,
    *,
    precision: Literal["fp32", "int8"] = "fp32",
    poolings: Iterable[Pooling] = POOLINGS,
    calibration: Tokens | None = None,
) -> onnx.ModelProto:
    """The same in memory."""
    config, poolings = encoder.config, tuple(poolings)
    graph = EncoderGraph(encoder, measure_ranges(encoder, calibration) if precision == "int8" else {})
    outputs = graph.pooled(graph.hidden(), poolings)
    graph.name_outputs(outputs)
    inputs: dict[str, Shape] = {
        "ids": (TensorProto.INT64, "batch", "tokens"),
        "mask": (TensorProto.BOOL, "batch", "tokens"),
        "segments": (TensorProto.INT64, "batch", "tokens"),
    }
    if not config.segments:
        del inputs["segments"]
    return as_model(graph, inputs, dict.fromkeys(outputs, (TensorProto.FLOAT, "batch", config.width)))


Shape = tuple[int, str | int, str | int]
"""Of an input or output: the type of its numbers, its rows and its columns."""


def as_model(graph: EncoderGraph, inputs: Mapping[str, Shape], outputs: Mapping[str, Shape]) -> onnx.ModelProto:
    """The graph's nodes and constants as a model; its metadata says under "minbert" what it can be given."""
    about = {
        "precision": "int8" if graph.int8 else "fp32",
        "width": graph.config.width,
        "vocab_size": graph.config.vocab_size,
        "max_tokens": graph.config.max_tokens,
        "pad_id": graph.config.pad_id,
    }

    def described(shapes: Mapping[str, Shape]) -> list[onnx.ValueInfoProto]:
        return [helper.make_tensor_value_info(name, kind, shape) for name, (kind, *shape) in shapes.items()]

    model = helper.make_model(
        helper.make_graph(graph.nodes, "encoder", described(inputs), described(outputs), graph.constants),
        opset_imports=[helper.make_opsetid("", OPSET), helper.make_opsetid(MICROSOFT, 1)],
        producer_name="minbert",
        producer_version=__version__,
    )
    model.ir_version = IR_VERSION
    helper.set_model_props(model, {"minbert": json.dumps(about)})
    return model


class EncoderGraph:
    """The nodes and constants of an encoder; its methods add to them and return the names of what they computed.

    Shapes are (batch, tokens, width) all along: ONNX Runtime multiplies them as one matrix. `ids`, `mask` (booleans) and
    `segments` are the names of what it reads. With ranges its products are int8, without they are fp32.
    """

    def __init__(self, encoder: Encoder, ranges: Ranges) -> None:
        self.config, self.int8, self.ranges = encoder.config, bool(ranges), ranges
        self.ids, self.mask, self.segments = "ids", "mask", "segments"
        self.weights: dict[str, Floats] = {
            name: weight.detach().float().numpy() for name, weight in encoder.state_dict().items()
        }
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []

    def hidden(self) -> str:
        """The hidden states of the last layer."""
        bias = self._attention_bias()
        x, factor = self._norm(self._embed(), "embeddings.norm", feeding="layers.0.attention.qkv")
        for number in range(self.config.layers):
            layer = f"layers.{number}"
            mixed = self._attend(x, factor, f"{layer}.attention", bias)
            x, factor = self._norm(mixed, f"{layer}.attention.norm", feeding=f"{layer}.feed_forward.up")
            inner = self._feed_forward(x, factor, f"{layer}.feed_forward")
            x, factor = self._norm(inner, f"{layer}.feed_forward.norm", feeding=f"layers.{number + 1}.attention.qkv")
        return x

    def pooled(self, hidden: str, poolings: Iterable[Pooling]) -> dict[str, str]:
        """The pooled vectors, each (batch, width), by pooling."""
        found: dict[str, str] = {}
        for how in poolings:
            if how in ("cls", "pooler"):
                found[how] = self.add("Gather", hidden, self.constant(np.int64(0)), axis=1)
            if how == "pooler":
                weight, bias = self.weights["pooler.dense.weight"], self.weights["pooler.dense.bias"]
                found[how] = self.add(
                    "Tanh", self.add("Gemm", found[how], self.constant(weight.T), self.constant(bias))
                )
            elif how == "mean":
                # Two rows, of which one is used: the products of a single row would be added in an order that depends on how
                # many there are, so that padding would move the last bit.
                row = self.add("Unsqueeze", self.add("Cast", self.mask, to=TensorProto.FLOAT), self.axes(1))
                summed = self.add("MatMul", self.add("Concat", row, row, axis=1), hidden)  # (batch, 2, width)
                first = self.add("Gather", summed, self.constant(np.int64(0)), axis=1)
                count = self.add("ReduceSum", row, self.axes(2), keepdims=0)  # (batch, 1)
                found[how] = self.add("Div", first, count)
            elif how == "max":
                lowest = self.constant(np.float32(-np.inf))
                masked = self.add("Where", self.add("Unsqueeze", self.mask, self.axes(2)), hidden, lowest)
                found[how] = self.add("ReduceMax", masked, self.axes(1), keepdims=0)
        return found

    # --- the parts of the network ----------------------------------------------------------------------------------

    def _embed(self) -> str:
        config, first = self.config, self.config.first_position
        positions = self.weights["embeddings.positions.weight"][first : first + config.max_tokens]
        tokens = self.add("Gather", self.constant(self.weights["embeddings.tokens.weight"]), self.ids)
        length = self.add("Shape", self.ids, start=1, end=2)
        near = self.add("Slice", self.constant(positions), self.axes(0), length, self.axes(0))
        summed = self.add("Add", tokens, near)
        if not config.segments:
            return summed
        segments = self.add("Gather", self.constant(self.weights["embeddings.segments.weight"]), self.segments)
        return self.add("Add", summed, segments)

    def _attend(self, x: str, factor: Floats | None, name: str, bias: str) -> str:
        """Attention and the residual: what the next norm reads."""
        heads = self.config.heads
        weights, biases = (np.split(self.weights[f"{name}.qkv.{part}"], 3) for part in ("weight", "bias"))
        # Three products, for which x is quantized once: splitting the result of one would copy it.
        numbers = self._rounded(x, f"{name}.qkv", factor)
        parts = [self._product(numbers, *both, factor) for both in zip(weights, biases, strict=True)]
        mixed = self._rounded(self.add("Attention", *parts, bias, q_num_heads=heads, kv_num_heads=heads), f"{name}.out")
        out = self._product(mixed, self.weights[f"{name}.out.weight"], self.weights[f"{name}.out.bias"])
        return self.add("Add", self._unscaled(x, factor), out)

    def _feed_forward(self, x: str, factor: Floats | None, name: str) -> str:
        """Up, activation, down and the residual: what the next norm reads."""
        up, down = self.weights[f"{name}.up.weight"], self.weights[f"{name}.down.weight"]
        offset = self.weights[f"{name}.up.bias"]
        residual = self._unscaled(x, factor)
        aside = self._outliers(f"{name}.down")
        if len(aside):  # the same two layers, for these units only
            inner = self._activate(self._product(x, up[aside], offset[aside], factor))
            residual = self.add("Add", residual, self._product(inner, down[:, aside]))
            up, offset, down = up.copy(), offset.copy(), down.copy()
            up[aside] = offset[aside] = down[:, aside] = 0.0
        inner = self._activate(self._product(self._rounded(x, f"{name}.up", factor), up, offset, factor))
        numbers = self._rounded(inner, f"{name}.down", aside=aside)  # (batch, tokens, feed_forward)
        return self.add("Add", residual, self._product(numbers, down, self.weights[f"{name}.down.bias"]))

    def _activate(self, x: str) -> str:
        name = self.config.activation
        if name == "relu":
            return self.add("Relu", x)
        if name == "silu":
            return self.add("Mul", x, self.add("Sigmoid", x))
        if self.int8:  # the tanh form is at most 5e-4 off, a fortieth of what the next product rounds to, and quicker
            return self.add("FastGelu", x, domain=MICROSOFT)
        return self.add("Gelu", x, approximate="none" if name == "gelu" else "tanh")

    def _norm(self, x: str, name: str, *, feeding: str) -> tuple[str, Floats | None]:
        """LayerNorm, each channel divided by the factor that comes with it: the weights it feeds are multiplied."""
        factor = self._balance(feeding)
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        if factor is not None:
            weight, bias = weight / factor, bias / factor
        constants = self.constant(weight), self.constant(bias)
        return self.add("LayerNormalization", x, *constants, axis=-1, epsilon=self.config.norm_eps), factor

    def _unscaled(self, x: str, factor: Floats | None) -> str:
        return x if factor is None else self.add("Mul", x, self.constant(factor))

    def _attention_bias(self) -> str:
        """What attention reads beside queries, keys and values, (batch, 1 or heads, tokens, tokens): where the real
        tokens are, as booleans; for MPNet the relative bias, far below 0 at padding."""
        config = self.config
        keys = self.add("Unsqueeze", self.mask, self.axes(1, 2))  # (batch, 1, 1, tokens)
        length = self.add("Shape", self.mask, start=1, end=2)
        if not config.relative_buckets:
            size = self.add(
                "Concat", self.add("Shape", self.mask, start=0, end=1), self.axes(1), length, length, axis=0
            )
            return self.add("Expand", keys, size)
        # The bias depends on the distance only: one row for each distance there can be, from far ahead to far back.
        buckets = relative_buckets(config.max_tokens, config.relative_buckets, device=torch.device("cpu")).numpy()
        by_distance = self.weights["relative_bias.weight"][np.concatenate([buckets[0, :0:-1], buckets[:, 0]])]
        position = self.add(
            "Range", *(self.constant(np.int64(0)), self.add("Squeeze", length)), self.constant(np.int64(1))
        )
        distance = self.add("Sub", self.add("Unsqueeze", position, self.axes(1)), position)  # (tokens, tokens)
        row = self.add("Add", distance, self.constant(np.int64(config.max_tokens - 1)))
        table = self.add("Gather", self.constant(by_distance), row)  # (tokens, tokens, heads)
        bias = self.add("Transpose", table, perm=[2, 0, 1])
        return self.add("Where", keys, bias, self.constant(np.float32(-1e9)))

    # --- products, in fp32 or int8 ---------------------------------------------------------------------------------

    def _rounded(
        self, x: str, name: str, factor: Floats | None = None, *, aside: NDArray[np.intp] = NOTHING
    ) -> str | Bytes:
        """What a linear layer's products read: in int8 x as bytes, in the range of the channels that are not aside."""
        if not self.int8:
            return x
        known = self.ranges[name] if factor is None else self.ranges[name] / factor
        scale, zero = (self.constant(value) for value in known.without(aside).as_bytes())
        return self.add("QuantizeLinear", x, scale, zero), scale, zero

    def _product(self, x: str | Bytes, weight: Floats, bias: Floats | None = None, factor: Floats | None = None) -> str:
        """A linear layer of (outputs, inputs), its weights multiplied by the factor that x was divided by; in int8 where
        x is bytes."""
        if factor is not None:
            weight = weight * factor
        offset = "" if bias is None else self.constant(bias)
        if isinstance(x, str):
            product = self.add("MatMul", x, self.constant(weight.T))
            return self.add("Add", product, offset) if offset else product
        numbers, scale, zero = x
        whole, scales = quantize(weight)
        inputs = numbers, self.constant(whole.T), scale, self.constant(scales), zero, "", offset
        return self.add("MatMulIntegerToFloat", *inputs, domain=MICROSOFT)

    def _balance(self, name: str) -> Floats | None:
        """What each input channel of a linear layer is divided by; None in fp32, and after the last layer."""
        return balance(self.ranges[name].peaks, self.weights[f"{name}.weight"]) if name in self.ranges else None

    def _outliers(self, name: str) -> NDArray[np.intp]:
        """The units of a feed-forward layer that are computed aside."""
        return outliers(self.ranges[name].peaks) if self.int8 else NOTHING

    # --- nodes and constants ---------------------------------------------------------------------------------------

    def add(self, operator: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """A node with one output; its name."""
        name = f"{operator}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [name], name=name, domain=domain, **attributes))
        return name

    def constant(self, value: Array | np.generic) -> str:
        name = f"constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(value).reshape(value.shape), name))
        return name

    def axes(self, *values: int) -> str:
        return self.constant(np.array(values, np.int64))

    def name_outputs(self, names: Mapping[str, str]) -> None:
        for name, found in names.items():
            self.nodes.append(helper.make_node("Identity", [found], [name], name=f"output_{name}"))
