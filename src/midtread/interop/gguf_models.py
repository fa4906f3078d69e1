"""GGUF models: llama.cpp's names and keys, as those of a Hugging Face folder and back.

`GGUFModel(path)` is a Source of interop/huggingface.py: `config` is the config.json that the
file's keys amount to, `tensors` have Hugging Face's names. What differs besides names:

    extents        are listed the innermost first; gguf.py gives numpy's shapes
    rows of q, k   of Llama's kind lie in the order of a rotary embedding that turns
                   neighbours; here they turn halves (gguf.half_turned)
    experts        are one tensor of all; here every expert has its own
    Gemma's norms  have their 1 added already; here the model adds it
    rope_freqs     are Llama 3.1's stretched frequencies, as factors; here four numbers of
                   config.json, found by comparing with those that Llama 3.1 and 3.2 have

One table, `KINDS`, says which of these an architecture has, and serves writing too.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from midtread.interop import gguf, gguf_blocks, layouts
from midtread.interop.huggingface import Tensor
from midtread.numerics.qarray import QArray

_LAYER, _BLOCK = "model.layers.{n}", "blk.{n}"
OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
INSIDE = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TWO_NORMS = {"ffn_norm.weight": "post_attention_layernorm.weight"}
_FOUR_NORMS = {
    "post_attention_norm.weight": "post_attention_layernorm.weight",
    "ffn_norm.weight": "pre_feedforward_layernorm.weight",
    "post_ffw_norm.weight": "post_feedforward_layernorm.weight",
}
_QWEN_EXPERTS = {
    "ffn_gate_inp.weight": "mlp.gate.weight",
    "ffn_gate_exps.weight": "mlp.experts.{e}.gate_proj.weight",
    "ffn_up_exps.weight": "mlp.experts.{e}.up_proj.weight",
    "ffn_down_exps.weight": "mlp.experts.{e}.down_proj.weight",
}
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}


@dataclasses.dataclass(frozen=True)
class Kind:
    """One architecture.

    Args:
        name: llama.cpp's.
        model_type: config.json's, and the class there.
        inside: names inside a layer that are not in `INSIDE`.
        turns_neighbours: rows of queries and keys lie for that.
        norm_offset: what norms have been added.
        keys: of config.json, that are so in every model of the kind: values, or functions
            of the rest. A file is read with them, and a model that has others is not written.
    """

    name: str
    model_type: str
    class_name: str
    inside: Mapping[str, str]
    turns_neighbours: bool = False
    norm_offset: float = 0.0
    keys: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def _gemma(period: int, layers_of_27b: int) -> dict[str, Any]:
    """Returns what llama.cpp takes as given in Gemma's kinds: of `period` layers one sees all,
    and logits are divided by the root of a head's width, except in the model of 27B."""

    def kinds(config: Mapping[str, Any]) -> list[str]:
        count = int(config["num_hidden_layers"])
        return [
            "sliding_attention" if (i + 1) % period else "full_attention"
            for i in range(count)
        ]

    def scalar(config: Mapping[str, Any]) -> float:
        if config["num_hidden_layers"] == layers_of_27b:
            return config["hidden_size"] // config["num_attention_heads"]
        return head_dim(config)

    return {"hidden_activation": "gelu_pytorch_tanh", "layer_types": kinds,
            "query_pre_attn_scalar": scalar}  # fmt: skip


def _or(key: str, default: float) -> Callable[[Mapping[str, Any]], Any]:
    return lambda config: config.get(key) or default


