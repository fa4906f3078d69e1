"""Float rows times the codes of a stored weight.

few_rows.py          up to MAX_ROWS rows: a plan for one of two kernels, or why not
few_groups.py        the same for a few rows of each group
few_codes.py         few rows of codes, as floats by the kernels above
many_rows.py         more rows
hopper_decode/       the kernel for few rows on Hopper
hopper_prefill/      the kernel for many rows on Hopper
triton.py            few rows on any NVIDIA GPU
triton_grouped.py    few rows of each group on any NVIDIA GPU
triton_tuned.py      their block sizes, from <device>.json
"""

# Formats that the kernels decode, and how many rows are few: of a group, on average.
FORMATS = ("int8", "float8_e4m3fn", "float8_e5m2", "int4", "nf4")
MAX_ROWS = 64


def why_not_format(name: str) -> str | None:
    if name in FORMATS:
        return None
    return f"{name} has no kernel: {', '.join(FORMATS)} have"
