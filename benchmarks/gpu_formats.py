"""Formats of stored weights: a gated MLP stack (benchmarks/gpu_serving.py), us a layer beside bfloat16's.

tests/device/test_formats.py holds their values against float64.

    python benchmarks/gpu_formats.py                          # all rows
    python benchmarks/gpu_formats.py w8a8 fp8 --rows 1 16
"""

import argparse

from gpu_serving import HEAD, SERVING, Stack, serve

TIMED = ("mxfp4", "nvfp4", "uint4-zero-g64", "int2-g64", "w8a8", "fp8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "formats", nargs="*", default=[], help=f"of {', '.join(SERVING)}"
    )
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 16, 64, 512])
    args = parser.parse_args()
    unknown = [name for name in args.formats if name not in SERVING]
    if unknown:
        parser.error(
            f"no format is called {unknown[0]}: there are {', '.join(SERVING)}."
        )
    formats = args.formats or TIMED
    print("\n".join([*HEAD, *serve(tuple(args.rows), formats, Stack(gated=True))]))


if __name__ == "__main__":
    main()
