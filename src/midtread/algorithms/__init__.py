"""Algorithms: from float weights and some data to codes that keep the model's quality.

Each is a pair of pure functions: what it needs to know of a running model is collected,
and one weight at a time is solved for, given what was collected.

    program.py    the model as a straight-line program whose weights and inputs are marked
    stages.py     such a program, cut where the inputs of its weights come out, and run
    collect.py    what is collected: second moments of inputs, weighted by what reaches the loss
    reach.py      inputs as the next layer sees them: what attention makes of a value's error
    weight.py     a weight of any contraction as a stack of matrices
    clip.py       scales by least weighted error
    gptq.py       codes by error feedback, then descent on codes and scales
    correct.py    targets that make up for errors of earlier layers
    flow.py       who makes and uses a program's variables, which of them are parameters
    rotate.py     turns of what weights hand to each other, fixed and learned
    stream.py     where the residual stream may be turned
    smooth.py     factors between an input's channels and a weight's rows: SmoothQuant, AWQ
    fold.py       such factors given to the norm or the weight before
    bias.py       biases that take back the mean of an error
    hqq.py        zero points and scales without data
    learn.py      codes and scales of all weights together, by gradients
    chain.py      a program and its gradients, run stage by stage
    served.py     what is quantized in a model, and codes put into it
    options.py    what a calibration is asked for, and which of that has a meaning
    task.py       one calibration, and batches on their way through the model
    statistics.py what is known of a weight's inputs when its turn comes
    solver.py     one weight, by all algorithms that act on it
    calibrate.py  all of it: float model and data in, quantized model out
    resume.py     solved weights in a folder, to go on after a kill
    offload.py    where activations lie meanwhile: device, host or disk
    report.py     what that did to every weight
    search.py     which layer hurts, and which format each should have
"""
