"""lm: a language model on top of the library, from a config to a report.

What a user writes:

    config.py         every key with its meaning, its default and its limits
    contradictions.py keys that cannot go together, and what to write instead
    usage.py          what the user wrote cannot be done, said in one line
    settings.py       from a YAML file and key=value words to a Config
    configs/          the configs that are shipped
    quantization.py   what each value of quantization= means

The model:

    build.py          a model as a config describes it, quantized, and what that reached
    model.py          the decoder: layers, head, multi-token prediction
    layers.py         linear layers, the embedding, norms and gates
    attention.py      attention, from the stream to the stream
    seen.py           which earlier tokens each token looks at
    attend.py         attention's formula, and the choice of how it is computed
    latent.py         DeepSeek's attention, which caches and decodes from latents
    blockwise.py      attention that never writes its logits to memory
    rope.py           the rotary embedding, plain or stretched
    moe.py            experts and their router
    loss.py           cross entropy of the head, in blocks of tokens

Data:

    data.py           documents, the training and held-out splits, batches
    files.py          text, jsonl and parquet of any size, a record by its number
    stream.py         documents of large files and of libraries, as they are needed
    rows.py           what a model is fed: rows of T tokens
    tokenizer.py      text to numbers and back

Training:

    train.py          a run, from a config to a report
    step.py           one step as a pure function
    program.py        the options that a step is compiled with, by device
    optimizer.py      how weights follow their gradients
    stacks.py         weights of all layers in one array, or each layer's in its own
    checkpoint.py     what a run keeps, so that a killed one goes on
    ranges.py         static ranges that a calibration run has noted
    memory.py         the bytes that a step needs, from shapes alone
    room.py           whether a run fits into its devices
    roofline.py       the least time that a step takes, from shapes alone
    bench.py          time and memory of a step and of decoding, beside the same in float

More than one device:

    mesh.py           where each array lies
    gather.py         weights that travel as codes of 8 bits
    ring.py           tokens that travel to experts by hand
    split.py          a layer that works on parts of the batch in turn
    processes.py      several processes, and what to do when one is lost
    transfers.py      what a compiled step gathers of each weight

Serving, and other programs' files:

    convert.py        a float checkpoint becomes a quantized one, and that a model
    calibrate.py      quantizing by an algorithm that looks at data
    join.py           weights that multiply the same rows become one weight
    decode.py         tokens, from a cache
    cache.py          keys and values of past tokens, in few bits if asked for
    generate.py       text from a model
    eval.py           what checkpoints lose on held-out text
    compare.py        a quantized checkpoint beside the float one that it was made from
    huggingface.py    Hugging Face folders and .gguf files as runs, and back
    architectures.py  published architectures, as keys and names of weights
    config_json.py    what a published model says of itself, as keys, and back
    codes.py          published weights that are quantized already
    manual.py         a tensor quantized by hand, as MaxText does it
"""
