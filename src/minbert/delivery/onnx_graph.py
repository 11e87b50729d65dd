"""An encoder as an ONNX file, built node by node from its weights: no exporter, no tracing.

    write_onnx(encoder, Path("encoder.onnx"), precision="int8", calibration=tokens)

Inputs are a padded batch (ids, mask, segments), outputs its pooled vectors. The operators are those that ONNX Runtime
has fast kernels for; docs/lab-log.md has the figures. Of them SkipLayerNormalization is left out on purpose: its CPU
kernel takes five times as long as Add and LayerNormalization.

int8 means weights of one scale per output channel, and activations whose range is measured at each product. Three
things keep it close to fp32, and each costs next to nothing:

* a weight's scale is the finest at which two neighbouring products cannot overflow the 16 bits in which CPUs without
  VNNI add them, instead of the usual 7-bit range;
* a few channels of every LayerNorm's output are ten times the others; they are divided by a factor that the next weights
  are multiplied by (SmoothQuant, Xiao et al. 2022, arXiv:2211.10438), and the residual gets it back;
* the one or two units of a feed-forward layer that do the same are computed aside, in fp32.

The last two need to know how large each channel gets: `measure_peaks` runs a few texts.
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
from minbert.data.batches import pad, plan_batches
from minbert.data.tokenizer import Tokens
from minbert.model.encoder import POOLINGS, Encoder, Pooling, relative_buckets

OPSET, IR_VERSION = 23, 10  # Attention is an operator since opset 23, which ONNX Runtime 1.23 reads
MICROSOFT = "com.microsoft"
SMOOTHING = 0.7  # how much of a channel's size moves from the activations into the weights
ASIDE = 6  # at most so many feed-forward units are computed in fp32 beside the others
OUTLIER = 1.5  # times as large as the largest of the others

Array = NDArray[Any]
Floats = NDArray[np.float32]
Peaks = Mapping[str, Floats]
"""The largest absolute value of each input channel of a linear layer, by the layer's name."""


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
        calibration: typical sequences, for int8. Without them it is a little less exact.
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
    peaks = measure_peaks(encoder, calibration) if precision == "int8" and calibration is not None else {}
    graph = EncoderGraph(encoder, int8=precision == "int8", peaks=peaks)
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
    `segments` are the names of what it reads.
    """

    def __init__(self, encoder: Encoder, *, int8: bool, peaks: Peaks) -> None:
        self.config, self.int8, self.peaks = encoder.config, int8, peaks
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
                real = self.add("Unsqueeze", self.add("Cast", self.mask, to=TensorProto.FLOAT), self.axes(1))
                summed = self.add("MatMul", real, hidden)  # (batch, 1, width)
                mean = self.add("Div", summed, self.add("ReduceSum", real, self.axes(2), keepdims=1))
                found[how] = self.add("Squeeze", mean, self.axes(1))
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
        qkv = self.weights[f"{name}.qkv.weight"], self.weights[f"{name}.qkv.bias"]
        query, key, value = self._three_products(x, *qkv, factor)
        mixed = self.add("Attention", query, key, value, bias, q_num_heads=heads, kv_num_heads=heads)
        out = self._product(mixed, self.weights[f"{name}.out.weight"], self.weights[f"{name}.out.bias"])
        return self.add("Add", self._unscaled(x, factor), out)

    def _feed_forward(self, x: str, factor: Floats | None, name: str) -> str:
        """Up, activation, down and the residual: what the next norm reads."""
        up, down = self.weights[f"{name}.up.weight"], self.weights[f"{name}.down.weight"]
        offset = self.weights[f"{name}.up.bias"]
        residual = self._unscaled(x, factor)
        aside = self._outliers(f"{name}.down")
        if len(aside):  # the same two layers, for these units only
            inner = self._activate(self._product(x, up[aside], offset[aside], factor, exact=True))
            residual = self.add("Add", residual, self._product(inner, down[:, aside], exact=True))
            up, offset, down = up.copy(), offset.copy(), down.copy()
            up[aside] = offset[aside] = down[:, aside] = 0.0
        inner = self._activate(self._product(x, up, offset, factor))  # (batch, tokens, feed_forward)
        return self.add("Add", residual, self._product(inner, down, self.weights[f"{name}.down.bias"]))

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

    def _product(
        self,
        x: str,
        weight: Floats,
        bias: Floats | None = None,
        factor: Floats | None = None,
        *,
        exact: bool = False,
    ) -> str:
        """A linear layer of (outputs, inputs), its weights multiplied by the factor that x was divided by."""
        if factor is not None:
            weight = weight * factor
        offset = "" if bias is None else self.constant(bias)
        if self.int8 and not exact:
            return self.add("DynamicQuantizeMatMul", x, *self._quantized(weight), "", offset, domain=MICROSOFT)
        product = self.add("MatMul", x, self.constant(weight.T))
        return self.add("Add", product, offset) if offset else product

    def _three_products(self, x: str, weight: Floats, bias: Floats, factor: Floats | None) -> list[str]:
        """A linear layer in three thirds, for which x is quantized once. (Splitting one result would copy it.)"""
        weights, biases = np.split(weight, 3), np.split(bias, 3)
        if not self.int8:
            return [self._product(x, one, other, factor) for one, other in zip(weights, biases, strict=True)]
        numbers, scale, zero = self.several("DynamicQuantizeLinear", x, count=3)
        found = []
        for one, other in zip(weights, biases, strict=True):
            whole, scales = self._quantized(one if factor is None else one * factor)
            inputs = numbers, whole, scale, scales, zero, "", self.constant(other)
            found.append(self.add("MatMulIntegerToFloat", *inputs, domain=MICROSOFT))
        return found

    def _quantized(self, weight: Floats) -> tuple[str, str]:
        whole, scales = quantize(weight)
        return self.constant(whole.T), self.constant(scales)

    def _balance(self, name: str) -> Floats | None:
        """The factor of each input channel of a linear layer: between the activations' size and the weights'."""
        if name not in self.peaks:
            return None
        weights = np.abs(self.weights[f"{name}.weight"]).max(0)
        factor = np.maximum(self.peaks[name], 1e-3) ** SMOOTHING / np.maximum(weights, 1e-4) ** (1 - SMOOTHING)
        return (factor / np.exp(np.log(factor).mean())).astype(np.float32)

    def _outliers(self, name: str) -> NDArray[np.intp]:
        """The units whose peaks stand far above all others."""
        if name not in self.peaks or len(self.peaks[name]) <= ASIDE:
            return np.zeros(0, np.intp)
        largest = np.argsort(-self.peaks[name])[: ASIDE + 1]
        return largest[self.peaks[name][largest] > OUTLIER * self.peaks[name][largest[-1]]]

    # --- nodes and constants ---------------------------------------------------------------------------------------

    def add(self, operator: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """A node with one output; its name."""
        return self.several(operator, *inputs, count=1, domain=domain, **attributes)[0]

    def several(self, operator: str, *inputs: str, count: int, domain: str = "", **attributes: Any) -> list[str]:
        name = f"{operator}_{len(self.nodes)}"
        outputs = [f"{name}_{number}" for number in range(count)]
        self.nodes.append(helper.make_node(operator, inputs, outputs, name=name, domain=domain, **attributes))
        return outputs

    def constant(self, value: Array | np.generic) -> str:
        name = f"constant_{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(value).reshape(value.shape), name))
        return name

    def axes(self, *values: int) -> str:
        return self.constant(np.array(values, np.int64))

    def name_outputs(self, names: Mapping[str, str]) -> None:
        for name, found in names.items():
            self.nodes.append(helper.make_node("Identity", [found], [name], name=f"output_{name}"))


def quantize(weight: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Weights, (outputs, inputs), as whole numbers and one scale for each output.

    Without VNNI a CPU multiplies two neighbouring inputs, each 0 to 255, and adds the two products in 16 bits, which
    must not overflow: two neighbours of one sign may add up to 128. The scale leaves 127, and rounding may add 1.
    """
    outputs, inputs = weight.shape
    even = np.pad(weight, ((0, 0), (0, inputs % 2))).reshape(outputs, -1, 2)
    positive, negative = np.maximum(even, 0).sum(-1).max(1), np.maximum(-even, 0).sum(-1).max(1)
    scales = np.maximum(np.maximum(positive, negative) / 127, np.finfo(np.float32).tiny).astype(np.float32)
    return np.clip(np.rint(weight / scales[:, None]), -127, 127).astype(np.int8), scales


@torch.inference_mode()
def measure_peaks(encoder: Encoder, tokens: Tokens) -> dict[str, Floats]:
    """How large each input channel of attention's first product and of the feed-forward layers gets."""
    peaks: dict[str, torch.Tensor] = {}
    real: torch.Tensor

    def remember(name: str, x: torch.Tensor) -> None:
        largest = x[real].abs().amax(0)
        peaks[name] = torch.maximum(peaks[name], largest) if name in peaks else largest

    hooks = [
        module.register_forward_pre_hook(lambda _, inputs, name=name: remember(name, inputs[0]))
        for name, module in encoder.named_modules()
        if name.endswith((".qkv", ".up", ".down"))
    ]
    training = encoder.training
    encoder.eval()
    try:
        for rows in plan_batches(tokens.lengths, tokens=2048):
            batch = pad(tokens, rows, encoder.config.pad_id)
            real = torch.from_numpy(batch.mask)
            encoder(torch.from_numpy(batch.ids), real, torch.from_numpy(batch.segments))
    finally:
        encoder.train(training)
        for hook in hooks:
            hook.remove()
    return {name: peak.float().numpy() for name, peak in peaks.items()}
