"""Float rows times the codes of a stored weight.

few_rows.py          up to 64 rows: which kernel takes them, or why not
few_groups.py        the same for a few rows of each group
many_rows.py         more rows
hopper_decode/       the kernel for few rows on Hopper
hopper_prefill/      the kernel for many rows on Hopper
triton.py            few rows on any NVIDIA GPU
triton_grouped.py    few rows of each group on any NVIDIA GPU
triton_tuned.py      their block sizes, from <device>.json
"""
