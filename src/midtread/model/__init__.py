"""Model: rules, and how the ops of a Flax model or function reach a provider.

rules.py      where in a model, in which formats; from a rule to Specs
provider.py   the base of every provider: rules, and handlers of the ops they match
quantize.py   quantize_model: a Flax model under a provider
donation.py   what is left of a model that was donated: its use is an error
function.py   quantize_function: a plain function under a provider
caught.py     the functions of JAX and Flax that are intercepted
intercept.py  calls of JAX's functions reach the active provider
spellings.py  the matmuls that are a dot_general by another name
everyop.py    every op reaches a provider, not contractions alone
eager.py      what a layer makes of its parameters outside of a trace is noted
running.py    which model, module and provider are at work on this thread
weights.py    which operand of a matmul is a parameter
flaxlib.py    Linen and NNX behind the same few functions
adopt.py      a Flax model gets classes whose methods run under a provider
boxes.py      how a quantized parameter is stored in a model
moves.py      what an operand was made from, and how codes follow what made it
guards.py     refuses a derivative or an optimizer that cannot be, with what to write instead

explain.py    what a provider does to a model, op by op, from
  ledger.py     what was seen while the model was traced,
  jaxprs.py     what the traced program multiplies, and how often,
  operands.py   the formats of each operand,
  clipping.py   how much of the data static ranges cut off,
  chosen.py     and the kernels that were chosen, as
  coverage.py   rows, totals and a table
prove.py      what the compiled program multiplies and sends, read from
  hlo.py        its text
"""