_SILU = {"hidden_act": "silu"}
_QWEN = {**_SILU, "use_sliding_window": False}
_QWEN3 = {**_QWEN, "attention_bias": False}
_GEMMA2 = {
    **_gemma(2, layers_of_27b=46),
    "attn_logit_softcapping": _or("attn_logit_softcapping", 50.0),
    "final_logit_softcapping": _or("final_logit_softcapping", 30.0),
}
_GEMMA3 = {
    **_gemma(6, layers_of_27b=62), "attn_logit_softcapping": None, "rope_local_base_freq": 10000.0
}  # fmt: skip
KINDS = [
    #    llama.cpp   model_type     class                      names
    Kind("llama",    "llama",       "LlamaForCausalLM",        _TWO_NORMS, turns_neighbours=True, keys=_SILU),
    Kind("qwen2",    "qwen2",       "Qwen2ForCausalLM",        _TWO_NORMS, keys=_QWEN),
    Kind("qwen3",    "qwen3",       "Qwen3ForCausalLM",        _TWO_NORMS, keys=_QWEN3),
    Kind("qwen3moe", "qwen3_moe",   "Qwen3MoeForCausalLM",     {**_TWO_NORMS, **_QWEN_EXPERTS},
         keys={**_QWEN3, "norm_topk_prob": True}),
    Kind("phi3",     "phi3",        "Phi3ForCausalLM",         {**_TWO_NORMS, **_FUSED}, keys=_SILU),
    Kind("gemma2",   "gemma2",      "Gemma2ForCausalLM",       _FOUR_NORMS, norm_offset=1.0, keys=_GEMMA2),
    Kind("gemma3",   "gemma3_text", "Gemma3ForCausalLM",       _FOUR_NORMS, norm_offset=1.0, keys=_GEMMA3),
]  # fmt: skip
BY_NAME = {kind.name: kind for kind in KINDS}
BY_TYPE = {kind.model_type: kind for kind in KINDS}

# keys of the file, after the architecture's name -> of config.json
CONFIG = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "rope.freq_base": "rope_theta",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_TURNED = "rope.dimension_count"  # numbers of a head that the rotary embedding turns
_MUST = ("context_length", "embedding_length", "block_count", "feed_forward_length",
         "attention.head_count", "attention.layer_norm_rms_epsilon")  # fmt: skip


def head_dim(config: Mapping[str, Any]) -> int:
    """Returns the width of a head."""
    given = config.get("head_dim")
    return given or config["hidden_size"] // config["num_attention_heads"]


