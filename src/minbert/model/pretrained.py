"""Published weights to our encoder, and back.

    encoder = load_encoder("minilm")                            # or a folder, or a hub id
    save_encoder(encoder, Path("my-encoder"))                   # Hugging Face layout; transformers.AutoModel loads it

Where an encoder comes from (names, cache, downloads) is the business of `minbert.encoders`; this file knows the layout of
a folder: `config.json` beside `model.safetensors` or `pytorch_model.bin`.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from minbert.encoders import find_encoder
from minbert.errors import MinbertError, shown
from minbert.model.encoder import ACTIVATIONS, Encoder, EncoderConfig

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from torch import Tensor, nn

# Published name -> ours, tried in order. The three matrices of attention become one; see `_split`.
RENAMES = [
    (r"^embeddings\.word_embeddings\.", "embeddings.tokens."),
    (r"^embeddings\.position_embeddings\.", "embeddings.positions."),
    (r"^embeddings\.token_type_embeddings\.", "embeddings.segments."),
    (r"^embeddings\.LayerNorm\.", "embeddings.norm."),
    (r"^encoder\.relative_attention_bias\.", "relative_bias."),
    (r"^encoder\.layer\.", "layers."),
    (r"\.attention\.(?:self\.query|attn\.q)\.", ".attention.query."),
    (r"\.attention\.(?:self\.key|attn\.k)\.", ".attention.key."),
    (r"\.attention\.(?:self\.value|attn\.v)\.", ".attention.value."),
    (r"\.attention\.(?:output\.dense|attn\.o)\.", ".attention.out."),
    (r"\.attention\.(?:output\.)?LayerNorm\.", ".attention.norm."),
    (r"\.intermediate\.dense\.", ".feed_forward.up."),
    (r"\.output\.dense\.", ".feed_forward.down."),
    (r"\.output\.LayerNorm\.", ".feed_forward.norm."),
]
PREFIXES = ("bert.", "mpnet.", "0.auto_model.", "auto_model.", "model.")
HEADS = ("query", "key", "value")


@dataclass(frozen=True)
class LoadReport:
    """What a checkpoint had too much of, and what it lacked and was drawn at random."""

    ignored: tuple[str, ...]
    initialised: tuple[str, ...]


def load_encoder(
    name: str | Path, *, dropout: float | None = None, generator: torch.Generator | None = None
) -> Encoder:
    """An encoder by name: a folder, a hub id, or a name of the cache such as "minilm".

    Args:
        name: see `encoders.find_encoder`.
        dropout: replaces both dropouts of the published config.
        generator: for weights that the checkpoint lacks (a missing pooler).
    """
    return load_folder(find_encoder(name), dropout=dropout, generator=generator)[0]


def load_folder(
    folder: Path, *, dropout: float | None = None, generator: torch.Generator | None = None
) -> tuple[Encoder, LoadReport]:
    """An encoder from a folder in Hugging Face layout, and what did not fit one to one."""
    config = read_config(folder, dropout=dropout)
    path, published = _read_tensors(folder)
    tensors, ignored = _to_our_names(published)
    encoder = Encoder(config, generator=generator)
    # Views of the encoder's own weights, under the names that the file has one tensor for: what fits is copied there.
    views = {part: view for name, weight in encoder.state_dict().items() for part, view in _split(name, weight)}
    initialised = tuple(name for name in views if name.startswith("pooler.") and name not in tensors)
    missing = [_published_name(name, config) for name in views if name not in tensors and name not in initialised]
    if missing:
        raise MinbertError(f"{shown(path)}: no tensor {_some(missing)}; {shown(folder / 'config.json')} asks for it")
    for name, view in views.items():
        if name in initialised:
            continue
        theirs, found, wanted = _published_name(name, config), tuple(tensors[name].shape), tuple(view.shape)
        if found != wanted:
            raise MinbertError(f"{shown(path)}: {theirs} has shape {found}; config.json makes it {wanted}")
        if not torch.isfinite(tensors[name]).all():
            raise MinbertError(f"{shown(path)}: {theirs} holds NaN or infinite weights; expected finite ones")
        view.copy_(tensors[name])  # fp16 becomes fp32 on the way
    unknown = sorted(_published_name(name, config) for name in set(tensors) - set(views))
    return encoder, LoadReport((*ignored, *unknown), initialised)


def weights_digest(folder: Path) -> str:
    """The sha256 of an encoder's weights, in half precision, so that a copy of it in that has the same."""
    digest = hashlib.sha256()
    _, tensors = _read_tensors(folder)
    for name in sorted(tensors):
        if tensors[name].is_floating_point():
            digest.update(name.encode() + tensors[name].half().numpy().tobytes())
    return digest.hexdigest()


