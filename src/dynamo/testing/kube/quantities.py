"""Quantities such as `500m` or `1Gi`, and the canonical form in which the API server stores them."""

import re
from decimal import Decimal
from typing import Any

_BINARY_SUFFIXES = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
_BINARY = {suffix: Decimal(2 ** (10 * power)) for power, suffix in enumerate(_BINARY_SUFFIXES)}
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_FORM = re.compile(r"^([+-]?[0-9.]+)((?:[KMGTPE]i)|[numkMGTPE]|(?:[eE][+-]?[0-9]+))?$")


def parse(text: Any) -> Decimal:
    """Return a quantity as a number. Raises ValueError for text that is none."""
    match = _FORM.match(str(text))
    if match is None:
        raise ValueError(f"expected a quantity such as 500m or 1Gi, got {text!r}")
    number, suffix = Decimal(match[1]), match[2] or ""
    if suffix in _BINARY:
        return number * _BINARY[suffix]
    exponent = _DECIMAL.get(suffix)
    return number.scaleb(int(suffix[1:]) if exponent is None else exponent)


def canonical(text: Any) -> str:
    """Return a quantity with the largest suffix that keeps it whole; what is no quantity is returned as it is."""
    try:
        value = parse(text)
    except (ValueError, ArithmeticError):
        return str(text)
    if str(text).endswith("i"):
        for suffix, size in reversed(_BINARY.items()):
            if value and value % size == 0:
                return f"{value // size:f}{suffix}"
    for suffix, exponent in sorted(_DECIMAL.items(), key=lambda entry: -entry[1]):
        scaled = value.scaleb(-exponent)
        if value and scaled == scaled.to_integral_value():
            return f"{scaled.to_integral_value():f}{suffix}"
    return "0"