def flat(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Returns a config.json with what it says of the rotary embedding among its other keys.

    Raises:
        ValueError: the embedding is stretched, which is not written.
    """
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, Mapping):
        raise layouts.refuse(where, f"rope parameters {rope!r:.80} are no object")
    local = rope.get("sliding_attention") or {}
    rope = rope.get("full_attention") or rope
    for given in (rope, local):
        stretch = given.get("rope_type", given.get("type", "default"))
        if stretch not in ("default", None):
            raise layouts.refuse(
                where, f"rope_type {stretch!r} is not written to GGUF; 'default' is"
            )
    near = (
        {"rope_local_base_freq": local["rope_theta"]} if "rope_theta" in local else {}
    )
    count = config.get("num_experts", config.get("num_local_experts"))
    return {**rope, **config, **near, **({"num_experts": count} if count else {})}


def check_keys(config: Mapping[str, Any], kind: Kind, where: str) -> None:
    """Raises ValueError if a model has something that llama.cpp has otherwise in its kind."""
    for key, value in kind.keys.items():
        wanted = value(config) if callable(value) else value
        given = config.get(key, wanted)
        if given is None and key not in CONFIG.values():
            continue  # what models of the kind have
        if given != wanted:
            raise layouts.refuse(
                where,
                f"{key}={given!r:.80} has no place in GGUF: llama.cpp's {kind.name} has "
                f"{wanted!r:.80}",
            )


class GGUFModel:
    """A .gguf file by the names of a Hugging Face folder.

    Args:
        path: of the file.

    Raises:
        ValueError: the file is damaged, or its architecture is not known here.
    """

    def __init__(self, path: Any):
        self.file = gguf.GGUF(path)
        self.name, self.notes, self.files = self.file.path, (), [self.file.path]
        self.model = self._model()
        self.config = self._config()
        self._places = self._names()
        self.tensors = {
            name: Tensor(self._shape(*tensor), np.dtype(np.float32))
            for name, tensor in self._places.items()
        }

    def _model(self) -> Kind:
        name = self.file.metadata.get("general.architecture")
        if not isinstance(name, str) or name not in BY_NAME:
            raise layouts.refuse(
                self.name,
                f"architecture {name!r} is not read; {', '.join(BY_NAME)} are",
            )
        return BY_NAME[name]

    def _key(self, key: str) -> Any:
        return self.file.metadata.get(f"{self.model.name}.{key}")

    def _config(self) -> dict[str, Any]:
        for key in (*CONFIG, _TURNED):
            value = self._key(key)
            if value is None and key not in _MUST:
                continue
            least = 1 if key == "attention.head_count" else 0
            if type(value) not in (int, float) or not float(value) >= least:
                raise layouts.refuse(
                    self.name, f"its key {self.model.name}.{key} is {value!r:.60}"
                )
        known = {
            v: _as_written(self._key(k))
            for k, v in CONFIG.items()
            if self._key(k) is not None
        }
        rows, _ = self._extents("token_embd.weight", 2)
        about: dict[str, Any] = {
            "model_type": self.model.model_type,
            "architectures": [self.model.class_name],
            "vocab_size": rows,
            "tie_word_embeddings": "output.weight" not in self.file,
            "attention_bias": "blk.0.attn_q.bias" in self.file,
            "mlp_bias": "blk.0.ffn_up.bias" in self.file,
            **known,
        }
        for key, value in self.model.keys.items():
            about[key] = value(about) if callable(value) else value
        turned = self._key(_TURNED)
        if turned is not None and turned != head_dim(about):
            about["partial_rotary_factor"] = turned / head_dim(about)
        for key, name in (("bos_token_id", "bos"), ("eos_token_id", "eos")):
            number = self.file.metadata.get(f"tokenizer.ggml.{name}_token_id")
            if number is not None:
                about[key] = number
        stretch = self._stretch(about)
        return {**about, **({"rope_scaling": stretch} if stretch else {})}

    def _extents(self, tensor: str, rank: int) -> tuple[int, ...]:
        """Returns the shape of a tensor that must be there."""
        if tensor not in self.file:
            raise layouts.refuse(self.name, f"it has no tensor {tensor}")
        shape = self.file.tensors[tensor].shape
        if len(shape) != rank:
            raise layouts.refuse(self.name, f"{tensor} has shape {list(shape)}")
        return shape

    def kind(self, name: str) -> str:
        """Returns the file's name for how a tensor is stored."""
        return self.file.tensors[self._places[name][0]].kind

    def is_quantized(self, name: str) -> bool:
        """Whether a tensor is in codes."""
        return self.kind(name) in gguf_blocks.BLOCKS

    def _stretch(self, about: Mapping[str, Any]) -> dict[str, Any] | None:
        """Returns Llama 3.1's rope_scaling, from the factors that a file has in its place."""
        kind = self._key("rope.scaling.type")
        if kind not in (None, "none"):
            raise layouts.refuse(self.name, f"rope.scaling.type {kind!r} is not read")
        if "rope_freqs.weight" not in self.file:
            return None
        self._extents("rope_freqs.weight", 1)
        factors = self.file.floats("rope_freqs.weight")
        for factor in (8.0, 32.0):
            given = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192}  # fmt: skip
            want = llama3_factors(about.get("rope_theta", 10000.0), len(factors), given)
            if np.allclose(factors, want, rtol=1e-4):
                return {"rope_type": "llama3", **given}
        raise layouts.refuse(
            self.name, "its rope_freqs are not those of Llama 3.1 (8) or 3.2 (32)"
        )

    def _names(self) -> dict[str, tuple[str, int | None]]:
        """Returns the tensor of each name, and which expert of it."""
        origins = {}
        for tensor in self.file:
            if tensor == "rope_freqs.weight":
                continue
            name = to_name(tensor, self.model)
            if name is None:
                raise layouts.refuse(
                    self.name,
                    f"tensor {tensor!r} has no name in {self.model.model_type}",
                )
            if "{e}" not in name:
                origins[name] = (tensor, None)
                continue
            for e in range(self.file.tensors[tensor].shape[0]):
                origins[name.replace("{e}", str(e))] = (tensor, e)
        return origins

    def _shape(self, tensor: str, expert: int | None) -> tuple[int, ...]:
        shape = self.file.tensors[tensor].shape
        return shape if expert is None else shape[1:]

    def read(self, name: str) -> QArray | np.ndarray:
        """Returns a tensor: a QArray of numpy arrays where it is quantized, an array
        elsewhere."""
        tensor, expert = self._places[name]
        array = self.file[tensor]
        if expert is not None:
            array = array[expert]
        heads = turned_heads(self.model, name, self.config)
        if heads:
            array = gguf.half_turned(array, heads)
        if self.model.norm_offset and name.endswith("norm.weight"):
            array = array - np.asarray(self.model.norm_offset, array.dtype)
        return array


