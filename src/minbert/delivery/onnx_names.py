"""What the inputs and outputs of an exported model are called; see `onnx_heads`."""

from __future__ import annotations

from minbert.tasks import Task

IDS, MASK, SEGMENTS = "input_ids", "attention_mask", "token_type_ids"
PAIRS, KNOWN, EMBEDDING = "pairs", "known", "embedding"


def output_name(task: Task) -> str:
    """The task's own name, unless an input or an output has it already."""
    taken = task.name in (IDS, MASK, SEGMENTS, PAIRS) or task.name.split("_")[0] in (KNOWN, EMBEDDING)
    return f"task_{task.name}" if taken else task.name
