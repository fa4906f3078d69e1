"""Kernels: the programs that multiply and quantize, one folder per operation.

    operation                             device     file
    codes x codes, scaled                 Hopper     scaled_matmul/hopper.py
      scales in tiles of the sum          Hopper     scaled_matmul/hopper_tiled.py
      rows in groups                      Hopper     scaled_matmul/hopper_grouped.py
    float x codes of a stored weight
      up to 64 rows                       Hopper     weight_matmul/hopper_decode/
                                          NVIDIA     weight_matmul/triton.py
      more rows                           Hopper     weight_matmul/hopper_prefill/
      few rows of each group              Hopper     weight_matmul/hopper_decode/grouped.py
                                          NVIDIA     weight_matmul/triton_grouped.py
                                          CPU        cpu.py
    float -> codes                        NVIDIA     quantize/triton.py
    one token against a cache             NVIDIA     decode_attention/triton.py
      turned, and written into it         NVIDIA     write_cache/triton.py
    many tokens, each over its range      Hopper     attention/triton.py
    a stream, a sum and its norm          NVIDIA     add_norm/triton.py
    everything else                       any        xla.py

Around them:

    choose.py          for each operation a table of candidates, and the first that can run
    candidates.py      what a candidate is: it has a plan, or a reason why not
    environment.py     the device, and which implementation the user asked for
    layout.py          from labelled axes to matrices
    */adapter.py       from matrices to a plan for a kernel, or why not; those of
                       weight_matmul/ are few_rows.py, few_groups.py, few_codes.py, many_rows.py
    pending.py         what a matmul leaves to the kernel that comes next in a step
    gates.py           how an MLP gates one half of its columns by the other, in JAX and in PTX
    partition.py       a kernel as a function of JAX that can be differentiated and sharded
    measured.py        how fast weights were served, with float rows and quantized ones
    tuned.py           reads the block sizes that lie beside each kernel, <device>.json
    decoding.py        how each kind of kernel decodes each format, a table
    triton_words.py    codes read 16 bits at a time, for Triton
    hopper/            what the kernels for Hopper are made of
    block_specs.py     QArrays as arguments of a user's own Pallas kernel
    pallas_compat.py   Pallas, whichever version of JAX it comes from
"""
