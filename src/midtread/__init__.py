"""Midtread: quantization for JAX.

The name is the textbook quantizer whose staircase has a flat tread at zero: zero stays
zero. The tour, from the inside out:

    Format, FORMATS     every number system we know, one row each
    Spec                how one array is quantized: format, sharing, calibration, rounding
    QArray              codes and what they are codes of; quantize, dequantize
    dot_general ...     JAX's contractions, taking QArrays where JAX takes arrays
    Recipe, recipe      the six operands of a training step; named recipes
    learn(recipe)       the same contractions, quantized while training
    QuantizationRule    where in a model, and how: a regular expression and formats
    quantize_model      a Flax model, unedited, under a provider:
      QtProvider          train it (QAT, QT)
      PtqProvider         serve it; quantize_variables turns a Linen model's parameters
      DelayedFp8Provider  train it in fp8 with scales from earlier steps
      LoraProvider        fine-tune it through adapters, over quantized weights or not
      OdmlQatProvider     train it for a phone; interop.litert writes the file
    calibrate           a float model and data in, a quantized model out: GPTQ and others
    sensitivity         which weight hurts; bisect, allocate: formats under a budget
    explain             what a provider does to a model, op by op, before it is run
    prove               what the compiled program does, and in which dtypes
    implementation      insists on XLA, or on a kernel of ours, for what is traced within it

>>> import jax.numpy as jnp, midtread as mt
>>> w = mt.quantize(jnp.ones((256, 64)), "int4", channelwise_axes=[1], tiled_axes={0: 128})
>>> mt.dot(jnp.ones((2, 256)), w).shape
(2, 64)
"""

from midtread.algorithms.calibrate import Calibrated as Calibrated
from midtread.algorithms.calibrate import CalibrationOptions as CalibrationOptions
from midtread.algorithms.calibrate import calibrate as calibrate
from midtread.algorithms.search import allocate as allocate
from midtread.algorithms.search import bisect as bisect
from midtread.algorithms.search import sensitivity as sensitivity
from midtread.kernels.environment import implementation as implementation
from midtread.model.boxes import WithAux as WithAux
from midtread.model.explain import explain as explain
from midtread.model.flaxlib import QuantStat as QuantStat
from midtread.model.function import quantize_function as quantize_function
from midtread.model.prove import assert_quantized as assert_quantized
from midtread.model.prove import prove as prove
from midtread.model.provider import QuantizationProvider as QuantizationProvider
from midtread.model.provider import get_current_rule as get_current_rule
from midtread.model.quantize import quantize_model as quantize_model
from midtread.model.rules import QtRule as QtRule
from midtread.model.rules import QuantizationRule as QuantizationRule
from midtread.model.rules import load_rules as load_rules
from midtread.model.running import disable_interceptions as disable_interceptions
from midtread.numerics.formats import FORMATS as FORMATS
from midtread.numerics.formats import Format as Format
from midtread.numerics.formats import as_format as as_format
from midtread.numerics.qarray import QArray as QArray
from midtread.numerics.qarray import dequantize as dequantize
from midtread.numerics.qarray import quantize as quantize
from midtread.numerics.sparsity import Sparsity as Sparsity
from midtread.numerics.spec import Spec as Spec
from midtread.ops.api import conv_general_dilated as conv_general_dilated
from midtread.ops.api import dot as dot
from midtread.ops.api import dot_general as dot_general
from midtread.ops.api import einsum as einsum
from midtread.ops.api import learn as learn
from midtread.ops.api import ragged_dot as ragged_dot
from midtread.ops.api import ragged_dot_general as ragged_dot_general
from midtread.ops.recipe import REUSE as REUSE
from midtread.ops.recipe import Dlhs as Dlhs
from midtread.ops.recipe import Drhs as Drhs
from midtread.ops.recipe import Fwd as Fwd
from midtread.ops.recipe import Recipe as Recipe
from midtread.ops.recipe import blocks as blocks
from midtread.ops.recipe import per_channel as per_channel
from midtread.ops.recipe import per_tensor as per_tensor
from midtread.ops.recipe import recipe as recipe
from midtread.ops.training import Ranges as Ranges
from midtread.providers.adapters import load_lora as load_lora
from midtread.providers.adapters import lora_params as lora_params
from midtread.providers.adapters import merge_lora as merge_lora
from midtread.providers.adapters import save_lora as save_lora
from midtread.providers.adapters import unmerge_lora as unmerge_lora
from midtread.providers.adapters import with_lora as with_lora
from midtread.providers.delayed import DelayedFp8Provider as DelayedFp8Provider
from midtread.providers.delayed import accumulate_gradients as accumulate_gradients
from midtread.providers.delayed import (
    overwrite_with_gradient as overwrite_with_gradient,
)
from midtread.providers.inject import QuantizedDotGeneral as QuantizedDotGeneral
from midtread.providers.inject import QuantizedEinsum as QuantizedEinsum
from midtread.providers.inject import remove_float_params as remove_float_params
from midtread.providers.litert import OdmlQatProvider as OdmlQatProvider
from midtread.providers.litert_convert import (
    OdmlConversionProvider as OdmlConversionProvider,
)
from midtread.providers.lora import LoraProvider as LoraProvider
from midtread.providers.lora import LoraRule as LoraRule
from midtread.providers.lora import apply_lora_to_model as apply_lora_to_model
from midtread.providers.params import quantize_params as quantize_params
from midtread.providers.prequantized import (
    process_prequantized_params as process_prequantized_params,
)
from midtread.providers.prequantized import (
    restore_quantization_rules as restore_quantization_rules,
)
from midtread.providers.ptq import PtqProvider as PtqProvider
from midtread.providers.qt import QtProvider as QtProvider
from midtread.providers.variables import quantize_variables as quantize_variables

__version__ = "0.1.0"