# Of a published prediction layer, as BERT and as MPNet name it -> ours. Its weights over the vocabulary are the token
# table's own, and the bias may stand there.
VOCABULARY = {
    r"cls\.predictions\.transform\.dense\.|lm_head\.dense\.": "transform.",
    r"cls\.predictions\.transform\.LayerNorm\.|lm_head\.layer_norm\.": "norm.",
    r"cls\.predictions\.decoder\.(?=bias)|lm_head\.decoder\.(?=bias)|cls\.predictions\.(?=bias)|lm_head\.(?=bias)": "",
}


def has_vocabulary(folder: Path) -> bool:
    """Does the folder's file hold a layer that guesses masked tokens, as it was published?"""
    return bool(_vocabulary(folder)[1])


def load_vocabulary(folder: Path, head: nn.Module) -> bool:
    """Put the published prediction layer into `head`; false, and nothing is done, where the file has none."""
    path, found = _vocabulary(folder)
    if not found:
        return False
    for name, weight in head.state_dict().items():
        if name not in found:
            raise MinbertError(f"{shown(path)}: its prediction layer has no {name}; it has: {', '.join(sorted(found))}")
        if found[name].shape != weight.shape:
            shapes = tuple(found[name].shape), tuple(weight.shape)
            raise MinbertError(
                f"{shown(path)}: {name} of the prediction layer has shape {shapes[0]}; config.json makes it {shapes[1]}"
            )
        if not torch.isfinite(found[name]).all():
            raise MinbertError(f"{shown(path)}: {name} of the prediction layer holds NaN or infinite weights")
        weight.copy_(found[name])
    return True


def _vocabulary(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """The tensors of a published prediction layer under our names; none unless the layer itself is there."""
    path, published = _read_tensors(folder)
    found: dict[str, Tensor] = {}
    for theirs, tensor in published.items():
        name = re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", theirs))
        for pattern, ours in VOCABULARY.items():
            if match := re.match(pattern, name):
                found[ours + name[match.end() :]] = tensor
                break
    return path, found if "transform.weight" in found else {}


def save_encoder(encoder: Encoder, folder: Path) -> None:
    """Write config.json and model.safetensors in the layout (and with the names) that transformers uses."""
    folder.mkdir(parents=True, exist_ok=True)
    config = encoder.config
    tensors = {
        _published_name(part, config): value.cpu().contiguous()
        for name, weight in encoder.state_dict().items()
        for part, value in _split(name, weight)
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_published_config(config), indent=2) + "\n", encoding="utf-8")


def read_config(folder: Path, *, dropout: float | None = None) -> EncoderConfig:
    """config.json to `EncoderConfig`; what this encoder cannot do is refused here."""
    path = folder / "config.json"
    try:
        raw: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MinbertError(f"{shown(path)}: no such file; expected a folder in Hugging Face layout") from None
    except (OSError, ValueError) as error:  # ValueError: not JSON, or not even text
        raise MinbertError(f"{shown(path)}: not readable JSON ({error})") from None
    if not isinstance(raw, dict):
        raise MinbertError(f"{shown(path)}: holds a {type(raw).__name__}; expected an object")
    kind = raw.get("model_type")
    if kind not in ("bert", "mpnet"):
        raise MinbertError(f'{shown(path)}: model_type is "{kind}"; known: bert (MiniLM, bge, gte, e5 too), mpnet')
    if raw.get("position_embedding_type", "absolute") != "absolute":
        found = raw["position_embedding_type"]
        raise MinbertError(f'{shown(path)}: position_embedding_type is "{found}"; expected "absolute"')
    if raw.get("is_decoder"):
        raise MinbertError(f"{shown(path)}: is_decoder is true; expected an encoder")
    if str(raw.get("hidden_act", "gelu")) not in ACTIVATIONS:
        raise MinbertError(f'{shown(path)}: hidden_act is "{raw["hidden_act"]}"; known: {", ".join(ACTIVATIONS)}')

    def size(key: str, default: int | None = None) -> int:
        value = raw.get(key, default)
        least = 1 if default is None else 0
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise MinbertError(f"{shown(path)}: {key} is {value!r}; expected a whole number from {least}")
        return value

    def fraction(key: str, default: float) -> float:
        value = raw.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= 1:
            raise MinbertError(f"{shown(path)}: {key} is {value!r}; expected a number from 0 to 1")
        return float(value)

    return EncoderConfig(
        kind=kind,
        vocab_size=size("vocab_size"),
        width=size("hidden_size"),
        layers=size("num_hidden_layers"),
        heads=size("num_attention_heads"),
        feed_forward=size("intermediate_size"),
        positions=size("max_position_embeddings"),
        segments=size("type_vocab_size", 2) if kind == "bert" else 0,
        activation=raw.get("hidden_act", "gelu"),
        norm_eps=fraction("layer_norm_eps", 1e-12),
        pad_id=size("pad_token_id", 0 if kind == "bert" else 1),
        dropout=fraction("hidden_dropout_prob", 0.1) if dropout is None else dropout,
        attention_dropout=fraction("attention_probs_dropout_prob", 0.1) if dropout is None else dropout,
        relative_buckets=size("relative_attention_num_buckets", 32) if kind == "mpnet" else 0,
    )


