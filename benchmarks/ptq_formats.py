"""Formats in the words of rows: of benchmarks/ptq_quality.py, and of its peers.

What stands here are fields of a rule, ours as well as Qwix's.
"""

FORMATS = {
    "int4/64": {"weight_qtype": "int4", "tile_size": 64},
    "int4": {"weight_qtype": "int4"},
    "int3/64": {"weight_qtype": "int3", "tile_size": 64},
    "nvfp4": {"weight_qtype": "nvfp4", "tile_size": 16},
    "mxfp4": {"weight_qtype": "mxfp4", "tile_size": 32},
    "w4a8/64": {"weight_qtype": "int4", "tile_size": 64, "act_qtype": "int8"},
    "w8a8": {"weight_qtype": "int8", "act_qtype": "int8"},
}
