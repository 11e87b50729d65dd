"""Ask an exported model without minbert: onnxruntime, tokenizers and numpy are all that it takes.

    minbert export runs/sample/model --to onnx --out sample-onnx
    python examples/onnx_alone.py sample-onnx "What a lovely day." "It is nice outside."

One text is answered by the tasks that read one, two texts by those that read two.
"""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import tokenizers

folder, *texts = Path(sys.argv[1]), *sys.argv[2:4]
manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))  # cuts and pads as the manifest says
options = onnxruntime.SessionOptions()
options.log_severity_level = 3  # it warns that `pairs` and `known` may be left out, which is what we want
session = onnxruntime.InferenceSession(str(folder / "model.onnx"), options)
VIEWS = {"first": texts[0], "second": texts[-1], "joint": tuple(texts), "reversed": tuple(texts[::-1])}

for name, task in manifest["tasks"].items():
    if ("pair" in task["kind"] or len(task["reads"]) == 2) != (len(texts) == 2):
        continue
    batch = tokenizer.encode_batch([VIEWS[view] for view in task["reads"]])  # one sequence for each view
    feed = {
        "input_ids": np.array([sequence.ids for sequence in batch]),
        "attention_mask": np.array([sequence.attention_mask for sequence in batch]),
        "token_type_ids": np.array([sequence.type_ids for sequence in batch]),
    }
    if len(batch) == 2:  # the head compares two sequences: number 0 with number 1
        feed["pairs"] = np.array([[0, 1]])
    output = session.run([task["output"]], feed)[0][0].astype(float)
    if "classes" in task:
        logits = np.array([0.0, *output] if len(output) == 1 else output) / task["temperature"]
        shares = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
        print(name, {label: round(float(share), 4) for label, share in zip(task["classes"], shares, strict=True)})
    elif "sigmoid" in task["answer"]:
        print(name, round(float(task["low"] + (task["high"] - task["low"]) / (1 + np.exp(-output[0]))), 4))
    else:
        print(name, round(float(np.clip(output[0], task.get("low", -np.inf), task.get("high", np.inf))), 4))