def _published_config(config: EncoderConfig) -> dict[str, Any]:
    shared = {
        "architectures": ["BertModel" if config.kind == "bert" else "MPNetModel"],
        "attention_probs_dropout_prob": config.attention_dropout,
        "hidden_act": config.activation,
        "hidden_dropout_prob": config.dropout,
        "hidden_size": config.width,
        "intermediate_size": config.feed_forward,
        "layer_norm_eps": config.norm_eps,
        "max_position_embeddings": config.positions,
        "model_type": config.kind,
        "num_attention_heads": config.heads,
        "num_hidden_layers": config.layers,
        "pad_token_id": config.pad_id,
        "vocab_size": config.vocab_size,
    }
    if config.kind == "bert":
        return shared | {"position_embedding_type": "absolute", "type_vocab_size": config.segments}
    return shared | {"bos_token_id": 0, "eos_token_id": 2, "relative_attention_num_buckets": config.relative_buckets}


def _read_tensors(folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """The tensors of model.safetensors or, failing that, of pytorch_model.bin, which may hold nothing but tensors."""
    path = folder / "model.safetensors"
    if path.exists():
        try:
            return path, load_file(path)
        except (SafetensorError, OSError) as error:
            size = path.stat().st_size
            raise MinbertError(f"{shown(path)}: truncated or damaged safetensors, {size} bytes ({error})") from None
    path = folder / "pytorch_model.bin"
    if path.exists():
        try:
            with warnings.catch_warnings(action="ignore"):  # torch warns about what it then refuses
                found = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # of any class: a damaged pickle is a program that went astray
            if called := re.search(r"GLOBAL (\S+)", str(error)):
                raise MinbertError(
                    f"{shown(path)}: a pickle that wants to run code ({called[1]}); refused, expected tensors only"
                ) from None
            size = path.stat().st_size
            raise MinbertError(
                f"{shown(path)}: truncated or damaged, or not a PyTorch file of tensors ({size} bytes)"
            ) from None
        if not isinstance(found, dict) or not all(isinstance(value, torch.Tensor) for value in found.values()):
            raise MinbertError(f"{shown(path)}: holds a {type(found).__name__}; expected a table of names and tensors")
        return path, found
    raise MinbertError(f"{shown(folder)}: no model.safetensors or pytorch_model.bin; expected one of them")


def _to_our_names(published: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Rename; what no encoder uses comes back as names."""
    renamed: dict[str, Tensor] = {}
    ignored: list[str] = []
    for theirs, tensor in published.items():
        name = theirs
        for prefix in PREFIXES:
            name = name.removeprefix(prefix)
        name = re.sub(r"\.gamma$", ".weight", re.sub(r"\.beta$", ".bias", name))  # from the first TensorFlow files
        for pattern, ours in RENAMES:
            name = re.sub(pattern, ours, name)
        if name.startswith(("embeddings.", "layers.", "pooler.", "relative_bias.")) and tensor.is_floating_point():
            renamed[name] = tensor
        else:
            ignored.append(theirs)  # MLM and classification leftovers, position_ids
    return renamed, ignored


def _split(name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
    """One of our tensors as views that match the published ones: attention's fused matrix is three of them."""
    if ".qkv." not in name:
        yield name, tensor
        return
    for head, part in zip(HEADS, tensor.chunk(3), strict=True):
        yield name.replace(".qkv.", f".{head}."), part


def _published_name(name: str, config: EncoderConfig) -> str:
    """The name of one of `_split`'s tensors as transformers writes it."""
    bert = config.kind == "bert"
    table = {
        "embeddings.tokens.": "embeddings.word_embeddings.",
        "embeddings.positions.": "embeddings.position_embeddings.",
        "embeddings.segments.": "embeddings.token_type_embeddings.",
        "embeddings.norm.": "embeddings.LayerNorm.",
        "relative_bias.": "encoder.relative_attention_bias.",
        "layers.": "encoder.layer.",
        ".attention.query.": ".attention.self.query." if bert else ".attention.attn.q.",
        ".attention.key.": ".attention.self.key." if bert else ".attention.attn.k.",
        ".attention.value.": ".attention.self.value." if bert else ".attention.attn.v.",
        ".attention.out.": ".attention.output.dense." if bert else ".attention.attn.o.",
        ".attention.norm.": ".attention.output.LayerNorm." if bert else ".attention.LayerNorm.",
        ".feed_forward.up.": ".intermediate.dense.",
        ".feed_forward.down.": ".output.dense.",
        ".feed_forward.norm.": ".output.LayerNorm.",
    }
    for ours, theirs in table.items():
        name = name.replace(ours, theirs)
    return name


def _some(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"