def _as_written(value: Any) -> Any:
    """Returns a number of a file's 32 bits with the digits that somebody wrote."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def llama3_factors(base: float, count: int, given: Mapping[str, Any]) -> np.ndarray:
    """Returns what llama.cpp divides the frequencies of Llama 3.1 by."""
    wave = 2 * np.pi * base ** (np.arange(count) / count)
    original = given["original_max_position_embeddings"]
    low, high = given["low_freq_factor"], given["high_freq_factor"]
    smooth = np.clip((original / wave - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / given["factor"] + smooth)


def turned_heads(kind: Kind, name: str, config: Mapping[str, Any]) -> int:
    """Returns how many heads have rows in the order in which llama.cpp rotates neighbours; 0
    where rows are in Hugging Face's order."""
    if not kind.turns_neighbours:
        return 0
    module = name.rsplit(".", 1)[0]
    if module.endswith(".q_proj"):
        return config["num_attention_heads"]
    if module.endswith(".k_proj"):
        return config.get("num_key_value_heads") or config["num_attention_heads"]
    return 0


def to_name(tensor: str, kind: Kind) -> str | None:
    """Returns Hugging Face's name for a tensor of llama.cpp, {e} standing for experts."""
    if tensor in OUTSIDE:
        return OUTSIDE[tensor]
    match = re.fullmatch(r"blk\.(\d+)\.(.+)", tensor)
    if match is None:
        return None
    names = {**INSIDE, **kind.inside}
    n, inner = match.groups()
    if inner in names:
        return f"model.layers.{n}.{names[inner]}"
    module, _, end = inner.rpartition(".")
    if module in names and end in ("weight", "bias"):
        return f"model.layers.{n}.{names[module]}.{end}"
    return None


def to_tensor(name: str, kind: Kind) -> tuple[str, int | None] | None:
    """Returns llama.cpp's tensor for a name of Hugging Face, and which expert of it."""
    back = {v: k for k, v in OUTSIDE.items()}
    if name in back:
        return back[name], None
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    if match is None:
        return None
    n, inner = match.groups()
    expert = re.fullmatch(r"(.*\.experts)\.(\d+)\.(.+)", inner)
    if expert:
        inner = f"{expert[1]}.{{e}}.{expert[3]}"
    back = {v: k for k, v in {**INSIDE, **kind.inside}.items()}
    module, _, end = inner.rpartition(".")
    if inner in back:
        tensor = f"blk.{n}.{back[inner]}"
    elif module in back:
        tensor = f"blk.{n}.{back[module]}.{end}"
    else:
        return None
    return tensor, int(expert[2]) if expert else None
