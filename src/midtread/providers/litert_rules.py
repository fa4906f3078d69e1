"""Rules for LiteRT: what it does not run is refused when a provider is built."""

from midtread.model.rules import QuantizationRule
from midtread.numerics import calibration
from midtread.numerics.formats import as_format
from midtread.providers import litert_ops as table


def as_range(value, name: str):
    if value is None:
        return None
    low, high = value
    calibration.parse(f"fixed,{low},{high}")  # says what is wrong with it
    return (float(low), float(high))


def check_rule(rule: QuantizationRule) -> None:
    where = f"rule {rule.module_path!r}"
    for field, known in (
        ("weight_qtype", table.WEIGHTS),
        ("act_qtype", table.ACTIVATIONS),
    ):
        value = getattr(rule, field)
        if value is not None and as_format(value).name not in known:
            raise ValueError(
                f"{where}: LiteRT has no {field} {as_format(value).name}. "
                f"There are: {', '.join(known)}."
            )
    if isinstance(rule.act_static_scale, str):
        raise ValueError(  # noqa: TRY004
            f"{where}: act_static_scale={rule.act_static_scale!r}, but LiteRT's static ranges "
            "are means, as Qwix's statistics have them. Write True."
        )
    if rule.tile_size is not None:
        raise ValueError(
            f"{where}: tile_size={rule.tile_size}, but LiteRT has one scale per channel. "
            "Drop it."
        )
    if calibration.parse(rule.weight_calibration_method).is_asymmetric:
        raise ValueError(
            f"{where}: weight_calibration_method={rule.weight_calibration_method!r}, but "
            "weights have no zero point in LiteRT. Use 'absmax'."
        )


def check_activations(rule: QuantizationRule) -> None:
    fmt, where = as_format(rule.act_qtype).name, f"rule {rule.module_path!r}"
    asymmetric = calibration.parse(rule.act_calibration_method).is_asymmetric
    if fmt == "int16" and asymmetric:
        raise ValueError(
            f"{where}: act_calibration_method={rule.act_calibration_method!r}, but int16 "
            "has no zero point in LiteRT. Use 'absmax'."
        )
    if fmt == "int16" and not rule.act_static_scale:
        raise ValueError(
            f"{where}: dynamic ranges of int16, but LiteRT's are int8. Use act_qtype="
            "'int8', or leave act_static_scale out."
        )
    if not rule.act_static_scale and rule.act_calibration_method != "minmax":
        raise ValueError(
            f"{where}: act_calibration_method={rule.act_calibration_method!r}, but LiteRT "
            "takes dynamic ranges from the smallest and largest value of each row. Drop it."
        )
    if fmt == "int16" and rule.weight_qtype is None:
        raise ValueError(
            f"{where}: int16 activations without weight_qtype, but a matmul of LiteRT "
            "takes int16 with int8 or int4 weights. Add weight_qtype='int8'."
        )
