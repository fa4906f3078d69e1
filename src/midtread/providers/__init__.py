"""Providers: what happens at the ops that rules match.

qt.py              QtProvider: quantization-aware and quantized training
static.py          StaticProvider: the same with ranges that were measured before
delayed.py         DelayedFp8Provider: fp8 with scales from earlier steps
ptq.py             PtqProvider: serving
float_weights.py   weights that stay float under it, and why
variables.py       quantize_variables: a Linen model and its variables in one call
params.py          quantize_params: float parameters for a model under PtqProvider
prequantized.py    parameters that were quantized elsewhere
lora.py            LoraProvider: adapters beside frozen weights, quantized or not
  lora_factors.py    how the two matrices of an adapter share out a weight's axes
adapters.py        adapters as a tree: take out, put in, merge, save, load
inject.py          quantized ops that are passed to layers by name, without interception
litert.py          OdmlQatProvider: trains a model as its LiteRT file will compute it
  litert_convert.py  OdmlConversionProvider: annotates a model for LiteRT's converter
  litert_ops.py      the table of ops, and what is known of an array
  litert_kinds.py    what a provider does at each kind of op
  litert_matmuls.py  matmuls and convolutions
  litert_own.py      ops of a user's own
  litert_rules.py    refuses rules that LiteRT does not run
"""
