"""Interop: models and weights from others, and for others.

Checkpoints of our own:
  safetensors.py         quantized trees in one file
  orbax.py               the same in a directory, by many hosts
  manifest.py            what a checkpoint says of itself
  trees.py               named entries in what users hold, and the way back

Models of others, read (`quantized.open_model`) and written (`export.export`):
  huggingface.py         weights of a folder into any tree, and back
  folders.py             such a folder on disk
  quantized.py           a folder or file in few bits, opened: its layout is one of
    layouts.py             what they have in common
    compressed_tensors.py  bitsandbytes.py  gptq.py  mlx.py  torchao.py  published.py
  export.py              a model into a folder, tensor after tensor
  targets.py             the formats that it can be written in
  gguf.py                llama.cpp's files
    gguf_blocks.py  gguf_models.py  gguf_tokenizer.py  gguf_export.py

Phones:
  litert.py              a Flax model as a .tflite file
  tflite.py              what is in one

qwix/                    Qwix's names, for programs that import qwix
"""
